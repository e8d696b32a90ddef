"""How much of the package's inside the tests know: `python -m tests.support.names` lists it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TEXT = r"hpctrain(\.\w+){2,}"  # what a test may patch


def is_module(name: str) -> bool:
    """Whether "hpctrain.a.b" is a module or a folder of modules."""
    path = TESTS.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def names_used(path: Path, facade: dict[str, str]) -> Iterator[str]:
    """The names that a file takes from the package's inside, as "hpctrain.module.name".

    Those that it imports, patches by their text, or takes from a module that it imports; `facade`
    has the modules that are handed on by tests/support/api.py.
    """
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if source == "tests.support.api" and alias.name in facade:
                    name = facade[alias.name]
                if name.startswith("hpctrain") and is_module(name):
                    modules[alias.asname or alias.name] = name
                elif source.startswith("hpctrain."):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hpctrain."))
        elif isinstance(node, ast.Constant) and re.fullmatch(TEXT, str(node.value)):
            yield node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
            yield f"{modules[node.value.id]}.{node.attr}"


def modules_of_facade() -> dict[str, str]:
    """The modules that tests/support/api.py hands on, by the names that it gives them."""
    found = {}
    for node in ast.walk(ast.parse((TESTS / "support" / "api.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpctrain"):
            for alias in node.names:
                if is_module(name := f"{node.module}.{alias.name}"):
                    found[alias.asname or alias.name] = name
    return found


def all_names() -> dict[str, set[str]]:
    """The names that each file of the tests takes from the package's inside."""
    found, facade = defaultdict(set), modules_of_facade()
    for path in sorted(TESTS.rglob("*.py")):
        for name in names_used(path, facade):
            found[str(path.relative_to(TESTS))].add(name)
    return found


if __name__ == "__main__":
    for file, theirs in sorted(all_names().items(), key=lambda item: len(item[1])):
        print(f"{len(theirs):4}  {file}: {', '.join(sorted(theirs))}")
    print(f"{len(set().union(*all_names().values())):4}  all")
