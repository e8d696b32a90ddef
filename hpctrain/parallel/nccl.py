"""NCCL or RCCL by ctypes, and the choice of the transport: NCCL where every rank can use it.

The library is the one that torch itself loaded; on AMD GPUs it is RCCL, which has the same
functions (NCCL User Guide, "NCCL API"). The calls are in `transport.py`. Nothing here needs MPI.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.text import counted


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Library(ctypes.CDLL):
    """NCCL, by default the one that torch's library for GPUs has loaded.

    Its functions raise RunError with NCCL's message if they fail. Pointers and lengths are passed
    as c_void_p and c_size_t: ctypes takes other integers for a C int.
    """

    def __init__(self, path: str = "") -> None:
        own = "libtorch_hip.so" if torch.version.hip else "libtorch_cuda.so"
        super().__init__(path or own, ctypes.DEFAULT_MODE if path else os.RTLD_NOLOAD)

    def __getitem__(self, name: str) -> Any:
        function: Any = super().__getitem__(name)
        if name in ("ncclGetErrorString", "ncclGetLastError"):
            function.restype = ctypes.c_char_p
        else:
            function.errcheck = lambda code, *_: self.check(name, code)
        return function

    def check(self, name: str, code: int) -> None:
        """Raise RunError if `code`, which the function `name` returned, is an error."""
        if code:
            words = [self.ncclGetErrorString(code), self.ncclGetLastError(None)]
            text = ": ".join(word.decode(errors="replace").strip() for word in words if word)
            raise RunError(f"{name} failed on this rank or a rank it talks to: {text}")


def version() -> str:
    """Return name and version of torch's NCCL, such as "NCCL 2.29.7"; empty if it has none."""
    try:
        found = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    except (AttributeError, RuntimeError):
        return ""
    return f"{'RCCL' if torch.version.hip else 'NCCL'} {found}"


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
