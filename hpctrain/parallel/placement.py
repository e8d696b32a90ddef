"""The GPU of each rank, and the transport of messages: pure functions of what all ranks have.

Transports:

mpi       all ranks compute on CPUs: MPI sums host memory
none      one rank with a GPU: nothing is sent
nccl      every rank has a GPU of its own, and torch has the same NCCL on all of them
host      GPUs, through pinned host memory: works everywhere, with any MPI
mpi-gpu   GPUs, whose memory is passed to MPI: only on request
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.errors import UsageError
from hpctrain.text import counted


class RankDevice(NamedTuple):
    """The device of one rank."""

    host: str
    gpu: str = ""  # its UUID; empty: computes on the CPU
    nccl: str = ""  # torch's, such as "NCCL 2.29.7"; empty = none


def which_gpu(local_rank: int, visible: int) -> int | None:
    """Return the index of a rank's GPU among those that it sees; None if it sees none.

    It is the local rank modulo the number of GPUs: 0 if the launcher shows each rank only its own.
    """
    return local_rank % visible if visible else None


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


class Choice(NamedTuple):
    """A transport, or a kind of memory, by name, and the reason for it."""

    name: str
    reason: str


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
    if wanted in ("host", "mpi-gpu"):
        return Choice(wanted, "asked for")
    against = _against_nccl(ranks)
    if wanted == "nccl" and against:
        raise UsageError(f"--reduce nccl: {against}")
    if wanted == "nccl":
        return Choice("nccl", "asked for")
    if len(ranks) == 1:
        return Choice("none", "one rank")
    if against:
        return Choice("host", against)
    return Choice("nccl", "every rank has a GPU of its own")


def _against_nccl(ranks: Sequence[RankDevice]) -> str:
    """Return why NCCL cannot be used with these ranks; empty if it can."""
    users: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(ranks):
        if not place.nccl:
            return f"torch on rank {rank} ({place.host}) was built without NCCL"
        if place.nccl != ranks[0].nccl:
            return f"{ranks[0].nccl} on rank 0, {place.nccl} on rank {rank} ({place.host})"
        other = users.setdefault((place.host, place.gpu), rank)
        if other != rank:
            return f"ranks {other} and {rank} share a GPU of {place.host}"
    return ""
