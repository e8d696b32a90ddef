"""Memory for messages, and the GPU libraries of torch.

On a GPU it is CuPy's, if CuPy is installed and built for the same runtime as torch, else torch's.
CuPy asks the runtime for it directly (cudaMalloc, hipMalloc), so that MPI and network cards can
register it; torch's allocator may map memory in pieces (expandable segments), which cannot be
registered. This is the only module that imports cupy.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from typing import Any

import numpy as np
import torch

from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.parallel.placement import Choice

NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def built_for() -> str:
    """Return torch's GPU platform, such as "CUDA 12.8" or "ROCm 7.0.51831"; empty if none."""
    for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            return f"{name} {version.partition('-')[0]}"
    return ""


def torch_library() -> ctypes.CDLL:
    """Return torch's library for GPUs. Raises RunError if there is none.

    The functions of the libraries that it loaded, such as the runtime and NCCL, are found in it.
    """
    for name in ("libtorch_cuda.so", "libtorch_hip.so"):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError:
            continue
    raise RunError(f"torch {torch.__version__} was built without GPUs")


@functools.cache
def memory_of(device: torch.device) -> Choice:
    """Return whose memory messages on this device use, "host", "cupy" or "torch", and why."""
    if device.type == "cpu":
        return Choice("host", "computes on the CPU")
    wanted = built_for().partition(".")[0]  # such as "CUDA 12"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's advice on how it is installed
            import cupy
        if (found := _cupy_built_for(cupy)) != wanted:
            return Choice("torch", f"CuPy is built for {found}, torch for {wanted}")
        _viewed(_cupy_memory(4, device), 1, torch.float32, device)
    except Exception as error:  # CuPy's own errors cannot be named without importing it
        if isinstance(error, ImportError) and error.name == "cupy":
            return Choice("torch", "CuPy is not installed, nor needed")
        problem = f"{type(error).__name__}: {first_line(error)}"
        return Choice("torch", f"CuPy does not work here ({problem})")
    return Choice("cupy", f"CuPy and torch are built for {wanted}")


def zeros_for_messages(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a vector of zeros for messages.

    Raises UsageError for types that MPI cannot sum, RunError if a GPU has not enough memory.
    """
    if dtype not in NUMPY_DTYPES:
        raise UsageError(f"a message of {dtype} cannot be summed by MPI: use float32 or float64")
    kind = np.dtype(NUMPY_DTYPES[dtype])
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(length, kind))
    device, size = torch.empty(0, device=device).device, length * kind.itemsize  # with its index
    try:
        if memory_of(device).name == "torch":
            return torch.zeros(length, dtype=dtype, device=device)
        memory = _cupy_memory(size, device)
    except Exception as error:  # as above
        raise RunError(f"{size:,} bytes on {device}: {first_line(error)}") from error
    return _viewed(memory, length, dtype, device).zero_()


def _cupy_memory(size: int, device: torch.device) -> Any:
    import cupy

    with cupy.cuda.Device(device.index):  # CuPy's current GPU may differ from torch's
        return cupy.cuda.Memory(size)


def _cupy_built_for(cupy: Any) -> str:
    """Return CuPy's platform, such as "CUDA 12" or "ROCm 7"; HIP encodes versions differently."""
    runtime, unit = cupy.cuda.runtime, 1000
    name = "CUDA"
    if runtime.is_hip:
        name, unit = "ROCm", 10_000_000
    return f"{name} {runtime.runtimeGetVersion() // unit}"


class _View:
    """Memory in the form that `torch.as_tensor` accepts; the tensor keeps it alive."""

    def __init__(self, memory: Any, length: int, kind: np.dtype) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": kind.str,
            "data": (memory.ptr, False),
            "version": 2,
        }


def _viewed(memory: Any, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the memory as a vector.

    torch asks its runtime which GPU holds the memory. Raises RunError if it is another one, and
    ValueError if the runtime does not know the memory.
    """
    tensor = torch.as_tensor(_View(memory, length, np.dtype(NUMPY_DTYPES[dtype])))
    if tensor.device != device or tensor.data_ptr() != memory.ptr:
        raise RunError(f"memory for {device} was found on {tensor.device}")
    return tensor
