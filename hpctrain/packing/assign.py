"""Assign images to splits and shuffle them, before any is decoded.

Splits are stratified (``data/draws.py``). Equal files stay together: they are placed first, in
train while there is room, and the remaining images then fill every split to its count. Groups of a
manifest are placed in order of size, the largest first, each in the split that most lacks the
group's classes, so counts are only as exact as the groups allow. Splits given by the source are
kept; copies in an earlier split (train before validation before test) are left out, so that no test
image is trained on.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hpctrain.config import PackConfig, fold_number, split_shares
from hpctrain.data.draws import check_splits, cut, fill, in_random_order, shuffled
from hpctrain.data.pack import SPLITS
from hpctrain.errors import UsageError
from hpctrain.packing.sources import NO_SPLIT, Source

TRAIN, VALIDATION, TEST = range(3)  # indices into SPLITS and shares


def assign_rows(source: Source, config: PackConfig) -> dict[str, np.ndarray]:
    """Return the images (n,) of every split in their final order.

    If the source gives test but no validation, validation is drawn from the given train, in the
    ratio of these two shares. Raises UsageError if a wanted split is empty, or a class has no image
    in train.
    """
    labels, given, groups = source.labels, source.splits, source.groups
    by_manifest, together = bool((groups >= 0).any()), source.duplicate_of
    if by_manifest:
        together = merge_groups(together, groups)
    if config.fold:
        given = _hold_out(source, together, fold_number(config.fold), config.seed)
    shares = split_shares(config.split)
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    splits = given.astype(np.int32)
    if not (given > TRAIN).any():  # a source with only train does not give splits
        splits[:] = NO_SPLIT
    else:
        wanted = []
        if shares[VALIDATION] and not (given == VALIDATION).any():
            wanted = ["validation"]
            splits[given == TRAIN] = NO_SPLIT
            shares = (shares[TRAIN], shares[VALIDATION], Fraction(0))
    latest = np.full(int(together.max()) + 1, NO_SPLIT, np.int32)  # given split of each group
    np.maximum.at(latest, together, splits)
    free = np.flatnonzero(latest[together] == NO_SPLIT)
    splits[splits < latest[together]] = NO_SPLIT  # left out
    rows = in_random_order(free, config.seed)
    splits[rows] = _draw(labels[rows], together[rows], shares, by_manifest)
    found = {name: np.flatnonzero(splits == position) for position, name in enumerate(SPLITS)}
    check_splits(found, labels, source.classes, wanted, source.name)
    return {name: shuffled(of, config.seed, name) for name, of in found.items() if len(of)}


def _hold_out(source: Source, together: np.ndarray, fold: tuple[int, int], seed: int) -> np.ndarray:
    """Return splits (N,) in which fold K of N is test, or validation if the source gives test.

    Every image, except those of a given test, is in one of the N folds, which are stratified and
    divide no group. Raises UsageError if the source gives validation.
    """
    number, count = fold
    if (source.splits == VALIDATION).any():
        raise UsageError(
            "--fold draws validation or test, but the source gives a validation split: leave"
            " --fold out"
        )
    is_test = source.splits == TEST
    rows = in_random_order(np.flatnonzero(~is_test), seed)
    folds = _draw(source.labels[rows], together[rows], (Fraction(1, count),) * count, True)
    if number - 1 not in folds:
        raise UsageError(
            f"--fold {number}/{count} leaves no image for fold {number}: there are {len(rows):,}"
            " images, of which equal ones and groups are not divided; use fewer folds"
        )
    splits = np.where(is_test, TEST, TRAIN)
    splits[rows[folds == number - 1]] = VALIDATION if is_test.any() else TEST
    return splits


def _draw(
    labels: np.ndarray, groups: np.ndarray, shares: tuple[Fraction, ...], balanced: bool
) -> np.ndarray:
    """Return the split (n,) of each row, in random order. Equal `groups` (n,) are not divided.

    If `balanced`, groups are those of a manifest.
    """
    counts = np.bincount(labels).tolist()
    wanted = np.array([cut(count, shares) for count in counts])  # (K, S)
    if balanced and len(set(shares)) == 1:  # else the first folds get the remainder of every class
        first = np.cumsum([0, *counts]) % len(shares)
        wanted = np.array([np.roll(row, by) for row, by in zip(wanted, first, strict=False)])
    room = wanted.copy()
    splits = np.empty(len(labels), np.int32)
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
    splits[is_single] = fill(labels[is_single], room.tolist())
    return splits


def merge_groups(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge two groupings (N,): images connected by equal numbers in either get equal numbers.

    -1 in `other` connects nothing.
    """
    one = np.unique(one, return_inverse=True)[1]  # below N
    numbers, named = one.copy(), np.flatnonzero(other >= 0)
    while True:
        before = numbers.copy()
        for groups, rows in ((other, named), (one, np.arange(len(one)))):
            smallest = np.full(int(groups.max(initial=-1)) + 1, len(one))
            np.minimum.at(smallest, groups[rows], numbers[rows])
            numbers[rows] = smallest[groups[rows]]
        if (numbers == before).all():
            return numbers
