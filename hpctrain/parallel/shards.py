"""Logical workers: which rank carries which shard.

A rank carries a contiguous run of shards and works through them one after another, so more
shards than ranks is gradient accumulation. Everything that happens to data belongs to the
shard; ranks only carry them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from hpctrain.errors import UsageError


def carried(shards: int, size: int, loads: Sequence[float] = ()) -> list[range]:
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
