"""Which rows each shard reads in each step: pure arithmetic, equal on every rank.

A mini-batch of B rows is cut evenly into S shares b_j, the remainder to the first shards. An
epoch over N rows has T = ceil(N / B) steps; all but the last are full. The rows of the last
step, R = N - (T - 1) B, are cut in proportion to the shares, so the partition of shard j has

    n_j = (T - 1) b_j + r_j,    r_j = floor(R c_{j+1} / B) - floor(R c_j / B)

rows, with c_j = b_0 + ... + b_{j-1}. As r_j <= b_j all shards finish together and every row is
read exactly once an epoch. Partitions are contiguous blocks of rows; ``orders.py`` says in which
order they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.errors import UsageError

RUN_BYTES = 4 << 20  # of consecutive rows that are read in one go, where order leaves them together


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


def cut_last_step(rows: int, shares: tuple[int, ...], least: int) -> tuple[int, ...] | None:
    """The rows of the last step by shard; none has fewer than `least` rows, except zero.

    With least = 2 (a layer with one value per row and channel cannot normalise a single row) as
    few shards as can hold the rows are filled evenly instead. None where even that fails.
    """
    cut = proportional_cut(rows, shares)
    if all(r == 0 or r >= least for r in cut):
        return cut
    for filled in range(1, len(shares) + 1):
        cut = even_shares(rows, filled)
        if all(least <= r <= b for r, b in zip(cut, shares, strict=False)):
            return cut + (0,) * (len(shares) - filled)
    return None


@dataclass(frozen=True)
class Partition:
    """How one epoch over `rows` rows is cut into steps and shards."""

    rows: int  # N, rows of the training split
    shares: tuple[int, ...]  # b_j, rows of shard j in a full step
    last: tuple[int, ...]  # r_j, rows of shard j in the last step

    @property
    def batch_size(self) -> int:
        return sum(self.shares)

    @property
    def steps(self) -> int:
        """Steps an epoch, T."""
        return -(-self.rows // self.batch_size)

    def sizes(self) -> tuple[int, ...]:
        """Rows of every shard's partition, n_j."""
        return tuple((self.steps - 1) * b + r for b, r in zip(self.shares, self.last, strict=True))

    def start(self, shard: int) -> int:
        """First row of the shard's partition."""
        return sum(self.sizes()[:shard])

    def count(self, step: int, shard: int) -> int:
        """Rows of `shard` in `step` (from 0 within the epoch), m_j."""
        return self.last[shard] if step == self.steps - 1 else self.shares[shard]

    def total(self, step: int) -> int:
        """Rows of all shards in `step`, M."""
        return sum(self.last) if step == self.steps - 1 else self.batch_size

    def slice(self, step: int, shard: int) -> slice:
        """The places in the shard's epoch that it reads in `step`."""
        first = step * self.shares[shard]
        return slice(first, first + self.count(step, shard))


def cut_epoch(rows: int, batch_size: int, shards: int, least: int = 1) -> Partition:
    """Cut an epoch over `rows` rows into steps of `batch_size` and shards.

    `least` is the smallest number of rows a shard may meet in a step, zero excepted.
    Raises UsageError where a full share or the last step cannot hold to it.
    """
    if batch_size < shards:
        raise UsageError(
            f"a mini-batch of {batch_size:,} rows cannot be cut into {shards:,} shards:"
            " raise --batch-size or use fewer ranks"
        )
    if rows < shards:
        raise UsageError(
            f"{rows:,} training images cannot be cut into {shards:,} shards: use fewer ranks"
        )
    batch_size = min(batch_size, rows)
    shares = even_shares(batch_size, shards)
    if min(shares) < least:
        raise UsageError(
            f"the model normalises one value per image and channel somewhere, so a shard needs"
            f" {least} images a step; {batch_size} images over {shards} shards leave {min(shares)}:"
            f" use --batch-size {least * shards} or more"
        )
    last = cut_last_step(_last_rows(rows, batch_size), shares, least)
    if last is None:
        raise UsageError(
            f"the model normalises one value per image and channel somewhere, so a shard needs"
            f" {least} images a step, but the last step of an epoch would hold"
            f" {_last_rows(rows, batch_size)} ({rows:,} images in mini-batches of {batch_size}):"
            f" use --batch-size {_batch_that_fits(rows, batch_size, shards, least)}"
        )
    return Partition(rows, shares, last)


def _last_rows(rows: int, batch_size: int) -> int:
    return rows - (-(-rows // batch_size) - 1) * batch_size


def _batch_that_fits(rows: int, batch_size: int, shards: int, least: int) -> int:
    """The nearest larger mini-batch that can be cut; one step of all rows at the latest."""
    for larger in range(batch_size + 1, rows):
        if cut_last_step(_last_rows(rows, larger), even_shares(larger, shards), least):
            return larger
    return rows
