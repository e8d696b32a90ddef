"""In which order the shards read the samples of a split: pure functions of (seed, epoch, shard).

    partition   every shard reads its own samples, in a new order every epoch
    global      every epoch assigns all samples anew to the shards
    blocks      every shard reads blocks of consecutive samples of its partition in a new order
                every epoch, and shuffles the samples of a few blocks, a window, among themselves:
                what a disk or a parallel file system reads fast

The samples of a pack were shuffled when it was made, so a partition holds all classes. An external
file may be sorted: there the samples (for "blocks", the blocks) are assigned to the partitions at
random, by one more permutation that never changes, `scattered`.

Permutations are made so that any part can be had without the rest. Small ones are drawn and kept.
Larger ones are computed where they are asked for, in no memory: a Feistel network (Luby and Rackoff
1988) is a bijection of the numbers of an even count of bits, and walking along its cycles until a
number is below n (Black and Rogaway 2002) makes one of 0 ... n-1. Both are made of raw bits alone,
so equal keys give equal orders with every NumPy: it promises to keep the raw output of PCG64 for a
seed, but not `Generator.permutation` (NEP 19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpctrain.data.partition import Partition, random_key

ORDERS = ("partition", "global", "blocks")
KEPT = 1 << 22  # numbers, 32 MiB
ROUNDS = 6

Made = TypeVar("Made")


class Order:
    """Which sample of the split a shard reads at which place of an epoch: here its own samples, in
    a new order every epoch.
    """

    def __init__(self, partition: Partition, seed: int, scattered: bool = False) -> None:
        self.partition, self.seed = partition, seed
        self.everywhere = scattered  # whether a shard may read any sample of the split
        self._scatter = self._make_scatter(partition.samples) if scattered else None
        self._newest: dict[object, tuple[object, Any]] = {}

    def samples(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """The samples at the shard's places first ... first + count - 1, (count,) int64."""
        own = self._permutation(epoch, shard)(np.arange(first, first + count))
        samples = self.partition.start(shard) + own
        return samples if self._scatter is None else self._scatter(samples)

    def reach(self, shards: range) -> range:
        """Samples that these shards may read, in whatever epoch."""
        if self.everywhere:
            return range(self.partition.samples)
        return range(self.partition.start(shards.start), self.partition.start(shards.stop))

    def _permutation(self, epoch: int, *shard: int) -> Permutation:
        """That of an epoch, of a shard's samples or of all."""
        n = self.partition.sizes[shard[0]] if shard else self.partition.samples
        return self._keep_newest(
            shard, epoch, lambda: Permutation(n, random_key(self.seed, "order", epoch, *shard))
        )

    def _make_scatter(self, n: int) -> Permutation:
        return Permutation(n, random_key(self.seed, "deal"))

    def _keep_newest(self, place: object, version: object, make: Callable[[], Made]) -> Made:
        """What `make` gives, kept at `place` until another version is asked for there."""
        if place not in self._newest or self._newest[place][0] != version:
            self._newest[place] = version, make()
        made: Made = self._newest[place][1]
        return made


class GlobalOrder(Order):
    """Every epoch assigns all samples anew."""

    def __init__(self, partition: Partition, seed: int) -> None:
        super().__init__(partition, seed)
        self.everywhere = True

    def samples(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """The samples at the shard's places first ... first + count - 1, (count,) int64."""
        start = self.partition.start(shard) + first
        return self._permutation(epoch)(np.arange(start, start + count))


class Window(NamedTuple):
    """Samples that are read together, block by block, and then used in another order."""

    number: int  # in the shard's epoch
    start: int  # place of its first sample in the shard's epoch
    samples: np.ndarray  # (n,) int64, in the order of reading
    order: Permutation  # in which they are used


class _Blocks(NamedTuple):
    """The blocks of a shard's partition in one epoch."""

    bounds: np.ndarray  # where each begins, and the last ends
    order: np.ndarray  # in which they are read
    ends: np.ndarray  # place after each, in that order


class BlockOrder(Order):
    """Blocks of samples in a new order every epoch, shuffled within windows."""

    def __init__(
        self,
        partition: Partition,
        seed: int,
        block_rows: int,
        window_blocks: int,
        scattered: bool = False,
    ) -> None:
        """A block has `block_rows` samples, or fewer at the ends of a partition."""
        super().__init__(partition, seed)
        self.block_rows, self.window_blocks = block_rows, window_blocks
        whole = partition.samples // block_rows
        self.everywhere = scattered and whole > 0
        self._scatter = self._make_scatter(whole) if self.everywhere else None

    def samples(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """The samples at the shard's places first ... first + count - 1, (count,) int64."""
        windows = self.windows(epoch, shard, first, count)
        parts = [window.samples[window.order(places)] for window, places in windows]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def windows(
        self, epoch: int, shard: int, first: int, count: int
    ) -> Iterator[tuple[Window, np.ndarray]]:
        """The windows in which these places lie, each with the places within it."""
        ends = self._order_blocks(epoch, shard).ends
        place, end = first, first + count
        while place < end:
            key = epoch, shard, int(np.searchsorted(ends, place, "right")) // self.window_blocks
            window = self._keep_newest(("window", shard), key, partial(self.window, *key))
            stop = min(end, window.start + len(window.samples))
            yield window, np.arange(place - window.start, stop - window.start)
            place = stop

    def window(self, epoch: int, shard: int, number: int) -> Window:
        """Window 0, 1, ... of a shard's epoch."""
        blocks = self._order_blocks(epoch, shard)
        first = number * self.window_blocks
        chosen = blocks.order[first : first + self.window_blocks]
        parts = [np.arange(blocks.bounds[b], blocks.bounds[b + 1]) for b in chosen]
        samples = self._assigned(np.concatenate(parts))
        start = int(blocks.ends[first - 1]) if first else 0
        key = random_key(self.seed, "window", epoch, shard, number)
        return Window(number, start, samples, Permutation(len(samples), key))

    def count(self, shard: int) -> int:
        """Windows of a shard's epoch."""
        return -(-(len(self._bounds(shard)) - 1) // self.window_blocks)

    def _bounds(self, shard: int) -> np.ndarray:
        """Where the blocks of the shard's partition begin, and the last ends."""
        start, stop = self.partition.start(shard), self.partition.start(shard + 1)
        inner = np.arange(-(-start // self.block_rows), -(-stop // self.block_rows))
        between = inner * self.block_rows
        return np.unique(np.concatenate([[start], between[between > start], [stop]]))

    def _order_blocks(self, epoch: int, shard: int) -> _Blocks:
        def make() -> _Blocks:
            bounds = self._bounds(shard)
            count = len(bounds) - 1
            order = Permutation(count, random_key(self.seed, "order", epoch, shard))
            chosen = order(np.arange(count))
            return _Blocks(bounds, chosen, np.cumsum(np.diff(bounds)[chosen]))

        return self._keep_newest(("blocks", shard), epoch, make)

    def _assigned(self, samples: np.ndarray) -> np.ndarray:
        """Samples of blocks that are assigned at random; those after the last whole one stay."""
        if self._scatter is None:
            return samples
        block, within = np.divmod(samples, self.block_rows)
        moved = self._scatter(np.minimum(block, self._scatter.n - 1)) * self.block_rows + within
        return np.where(block < self._scatter.n, moved, samples)


def make_order(
    name: str,
    partition: Partition,
    seed: int,
    block_rows: int = 1,
    window_blocks: int = 1,
    scattered: bool = False,
) -> Order:
    """The order of that name; blocks and windows are for "blocks"."""
    if name == "global":
        return GlobalOrder(partition, seed)
    if name == "blocks":
        return BlockOrder(partition, seed, block_rows, window_blocks, scattered)
    return Order(partition, seed, scattered)


class Permutation:
    """A permutation of 0 ... n-1 that is a pure function of n and the key."""

    def __init__(self, n: int, key: int, kept: int = KEPT) -> None:
        self.n = n
        self._drawn = random_order(n, key) if n <= kept else None
        self._half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))  # bits of each half
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(random_key(key, "round", r)) for r in range(ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at these places, of the same shape, int64."""
        if self._drawn is not None:
            return self._drawn[places]
        numbers = self._network(places.astype(np.uint64))
        while (beyond := numbers >= self.n).any():
            numbers[beyond] = self._network(numbers[beyond])
        return numbers.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def random_order(n: int, key: int) -> np.ndarray:
    """0 ... n-1 in random order, (n,) int64: sorted by words of PCG64, without as many of their low
    bits as n-1 has. There the number itself is put, so words can be sorted in place of an index,
    which is ten times as fast; where the high bits are equal the smaller number comes first.
    """
    bits = np.uint64(max(n - 1, 0).bit_length())
    words = np.random.PCG64(key).random_raw(n)
    words >>= bits
    words <<= bits
    words |= np.arange(n, dtype=np.uint64)
    words.sort()
    words &= (np.uint64(1) << bits) - np.uint64(1)
    return words.view(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
