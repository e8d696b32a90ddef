"""Partition the samples of an epoch into steps and shards: pure arithmetic, equal on every rank.

A global batch of B samples is divided evenly into S shares b_j; the remainder goes to the first
shards. An epoch over N samples has T = ceil(N / B) steps; all but the last are full. The samples of
the last step, R = N - (T - 1) B, are divided in proportion to the shares, so the partition of shard
j has

    n_j = (T - 1) b_j + r_j,    r_j = floor(R c_{j+1} / B) - floor(R c_j / B)

samples, with c_j = b_0 + ... + b_{j-1}. As r_j <= b_j, all shards finish in the same step, and
every sample is read exactly once per epoch. Partitions are contiguous ranges of samples.

A rank processes a contiguous run of shards one after another: more shards than ranks means gradient
accumulation.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hpctrain.errors import UsageError
from hpctrain.text import counted

READ_BYTES = 4 << 20  # consecutive samples read at once, if the order allows it


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """Divide `total` into `parts` shares that differ by at most one; the first are the larger."""
    share, remainder = divmod(total, parts)
    return (share + 1,) * remainder + (share,) * (parts - remainder)


def cut_last_step(
    samples: int,
    shares: tuple[int, ...],
    min_samples: int,
) -> tuple[int, ...] | None:
    """Divide the samples of the last step among shards with even `shares`.

    Each shard gets none or at least `min_samples`. If a division in proportion to the shares does
    not allow it, the samples are divided evenly among as few shards as can hold them; None if even
    that fails.
    """
    sums = [*accumulate(shares, initial=0)]
    last = tuple(samples * b // sums[-1] - samples * a // sums[-1] for a, b in pairwise(sums))
    if all(r == 0 or r >= min_samples for r in last):
        return last
    filled = next(n for n, room in enumerate(accumulate(shares), start=1) if room >= samples)
    last = even_shares(samples, filled)
    if last[-1] < min_samples:
        return None
    return last + (0,) * (len(shares) - filled)


@dataclass(frozen=True)
class Partition:
    """The division of an epoch over N samples into steps and shards."""

    samples: int  # N, samples of the training split
    shares: tuple[int, ...]  # b_j, samples of shard j in a full step
    last: tuple[int, ...]  # r_j, samples of shard j in the last step

    @cached_property
    def batch_size(self) -> int:
        return sum(self.shares)

    @cached_property
    def steps(self) -> int:
        """Number of steps per epoch, T."""
        return -(-self.samples // self.batch_size)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples in every shard's partition, n_j."""
        return tuple((self.steps - 1) * b + r for b, r in zip(self.shares, self.last, strict=True))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First sample of every shard's partition, and N, (S + 1,)."""
        return tuple(accumulate(self.sizes, initial=0))

    def count(self, step: int, shard: int) -> int:
        """Return the number of samples of `shard` in `step` (from 0 within the epoch), m_j."""
        if step == self.steps - 1:
            return self.last[shard]
        return self.shares[shard]

    def total(self, step: int) -> int:
        """Return the number of samples of all shards in `step`, M."""
        if step == self.steps - 1:
            return sum(self.last)
        return self.batch_size


def cut_epoch(samples: int, batch_size: int, shards: int, min_samples: int = 1) -> Partition:
    """Divide an epoch over `samples` samples into steps of `batch_size` and into shards.

    `min_samples` is the fewest that a shard may have in a step, except zero: 2 if a layer
    normalises one value per image and channel. Raises UsageError if this is impossible.
    """
    batch_size = min(batch_size, samples)
    rest = samples % batch_size or batch_size
    shares: tuple[int, ...] = ()
    last: tuple[int, ...] | None = None
    if batch_size // shards >= max(min_samples, 1):  # else there may be 10^12 that do not fit
        shares = even_shares(batch_size, shards)
        last = cut_last_step(rest, shares, min_samples)
    if last is None:
        why = ""
        if min_samples > 1:
            why = " (the model normalizes one value per image and channel)"
        raise UsageError(
            f"{samples:,} training images in mini-batches of {batch_size:,}, the last one of"
            f" {rest:,}, cannot be cut into {counted(shards, 'shard')} of {min_samples} or more"
            f" images{why}: use another --batch-size (or --batch-per-rank), or fewer shards or"
            " ranks"
        )
    return Partition(samples, shares, last)


def random_key(*parts: int | str) -> int:
    """Hash (BLAKE2b) the purpose of random numbers to a 63-bit key: seed, epoch, step, shard, ...

    As it depends on nothing else, no generator state is saved, and any number of ranks draws the
    same. In a sum, (seed 1, epoch 0) and (seed 0, epoch 1) would be equal.
    """
    text = "|".join(f"{type(part).__name__}:{part!r}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def assign_shards(shards: int, size: int, loads: Sequence[float] = ()) -> list[range]:
    """Assign a run of at least one shard to each of `size` ranks, in proportion to its load.

    `loads` are positive numbers, one per rank; without them all are equal. Every shard goes to the
    rank that would finish first with it, in a tie to the first. Raises UsageError.
    """
    if size > shards:
        raise UsageError(
            f"{size} ranks cannot carry {counted(shards, 'shard')}: start at most {shards}, or a"
            f" new run with --shards {size}"
        )
    if loads and len(loads) != size:
        raise UsageError(f"--worker-load names {len(loads)} ranks, but there are {size}")
    counts = [1] * size
    speeds = loads or [1.0] * size
    heap = [(2 / speed, rank) for rank, speed in enumerate(speeds)]  # with one shard more
    heapq.heapify(heap)
    for _ in range(shards - size):
        rank = heap[0][1]
        counts[rank] += 1
        heapq.heapreplace(heap, ((counts[rank] + 1) / speeds[rank], rank))
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
