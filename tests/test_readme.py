"""The program in the README runs as printed, and what the pages refer to exists."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest

from hpctrain.cli import COMMANDS
from tests.support.launch import ROOT, run_mpi
from tests.support.packs import make_pack
from tests.test_house import FLOORS, ONLY_IN

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += DOCS
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
ARCHITECTURE = ROOT / "docs/architecture.md"
PATH = re.compile(r"(?<![\w./-])(?:[a-z][\w.-]*/)*(?:[a-z]\w*\.py\b|(?<=/)(?![\w.-]))")
OTHERS = {
    *("--hostfile", "--map-by"),  # of mpirun
    "--array",
    "--exact",
    "--gpus",
    "--gpus-per-node",
    "--logdir",
    "--no-kill",
}  # Slurm's, ...
OTHERS |= {"--requeue", "--signal"}

CHECK = """
totals = message.totals()
bits = comm.allgather(message.weights.detach().numpy().tobytes())
assert len(set(bits)) == 1, "ranks hold different weights"
print(f"epochs {epoch + 1} steps {step + 1} finite {totals.finite} loss {float(loss):.4f}")
"""


def program() -> str:
    """The Python block of the README."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def targets(page):
    """The files that a page's links lead to, and the headings that they name there."""
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        yield (page.parent / path).resolve() if path else page, heading


def headings(page):
    """Of a page, as links name them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in found}


def test_links_lead_somewhere_and_every_page_is_linked():
    links = [(page.name, *target) for page in PAGES for target in targets(page)]
    assert [link for link in links if not link[1].exists()] == []
    assert [link for link in links if link[2] and link[2] not in headings(link[1])] == []
    linked = {path for name, path, _ in links if name == "README.md"}
    assert linked >= {*DOCS, *PAGES[:3]} - {PAGES[0]} and len(DOCS) > 5


def test_pages_have_at_most_100_columns_and_the_readme_160_lines():
    lines = {page: page.read_text().splitlines() for page in PAGES}
    assert [(page.name, line) for page in lines for line in lines[page] if len(line) > 100] == []
    assert len(lines[PAGES[0]]) <= 160


def test_the_flags_that_pages_name_exist():
    fields = {f.name for c in COMMANDS.values() for f in dataclasses.fields(c.settings)}
    known = {"--" + name.replace("_", "-") for name in fields} | {"--config", "--help"}
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.suffix in ("", ".py")]
    known |= {f for path in scripts if path.is_file() for f in FLAG.findall(path.read_text())}
    named = {(page.name, flag) for page in PAGES for flag in FLAG.findall(page.read_text())}
    assert {pair for pair in named if pair[1] not in known | OTHERS} == set()
    assert len(named) > 80


def find(path):
    """The file or folder of this path in the project or in the package; None."""
    places = [ROOT / path, ROOT / "hpctrain" / path]
    return next((place for place in places if place.exists()), None)


def names_in(path):
    """Functions, classes, methods and module constants of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_the_files_and_functions_that_the_architecture_names_exist():
    """As `file.py` and `file.py: name, name`; in the figures each file on a line of its own."""
    tree = (ROOT / "README.md").read_text().partition("## How it is built")[2]
    page = ARCHITECTURE.read_text()
    figures = [path.read_text() for path in (ROOT / "docs").glob("*.svg")]
    paths = {path for text in (tree, page, *figures) for path in PATH.findall(text)}
    assert ([path for path in paths if not find(path)], len(figures)) == ([], 2)
    assert len(paths) > 40
    named = re.findall(r"`([\w/]+\.py): ([\w., ]+)`", page)
    pairs = {(path, name) for path, names in named for name in re.split(", |[.]", names)}
    assert {pair for pair in pairs if pair[1] not in names_in(find(pair[0]))} == set()
    assert len(pairs) > 20


def test_the_levels_of_imports_are_those_that_are_tested():
    page = re.sub(r"\n +", " ", ARCHITECTURE.read_text())
    levels = re.findall(r"^\d\. (`.*`)$", page, re.MULTILINE)
    assert [re.findall("`([^`]+)`", level) for level in levels] == [f.split() for f in FLOORS]
    only = re.findall(r"^\* `(\w+)`: (`.*`)$", page, re.MULTILINE)
    assert {name: re.findall("`([^`]+)`", modules) for name, modules in only} == {
        name: modules.split() for name, modules in ONLY_IN.items()
    }


def test_the_loop_of_the_readme_has_at_most_30_lines():
    assert len([line for line in program().splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loop_of_the_readme_runs(tmp_path, ranks):
    (tmp_path / "data").mkdir()
    make_pack(tmp_path / "data/digits.h5", {"train": 401})
    (tmp_path / "loop.py").write_text(program() + CHECK)
    env = {"OMP_NUM_THREADS": "1"}
    result = run_mpi(ranks, ["loop.py"], cwd=tmp_path, env=env, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("epochs 2 steps 4 finite True") == ranks
    epochs = re.findall(r"^epoch (\d+): loss (\S+)$", result.stdout, re.MULTILINE)
    assert [number for number, _ in epochs] == ["1", "2"]
    assert float(epochs[1][1]) < 0.5, "the network did not learn: chance is 2.3"
