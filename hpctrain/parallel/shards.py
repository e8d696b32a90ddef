"""Logical workers: which rank carries which shard.

A rank carries a contiguous run of shards and works through them one after another, so more
shards than ranks is gradient accumulation. Everything that happens to data belongs to the
shard; ranks only carry them.
"""

from __future__ import annotations

from hpctrain.errors import UsageError


def carried(shards: int, size: int, rank: int) -> range:
    """The shards that `rank` of `size` carries: even runs, the remainder to the first ranks.

    Raises UsageError for more ranks than shards: a rank without work would only wait.
    """
    if size > shards:
        raise UsageError(f"{size} ranks cannot carry {shards} shards: use at most {shards} ranks")
    share, remainder = divmod(shards, size)
    first = rank * share + min(rank, remainder)
    return range(first, first + share + (rank < remainder))
