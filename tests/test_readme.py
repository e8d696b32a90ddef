"""The program in the README runs as printed, and what the pages refer to exists."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hpctrain.cli import COMMANDS
from tests.launch import ROOT, run_mpi
from tests.packs import make_pack

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OTHERS = {"--array", "--exact", "--gpus", "--gpus-per-node", "--logdir", "--signal"}  # Slurm's, ...

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
    assert linked >= set(PAGES[1:]) and len(PAGES) > 5


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
