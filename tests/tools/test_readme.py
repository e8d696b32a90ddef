"""The program in the README runs as printed."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest

from tests.support.launch import ROOT
from tests.support.packs import make_pack
from tests.support.ranks import on_ranks

CHECK = """
totals = message.totals()
bits = comm.allgather(message.weights.detach().numpy().tobytes())
assert len(set(bits)) == 1, "ranks hold different weights"
found = (epoch + 1, step + 1, totals.finite)
"""


def execute(comm, folder, program):
    """Run the program on a rank: what its CHECK found, and what it printed."""
    os.chdir(folder)
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, names)
    return names["found"], printed.getvalue()


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loop_of_the_readme_runs_and_learns(tmp_path, ranks):
    (tmp_path / "data").mkdir()
    make_pack(tmp_path / "data/digits.h5", {"train": 401})
    page = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ended = on_ranks(ranks, execute, folder=tmp_path, program=program + CHECK)
    assert [found for found, _ in ended] == [(2, 4, True)] * ranks
    epochs = re.findall(r"^epoch (\d+): loss (\S+)$", ended[0][1], re.MULTILINE)
    assert [number for number, _ in epochs] == ["1", "2"]
    assert float(epochs[1][1]) < 0.5, "the network did not learn: chance is 2.3"
