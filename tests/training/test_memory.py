"""The memory of a rank does not grow with the number of samples of a pack."""

from __future__ import annotations

import sys

import pytest

from tests.launch import run
from tests.packs import make_sparse_pack

TRAINING = """
import sys
from hpctrain.cli import main
from tests.launch import peak_memory
from tests.training.runs import leave_after
with leave_after(3):
    code = main([*sys.argv[1:], "--model", "digits", "--threads", "1"])
print(code, peak_memory() >> 10)
"""


@pytest.mark.parametrize("shuffle", ["partition", "global", "blocks"])
def test_one_rank_trains_on_10_to_the_9_samples_in_600_mib(tmp_path, shuffle):
    path = make_sparse_pack(tmp_path / "a.h5", {"train": 10**9}, (16, 16, 3))
    words = ["--data", str(path), "--runs-dir", str(tmp_path / "runs"), "--run", "a"]
    words += ["--read-buffer", "128M"]
    done = run([sys.executable, "-c", TRAINING, *words, "--shuffle", shuffle])
    assert done.returncode == 0, done.stderr
    code, peak = map(int, done.stdout.split()[-2:])
    assert code == 75 and peak < 600
