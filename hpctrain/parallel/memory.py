"""Memory for messages: on a GPU that of CuPy, if it is installed and fits torch, else torch's.

CuPy asks the runtime for it directly (cudaMalloc, hipMalloc), so that MPI and network cards can
register it; torch's allocator may map memory in pieces (expandable segments), which cannot be
registered. This is the only module that imports cupy.
"""

from __future__ import annotations

import functools
import warnings

import numpy as np
import torch

from hpctrain.errors import UsageError, first_line
from hpctrain.parallel.device import built_for

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


@functools.cache
def memory_of(device: torch.device) -> tuple[str, str]:
    """Return whose memory messages on this device use, "host", "cupy" or "torch", and why."""
    if device.type == "cpu":
        return "host", "computes on the CPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's advice on how it is installed
            import cupy
        runtime = cupy.cuda.runtime
        name, unit = ("ROCm", 10_000_000) if runtime.is_hip else ("CUDA", 1000)
        found = f"{name} {runtime.runtimeGetVersion() // unit}"
        if found != built_for().partition(".")[0]:
            return "torch", f"CuPy is built for {found}, torch for {built_for()}"
        _empty_of_cupy(1, torch.float32, device)
    except Exception as error:  # CuPy's own errors cannot be named without importing it
        return "torch", f"no CuPy ({type(error).__name__}: {first_line(error)})"
    return "cupy", f"CuPy and torch are built for {found}"


def zeros_for_messages(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a vector of zeros for messages. Raises UsageError for types that MPI cannot sum."""
    if dtype not in DTYPES:
        raise UsageError(f"a message of {dtype} cannot be summed by MPI: use float32 or float64")
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(length, DTYPES[dtype]))
    device = torch.empty(0, device=device).device  # with its index
    if memory_of(device)[0] == "cupy":
        return _empty_of_cupy(length, dtype, device).zero_()
    return torch.zeros(length, dtype=dtype, device=device)


def _empty_of_cupy(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new CuPy array outside of CuPy's memory pool, as a tensor that keeps it alive."""
    import cupy

    with cupy.cuda.Device(device.index), cupy.cuda.using_allocator(None):
        return torch.as_tensor(cupy.empty(length, DTYPES[dtype]))
