"""The device of this rank: which one, its threads, streams, generators and graphs."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn

from hpctrain.errors import UsageError, first_line
from hpctrain.parallel.runtime import EXCLUSIVE, built_for, is_exclusive
from hpctrain.parallel.topology import which_gpu
from hpctrain.streams import current_stream


def choose_device(requested: str, local_rank: int) -> torch.device:
    """The device of a rank, by `which_gpu`; the CPU where it sees none.

    Makes the GPU the current one.
    Raises UsageError where CUDA is asked for and missing, or a GPU cannot be used.
    """
    count = torch.cuda.device_count() if requested != "cpu" else 0
    if requested == "cuda" and count == 0:
        raise UsageError(
            f"--device cuda, but torch {torch.__version__} sees no GPU"
            + ("" if built_for() else " (this torch was built without GPUs)")
        )
    number = which_gpu(local_rank, count)
    if number is None:
        return torch.device("cpu")
    try:
        torch.cuda.set_device(number)
        device = torch.device("cuda", number)
        current_stream(device).synchronize()  # the first use: to make it current may be none
    except RuntimeError as error:  # an old driver, a GPU in exclusive mode that is taken
        way_out = "python -m hpctrain doctor says more; --device cpu does without"
        if is_exclusive(number):
            way_out = (
                f"it {EXCLUSIVE}: start one rank for each GPU and end others that use it, or ask"
                f" for the mode DEFAULT (nvidia-smi -i {number} -c DEFAULT)"
            )
        raise UsageError(
            f"GPU {number} of {count} cannot be used ({first_line(error)}): {way_out}"
        ) from error
    return device


def gpu_uuid(device: torch.device) -> str:
    """What tells a GPU from all others, whatever its number here."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))


def place(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """Move a model to the device and its 4-d weights to the memory format, NHWC or NCHW."""
    model.to(device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    for parameter in model.parameters():
        if parameter.dim() == 4:  # those of 3-d convolutions have no NHWC
            parameter.data = parameter.data.contiguous(memory_format=layout)
    return model


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for numbers, not yet filled. On the CPU it is NumPy's, which asks for huge pages:
    copies between processes are then twice as fast.
    """
    if device.type == "cpu":
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        return torch.from_numpy(np.empty(shape, kind))
    return torch.empty(shape, dtype=dtype, device=device)


def pinned(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed host memory for `length` numbers, pinned where it is for a GPU `device`."""
    return torch.zeros(length, dtype=dtype, pin_memory=device.type == "cuda")


def seed_torch(key: int, device: torch.device) -> None:
    """Seed the generators that a model on this device draws from (dropout).

    Without `torch.manual_seed`, which spends 0.3 ms a call on devices that are not there.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn in this context leaves the generators of `seed_torch` as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def set_threads(threads: int) -> None:
    """CPU threads of this process. Launchers leave 1 or all cores; the plan decides instead."""
    torch.set_num_threads(threads)


def keep_memory() -> None:
    """Let glibc keep freed memory for the next step instead of giving it back after each.

    A step frees and asks for the same blocks again; given back, every page faults anew (700 to
    1,400 faults a step of the digits network, a third of its time). Threads share one arena:
    glibc gives those of other threads than the first back whatever it was told, which costs the
    loader's thread 1,300 faults a batch of 128 images of 100x100x3, and half its speed. See
    mallopt(3); does nothing where the C library has no such function.
    """
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Older libraries take at most 32 MiB, and each call ends their own adjusting of both.
    if mallopt is not None and (mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)):
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(arena_max, 1)
