"""Classes of unequal size: their weights in the loss, and orders that draw them equally often.

With ``--balanced-sampling``, an epoch has as many samples and steps as without. Its positions are
dealt to the classes in turn, in random order, so the numbers of positions of two classes differ by
at most one. The positions of a class go through its samples in an order that is new in every epoch,
as often as needed: samples of a rare class repeat, and those of a frequent class are partly left
out. All this is a pure function of seed, epoch and shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from hpctrain.config.option import class_weights
from hpctrain.data.columns import pieces
from hpctrain.data.orders import Order, Permutation
from hpctrain.data.partition import Partition, random_key
from hpctrain.errors import UsageError
from hpctrain.text import brief, listed, ranges


def find_class_weights(
    given: str, classes: Sequence[str], count_classes: Callable[[], np.ndarray]
) -> tuple[float, ...]:
    """Return the weight of each class that --class-weights asks for.

    `given` is "balanced", for n / (K n_c) as in scikit-learn, with n_c of n samples in class c of K
    (`count_classes` returns the n_c); or numbers in the order of `classes`. Raises UsageError.
    """
    setting = f"--class-weights {brief(given)}"
    if given == "balanced":
        counts = count_classes()
        if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
            raise UsageError(
                f"{setting}: no training image is of class {listed(empty, 3)}, so its weight would"
                " be infinite: give a number for each class"
            )
        return tuple((counts.sum() / (len(classes) * counts)).tolist())
    weights = class_weights(given)
    if len(weights) != len(classes):
        raise UsageError(
            f"{setting}: these are {len(weights)} weights, and the data has {len(classes)} classes:"
            f" {listed(classes)}"
        )
    return weights


class BalancedOrder(Order):
    """An order in which every shard draws the classes of its partition equally often.

    With `everywhere`, it draws them from all samples of the split.
    """

    def __init__(
        self,
        partition: Partition,
        seed: int,
        labels_of: Callable[[np.ndarray], np.ndarray],
        everywhere: bool = False,
        scattered: bool = False,
    ) -> None:
        """`labels_of` returns the labels of samples (n,). See `Order` for `scattered`."""
        super().__init__(partition, seed, scattered)
        self.draws_from_all, self.labels_of = everywhere, labels_of
        self.everywhere |= everywhere

    def samples(self, epoch: int, shard: int, first: int, count: int) -> np.ndarray:
        """Return the shard's samples from position `first` of the epoch on, (count,) int64."""
        pool = () if self.draws_from_all else (shard,)
        start = first + (self.partition.start(shard) if self.draws_from_all else 0)
        turns = self._permutation(epoch, *pool)(np.arange(start, start + count))
        classes = self.classes(shard)
        first_class = random_key(self.seed, "first class", epoch, *pool) % len(classes)
        rounds, numbers = np.divmod(turns, len(classes))
        numbers = (numbers + first_class) % len(classes)
        drawn = np.empty(count, np.int64)
        for number in np.unique(numbers).tolist():
            own, places = classes[number], np.flatnonzero(numbers == number)
            order = self._order_within(epoch, number, len(own), *pool)
            drawn[places] = own[order(rounds[places] % len(own))]
        return drawn

    def classes(self, shard: int) -> list[np.ndarray]:
        """Return the samples of each class that the shard draws from, without empty classes."""

        def make() -> list[np.ndarray]:
            samples = np.concatenate([*self.pool(shard)])
            labels = self.labels_of(samples)
            by_class = np.argsort(labels, kind="stable")
            return np.split(samples[by_class], np.flatnonzero(np.diff(labels[by_class])) + 1)

        return self._keep_newest(("classes", None if self.draws_from_all else shard), 0, make)

    def pool(self, shard: int) -> Iterator[np.ndarray]:
        """Yield the samples from which the shard draws, in parts (n,) int64."""
        if self.draws_from_all:
            yield from pieces(self.partition.samples)
            return
        for part in pieces(self.partition.sizes[shard]):
            own = self.partition.start(shard) + part
            yield own if self._scatter is None else self._scatter(own)

    def count_classes(self, samples: Iterable[np.ndarray]) -> np.ndarray:
        """Return the number of samples of each class up to the largest label, (k,) int64."""
        counts = np.zeros(0, np.int64)
        for part in samples:
            found = np.bincount(self.labels_of(part), minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
        return counts

    def _order_within(self, epoch: int, number: int, n: int, *pool: int) -> Permutation:
        """Return the order in which an epoch draws the n samples of a class."""
        key = random_key(self.seed, "class", epoch, number, *pool)
        return self._keep_newest(("class", number, pool), epoch, lambda: Permutation(n, key))


def describe_missing(order: Order, names: Sequence[str]) -> str | None:
    """Describe the classes that some shards of a balanced order cannot draw, if any.

    `names` are those of all classes.
    """
    if not isinstance(order, BalancedOrder) or order.draws_from_all:
        return None
    shards, lacking = range(len(order.partition.shares)), dict[str, list[int]]()
    found = [np.flatnonzero(order.count_classes(order.pool(shard))) for shard in shards]
    present = np.unique(np.concatenate(found))
    for shard in shards:
        for label in np.setdiff1d(present, found[shard]).tolist():
            lacking.setdefault(names[label], []).append(shard)
    if not lacking:
        return None
    parts = [f"{name} in shard{'s' * (len(n) > 1)} {ranges(n)}" for name, n in lacking.items()]
    return (
        "--balanced-sampling: some shards have no image of a class, which is therefore drawn less"
        f" often ({listed(sorted(parts), 3, '; ')}): use fewer shards, or --shuffle global"
    )
