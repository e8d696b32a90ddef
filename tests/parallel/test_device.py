"""The device of a rank, on a faked torch."""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel import device
from hpctrain.parallel.device import choose_device
from tests.support.launch import ROOT, run
from tests.support.packs import make_pack

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch):
    """A torch for CUDA 12 that sees two GPUs; the numbers that are made current."""
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(device, "current_stream", Mock())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return current


def test_the_gpu_of_a_rank_becomes_the_current_one(two_gpus):
    chosen = [choose_device("auto", local_rank) for local_rank in range(3)]
    assert [d.index for d in chosen] == two_gpus == [0, 1, 0]
    assert choose_device("cpu", 1) == CPU and len(two_gpus) == 3


def test_cuda_without_a_gpu_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto", 0) == CPU
    for cuda, text in ((None, r"sees no GPU \(this torch was built without"), ("12.8", "no GPU$")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(UsageError, match=f"--device cuda, but torch .* {text}"):
            choose_device("cuda", 0)


def test_a_gpu_that_cannot_be_used_is_one_line(two_gpus, monkeypatch):
    def fails(number):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore of it")

    monkeypatch.setattr(torch.cuda, "set_device", fails)
    expected = (
        r"^GPU 1 of 2 cannot be used \(CUDA error: all CUDA-capable devices are busy\): .*cpu"
    )
    with pytest.raises(UsageError, match=expected):
        choose_device("auto", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)  # current already: not used
    monkeypatch.setattr(device, "current_stream", fails)
    with pytest.raises(UsageError, match=expected):
        choose_device("auto", 1)


def test_on_the_cpu_nothing_touches_cupy(tmp_path):
    """Though it is installed, and would end whoever imports it."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise SystemExit('cupy was imported')\n")
    make_pack(tmp_path / "p.h5", {"train": 40, "test": 9})
    network = ["--runs-dir", ".", "--device", "cpu"]
    begins = "hpctrain {}: starting on 1 rank ...\n".format
    train = ["--data", "p.h5", "--epochs", "1", "--run", "a"]
    for command, code, said in (
        (["-m", "hpctrain", *train, *network], 0, begins("train")),
        (["-m", "hpctrain", "evaluate", "a", *network], 0, begins("evaluate")),
        (["-c", "import cupy"], 1, "cupy was imported\n"),
    ):
        done = run([sys.executable, *command], 60, {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, tmp_path)
        assert (done.returncode, done.stderr) == (code, said)
