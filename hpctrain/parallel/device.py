"""The device of a rank: which it is, what it is called, and the memory of messages on it."""

from __future__ import annotations

import functools
import os
import platform
import re
import warnings
from pathlib import Path

import numpy as np
import torch

from hpctrain.cluster import gpu_files
from hpctrain.errors import UsageError, first_line
from hpctrain.streams import record_event
from hpctrain.text import listed

#: Types of messages.
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def built_for() -> str:
    """Return torch's GPU platform, such as "CUDA 12.8" or "ROCm 7.0.51831"; empty if none."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip.partition('-')[0]}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return ""


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Return the device of a rank, and make it the current one; the CPU if the rank sees no GPU.

    It is the GPU of the local rank modulo the number of GPUs: the first one if the launcher shows
    each rank only its own. Raises UsageError if CUDA is requested and missing, or if a GPU cannot
    be used.
    """
    _choose_slice(local_rank)
    if requested == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        if requested != "cuda":
            return torch.device("cpu")
        text = f"--device cuda, but torch {torch.__version__} sees no GPU"
        if not built_for():
            text += " (this torch was built without GPUs)"
        raise UsageError(text)
    device = torch.device("cuda", local_rank % count)
    try:
        torch.cuda.set_device(device)
        record_event(device).synchronize()  # first use of the GPU, unlike set_device
    except RuntimeError as error:  # an old driver, a GPU that another process holds
        raise UsageError(
            f"GPU {device.index} of {count} cannot be used ({first_line(error)}):"
            " python -m hpctrain doctor shows more"
        ) from error
    return device


def unused_gpus_note(requested: str, device: torch.device) -> str:
    """Return a note if this host has GPUs and `device`, chosen for --device, is none; else ""."""
    files = gpu_files()
    if requested != "auto" or device.type != "cpu" or not files:
        return ""
    return (
        f"training runs on the CPU: this host has {listed(files, 1)}, but torch sees no GPU"
        " (python -m hpctrain doctor shows why; --device cpu, if that is meant)"
    )


def _choose_slice(local_rank: int) -> None:
    """Leave this rank's slice alone in CUDA_VISIBLE_DEVICES, if it lists slices of GPUs (MIG).

    A process can use one slice, and CUDA would take the first of the list in each.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(name.strip().startswith("MIG-") for name in names):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank % len(names)]


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised tensor.

    On the CPU NumPy does, in huge pages: copies between processes are then twice as fast.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.empty(shape, DTYPES[dtype]))
    return torch.empty(shape, dtype=dtype, device=device)


@functools.cache
def memory_of(device: torch.device) -> tuple[str, str]:
    """Return whose memory messages on this device use, "host", "cupy" or "torch", and why.

    On a GPU it is CuPy's, if CuPy is installed and fits torch. CuPy asks the runtime for it
    (cudaMalloc, hipMalloc), so that MPI and network cards can register it; torch's allocator may
    map memory in pieces (expandable segments), which cannot be registered.
    """
    if device.type == "cpu":
        return "host", "computes on the CPU"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's advice on how it is installed
            import cupy
        runtime = cupy.cuda.runtime
        version = runtime.runtimeGetVersion()
        if runtime.is_hip:
            platform_of_cupy = f"ROCm {version // 10_000_000}"
        else:
            platform_of_cupy = f"CUDA {version // 1000}"
        if platform_of_cupy != built_for().partition(".")[0]:
            return "torch", f"CuPy is built for {platform_of_cupy}, torch for {built_for()}"
        _empty_of_cupy(1, torch.float32, device)
    except Exception as error:  # CuPy's own errors cannot be named without importing it
        return "torch", f"no CuPy ({type(error).__name__}: {first_line(error)})"
    return "cupy", f"CuPy and torch are built for {platform_of_cupy}"


def zeros_for_messages(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a vector of zeros for messages. Raises UsageError for types that MPI cannot sum."""
    if dtype not in DTYPES:
        raise UsageError(f"a message of {dtype} cannot be summed by MPI: use float32 or float64")
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(length, DTYPES[dtype]))
    if memory_of(device)[0] == "cupy":
        return _empty_of_cupy(length, dtype, device).zero_()
    return torch.zeros(length, dtype=dtype, device=device)


def _empty_of_cupy(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new CuPy array outside of CuPy's memory pool, as a tensor that keeps it alive."""
    import cupy

    with cupy.cuda.Device(device.index), cupy.cuda.using_allocator(None):
        return torch.as_tensor(cupy.empty(length, DTYPES[dtype]))


@functools.cache
def processor_name() -> str:
    """Return the processor's name, family and model: "AMD EPYC 9654 96-Core Processor (25.17)"."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    family = fields.get("cpu family", "?")
    model = fields.get("model", "?")
    return f"{fields['model name']} ({family}.{model})"


def hardware_key(device: torch.device) -> str:
    """Return what the bits of results depend on besides the plan: versions and hardware."""
    parts = [
        f"torch {torch.__version__}",
        processor_name(),
        torch.backends.cpu.get_cpu_capability(),
    ]
    if device.type == "cuda":
        kernels = "MIOpen" if torch.version.hip else "cuDNN"
        parts += [
            torch.cuda.get_device_name(device),
            built_for(),
            f"{kernels} {torch.backends.cudnn.version()}",
        ]
    return ", ".join(parts)
