"""The README's own program, run word for word."""

from __future__ import annotations

import re

import pytest

from tests.launch import ROOT, run_mpi
from tests.packs import make_pack

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
    losses = [float(x) for x in re.findall(r"loss (\S+)", result.stdout)]
    assert max(losses) * ranks < 2.3, "the network did not learn"
