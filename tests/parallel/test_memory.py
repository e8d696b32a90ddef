"""Whose memory messages lie in: on made-up facts, and on a made-up GPU with and without CuPy."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.parallel import memory
from hpctrain.parallel.memory import (
    Installed,
    PlainMemory,
    built_for,
    call_runtime,
    choose_memory,
    is_exclusive,
    memory_of,
    plain_zeros,
)
from hpctrain.parallel.placement import Choice

C12, C13, R70, R71 = "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "cupy-rocm-7-1"
NVRTC = "libnvrtc.so.12: cannot open"
GPU = torch.device("cuda", 1)

FACTS = {
    Installed("", 0): ("host", "torch was built without GPUs"),
    Installed("", 0, (C12,), "CUDA 12"): ("host", "torch was built without GPUs"),
    Installed("CUDA 12", 0): ("host", "torch, built for CUDA 12, sees no GPU"),
    Installed("ROCm 6", 0, (R70,), "ROCm 7"): (
        "host",
        "torch, built for ROCm 6, sees no GPU",
    ),
    Installed("CUDA 12", 1): ("torch", "CuPy is not installed, nor needed"),
    Installed("CUDA 13", 4): ("torch", "CuPy is not installed, nor needed"),
    Installed("ROCm 6", 8): ("torch", "CuPy is not installed, nor needed"),
    Installed("CUDA 12", 1, (C12,), "CUDA 12"): (
        "cupy",
        "cupy-cuda12x and torch are built for CUDA 12",
    ),
    Installed("CUDA 13", 2, (C13,), "CUDA 13"): (
        "cupy",
        "cupy-cuda13x and torch are built for CUDA 13",
    ),
    Installed("ROCm 7", 8, (R70,), "ROCm 7"): (
        "cupy",
        "cupy-rocm-7-0 and torch are built for ROCm 7",
    ),
    Installed("CUDA 13", 1, (), "CUDA 13"): (
        "cupy",
        "CuPy and torch are built for CUDA 13",
    ),
    Installed("CUDA 13", 1, (C12,), "CUDA 12"): (
        "torch",
        "cupy-cuda12x is built for CUDA 12, torch for CUDA 13:"
        " pip uninstall cupy-cuda12x; then pip install 'hpctrain[cuda13]'",
    ),
    Installed("CUDA 12", 1, (R70,), "ROCm 7"): (
        "torch",
        "cupy-rocm-7-0 is built for ROCm 7, torch for CUDA 12:"
        " pip uninstall cupy-rocm-7-0; then pip install 'hpctrain[cuda12]'",
    ),
    Installed("ROCm 7", 1, (C12,), "CUDA 12"): (
        "torch",
        "cupy-cuda12x is built for CUDA 12, torch for ROCm 7:"
        " pip uninstall cupy-cuda12x; then pip install 'hpctrain[rocm]'",
    ),
    Installed("ROCm 6", 1, (R70,), "ROCm 7"): (
        "torch",
        "cupy-rocm-7-0 is built for ROCm 7, torch for ROCm 6",
    ),
    Installed("CUDA 12", 1, (C12, C13), "CUDA 13"): (
        "torch",
        "several CuPy packages are installed:"
        " pip uninstall cupy-cuda12x cupy-cuda13x; then pip install 'hpctrain[cuda12]'",
    ),
    Installed("ROCm 6", 1, (R70, R71), "ROCm 7"): (
        "torch",
        "several CuPy packages are installed: pip uninstall cupy-rocm-7-0 cupy-rocm-7-1",
    ),
    Installed("CUDA 12", 1, (C12,), "", NVRTC): (
        "torch",
        f"cupy-cuda12x does not work here ({NVRTC})",
    ),
    Installed("ROCm 7", 4, (R70,), "ROCm 7", "RunError: memory for cuda:1 was found on cuda:0"): (
        "torch",
        "cupy-rocm-7-0 does not work here (RunError: memory for cuda:1 was found on cuda:0)",
    ),
}


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_one_true_line_for_each(facts):
    assert choose_memory(facts) == Choice(*FACTS[facts])


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
    monkeypatch.setattr(memory, "_is_installed", lambda name: name == R70)
    memory_of.cache_clear()
    yield monkeypatch
    memory_of.cache_clear()


def test_cupy_of_rocm_is_told_from_that_of_cuda_and_gives_memory_of_the_ranks_gpu(two_gpus):
    cupy = Cupy(70051831, is_hip=True)
    two_gpus.setitem(sys.modules, "cupy", cupy)
    assert memory_of(GPU) == ("cupy", "cupy-rocm-7-0 and torch are built for ROCm 7")
    assert cupy.given == [(4, 1)]  # bytes, GPU


def test_memory_of_another_gpu_is_not_taken(two_gpus):
    cupy = Cupy(70051831, is_hip=True)
    cupy.memory = lambda size: SimpleNamespace(ptr=64, device=0)
    cupy.cuda.Memory = cupy.memory
    two_gpus.setitem(sys.modules, "cupy", cupy)
    assert memory_of(GPU).reason.endswith("(RunError: memory for cuda:1 was found on cuda:0)")


@pytest.mark.parametrize(
    ("cupy", "installed", "reason"),
    [
        (None, (), "CuPy is not installed, nor needed"),
        (None, (R70,), "cupy-rocm-7-0 does not work here (import of cupy halted; None in"),
        (Cupy(12090), (C12,), "cupy-cuda12x is built for CUDA 12, torch for ROCm 7: pip un"),
        (Cupy(60443482, is_hip=True), (), "CuPy is built for ROCm 6, torch for ROCm 7: pip un"),
        (ModuleType("cupy"), (), "CuPy does not work here (AttributeError: module 'cupy' has no"),
    ],
)
def test_where_cupy_does_not_fit_memory_is_torchs(two_gpus, cupy, installed, reason):
    two_gpus.setitem(sys.modules, "cupy", cupy)
    two_gpus.setattr(memory, "_is_installed", lambda name: name in installed)
    choice = memory_of(GPU)
    assert choice.name == "torch" and choice.reason.startswith(reason)


def test_on_the_cpu_it_is_numpys():
    for dtype in (torch.float32, torch.float64):
        vector = plain_zeros(5, dtype, torch.device("cpu"))
        assert vector.tolist() == [0] * 5 and vector.dtype == dtype
    with pytest.raises(UsageError, match="a message of torch.float16 cannot be summed by MPI"):
        plain_zeros(5, torch.float16, torch.device("cpu"))
    assert memory_of(torch.device("cpu")).name == "host"


@pytest.mark.skipif(built_for() != "", reason="torch knows GPUs")
def test_a_torch_without_a_runtime_is_one_line():
    with pytest.raises(RunError, match=r"^torch \S+ was built without GPUs$"):
        PlainMemory(8)
    with pytest.raises(RunError, match="without GPUs"):
        call_runtime("Malloc")
    assert not is_exclusive(0)


def test_a_broken_cupy_is_described_without_its_bars():
    text = "\n" + "=" * 40 + "\nFailed to import CuPy.\n" + "=" * 40
    assert first_line(ImportError(text)) == "Failed to import CuPy."
    assert first_line(ImportError()) == "ImportError"
    assert first_line(RuntimeError("\n\n two \nthree")) == "two"
