"""Which samples each shard reads in each step: pure arithmetic, equal on every rank.

A global batch of B samples is cut evenly into S shares b_j, the remainder to the first shards. An
epoch over N samples has T = ceil(N / B) steps; all but the last are full. The samples of the last
step, R = N - (T - 1) B, are cut in proportion to the shares, so the partition of shard j has

    n_j = (T - 1) b_j + r_j,    r_j = floor(R c_{j+1} / B) - floor(R c_j / B)

samples, with c_j = b_0 + ... + b_{j-1}. As r_j <= b_j all shards finish together and every sample
is read exactly once an epoch. Partitions are contiguous ranges of samples; ``orders.py`` says in
which order they are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hpctrain.errors import UsageError

READ_BYTES = 4 << 20  # of consecutive samples that are read in one go, where order allows it


def even_shares(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` into `parts` shares that differ by at most one; the remainder to the first."""
    share, remainder = divmod(total, parts)
    return tuple(share + (j < remainder) for j in range(parts))


def proportional_cut(total: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `total` in proportion to `shares` (cumulative floors); share j gets at most its own."""
    whole, seen, cut = sum(shares), 0, []
    for share in shares:
        cut.append(total * (seen + share) // whole - total * seen // whole)
        seen += share
    return tuple(cut)


def cut_last_step(
    samples: int, shares: tuple[int, ...], min_samples: int
) -> tuple[int, ...] | None:
    """The samples of the last step by shard, of even `shares`; none has fewer than `min_samples`,
    except zero.

    With min_samples = 2 (a layer with one value per image and channel cannot normalise a single
    one) as few shards as can hold the samples are filled evenly instead: more would have fewer
    each. None where even that fails.
    """
    cut = proportional_cut(samples, shares)
    if all(r == 0 or r >= min_samples for r in cut):
        return cut
    filled = next(n for n, room in enumerate(accumulate(shares), start=1) if room >= samples)
    cut = even_shares(samples, filled)
    return cut + (0,) * (len(shares) - filled) if cut[-1] >= min_samples else None


@dataclass(frozen=True)
class Partition:
    """How one epoch over N samples is cut into steps and shards."""

    samples: int  # N, samples of the training split
    shares: tuple[int, ...]  # b_j, samples of shard j in a full step
    last: tuple[int, ...]  # r_j, samples of shard j in the last step

    @cached_property
    def batch_size(self) -> int:
        return sum(self.shares)

    @cached_property
    def steps(self) -> int:
        """Steps an epoch, T."""
        return -(-self.samples // self.batch_size)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of every shard's partition, n_j."""
        return tuple((self.steps - 1) * b + r for b, r in zip(self.shares, self.last, strict=True))

    @cached_property
    def _starts(self) -> Sequence[int]:
        return tuple(accumulate(self.sizes, initial=0))

    def start(self, shard: int) -> int:
        """First sample of the shard's partition; for shard S, the number of samples."""
        return self._starts[shard]

    def count(self, step: int, shard: int) -> int:
        """Samples of `shard` in `step` (from 0 within the epoch), m_j."""
        return self.last[shard] if step == self.steps - 1 else self.shares[shard]

    def total(self, step: int) -> int:
        """Samples of all shards in `step`, M."""
        return sum(self.last) if step == self.steps - 1 else self.batch_size


def cut_epoch(samples: int, batch_size: int, shards: int, min_samples: int = 1) -> Partition:
    """Cut an epoch over `samples` samples into steps of `batch_size` and shards.

    `min_samples` is the smallest number of samples a shard may have in a step, zero excepted.
    Raises UsageError where a full share or the last step cannot hold to it, with the nearest larger
    global batch that can, if there is one.
    """
    partition = _cut(samples, min(batch_size, samples), shards, min_samples)
    if partition is None:
        raise UsageError(_refusal(samples, min(batch_size, samples), shards, min_samples))
    return partition


def _cut(samples: int, batch_size: int, shards: int, floor: int) -> Partition | None:
    shares = even_shares(batch_size, shards)
    if shares[-1] < max(floor, 1):
        return None
    last = cut_last_step(_last_samples(samples, batch_size), shares, floor)
    return None if last is None else Partition(samples, shares, last)


def _last_samples(samples: int, batch_size: int) -> int:
    return samples - (-(-samples // batch_size) - 1) * batch_size


def _refusal(samples: int, batch_size: int, shards: int, floor: int) -> str:
    """Why the global batch, at most all samples, cannot be cut; what to type."""
    needs = (
        f"the model normalises one value per image and channel somewhere, so a shard needs {floor}"
        " images a step"
    )
    if samples < floor * shards:
        why = f"{samples:,} training images cannot be cut into {shards:,} shards"
        way = f"use at most {samples // floor} shards or ranks" if samples >= floor else "add some"
        return f"{needs}: {why}: {way}" if floor > 1 else f"{why}: {way}"
    if batch_size < shards:
        why = f"a mini-batch of {batch_size:,} rows cannot be cut into {shards:,} shards"
    elif batch_size < floor * shards:
        share = batch_size // shards
        why = f"{needs}; {batch_size:,} images over {shards:,} shards leave {share}"
    else:
        last = _last_samples(samples, batch_size)
        why = (
            f"{needs}, but the last step of an epoch would hold {last:,}"
            f" ({samples:,} images in mini-batches of {batch_size:,})"
        )
    larger = range(max(batch_size + 1, floor * shards), samples + 1)  # the last of them is one step
    fits = next(size for size in larger if _cut(samples, size, shards, floor))
    return f"{why}: use --batch-size {fits}"


def random_key(*parts: int | str) -> int:
    """A 63-bit integer hashed (BLAKE2b) from what it is for: (seed, epoch, step, shard, purpose).

    Hashed, never added: with sums, (seed 1, epoch 0) and (seed 0, epoch 1) would draw the same
    numbers. A key depends on nothing else, so no generator state needs saving and any number of
    ranks draws the same numbers.
    """
    text = "|".join(f"{type(part).__name__}:{part!r}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
