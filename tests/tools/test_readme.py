"""The program in the README runs as printed."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import ROOT
from tests.support.packs import make_pack
from tests.support.programs import run_program

CHECK = """
totals = message.totals()
bits = comm.allgather(message.weights.detach().numpy().tobytes())
assert len(set(bits)) == 1, "ranks hold different weights"
print("found", epoch + 1, step + 1, not totals.skipped)
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loop_of_the_readme_runs_and_learns(tmp_path, ranks):
    (tmp_path / "data").mkdir()
    make_pack(tmp_path / "data/digits.h5", {"train": 401})
    page = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "loop.py").write_text(program + CHECK)
    printed = run_program(ranks, tmp_path / "loop.py")
    assert [text.splitlines()[-1] for text in printed] == ["found 2 4 True"] * ranks
    epochs = re.findall(r"^epoch (\d+): loss (\S+)$", printed[0], re.MULTILINE)
    assert [number for number, _ in epochs] == ["1", "2"]
    assert float(epochs[1][1]) < 0.5, "the network did not learn: chance is 2.3"
