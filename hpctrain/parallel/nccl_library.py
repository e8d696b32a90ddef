"""The C functions of the NCCL that torch itself loaded, or on AMD GPUs of its RCCL, which has the
same (NCCL User Guide, "NCCL API").
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import torch

from hpctrain.errors import RunError
from hpctrain.parallel.runtime import built_for, torch_library


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


FUNCTIONS: dict[str, tuple[Any, ...]] = {  # all return a ncclResult_t, an int
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # from, to, numbers, type, operation, communicator, stream
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    # place, numbers, type, peer, communicator, stream
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


class Library:
    """The functions of a NCCL, that of torch by default. RunError where it has none."""

    def __init__(self, path: str = "") -> None:
        self._handle = ctypes.CDLL(path) if path else torch_library()
        try:
            for name, arguments in FUNCTIONS.items():
                getattr(self._handle, name).argtypes = arguments
            for name, argument in (("ncclGetErrorString", c_int), ("ncclGetLastError", c_void_p)):
                getattr(self._handle, name).argtypes = (argument,)
                getattr(self._handle, name).restype = c_char_p
        except AttributeError as error:
            raise RunError(f"torch {torch.__version__} was built without NCCL ({error})") from None

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function by its name. RunError with NCCL's own words where it fails."""
        if code := getattr(self._handle, name)(*arguments):
            self.fail(name, code)

    def fail(self, name: str, code: int) -> None:
        """RunError for a code that this function returned."""
        words = [self._handle.ncclGetErrorString(code), self._handle.ncclGetLastError(None)]
        text = ": ".join(word.decode(errors="replace").strip() for word in words if word)
        raise RunError(f"{name} failed on this rank or a rank it talks to: {text}")

    def version(self) -> str:
        """Such as "NCCL 2.29.7"."""
        found = c_int()
        self("ncclGetVersion", ctypes.byref(found))
        major, rest = divmod(found.value, 10000)
        name = "RCCL" if built_for().startswith("ROCm") else "NCCL"
        return f"{name} {major}.{rest // 100}.{rest % 100}"

    def unique_id(self) -> bytes:
        """By which the ranks of one communicator meet."""
        made = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


def nccl_version() -> str:
    """Name and version of the NCCL that torch loaded; empty without one."""
    try:
        return Library().version()
    except RunError:
        return ""
