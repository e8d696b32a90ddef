"""Whose memory messages lie in: on made-up facts, and on a made-up GPU with and without CuPy."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hpctrain.errors import UsageError, first_line
from hpctrain.parallel.memory import (
    memory_of,
    zeros_for_messages,
)

GPU = torch.device("cuda", 1)


class Cupy(ModuleType):
    """One that gives memory of its own current GPU, 0."""

    def __init__(self, version, is_hip=False):
        super().__init__("cupy")
        self.current, self.given = [0], []
        runtime = SimpleNamespace(is_hip=is_hip, runtimeGetVersion=lambda: version)
        self.cuda = SimpleNamespace(Device=self.device, Memory=self.memory, runtime=runtime)

    def device(self, number):
        cupy = self

        class Device:
            def __enter__(self):
                cupy.current.append(number)

            def __exit__(self, *error):
                cupy.current.pop()

        return Device()

    def memory(self, size):
        self.given.append((size, self.current[-1]))
        return SimpleNamespace(ptr=64, device=self.current[-1])


@pytest.fixture
def two_gpus(monkeypatch):
    """A torch for ROCm 7.0 that sees two GPUs, and views memory as host memory of that device."""

    class Viewed(SimpleNamespace):
        def data_ptr(self):
            return self.view.memory.ptr

    def as_tensor(view):
        return Viewed(view=view, device=torch.device("cuda", view.memory.device))

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0.51831-a3e329ad8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    memory_of.cache_clear()
    yield monkeypatch
    memory_of.cache_clear()


def test_cupy_of_rocm_is_told_from_that_of_cuda_and_gives_memory_of_the_ranks_gpu(two_gpus):
    cupy = Cupy(70051831, is_hip=True)
    two_gpus.setitem(sys.modules, "cupy", cupy)
    assert memory_of(GPU) == ("cupy", "CuPy and torch are built for ROCm 7")
    assert cupy.given == [(4, 1)]  # bytes, GPU


def test_memory_of_another_gpu_is_not_taken(two_gpus):
    cupy = Cupy(70051831, is_hip=True)
    cupy.memory = lambda size: SimpleNamespace(ptr=64, device=0)
    cupy.cuda.Memory = cupy.memory
    two_gpus.setitem(sys.modules, "cupy", cupy)
    assert memory_of(GPU).reason.endswith("(RunError: memory for cuda:1 was found on cuda:0)")


@pytest.mark.parametrize(
    ("cupy", "reason"),
    [
        (None, "CuPy is not installed, nor needed"),
        (Cupy(12090), "CuPy is built for CUDA 12, torch for ROCm 7"),
        (Cupy(60443482, is_hip=True), "CuPy is built for ROCm 6, torch for ROCm 7"),
        (ModuleType("cupy"), "CuPy does not work here (AttributeError: module 'cupy' has no"),
    ],
)
def test_where_cupy_does_not_fit_memory_is_torchs(two_gpus, cupy, reason):
    two_gpus.setitem(sys.modules, "cupy", cupy)
    choice = memory_of(GPU)
    assert choice.name == "torch" and choice.reason.startswith(reason)


def test_a_cupy_whose_libraries_are_missing_is_not_taken_for_none(two_gpus, tmp_path):
    (tmp_path / "cupy").mkdir()
    code = "raise ImportError('libnvrtc.so.12: cannot open')"
    (tmp_path / "cupy/__init__.py").write_text(code)
    two_gpus.delitem(sys.modules, "cupy", raising=False)
    two_gpus.syspath_prepend(tmp_path)
    reason = "CuPy does not work here (ImportError: libnvrtc.so.12: cannot open)"
    assert memory_of(GPU) == ("torch", reason)


def test_on_the_cpu_it_is_numpys():
    for dtype in (torch.float32, torch.float64):
        vector = zeros_for_messages(5, dtype, torch.device("cpu"))
        assert vector.tolist() == [0] * 5 and vector.dtype == dtype
    with pytest.raises(UsageError, match="a message of torch.float16 cannot be summed by MPI"):
        zeros_for_messages(5, torch.float16, torch.device("cpu"))
    assert memory_of(torch.device("cpu")).name == "host"


def test_a_broken_cupy_is_described_without_its_bars():
    text = "\n" + "=" * 40 + "\nFailed to import CuPy.\n" + "=" * 40
    assert first_line(ImportError(text)) == "Failed to import CuPy."
    assert first_line(ImportError()) == "ImportError"
    assert first_line(RuntimeError("\n\n two \nthree")) == "two"
