"""Assign images to splits and shuffle them: pure arithmetic, from a seed.

Splits are stratified: each class is divided by the shares with the largest remainder method, so its
counts are exact. Images of equal pixels stay together: they are placed first, in train while there
is room, and the remaining images then fill every split to its count. Groups of a manifest are
placed in order of size, the largest first, each in the split that most lacks the group's classes,
so counts are only as exact as the groups allow. Splits given by the source are kept; copies in an
earlier split (train before validation before test) are left out, so that no test image is trained
on.

Random orders are made by `random_order`, so equal seeds give equal packs with any NumPy.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hpctrain.config import PackConfig, fold_number
from hpctrain.data.orders import random_order
from hpctrain.data.pack_format import SPLITS
from hpctrain.data.packing.layout import ImageSource
from hpctrain.data.partition import random_key
from hpctrain.errors import UsageError

LEFT_OUT = -1
Shares = tuple[Fraction, Fraction, Fraction]  # of train, validation, test
TRAIN, VALIDATION, TEST = range(3)  # indices into SPLITS and shares


def cut(count: int, shares: tuple[Fraction, ...]) -> list[int]:
    """Divide `count` by `shares` into integers with that sum; largest remainders are rounded up."""
    total = sum(shares)
    exact = [count * share / total for share in shares]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts


def assign(
    labels: np.ndarray,
    shares: Shares,
    seed: int,
    given: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    balanced: bool = False,
) -> np.ndarray:
    """Return the split of every image: (N,) int8 indices into SPLITS, or LEFT_OUT.

    labels (N,); given (N,) int8: the splits of the source, LEFT_OUT without one; groups (N,):
    images that must not be divided have equal numbers; `balanced`: groups come from a manifest. If
    the source gives test but no validation, validation is drawn from the given train, in the ratio
    of these two shares.
    """
    given = np.full(len(labels), LEFT_OUT, np.int8) if given is None else given
    groups = np.arange(len(labels)) if groups is None else groups
    labels, splits = np.asarray(labels), given.copy()
    if not (given > TRAIN).any():  # a source with only train does not give splits
        splits[:] = LEFT_OUT
    elif shares[VALIDATION] and not (given == VALIDATION).any():
        splits[given == TRAIN] = LEFT_OUT
        shares = (shares[TRAIN], shares[VALIDATION], Fraction(0))
    latest = np.full(int(groups.max()) + 1, LEFT_OUT, np.int8)  # given split of every group
    np.maximum.at(latest, groups, splits)
    free = np.flatnonzero((splits == LEFT_OUT) & (latest[groups] == LEFT_OUT))
    splits[splits < latest[groups]] = LEFT_OUT
    rows = free[random_order(len(free), random_key(seed, "pack split"))]
    splits[rows] = _draw(labels[rows], groups[rows], shares, balanced)
    return splits


def fold_as_given(
    labels: np.ndarray, given: np.ndarray, groups: np.ndarray, fold: tuple[int, int], seed: int
) -> np.ndarray:
    """Return splits (N,) in which fold K of N is test, or validation if the source gives test.

    Every image, except those of a given test, is in one of the N folds, which are stratified and
    divide no group. Raises UsageError if the source gives validation.
    """
    number, count = fold
    if (given == VALIDATION).any():
        raise UsageError(
            "--fold draws validation or test, but the source gives a validation split: leave"
            " --fold out"
        )
    held_out = VALIDATION if (given == TEST).any() else TEST
    free = np.flatnonzero(given != TEST)
    rows = free[random_order(len(free), random_key(seed, "pack split"))]
    folds = _draw(labels[rows], groups[rows], (Fraction(1, count),) * count, True)
    splits = np.where(given == TEST, TEST, TRAIN).astype(np.int8)
    splits[rows[folds == number - 1]] = held_out
    return splits


def _draw(
    labels: np.ndarray, groups: np.ndarray, shares: tuple[Fraction, ...], balanced: bool
) -> np.ndarray:
    """Return the split of rows in random order: (n,) int8, or int64 for many folds."""
    kind = np.int8 if len(shares) < 128 else np.int64
    counts = np.bincount(labels).tolist()
    wanted = np.array([cut(count, shares) for count in counts])  # (K, S)
    if balanced and len(set(shares)) == 1:  # else the first folds get the remainder of every class
        first = np.cumsum([0, *counts]) % len(shares)
        wanted = np.array([np.roll(row, by) for row, by in zip(wanted, first, strict=False)])
    room = wanted.copy()
    splits = np.full(len(labels), LEFT_OUT, kind)
    is_single = np.bincount(groups)[groups] == 1
    by_group: dict[int, list[int]] = {}
    for row in np.flatnonzero(~is_single).tolist():
        by_group.setdefault(int(groups[row]), []).append(row)
    for members in sorted(by_group.values(), key=len, reverse=True):
        need = np.bincount(labels[members], minlength=len(room))  # (K,)
        fits = (room >= need[:, None]).all(axis=0) & (room.sum(axis=0) > 0)
        if balanced:
            lack = np.where(wanted > 0, room / np.maximum(wanted, 1), -1.0)
            split = int(np.argmax(need @ lack))
        else:
            split = int(np.argmax(fits)) if fits.any() else int(np.argmax(room.sum(axis=0)))
        splits[members] = split
        room[:, split] -= need
    single = np.flatnonzero(is_single)
    by_class = single[np.argsort(labels[single], kind="stable")]
    start = 0
    for label, count in enumerate(np.bincount(labels[single], minlength=len(room)).tolist()):
        splits[by_class[start : start + count]] = np.repeat(
            np.arange(len(shares), dtype=kind), _filled(room[label], count)
        )
        start += count
    return splits


def _filled(room: np.ndarray, count: int) -> list[int]:
    """Distribute `count` single images over the room left in each split.

    If large groups of equal images overfill a split (room below 0), the largest rooms are reduced.
    """
    places = [max(0, int(part)) for part in room]
    while sum(places) > count:
        places[places.index(max(places))] -= 1
    return places


def merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge two groupings (N,): images connected by equal numbers in either get equal numbers.

    -1 in `other` connects nothing.
    """
    numbers = one.copy()
    named = np.flatnonzero(other >= 0)
    while True:
        before = numbers.copy()
        for groups, rows in ((other, named), (one, np.arange(len(one)))):
            smallest = np.full(int(groups.max(initial=-1)) + 1, len(one))
            np.minimum.at(smallest, groups[rows], numbers[rows])
            numbers[rows] = smallest[groups[rows]]
        if (numbers == before).all():
            return numbers


def equal_pixels(digests: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Number images (N,) by digest; return the numbers and the indices of each group of >= 2.

    The number is the index of the first image of the group.
    """
    order = np.argsort(digests, kind="stable")
    digests = digests[order]
    repeats = np.flatnonzero(digests[1:] == digests[:-1]) + 1
    runs = np.split(repeats, np.flatnonzero(np.diff(repeats) > 1) + 1) if len(repeats) else []
    equal = [order[run[0] - 1 : run[-1] + 1].copy() for run in runs]
    groups = np.arange(len(order))
    for group in equal:
        groups[group] = group[0]
    return groups, sorted(equal, key=lambda group: int(group[0]))


def shuffled(rows: np.ndarray, seed: int, split: str) -> np.ndarray:
    """Return the rows (n,) of a split in their final order."""
    return rows[random_order(len(rows), random_key(seed, "pack order", split))]


def rows_by_split(
    splits: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], wanted: list[str], seed: int
) -> dict[str, np.ndarray]:
    """Return the source rows of every split in their final, shuffled order.

    Raises UsageError if a wanted split is empty, or a class has no image in train.
    """
    result: dict[str, np.ndarray] = {}
    for position, name in enumerate(SPLITS):
        rows = np.flatnonzero(splits == position)
        if len(rows):
            result[name] = shuffled(rows, seed, name)
        elif name in wanted:
            raise UsageError(
                f"--split leaves no image for {name}: there are {len(labels)} images in"
                f" {len(classes)} classes; give {name} a larger share or more images"
            )
    trained = np.bincount(labels[splits == TRAIN], minlength=len(classes))
    for label, name in enumerate(classes):
        if not trained[label]:
            raise UsageError(
                f"class {name!r} has {int((labels == label).sum())} images and none of them"
                " in train: give train a larger share, or the class more images"
            )
    return result


def assign_rows(
    source: ImageSource, good: np.ndarray, pixels: np.ndarray, config: PackConfig, shares: Shares
) -> dict[str, np.ndarray]:
    """Return the images (n,) of every split in their final order. Raises UsageError.

    good (N,): the readable images; pixels (N,): equal numbers for images of equal pixels.
    """
    labels, given, groups = (source.images[name][good] for name in ("label", "split", "group"))
    by_manifest = bool((groups >= 0).any())
    groups = merged(pixels, groups) if by_manifest else pixels
    if config.fold:
        given = fold_as_given(labels, given, groups, fold_number(config.fold), config.seed)
    splits = assign(labels, shares, config.seed, given, groups, by_manifest)
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    wanted = [] if (given > TRAIN).any() else wanted
    rows = rows_by_split(splits, labels, source.classes, wanted, config.seed)
    return {name: good[part] for name, part in rows.items()}
