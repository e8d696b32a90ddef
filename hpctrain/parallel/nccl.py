"""NCCL or RCCL by ctypes, and the choice of the transport: NCCL where every rank can use it.

The library is the one that torch itself loaded; on AMD GPUs it is RCCL, which has the same
functions (NCCL User Guide, "NCCL API"). The calls are in `transport.py`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, NamedTuple

import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.text import counted


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


FUNCTIONS: dict[str, tuple[Any, ...]] = {  # all return a ncclResult_t, an int
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # send buffer, receive buffer, count, type, operation, communicator, stream
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    # send buffer, receive buffer, count of a block, type, communicator, stream
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    # buffer, count, type, peer, communicator, stream
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


def load_nccl(path: str = "") -> Any:
    """Load an NCCL library, by default the one that torch's library for GPUs has loaded.

    Its functions raise RunError with NCCL's message if they fail.
    """
    own = "libtorch_hip.so" if torch.version.hip else "libtorch_cuda.so"
    library = ctypes.CDLL(path or own, mode=ctypes.DEFAULT_MODE if path else os.RTLD_NOLOAD)

    def check(code: int, function: Any, arguments: tuple[Any, ...]) -> int:
        if code:
            raise nccl_error(library, function.__name__, code)
        return code

    for name, types in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.errcheck = types, check
    for name, type_ in (("ncclGetErrorString", c_int), ("ncclGetLastError", c_void_p)):
        function = getattr(library, name)
        function.argtypes, function.restype = (type_,), c_char_p
    return library


def nccl_error(library: Any, name: str, code: int) -> RunError:
    """Return the error for a code that the function `name` returned."""
    words = [library.ncclGetErrorString(code), library.ncclGetLastError(None)]
    text = ": ".join(word.decode(errors="replace").strip() for word in words if word)
    return RunError(f"{name} failed on this rank or a rank it talks to: {text}")


def nccl_version() -> str:
    """Return name and version of torch's NCCL, such as "NCCL 2.29.7"; empty if it has none."""
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    except (AttributeError, RuntimeError):
        return ""
    return f"{'RCCL' if torch.version.hip else 'NCCL'} {version}"


class RankDevice(NamedTuple):
    """The device of one rank."""

    host: str
    gpu: str = ""  # its UUID; empty: computes on the CPU
    nccl: str = ""  # torch's, such as "NCCL 2.29.7"; empty = none


class Choice(NamedTuple):
    """A transport by name, and the reason for it."""

    name: str
    reason: str


def describe_sharing(ranks: Sequence[RankDevice]) -> str:
    """Describe the first host on which more ranks than GPUs compute; empty if there is none."""
    gpus: dict[str, list[str]] = {}
    for place in ranks:
        if place.gpu:
            gpus.setdefault(place.host, []).append(place.gpu)
    for host, used in gpus.items():
        if len(set(used)) < len(used):
            return f"{len(used)} ranks share {counted(len(set(used)), 'GPU')} of {host}"
    return ""


def choose_transport(ranks: Sequence[RankDevice], wanted: str = "auto") -> Choice:
    """Choose the transport for all ranks from their devices.

    Raises UsageError with the reason if the `wanted` one is not possible, and if only some ranks
    have a GPU: these round differently, so weights that each rank updates would drift apart.
    """
    without = [f"rank {rank} ({place.host})" for rank, place in enumerate(ranks) if not place.gpu]
    if wanted in ("nccl", "mpi-gpu") and without:
        raise UsageError(f"--reduce {wanted} is for GPUs: {without[0]} has none")
    if len(without) == len(ranks):
        return Choice("mpi", "all ranks compute on CPUs")
    if without:
        raise UsageError(
            f"{len(without)} of {len(ranks)} ranks see no GPU, such as {without[0]}:"
            " weights would differ; give every rank a GPU, or all --device cpu"
        )
    against = describe_sharing(ranks)
    for rank, place in enumerate(ranks):
        if not place.nccl:
            against = f"torch on rank {rank} ({place.host}) was built without NCCL"
        elif place.nccl != ranks[0].nccl:
            against = f"{ranks[0].nccl} on rank 0, {place.nccl} on rank {rank} ({place.host})"
    if wanted == "nccl" and against:
        raise UsageError(f"--reduce nccl: {against}")
    if wanted != "auto":
        return Choice(wanted, "asked for")
    if len(ranks) == 1:
        return Choice("none", "one rank")
    if against:
        return Choice("host", against)
    return Choice("nccl", "every rank has a GPU of its own")
