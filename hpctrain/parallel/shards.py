"""Logical workers: which rank carries which shard.

A rank carries a contiguous run of shards and works through them one after another, so more
shards than ranks is gradient accumulation. Everything that happens to data belongs to the
shard; ranks only carry them.

--worker-load auto: shards move from slow ranks to fast ones, between epochs.

Every step's message tells all ranks how many seconds each of them computed. All see the same
numbers, so all reach the same decision without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from hpctrain.errors import UsageError


def assign_shards(shards: int, size: int, loads: Sequence[float] = ()) -> list[range]:
    """The run of shards of every rank of `size`, each at least one, in proportion to its load.

    `loads` are positive numbers, one per rank; none stands for equal ones. Every shard goes to
    the rank that would have the least to do with it (the slowest rank then finishes as early as
    possible), a tie to the first. Raises UsageError for more ranks than shards, since a rank
    without work would only wait, and for loads that are not one per rank.
    """
    if size > shards:
        raise UsageError(f"{size} ranks cannot carry {shards} shards: start at most {shards} ranks")
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


GAIN = 0.05  # of a step's time, below which nothing moves


class Balance:
    """Who carries what, and the seconds that each rank computed since shards last moved."""

    def __init__(self, runs: Sequence[range]) -> None:
        self.runs = list(runs)
        self._seconds = [0.0] * len(runs)
        self._steps = 0

    def add(self, compute: Sequence[float]) -> None:
        """One step's seconds, by rank."""
        self._seconds = [a + b for a, b in zip(self._seconds, compute, strict=True)]
        self._steps += 1

    def better(self) -> list[range] | None:
        """How ranks carry the shards from now on, if that saves time; starts to measure anew."""
        runs, seconds, steps = self.runs, self._seconds, self._steps
        self._seconds, self._steps = [0.0] * len(seconds), 0
        if not steps or min(seconds) <= 0:
            return None
        cost = [total / len(run) for total, run in zip(seconds, runs, strict=True)]  # of a shard
        found = assign_shards(runs[-1].stop, len(runs), [1 / each for each in cost])
        if _slowest(cost, found) >= (1 - GAIN) * _slowest(cost, runs):
            return None
        self.runs = found
        return found


def _slowest(cost: Sequence[float], runs: Sequence[range]) -> float:
    return max(each * len(run) for each, run in zip(cost, runs, strict=True))
