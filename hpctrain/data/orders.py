"""In which order the shards read the rows of a split: pure functions of (seed, epoch, shard).

    partition   every shard reads its own block of rows, in a new order every epoch
    global      every epoch deals all rows anew to the shards
    blocks      every shard reads runs of rows of its partition in a new order every epoch, and
                shuffles the rows of a few runs, a window, among themselves: what a disk or a
                parallel file system reads fast

The rows of a pack were shuffled when it was made, so a partition holds all classes. A file of
somebody else may be sorted: there the rows (the runs, for "blocks") are dealt to the partitions
at random, by one more permutation that never changes, `scattered`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain.data.partition import Partition
from hpctrain.data.permute import Permutation
from hpctrain.keys import random_key

ORDERS = ("partition", "global", "blocks")


class Order(Protocol):
    """Which row of the split a shard reads at which place of an epoch."""

    partition: Partition

    def rows(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """The rows at the shard's places first ... first + count - 1, (count,) int64."""

    def reach(self, shards: range) -> range:
        """Rows that these shards may read, in whatever epoch."""


@dataclass
class _Cache:
    """The permutation that was asked for last, by shard."""

    held: dict[int, tuple[int, Permutation]] = field(default_factory=dict)

    def get(self, shard: int, epoch: int, n: int, key: int) -> Permutation:
        if shard not in self.held or self.held[shard][0] != epoch:
            self.held[shard] = epoch, Permutation(n, key)
        return self.held[shard][1]


class ByPartition:
    """Every shard reads its own rows, in a new order every epoch."""

    def __init__(self, partition: Partition, seed: int, scattered: bool = False) -> None:
        self.partition, self.seed = partition, seed
        self._scatter = _scatter(partition.rows, seed) if scattered else None
        self._cache = _Cache()

    def rows(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """The rows at the shard's places first ... first + count - 1, (count,) int64."""
        key = random_key(self.seed, "order", epoch, shard)
        own = self._cache.get(shard, epoch, self.partition.sizes()[shard], key)
        dealt = self.partition.start(shard) + own(np.arange(first, first + count))
        return dealt if self._scatter is None else self._scatter(dealt)

    def reach(self, shards: range) -> range:
        """Rows that these shards may read, in whatever epoch."""
        return _everything(self.partition) if self._scatter else _own(self.partition, shards)


class Global:
    """Every epoch deals all rows anew."""

    def __init__(self, partition: Partition, seed: int) -> None:
        self.partition, self.seed = partition, seed
        self._cache = _Cache()

    def rows(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """The rows at the shard's places first ... first + count - 1, (count,) int64."""
        key = random_key(self.seed, "order", epoch)
        dealt = self._cache.get(0, epoch, self.partition.rows, key)
        start = self.partition.start(shard) + first
        return dealt(np.arange(start, start + count))

    def reach(self, shards: range) -> range:
        """Rows that these shards may read, in whatever epoch."""
        return _everything(self.partition)


class Window(NamedTuple):
    """Rows that are read together, run by run, and then used in another order."""

    number: int  # in the shard's epoch
    start: int  # place of its first row in the shard's epoch
    rows: np.ndarray  # (n,) int64, in the order of reading
    order: Permutation  # of its rows


class _Runs(NamedTuple):
    """The runs of a shard's partition in one epoch."""

    bounds: np.ndarray  # where each begins, and the last ends
    order: np.ndarray  # in which they are read
    ends: np.ndarray  # place after each, in that order


class Blocks:
    """Runs of rows in a new order every epoch, their rows shuffled within windows."""

    def __init__(
        self,
        partition: Partition,
        seed: int,
        block_rows: int,
        window_blocks: int,
        scattered: bool = False,
    ) -> None:
        """A run has `block_rows` rows, or fewer at the ends of a partition."""
        self.partition, self.seed = partition, seed
        self.block_rows, self.window_blocks = block_rows, window_blocks
        whole = partition.rows // block_rows
        self._scatter = _scatter(whole, seed) if scattered and whole else None
        self._held: dict[int, tuple[int, int, Window]] = {}  # by shard, with epoch and number
        self._plans: dict[int, tuple[int, _Runs]] = {}  # by shard, with epoch

    def rows(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """The rows at the shard's places first ... first + count - 1, (count,) int64."""
        parts = [w.rows[w.order(places)] for w, places in self.windows(epoch, shard, first, count)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def windows(
        self, epoch: int, shard: int, first: int, count: int
    ) -> Iterator[tuple[Window, np.ndarray]]:
        """The windows in which these places lie, each with the places within it."""
        ends = self._plan(epoch, shard).ends
        place, end = first, first + count
        while place < end:
            number = int(np.searchsorted(ends, place, side="right")) // self.window_blocks
            window = self.window(epoch, shard, number)
            stop = min(end, window.start + len(window.rows))
            yield window, np.arange(place - window.start, stop - window.start)
            place = stop

    def rows_of(self, epoch: int, shard: int, number: int) -> np.ndarray:
        """The rows of a window in the order of reading, (n,) int64."""
        return self._window(epoch, shard, number).rows

    def window(self, epoch: int, shard: int, number: int) -> Window:
        """Window 0, 1, ... of a shard's epoch."""
        held = self._held.get(shard)
        if held is None or held[:2] != (epoch, number):
            held = self._held[shard] = epoch, number, self._window(epoch, shard, number)
        return held[2]

    def _window(self, epoch: int, shard: int, number: int) -> Window:
        runs = self._plan(epoch, shard)
        first = number * self.window_blocks
        chosen = runs.order[first : first + self.window_blocks]
        parts = [np.arange(runs.bounds[b], runs.bounds[b + 1]) for b in chosen]
        rows = self._dealt(np.concatenate(parts))
        start = int(runs.ends[first - 1]) if first else 0
        key = random_key(self.seed, "window", epoch, shard, number)
        return Window(number, start, rows, Permutation(len(rows), key))

    def count(self, shard: int) -> int:
        """Windows of a shard's epoch."""
        return -(-(len(self._bounds(shard)) - 1) // self.window_blocks)

    def reach(self, shards: range) -> range:
        """Rows that these shards may read, in whatever epoch."""
        return _everything(self.partition) if self._scatter else _own(self.partition, shards)

    def _bounds(self, shard: int) -> np.ndarray:
        """Where the runs of the shard's partition begin, and the last ends."""
        own = _own(self.partition, range(shard, shard + 1))
        inner = np.arange(-(-own.start // self.block_rows), -(-own.stop // self.block_rows))
        between = inner * self.block_rows
        return np.unique(np.concatenate([[own.start], between[between > own.start], [own.stop]]))

    def _plan(self, epoch: int, shard: int) -> _Runs:
        if shard not in self._plans or self._plans[shard][0] != epoch:
            bounds = self._bounds(shard)
            blocks = len(bounds) - 1
            key = random_key(self.seed, "order", epoch, shard)
            order = Permutation(blocks, key)(np.arange(blocks))
            runs = _Runs(bounds, order, np.cumsum(np.diff(bounds)[order]))
            self._plans[shard] = epoch, runs
        return self._plans[shard][1]

    def _dealt(self, rows: np.ndarray) -> np.ndarray:
        """Rows of runs that are dealt at random; those after the last whole run stay."""
        if self._scatter is None:
            return rows
        block, within = np.divmod(rows, self.block_rows)
        moved = self._scatter(np.minimum(block, self._scatter.n - 1)) * self.block_rows + within
        return np.where(block < self._scatter.n, moved, rows)


def make_order(
    name: str,
    partition: Partition,
    seed: int,
    block_rows: int = 1,
    window_blocks: int = 1,
    scattered: bool = False,
) -> Order:
    """The order of that name; runs and windows are for "blocks"."""
    if name == "global":
        return Global(partition, seed)
    if name == "blocks":
        return Blocks(partition, seed, block_rows, window_blocks, scattered)
    return ByPartition(partition, seed, scattered)


def _scatter(n: int, seed: int) -> Permutation:
    return Permutation(n, random_key(seed, "deal"))


def _own(partition: Partition, shards: range) -> range:
    return range(partition.start(shards.start), partition.start(shards.stop))


def _everything(partition: Partition) -> range:
    return range(partition.rows)
