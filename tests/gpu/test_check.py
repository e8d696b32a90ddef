"""scripts/gpu_check: without a GPU, and a rehearsal of all rows."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from scripts.benchmarks.gpu import check
from scripts.benchmarks.gpu.case import MISSED, NOT_RUN, OK, Result
from scripts.benchmarks.gpu.rows import ROWS
from tests.support.launch import ROOT, run

CUDA_ONLY = {  # why a rehearsal leaves lines out, by row
    "parity": {"only a real GPU computes in TF32"},
    "message": {"CuPy does not allocate it"},
    "memory": {"CuPy does not allocate it"},
    "trace": {"torch's alarm for waits is CUDA's"},
    **{row: {"--cuda-graphs is for GPUs"} for row in ("peers", "digests", "speed")},
}
EXACT = ("parity", "message", "memory", "trace", "digests")  # right on a CPU too


def gpu_check(*words, timeout=110):
    return run([sys.executable, str(ROOT / "scripts/gpu_check"), *words], timeout)


def test_without_a_gpu_nothing_is_checked_and_the_exit_code_says_so(tmp_path):
    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    done = gpu_check("--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "gpu_check: torch sees no GPU, nothing was checked; --rehearse runs all on the CPU"
    ]
    assert done.stdout.count("not run: no GPU here") == len(ROWS)
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert {r["verdict"] for results in rows.values() for r in results} == {NOT_RUN}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    ["parity,message,memory,trace,staging", "digits,flowers,peers", "digests", "several", "speed"],
)
def test_a_rehearsal_goes_through_every_row(names, tmp_path):
    done = gpu_check("--rehearse", "--only", names, "--output", str(tmp_path / "out"))
    said = (tmp_path / "out/log.txt").read_text() + done.stdout + done.stderr
    assert done.returncode == 0, said
    assert done.stdout.count(check.REHEARSAL) == 2
    left = json.loads((tmp_path / "out/results.json").read_text())
    assert left["rehearsal"] is True and left["machine"]["torch"] == torch.__version__
    assert list(left["rows"]) == names.split(",")
    for name, lines in left["rows"].items():
        results = [Result(**line) for line in lines]
        reasons = {r.remark.partition(":")[0] for r in results if r.verdict == NOT_RUN}
        assert reasons <= CUDA_ONLY.get(name, set()), said
        assert any(r.verdict in (OK, MISSED) for r in results), said
        if name in EXACT:
            assert {r.verdict for r in results} <= {OK, NOT_RUN}, said
    text = (tmp_path / "out/table.txt").read_text().splitlines()
    assert [line.split()[0] for line in text if line[1:2].strip()] == ["row", *names.split(",")]


@pytest.mark.emulated_gpu
@pytest.mark.timeout(300)
def test_a_rehearsal_on_gpus_leaves_out_what_only_real_ones_have(tmp_path):
    words = ("--rehearse", "cuda", "--only", "trace,digests")
    done = gpu_check(*words, "--output", str(tmp_path / "out"), timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    left = [r["remark"] for results in rows.values() for r in results if r["verdict"] != OK]
    assert left == ["only a real GPU has a profiler"], done.stdout


def test_all_rows_are_rehearsed():
    (mark, _) = test_a_rehearsal_goes_through_every_row.pytestmark
    assert sorted(",".join(mark.args[1]).split(",")) == sorted(ROWS)
