"""Circles of imports in the package: `python -m tests.support.circles` lists them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hpctrain"


def modules() -> dict[str, Path]:
    """The files of the package by the names of their modules, without hpctrain/__init__.py.

    That one imports the names that it offers when they are first used.
    """
    files: dict[str, Path] = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    del files["hpctrain"]
    return files


def imported(path: Path) -> Iterator[str]:
    """The names that a file imports anywhere: in functions and under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} imports relatively"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    """The modules that are imported by a module, by these, and so on."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        new = imports[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def circles(files: dict[str, Path] | None = None) -> list[list[str]]:
    """The largest sets of modules that all import each other, directly or through others."""
    files = files or modules()
    imports = {name: {*imported(path)} & files.keys() - {name} for name, path in files.items()}
    reached = {name: reachable(name, imports) for name in imports}
    mutual = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    return sorted(sorted(circle) for circle in mutual)


if __name__ == "__main__":
    for circle in circles():
        print(", ".join(circle))
