"""Memory of the host: pinned for copies from and to a GPU, and kept by glibc."""

from __future__ import annotations

import ctypes

import torch

# Parameters of mallopt (malloc.h)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def empty_on_host(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an uninitialised tensor on the host, for copies from or to `device`.

    It is pinned if that is a GPU: copies then wait for nothing (``non_blocking=True``).
    """
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def keep_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the system.

    Every step frees and allocates the same blocks; if they are returned, every page faults again
    (700 to 1,400 faults per step of the digits network, a third of its time). Threads share one
    arena: glibc returns the memory of other arenas than the first regardless of the setting, which
    costs the loader's thread 1,300 faults per batch of 128 images of 100x100x3, and half its speed.
    See mallopt(3).
    """
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions accept at most 32 MiB; each call disables the dynamic adjustment of both.
    if mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25):
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_ARENA_MAX, 1)
