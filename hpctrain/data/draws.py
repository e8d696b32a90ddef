"""Divide samples into splits and shuffle them: pure arithmetic, from a seed.

Splits are stratified: each class is divided by the shares with the largest remainder method, so its
counts are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from hpctrain.data.orders import random_order
from hpctrain.data.partition import random_key
from hpctrain.errors import UsageError

Shares = tuple[Fraction, Fraction, Fraction]  # of train, validation, test


def cut(count: int, shares: tuple[Fraction, ...]) -> list[int]:
    """Divide `count` by `shares` into integers with that sum; largest remainders are rounded up."""
    total = sum(shares)
    exact = [count * share / total for share in shares]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts


def assign(labels: np.ndarray, shares: Shares, seed: int) -> np.ndarray:
    """Return the split of every sample: (N,) indices into SPLITS. Labels (N,) are 0 ... K-1."""
    rows = shuffled(np.arange(len(labels)), seed, "pack split")
    splits = np.empty(len(labels), np.int32)
    splits[rows] = fill(labels[rows], [cut(n, shares) for n in np.bincount(labels).tolist()])
    return splits


def fill(labels: np.ndarray, room: list[list[int]]) -> np.ndarray:
    """Distribute samples (n,) in random order over the splits; return the split (n,) of each.

    Of class k, the first `room[k][0]` samples are in split 0, the next `room[k][1]` in split 1, ...
    If there is room for more than all samples of a class, the largest rooms are reduced.
    """
    splits = np.empty(len(labels), np.int32)
    by_class = np.argsort(labels, kind="stable")
    start = 0
    for places, count in zip(room, np.bincount(labels, minlength=len(room)).tolist(), strict=True):
        places = [max(0, part) for part in places]
        while sum(places) > count:
            places[places.index(max(places))] -= 1
        splits[by_class[start : start + count]] = np.repeat(np.arange(len(places)), places)
        start += count
    return splits


def shuffled(rows: np.ndarray, *key: int | str) -> np.ndarray:
    """Return the rows (n, ...) in a random order that depends on n and the key alone."""
    return rows[random_order(len(rows), random_key(*key))]


def check_splits(
    rows: Mapping[str, np.ndarray],
    labels: np.ndarray,
    classes: Sequence[str],
    wanted: Iterable[str],
    source: str,
    way: str = "",
) -> None:
    """Raise UsageError if a `wanted` split has no sample, or a class has none in train.

    `rows` are the samples of each split, `labels` (N,) those of all; `way`: how they were drawn.
    """
    for name in wanted:
        if not len(rows[name]):
            what = f"--split leaves none of {len(labels):,} images of {source} for {name}{way}"
            raise UsageError(f"{what}: give it a larger share or more images")
    trained = np.bincount(labels[rows["train"]], minlength=len(classes))
    for label in np.flatnonzero(trained == 0)[:1].tolist():
        where = f"class {classes[label]} of {source} has no image in train{way}"
        raise UsageError(f"{where}: give train a larger share, or the class more images")
