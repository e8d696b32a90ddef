"""The GPU runtime that torch was built for and loaded, CUDA's or ROCm's (HIP), by its C functions.

Both have the same functions but for their first letters. They are looked up from torch's own
library on, so that there is no second runtime, which would not know the memory and the streams of
the first.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from contextlib import suppress
from typing import Any

import torch

from hpctrain.errors import RunError

COMPUTE_MODE = 20  # cudaDevAttrComputeMode
EXCLUSIVE_PROCESS = 3  # cudaComputeModeExclusiveProcess
EXCLUSIVE = "is in compute mode EXCLUSIVE_PROCESS and serves one process at a time"


def built_for() -> str:
    """Such as "CUDA 12.8", "ROCm 7.0.51831"; empty for a torch that knows no GPUs."""
    for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            return f"{name} {version.partition('-')[0]}"
    return ""


def torch_library() -> ctypes.CDLL:
    """The part of torch that computes on GPUs, in which the functions of all libraries are found
    that it loaded: of the runtime, of NCCL. RunError where there is none.
    """
    for name in ("libtorch_cuda.so", "libtorch_hip.so"):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError:
            continue
    raise RunError(f"torch {torch.__version__} was built without GPUs")


def call_runtime(name: str, *arguments: Any) -> None:
    """Call cudaName or hipName. RunError with the runtime's own words where it fails."""
    library, prefix = torch_library(), "hip" if torch.version.hip else "cuda"
    try:
        function, text_of = (getattr(library, prefix + n) for n in (name, "GetErrorString"))
    except AttributeError:  # linked into torch and hidden
        raise RunError(f"torch {torch.__version__} hides {prefix}{name} of its runtime") from None
    if code := function(*arguments):
        text_of.restype = ctypes.c_char_p
        raise RunError(f"{prefix}{name}: {text_of(code).decode(errors='replace')}")


class PlainMemory:
    """Memory of the current GPU straight from the runtime, freed with this object."""

    def __init__(self, size: int) -> None:
        """`size` bytes. RunError where there is no room."""
        place = ctypes.c_void_p()
        call_runtime("Malloc", ctypes.byref(place), ctypes.c_size_t(size))
        self.ptr = place.value or 0
        # Not when the interpreter ends: the runtime may be gone before.
        weakref.finalize(self, call_runtime, "Free", place).atexit = False


def is_exclusive(gpu: int) -> bool:
    """Whether this GPU serves one process at a time (compute mode EXCLUSIVE_PROCESS). Starts no
    context on it; AMD's GPUs have no such mode.
    """
    mode = ctypes.c_int()
    with suppress(RunError):
        if torch.version.cuda:
            call_runtime("DeviceGetAttribute", ctypes.byref(mode), COMPUTE_MODE, gpu)
    return mode.value == EXCLUSIVE_PROCESS
