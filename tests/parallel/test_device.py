"""The device of a rank and the CuPy that it needs, on faked torch and CuPy."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.device import (
    array_module,
    choose_device,
    nccl_version,
)
from tests.launch import ROOT, run
from tests.packs import make_pack

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch):
    """A torch for CUDA 12 that sees two GPUs; the numbers that are made current."""
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    return current


def fake_cupy(monkeypatch, version):
    """A CuPy for this version of CUDA, such as 12090."""
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: version))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


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


def test_cupy_and_torch_are_for_the_same_cuda(two_gpus, monkeypatch):
    cupy = fake_cupy(monkeypatch, 12090)
    assert array_module(GPU) is cupy
    fake_cupy(monkeypatch, 13010)
    with pytest.raises(UsageError) as caught:
        array_module(GPU)
    assert str(caught.value) == (
        "cupy is built for CUDA 13, torch for CUDA 12:"
        " pip install cupy-cuda12x in place of cupy-cuda13x"
    )


def test_a_gpu_without_cupy_says_what_to_install(two_gpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not there
    with pytest.raises(UsageError, match=r"cupy is missing: pip install 'hpctrain\[cuda12\]'$"):
        array_module(GPU)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UsageError, match=r"'hpctrain\[cuda13\]'$"):
        array_module(GPU)


def refuses(name):
    raise RuntimeError(f"Failed to dlopen libnccl.so.2: {name}")


@pytest.mark.parametrize(
    ("library", "version"),
    [
        ({"get_version": lambda: 22304}, 22304),
        ({}, 0),  # CuPy's own stand-in for a missing one
        ({"__getattr__": refuses}, 0),
        (None, 0),
    ],
)
def test_an_nccl_that_is_missing_or_broken_is_none(monkeypatch, library, version):
    fake_cupy(monkeypatch, 12090)
    cuda = ModuleType("cupy.cuda")
    if library is not None:
        cuda.nccl = ModuleType("cupy.cuda.nccl")
        vars(cuda.nccl).update(library)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)  # a real one stays out of it
    assert nccl_version() == version


def test_what_cupy_says_while_it_looks_for_nccl_is_not_shown(monkeypatch):
    def warns(name):
        warnings.warn("nccl library could not be loaded", stacklevel=1)
        raise AttributeError(name)

    fake_cupy(monkeypatch, 12090)
    cuda = ModuleType("cupy.cuda")
    cuda.__getattr__ = warns
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)  # a real one stays out of it
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert nccl_version() == 0
        assert not said
        with pytest.raises(AttributeError):
            _ = cuda.nccl
        assert len(said) == 1


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
