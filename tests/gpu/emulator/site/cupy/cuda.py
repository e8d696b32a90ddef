"""cupy.cuda: plain device memory."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

_RUNTIME = ctypes.CDLL("libcudart.so.13")


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


def _integer(call: Any) -> int:
    found = ctypes.c_int()
    _check(call(ctypes.byref(found)))
    return found.value


class runtime:
    """cupy.cuda.runtime."""

    is_hip = False

    @staticmethod
    def runtimeGetVersion() -> int:
        return _integer(_RUNTIME.cudaRuntimeGetVersion)


class Device:
    """The current device within a `with`."""

    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> Device:
        self._before = _integer(_RUNTIME.cudaGetDevice)
        _check(_RUNTIME.cudaSetDevice(self.id))
        return self

    def __exit__(self, *_: Any) -> None:
        _check(_RUNTIME.cudaSetDevice(self._before))


using_allocator = nullcontext  # the emulated CuPy has no memory pool


class Memory:
    """Memory of the current device, whichever that is; freed with the object."""

    def __init__(self, size: int) -> None:
        place = ctypes.c_void_p()
        self.device_id = _integer(_RUNTIME.cudaGetDevice)
        _check(_RUNTIME.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(size)))
        self.ptr, self.size = place.value or 0, size

    def __del__(self, _free: Any = _RUNTIME.cudaFree) -> None:
        if getattr(self, "ptr", 0):
            _free(ctypes.c_void_p(self.ptr))
