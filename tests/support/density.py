"""How much a line of the package holds: `python -m tests.support.density [FOLDER]` lists files."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hpctrain"
VAGUE = ("found", "own", "known", "each")  # names that do not say what they hold
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)


def branches(function: ast.AST) -> int:
    """The ways through a function, with the functions in it (its cyclomatic complexity)."""
    ways = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            ways += 1
        elif isinstance(node, ast.BoolOp):
            ways += len(node.values) - 1
    return ways


def names_stored(function: ast.AST) -> set[str]:
    """The names to which a function assigns, with the functions in it."""
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def is_packed(node: ast.AST) -> bool:
    """Whether it is an assignment such as `a, b = x, y`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def docstring(node: ast.AST) -> ast.AST | None:
    """The docstring of a module, class or function."""
    if not isinstance(node, DOCUMENTED) or ast.get_docstring(node, clean=False) is None:
        return None
    return node.body[0]


class Density:
    """What is counted in some texts of Python.

    Lines of code are those that are neither blank nor a comment, less all lines of docstrings,
    blank ones included; a docstring is a statement. Other code bases were measured alike.
    """

    def __init__(self, *texts: str) -> None:
        self.code = 0
        self.statements = 0
        self.packed = 0
        self.conditional = 0
        self.vague: Counter[str] = Counter()  # functions that store these names
        self.branches: Counter[str] = Counter()  # of functions by name; of several the most
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        for line in map(str.strip, text.splitlines()):
            if line and not line.startswith("#"):
                self.code += 1
        for node in ast.walk(ast.parse(text)):
            self.statements += isinstance(node, ast.stmt)
            self.packed += is_packed(node)
            self.conditional += isinstance(node, ast.IfExp)
            documentation = docstring(node)
            if documentation:
                self.code -= documentation.end_lineno - documentation.lineno + 1
            if isinstance(node, FUNCTIONS):
                self.vague.update(names_stored(node) & {*VAGUE})
                self.branches |= Counter({node.name: branches(node)})

    def figures(self) -> dict[str, float]:
        """What tests/test_house.py bounds."""
        lines = max(self.code, 1)
        return {
            "statements a line": self.statements / lines,
            "packed assignments per 1,000 lines": 1000 * self.packed / lines,
            "conditional expressions per 1,000 lines": 1000 * self.conditional / lines,
            **{f"functions that store {name}": self.vague[name] for name in VAGUE},
            "branches of a function": max(self.branches.values(), default=0),
        }


def texts(folder: Path = PACKAGE) -> dict[Path, str]:
    """The files of Python in a folder."""
    return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}


if __name__ == "__main__":
    files = texts(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
    parts = {str(path): Density(text) for path, text in files.items()}
    for name, part in {**parts, "all": Density(*files.values())}.items():
        shown = [f"{value:.3g} {what}" for what, value in part.figures().items() if value]
        print(f"{name}: {part.code:,} lines of code, {', '.join(shown)}")
        print("   ", *(f"{function} {ways}" for function, ways in part.branches.most_common(3)))
