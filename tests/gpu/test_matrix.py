"""hpctrain on emulated GPUs: settings in pairs, and ranks that are killed."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.gpu.emulator import REPORT, launch
from tests.support.api import read_records
from tests.support.launch import Job, mpirun, run_mpi
from tests.support.packs import make_pack
from tests.support.wait import wait_for

pytestmark = pytest.mark.emulated_gpu


@pytest.mark.timeout(3600)
def test_every_two_settings_together(tmp_path):
    """Losses are the CPU's; in tree order the digest is that of one rank, whatever ranks,
    transport, launch and order.

    HPCTRAIN_TEST_GPU_MATRIX=all runs every cell.
    """
    from tests.gpu.matrix import Cell, pairwise, problems, product

    which = os.environ.get("HPCTRAIN_TEST_GPU_MATRIX", "pairwise")
    done = run_mpi(
        4,
        ["-m", "mpi4py", "-m", "tests.gpu.matrix", str(tmp_path), which],
        timeout=3500 if which == "all" else 400,
        env={"HPCTRAIN_EMULATED_GPUS": "4"},
    )
    path, printed = tmp_path / "cells.jsonl", done.stdout[-3000:] + done.stderr[-3000:]
    assert path.exists(), printed
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert problems(found) == []
    assert REPORT not in done.stderr, printed
    assert done.returncode == 0, printed
    wanted = list(product()) if which == "all" else pairwise()
    assert [Cell(*result["cell"]) for result in found] == wanted
    digests = [result["late"]["digest"] for result in found if "digest" in result["late"]]
    assert len(digests) > 10 and len(set(digests)) > 4, "cells do not differ"


def test_other_figures_are_problems():
    from tests.gpu.matrix import Cell, problems

    cell = Cell("classify", "nccl", "tree", "eager", "fp32", "exact", 2, "1")
    gpu, cpu = {"losses": [1.0, 0.5], "digest": "a"}, {"losses": [1.0, 0.5], "digest": "b"}
    sound = {"cell": cell, "1": gpu, "late": gpu, "one": gpu, "expected": cpu}
    assert problems([sound, sound]) == []
    other = gpu | {"digest": "c"}
    for wrong in ({"one": other}, {"1": other}, {"late": gpu | {"losses": [1.0, 0.6]}}):
        assert len(problems([sound, sound | wrong])) == 1
    assert problems([sound | {"late": gpu | {"losses": [1.0]}}])
    assert problems([{"cell": cell, "error": "late"}])


@pytest.mark.parametrize("transport", ["host", "nccl"])
def test_a_killed_rank_costs_no_bits(tmp_path, transport):
    """kill -9 of one of three ranks; two go on from the last checkpoint to the same digest."""
    make_pack(tmp_path / "pack.h5", {"train": 127, "test": 31}, shape=(13, 11, 3))

    def words(name):
        flags = ["--deterministic", "--shards", "4", "--reduce", transport, "--overlap", "3"]
        flags += ["--device", "cuda", "--epochs", "20", "--batch-size", "16", "--threads", "1"]
        flags += ["--checkpoint-every", "10steps", "--progress", "none", "--model", "digits"]
        places = ["--data", str(tmp_path / "pack.h5"), "--runs-dir", str(tmp_path / "runs")]
        return ["train", *places, "--run", name, *flags]

    whole = launch(words("whole"), 2)
    assert whole.returncode == 0, whole.stderr
    env = {"HPCTRAIN_EMULATED_GPUS": "3", "HPCTRAIN_EMULATED_GPU_ORDER": "1"}
    job = Job([mpirun(), "-n", "3", sys.executable, "-m", "hpctrain", *words("killed")], env)
    run = tmp_path / "runs" / "killed"
    try:
        wait_for(lambda: [*run.glob("checkpoints/*.safetensors")] or job.poll() is not None)
        assert job.poll() is None, job.communicate()
        os.kill(json.loads((run / "ranks" / "2.json").read_text())["pid"], signal.SIGKILL)
        assert job.wait(timeout=60) not in (0, 75)
    finally:
        job.end()
    again = launch(words("killed"), 2, order="late")
    assert again.returncode == 0, again.stderr
    whole, killed = (list(read_records(tmp_path / "runs" / name)) for name in ("whole", "killed"))
    assert any("going on after step" in record.get("text", "") for record in killed)
    assert whole[-1]["digest"] == killed[-1]["digest"]
