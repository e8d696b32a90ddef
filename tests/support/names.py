"""How much of the package's inside the tests know."""

import ast
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"


def names_used(path):
    """The names that a file takes from the package's inside: "module.name"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpctrain"):
            if node.module != "hpctrain" or any(
                (TESTS.parent / "hpctrain" / f"{a.name}.py").exists()
                or (TESTS.parent / "hpctrain" / a.name).is_dir()
                for a in node.names
            ):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hpctrain."))


if __name__ == "__main__":  # python -m tests.support.names: who still knows what
    found, files = set(), defaultdict(set)
    for path in TESTS.rglob("*.py"):
        for name in names_used(path):
            found.add(name)
            files[str(path.relative_to(TESTS))].add(name)
    for file, theirs in sorted(files.items(), key=lambda item: len(item[1])):
        print(f"{len(theirs):4}  {file}")
    print(f"{len(found):4}  all")
