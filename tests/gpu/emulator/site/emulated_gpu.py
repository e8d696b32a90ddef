"""Loaded by `import torch` in the environment of the emulated GPU: its operators and its
counters.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent  # where the libraries are
COUNTERS = (
    "launches",
    "copies_up",
    "copies_down",
    "copies_within",
    "bytes_up",
    "bytes_down",
    "bytes_within",
    "allocations",
    "frees",
    "host_allocations",
    "host_waits",
    "host_blocked",
    "graph_launches",
    "other_device",
)


def start() -> None:
    """Put the emulated operators in the place of torch's. Called at the end of `import torch`."""
    operators = ctypes.CDLL(str(HERE / "liboperators.so"))
    if os.environ.get("HPCTRAIN_EMULATED_GPU_RACES"):
        import races

        races.watch(operators)


def runtime() -> ctypes.CDLL:
    """The library in the place of CUDA's runtime."""
    return ctypes.CDLL("libcudart.so.13")


def counts() -> dict[str, int]:
    """What this process asked of the emulated runtime so far: kernels, copies by their way and
    their bytes, memory from the driver, calls that make the host wait, and among these
    (`host_blocked`) those that found work undone; calls that use objects of another device than the
    current one of their thread (`other_device`).
    """
    found = (ctypes.c_uint64 * len(COUNTERS)).in_dll(runtime(), "emulator_counters")
    return dict(zip(COUNTERS, found, strict=True))


def contexts() -> list[int]:
    """The devices on which this process has a context: those that were current in a call."""
    bits = runtime().emulator_contexts()
    return [number for number in range(bits.bit_length()) if bits >> number & 1]


def set_order(order: str, idle: int = 20) -> None:
    """When work is done from now on, as HPCTRAIN_EMULATED_GPU_ORDER and _IDLE say it at the start.
    What is queued is done first. ValueError for an order that is none.
    """
    choose = runtime().emulator_set_order
    choose.restype = ctypes.c_bool
    if not choose(order.encode(), ctypes.c_long(idle)):
        raise ValueError(f"order {order!r}: free, early, late or a number")
