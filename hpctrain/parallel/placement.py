"""Assignment of shards to ranks, the device of each rank, and the transport of messages.

All ranks decide from the same values, so they agree without communication.

A rank carries a contiguous run of shards, which are logical workers, and processes them one after
another: more shards than ranks means gradient accumulation. Data, their order and random numbers
depend on the shard.

Transports:

mpi       all ranks compute on CPUs: MPI sums host memory
none      one rank with a GPU: nothing is sent
nccl      every rank has a GPU of its own, and torch has the same NCCL on all of them
host      GPUs, through pinned host memory: works everywhere, with any MPI
mpi-gpu   GPUs, whose memory is passed to MPI: only on request
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import NamedTuple

from hpctrain.errors import UsageError
from hpctrain.text import counted


def assign_shards(shards: int, size: int, loads: Sequence[float] = ()) -> list[range]:
    """Assign a run of at least one shard to each of `size` ranks, in proportion to its load.

    `loads` are positive numbers, one per rank; without them all are equal. Every shard goes to the
    rank that would finish first with it (so that the slowest rank finishes as early as possible),
    in a tie to the first. Raises UsageError for more ranks than shards, since a rank without work
    would only wait, and for loads that are not one per rank.
    """
    if size > shards:
        raise UsageError(
            f"{size} ranks cannot carry {shards} shards: start at most {shards}; a new run may have"
            f" --shards {size} (a run keeps those of its first launch, by default one per rank)"
        )
    if loads and len(loads) != size:
        raise UsageError(f"--worker-load names {len(loads)} ranks, but there are {size}")
    counts, speeds = [1] * size, loads or [1.0] * size
    heap = [(2 / speed, rank) for rank, speed in enumerate(speeds)]  # with one shard more
    heapq.heapify(heap)
    for _ in range(shards - size):
        rank = heap[0][1]
        counts[rank] += 1
        heapq.heapreplace(heap, ((counts[rank] + 1) / speeds[rank], rank))
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def crowd(masks: Sequence[int]) -> tuple[float, int, int]:
    """Return ranks per core, the number of ranks and the number of cores of a host.

    `masks` holds a bit mask of the allowed cores for each rank of the host: bit N is core N.
    """
    cores = reduce(or_, masks).bit_count()
    return len(masks) / cores, len(masks), cores


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
