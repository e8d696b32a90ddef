"""Order the samples that shards read: functions of (seed, epoch, shard).

    partition   every shard reads its own samples, in a new order every epoch
    global      all samples are reassigned to the shards every epoch
    blocks      every shard reads blocks of consecutive samples of its partition, in a new order
                every epoch, and shuffles the samples within a window of a few blocks

With ``--balanced-sampling``, the positions of an epoch of partition or global are dealt to the
classes in turn, in random order. Those of a class go through its samples in an order that is new in
every epoch, as often as needed. Packs are shuffled when they are made, and external files, or their
blocks, when splits are drawn, so a partition holds all classes but very rare ones: a shard cannot
draw a class that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpctrain.data.partition import Partition, random_key

KEPT = 1 << 22  # largest permutation that is drawn and kept: 16 MiB
ROUNDS = 6

Made = TypeVar("Made")
ClassesOf = Callable[[np.ndarray], np.ndarray]  # samples (n,) -> their classes (n,)


class Order:
    """The order in which shards read samples: their own, reshuffled every epoch, or with
    `everywhere` all samples, reassigned every epoch.
    """

    def __init__(self, partition: Partition, seed: int = 0, everywhere: bool = False) -> None:
        self.partition = partition
        self.seed = seed
        self.everywhere = everywhere
        self._newest: dict[object, tuple[object, Any]] = {}

    def samples(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """Return the shard's samples from position `first` of the epoch on, (count,) int64."""
        return self.reach(range(shard, shard + 1)).start + self._draw(epoch, shard, first, count)

    def reach(self, shards: range) -> range:
        """Return the samples that these shards may read in any epoch."""
        if self.everywhere:
            return range(self.partition.samples)
        return range(self.partition.starts[shards.start], self.partition.starts[shards.stop])

    def _draw(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """Return what these positions have in a permutation of all that the shard may read."""
        if self.everywhere:
            n = self.partition.samples
            first += self.partition.starts[shard]
        else:
            n = self.partition.sizes[shard]
        pool = self._pool(shard)
        permutation = self._permutation(("order", *pool), epoch, n, "order", epoch, *pool)
        return permutation(np.arange(first, first + count))

    def _pool(self, shard: int) -> tuple[int, ...]:
        """Return what names the samples that the shard may read, in keys of random numbers."""
        return () if self.everywhere else (shard,)

    def _permutation(self, place: object, epoch: int, n: int, *key: int | str) -> Permutation:
        return self._keep_newest(place, epoch, lambda: Permutation(n, random_key(self.seed, *key)))

    def _keep_newest(self, place: object, version: object, make: Callable[[], Made]) -> Made:
        """Return `make()`, cached under `place` until another version is requested there."""
        if place not in self._newest or self._newest[place][0] != version:
            self._newest[place] = (version, make())
        made: Made = self._newest[place][1]
        return made


class Window(NamedTuple):
    """Samples that are read together, block by block, and then used in random order."""

    number: int  # counted in the shard's epoch
    start: int  # position of its first sample in the shard's epoch
    samples: np.ndarray  # (n,) int64, in reading order
    order: Permutation  # the order in which samples are used


class BlockOrder(Order):
    """An order of blocks, reshuffled every epoch, with samples shuffled within windows."""

    def __init__(
        self,
        partition: Partition,
        seed: int,
        block_rows: int,
        window_blocks: int,
        starts: np.ndarray | None = None,
    ) -> None:
        """A block has `block_rows` samples, or fewer at the ends of a partition.

        With `starts` (B + 1,), the first sample of each block, and N, it has those to the next one.
        """
        super().__init__(partition, seed)
        self.block_rows = block_rows
        self.starts = starts
        self.window_blocks = window_blocks

    def samples(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        windows = self.windows(epoch, shard, first, count)
        parts = [window.samples[window.order(places)] for window, places in windows]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def windows(
        self,
        epoch: int,
        shard: int,
        first: int,
        count: int,
    ) -> Iterator[tuple[Window, np.ndarray]]:
        """Yield the windows of these positions, each with the positions within the window."""
        _, ends = self._blocks(epoch, shard)
        end = first + count
        while first < end:
            number = int(np.searchsorted(ends, first, "right")) // self.window_blocks
            make = partial(self.window, epoch, shard, number)
            window = self._keep_newest(("window", shard), (epoch, number), make)
            stop = min(end, window.start + len(window.samples))
            yield window, np.arange(first - window.start, stop - window.start)
            first = stop

    def window(self, epoch: int, shard: int, number: int) -> Window:
        """Return window `number` (from 0) of a shard's epoch."""
        blocks, ends = self._blocks(epoch, shard)
        first = number * self.window_blocks
        chosen = blocks[first : first + self.window_blocks]
        samples = np.concatenate([np.arange(start, stop) for start, stop in chosen.tolist()])
        key = random_key(self.seed, "window", epoch, shard, number)
        return Window(
            number=number,
            start=int(ends[first - 1]) if first else 0,
            samples=samples,
            order=Permutation(len(samples), key),
        )

    def count(self, shard: int) -> int:
        """Return the number of windows in a shard's epoch."""
        return -(-(len(self._bounds(shard)) - 1) // self.window_blocks)

    def _bounds(self, shard: int) -> np.ndarray:
        """Return the first sample of each block of a shard's partition, and its end, (n + 1,)."""

        def make() -> np.ndarray:
            start, stop = self.partition.starts[shard : shard + 2]
            if self.starts is None:
                first = start - start % self.block_rows
                return np.append(np.arange(first, stop, self.block_rows), stop).clip(start)
            first, last = np.searchsorted(self.starts, [start, stop], "right")
            inside = self.starts[first:last]
            return np.concatenate([[start], inside[inside < stop], [stop]])

        return self._keep_newest(("bounds", shard), 0, make)

    def _blocks(self, epoch: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop of a shard's blocks, (n, 2), and the position after each, (n,)."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            bounds = self._bounds(shard)
            order = Permutation(len(bounds) - 1, random_key(self.seed, "order", epoch, shard))
            chosen = order(np.arange(len(bounds) - 1))
            blocks = np.stack([bounds[chosen], bounds[chosen + 1]], axis=1)
            return blocks, np.cumsum(blocks[:, 1] - blocks[:, 0])

        return self._keep_newest(("blocks", shard), epoch, make)


def block_starts(rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return where blocks begin in these rows (n,), whose blocks lie in one piece, and n.

    `bounds` are the first row of each block.
    """
    numbers = np.searchsorted(bounds, rows, "right")
    return np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1, [len(rows)]])


class BalancedOrder(Order):
    """An order in which every shard draws all classes of what it may read equally often."""

    def __init__(
        self,
        partition: Partition,
        seed: int,
        everywhere: bool,
        classes_of: ClassesOf,
    ) -> None:
        super().__init__(partition, seed, everywhere)
        self.classes_of = classes_of

    def samples(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        pool = self._pool(shard)
        classes = self.classes(shard)
        first_class = random_key(self.seed, "first class", epoch, *pool) % len(classes)
        rounds, numbers = np.divmod(self._draw(epoch, shard, first, count), len(classes))
        numbers = (numbers + first_class) % len(classes)
        drawn = np.empty(count, np.int64)
        for number in np.unique(numbers).tolist():
            members = classes[number]
            places = np.flatnonzero(numbers == number)
            order = self._permutation(
                ("class", number, pool),
                epoch,
                len(members),
                "class",
                epoch,
                number,
                *pool,
            )
            drawn[places] = members[order(rounds[places] % len(members))]
        return drawn

    def classes(self, shard: int) -> list[np.ndarray]:
        """Return the samples of each class that the shard draws from, without empty classes."""
        reach = self.reach(range(shard, shard + 1))

        def make() -> list[np.ndarray]:
            samples = np.arange(reach.start, reach.stop)
            labels = self.classes_of(samples)
            by_class = np.argsort(labels, kind="stable")
            return np.split(samples[by_class], np.flatnonzero(np.diff(labels[by_class])) + 1)

        return self._keep_newest(("classes", reach), 0, make)

    def drawn(self, shard: int, classes: int) -> np.ndarray:
        """Return how many samples of each of K classes the shard draws in an epoch, (K,) float64.

        These are means over epochs.
        """
        members = self.classes(shard)
        labels = self.classes_of(np.array([samples[0] for samples in members]))
        drawn = np.zeros(classes)
        drawn[labels] = self.partition.sizes[shard] / len(members)
        return drawn


def make_order(
    name: str,
    partition: Partition,
    seed: int,
    block_rows: int = 1,
    window_blocks: int = 1,
    starts: np.ndarray | None = None,
    classes_of: ClassesOf | None = None,
) -> Order:
    """Return the order of that name; `block_rows`, `window_blocks`, `starts` are for "blocks".

    With `classes_of`, which returns the classes of samples (n,), all are drawn equally often.
    """
    if classes_of is not None:
        return BalancedOrder(partition, seed, name == "global", classes_of)
    if name == "blocks":
        return BlockOrder(partition, seed, block_rows, window_blocks, starts)
    return Order(partition, seed, everywhere=name == "global")


class Permutation:
    """A permutation of 0 ... n-1 that is a pure function of n and the key.

    Small ones are drawn and kept. A larger one is a Feistel network (Luby and Rackoff 1988), a
    bijection on the numbers with an even count of bits, with cycle walking (Black and Rogaway 2002)
    to 0 ... n-1: any part can be computed without the rest. Both kinds use raw output of PCG64,
    which is stable in every NumPy; `Generator.permutation` is not (NEP 19).
    """

    def __init__(self, n: int, key: int, kept: int = KEPT) -> None:
        self.n = n
        self._drawn: np.ndarray | None = None
        if n <= kept:
            self._drawn = random_order(n, key).astype(np.uint32)
        self._half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))  # bits of each half
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [np.uint64(random_key(key, "round", r)) for r in range(ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at these positions: an int64 array of the same shape."""
        if self._drawn is not None:
            return self._drawn[places].astype(np.int64)
        numbers = self._network(places.astype(np.uint64))
        while (beyond := numbers >= self.n).any():
            numbers[beyond] = self._network(numbers[beyond])
        return numbers.astype(np.int64)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        left = numbers >> self._half
        right = numbers & self._mask
        for key in self._keys:
            mixed = left ^ (_mixed(right ^ key) & self._mask)
            left = right
            right = mixed
        return (left << self._half) | right


def random_order(n: int, key: int) -> np.ndarray:
    """Return 0 ... n-1 in random order, (n,) int64: sorted by random words of PCG64.

    The low bits of each word, as many as n-1 has, are replaced by the number itself. So the words
    are sorted directly, which is ten times as fast as an argsort. If the high bits of two words are
    equal, the smaller number comes first.
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
    """Apply SplitMix64's finalizer (Steele, Lea and Flood 2014): every bit depends on all of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(rows: np.ndarray, *key: int | str) -> np.ndarray:
    """Return the rows (n, ...) in a random order that depends on n and the key alone."""
    return rows[random_order(len(rows), random_key(*key))]
