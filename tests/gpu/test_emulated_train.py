"""hpctrain on emulated GPUs: a run finds there what it finds on the CPU, within rounding, and the
same bits whenever the devices do their work.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.gpu.emulator import launch
from tests.support.api import read_records
from tests.support.launch import ROOT, run
from tests.support.packs import make_pack

pytestmark = [pytest.mark.emulated_gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("emulated")
    make_pack(made / "pack.h5", {"train": 127, "test": 31}, shape=(13, 11, 3))
    return made


def train(folder, *flags, device="cuda", **how):
    """The records of a run."""
    name = f"run{len(list(folder.iterdir()))}-{len(list(folder.glob('runs/*')))}"
    words = ["train", "--data", str(folder / "pack.h5"), "--device", device, "--epochs", "2"]
    words += ["--batch-size", "32", "--runs-dir", str(folder / "runs"), "--run", name, *flags]
    done = launch([*words, "--progress", "none", "--threads", "1"], timeout=200, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(read_records(folder / "runs" / name))


def losses(records):
    """Of every step, and of the test rows."""
    found = [r["loss"] for r in records if r["kind"] in ("step", "evaluation")]
    assert len(found) > 4
    return found


def digests(runs):
    return {run[-1]["digest"] for run in runs}


def test_a_run_is_that_of_the_cpu_in_every_order(folder):
    flags = ("--flip", "--shift", "2", "--overlap", "2")
    runs = [train(folder, *flags, order=order) for order in ("early", "late", "1")]
    assert len(digests(runs)) == 1
    cpu = train(folder, *flags, device="cpu")
    np.testing.assert_allclose(losses(runs[0]), losses(cpu), rtol=1e-3)


def test_deterministic_runs_have_one_digest_on_any_number_of_gpus(folder):
    flags = ("--deterministic", "--shards", "4")
    ways = [(1, "late", ()), (2, "2", ("--reduce", "nccl")), (3, "early", ("--overlap", "3"))]
    runs = [train(folder, *flags, *more, ranks=n, order=order) for n, order, more in ways]
    assert len(digests(runs)) == 1


def test_fine_tuning_has_one_digest_on_any_number_of_gpus(folder):
    flags = ["--deterministic", "--shards", "4", "--freeze", "conv1,bn1,layer1"]
    flags += ["--lr-factors", "layer*=0.5", "--ema", "0.9"]
    flags += ["--final", "ema", "--weight-decay", "0.1", "--no-decay", "norm"]
    ways = [(1, "late", ()), (2, "2", ("--reduce", "nccl")), (3, "early", ("--overlap", "3"))]
    runs = [train(folder, *flags, *more, ranks=n, order=order) for n, order, more in ways]
    assert len(digests(runs)) == 1
    graphs = train(folder, *flags, "--cuda-graphs", order="late")
    assert digests([graphs]) == digests(runs)


def test_graphs_train_with_the_same_bits_as_kernel_by_kernel(folder):
    plain = train(folder, "--comm-dtype", "bf16", ranks=2, order="early")
    graphs = train(folder, "--comm-dtype", "bf16", "--cuda-graphs", ranks=2, order="late")
    assert digests([plain]) == digests([graphs])


SECOND = """
import torch
from tests.support.api import memory_of, zeros_for_messages
device = torch.device("cuda:1")
assert zeros_for_messages(7, torch.float32, device).device == device
print(memory_of(device))
"""


@pytest.mark.parametrize(("cupy", "whose"), [("", "cupy"), ("no", "torch")])
def test_memory_is_that_of_the_named_gpu_whichever_is_current(cupy, whose):
    env = {"HPCTRAIN_EMULATED_GPUS": "2", "HPCTRAIN_EMULATED_CUPY": cupy}
    done = run([sys.executable, "-c", SECOND], 100, env, ROOT)
    assert done.returncode == 0 and f"('{whose}'," in done.stdout, done.stdout + done.stderr


def test_a_run_goes_on_on_another_device_unless_its_bits_are_promised(folder):
    for name, flags, code in (("any", [], 0), ("same", ["--deterministic"], 2)):
        words = ["train", "--data", str(folder / "pack.h5"), "--runs-dir", str(folder / "runs")]
        words += ["--batch-size", "32", "--threads", "1", "--run", name, *flags]
        begun = launch([*words, "--device", "cuda", "--epochs", "1"], timeout=200)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        done = launch([*words, "--device", "cpu", "--epochs", "2"], timeout=200)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("begun with device cuda, not cpu" in done.stderr) == (code == 2)


def test_a_kernel_that_fails_is_one_line(folder):
    words = ["train", "--data", str(folder / "pack.h5"), "--runs-dir", str(folder / "runs")]
    words += ["--model", "tests.support.nets:failing_on_gpu", "--run", "fails", "--threads", "1"]
    done = launch([*words, "--device", "cuda", "--batch-size", "8"], timeout=200)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "a GPU or a kernel on it failed (CUDA error" in line
