"""Memory for messages, which MPI libraries, NCCL and network cards register and keep registered.

On a GPU it is allocated directly by the runtime, cudaMalloc or hipMalloc, not from a pool: torch's
allocator may map memory in pieces (expandable segments), which can be neither shared between
processes nor registered. CuPy allocates it if it is compatible with torch, otherwise torch's own
runtime. This is the only module that imports cupy.

The runtime's C functions are looked up through torch's own library, so that no second runtime is
loaded, which would not know the memory and the streams of the first. The functions of CUDA and of
ROCm (HIP) differ only in their prefix.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
import weakref
from contextlib import suppress
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.parallel.placement import Choice

COMPUTE_MODE = 20  # cudaDevAttrComputeMode
EXCLUSIVE_PROCESS = 3  # cudaComputeModeExclusiveProcess
EXCLUSIVE = "is in compute mode EXCLUSIVE_PROCESS and serves one process at a time"
NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
# As CuPy lists them (_environment.py); only one may be installed.
CUPY_PACKAGES = (
    *("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
    *("amd-cupy", "cupy-rocm-5-0", "cupy-rocm-7-0", "cupy-rocm-7-1", "cupy-rocm-7-14"),
)
EXTRAS = {"CUDA 12": "cuda12", "CUDA 13": "cuda13", "ROCm 7": "rocm"}  # of setup.py


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


def call_runtime(name: str, *arguments: Any) -> None:
    """Call cudaName or hipName. Raises RunError with the runtime's message if it fails."""
    library, prefix = torch_library(), "hip" if torch.version.hip else "cuda"
    try:
        function, text_of = (getattr(library, prefix + n) for n in (name, "GetErrorString"))
    except AttributeError:  # linked into torch and hidden
        raise RunError(f"torch {torch.__version__} hides {prefix}{name} of its runtime") from None
    if code := function(*arguments):
        text_of.restype = ctypes.c_char_p
        raise RunError(f"{prefix}{name}: {text_of(code).decode(errors='replace')}")


class PlainMemory:
    """Memory of the current GPU, allocated by the runtime and freed with this object."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes. Raises RunError if there is not enough memory."""
        place = ctypes.c_void_p()
        call_runtime("Malloc", ctypes.byref(place), ctypes.c_size_t(size))
        self.ptr = place.value or 0
        # Not at interpreter exit: the runtime may already be unloaded.
        weakref.finalize(self, call_runtime, "Free", place).atexit = False


def is_exclusive(gpu: int) -> bool:
    """Whether this GPU serves one process at a time (compute mode EXCLUSIVE_PROCESS).

    Creates no context on it. AMD's GPUs have no such mode.
    """
    mode = ctypes.c_int()
    with suppress(RunError):
        if torch.version.cuda:
            call_runtime("DeviceGetAttribute", ctypes.byref(mode), COMPUTE_MODE, gpu)
    return mode.value == EXCLUSIVE_PROCESS


class Installed(NamedTuple):
    """Installed software, by which `choose_memory` decides."""

    torch: str  # platform it was built for, such as "CUDA 12"; empty without GPU support
    gpus: int  # number that torch sees
    packages: tuple[str, ...] = ()  # of CuPy
    cupy: str = ""  # platform it was built for; empty if it cannot be imported
    problem: str = ""  # error when CuPy was imported or shared memory with torch


def choose_memory(found: Installed) -> Choice:
    """Return which memory messages use, "host", "cupy" or "torch", and why."""
    if not found.torch:
        return Choice("host", "torch was built without GPUs")
    if not found.gpus:
        return Choice("host", f"torch, built for {found.torch}, sees no GPU")
    extra = EXTRAS.get(found.torch)
    install = f"; then pip install 'hpctrain[{extra}]'" if extra else ""
    if not any((found.packages, found.cupy, found.problem)):
        return Choice("torch", "CuPy is not installed, nor needed")
    if len(found.packages) > 1:
        names = " ".join(found.packages)
        why = f"several CuPy packages are installed: pip uninstall {names}{install}"
        return Choice("torch", why)
    name = "".join(found.packages) or "CuPy"
    if found.cupy and found.cupy != found.torch:
        why = f"{name} is built for {found.cupy}, torch for {found.torch}"
        return Choice("torch", f"{why}: pip uninstall {name}{install}" if extra else why)
    if found.problem:
        return Choice("torch", f"{name} does not work here ({found.problem})")
    return Choice("cupy", f"{name} and torch are built for {found.torch}")


@functools.cache
def memory_of(device: torch.device) -> Choice:
    """Return which memory messages on this device use, by what is installed and works."""
    if device.type == "cpu":
        return Choice("host", "computes on the CPU")
    packages = tuple(name for name in CUPY_PACKAGES if _is_installed(name))
    found = Installed(built_for().split(".")[0], torch.cuda.device_count(), packages)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's advice on how it is installed
            import cupy
        found = found._replace(cupy=_cupy_built_for(cupy))
        if found.cupy == found.torch and len(packages) < 2:
            _viewed(_cupy_memory(4, device), 1, torch.float32, device)
    except ImportError as error:
        found = found._replace(problem=first_line(error) if packages else "")
    except Exception as error:  # CuPy's own errors cannot be named without importing it
        found = found._replace(problem=f"{type(error).__name__}: {first_line(error)}")
    return choose_memory(found)


def plain_zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a vector of zeros that MPI and network cards may register.

    Raises UsageError for types that MPI cannot sum, RunError if a GPU has not enough memory.
    """
    if dtype not in NUMPY_DTYPES:
        raise UsageError(f"a message of {dtype} cannot be summed by MPI: use float32 or float64")
    kind = np.dtype(NUMPY_DTYPES[dtype])
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(length, kind))
    device, size = torch.empty(0, device=device).device, length * kind.itemsize  # with its index
    if memory_of(device).name == "cupy":
        try:
            cupy_memory = _cupy_memory(size, device)
        except Exception as error:  # as above
            raise RunError(f"{size:,} bytes on {device}: {first_line(error)}") from error
        return _viewed(cupy_memory, length, dtype, device).zero_()
    with torch.cuda.device(device):
        memory = PlainMemory(size)
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


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False
