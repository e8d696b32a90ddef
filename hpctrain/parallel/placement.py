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
mpi-gpu   GPUs, whose memory is passed to MPI: only on request, after a test in another process
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
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
    """The device of one rank, and what it supports."""

    host: str
    device: str  # "cpu" or "cuda"
    gpu: str = ""  # its UUID
    nccl: str = ""  # torch's, such as "NCCL 2.29.7"; empty = none
    refusal: str | None = None  # why MPI cannot take device memory; None = it can, or not tested


def which_gpu(local_rank: int, visible: int) -> int | None:
    """Return the index of a rank's GPU among those that it sees; None if it sees none.

    It is the local rank modulo the number of GPUs: 0 if the launcher shows each rank only its own.
    """
    return local_rank % visible if visible else None


def describe_sharing(places: Iterable[RankDevice]) -> str:
    """Describe a host on which more ranks than GPUs compute; empty if there is none."""
    gpus: dict[str, list[str]] = {}
    for place in places:
        if place.device != "cpu":
            gpus.setdefault(place.host, []).append(place.gpu)
    shared = [(host, used) for host, used in gpus.items() if len(set(used)) < len(used)]
    if not shared:
        return ""
    (host, used), distinct = shared[0], len(set(shared[0][1]))
    text = f"{len(used)} ranks share {distinct} GPU{'s' * (distinct > 1)} of {host}"
    return and_other_hosts(text, len(shared))


def and_other_hosts(text: str, hosts: int) -> str:
    """Return a text about the first of `hosts` hosts, with the number of other hosts added."""
    return text + (f", likewise on {counted(hosts - 1, 'other host')}" if hosts > 1 else "")


class DeviceKind(NamedTuple):
    """The properties of a rank's device that `choose_transport` needs, without its location."""

    device: str
    nccl: str
    refusal: str | None
    shared: bool  # an earlier rank of the host has the same GPU


class DeviceGroup(NamedTuple):
    """The ranks whose devices are of one kind."""

    first: int  # lowest rank
    host: str  # of rank `first`
    other: int  # the lowest rank with the same GPU as rank `first`
    ranks: int  # number of ranks


DeviceGroups = dict[DeviceKind, DeviceGroup]


def group_devices(places: Mapping[int, RankDevice]) -> DeviceGroups:
    """Group ranks by the kind of their device; `places` must hold all ranks of each host."""
    groups: DeviceGroups = {}
    seen: dict[tuple[str, str], int] = {}
    for rank, place in places.items():
        other = seen.setdefault((place.host, place.gpu), rank)
        shared = place.device != "cpu" and other != rank
        kind = DeviceKind(place.device, place.nccl, place.refusal, shared)
        groups = merge_groups(groups, {kind: DeviceGroup(rank, place.host, other, 1)})
    return groups


def merge_groups(a: DeviceGroups, b: DeviceGroups) -> DeviceGroups:
    """Merge the groups of two disjoint sets of ranks."""
    both = {kind: [groups[kind] for groups in (a, b) if kind in groups] for kind in {**a, **b}}
    return {
        kind: min(found)._replace(ranks=sum(group.ranks for group in found))
        for kind, found in both.items()
    }


class Choice(NamedTuple):
    """A transport, or a kind of memory, by name, and the reason for it."""

    name: str
    reason: str


def choose_transport(groups: DeviceGroups, wanted: str = "auto") -> Choice:
    """Choose the transport for these ranks.

    Raises UsageError with the reason if the `wanted` one is not possible, and if only some ranks
    have a GPU: these round differently, so weights that each rank updates would drift apart.
    """
    ordered = sorted(groups.items(), key=lambda item: item[1].first)
    size = sum(group.ranks for group in groups.values())
    without = [group for kind, group in ordered if kind.device == "cpu"]
    on_cpu = sum(group.ranks for group in without)
    if wanted in ("nccl", "mpi-gpu") and without:
        raise UsageError(f"--reduce {wanted} is for GPUs: {_named(without[0])} has none")
    if on_cpu == size:
        return Choice("mpi", "all ranks compute on CPUs")
    if without:
        raise UsageError(
            f"{on_cpu} of {size} ranks see no GPU, such as {_named(without[0])}:"
            " weights would differ; give every rank a GPU, or all --device cpu"
        )
    against = _against_nccl(ordered)
    if wanted == "nccl" and against:
        raise UsageError(f"--reduce nccl: {against}")
    if wanted == "mpi-gpu":
        for kind, group in ordered:
            if kind.refusal is not None:
                raise UsageError(f"--reduce mpi-gpu: on {_named(group)} {kind.refusal}")
        return Choice("mpi-gpu", "asked for, and MPI took device memory in a trial")
    if wanted == "host":
        return Choice("host", "asked for")
    if against:
        return Choice("host", against)
    if wanted == "auto" and size == 1:
        return Choice("none", "one rank")
    return Choice("nccl", "every rank has a GPU of its own" if wanted == "auto" else "asked for")


def _against_nccl(ordered: Sequence[tuple[DeviceKind, DeviceGroup]]) -> str:
    """Return why NCCL cannot be used with these ranks; empty if it can."""
    expected = ordered[0][0].nccl
    for kind, group in ordered:
        if not kind.nccl:
            return f"torch on {_named(group)} was built without NCCL"
        if kind.nccl != expected:
            return f"{expected} on rank 0, {kind.nccl} on {_named(group)}"
        if kind.shared:
            return f"ranks {group.other} and {group.first} share a GPU of {group.host}"
    return ""


def _named(group: DeviceGroup) -> str:
    return f"rank {group.first} ({group.host})"
