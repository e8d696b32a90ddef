"""Assign images to splits and shuffle them, before any is decoded.

Splits are stratified (``data/orders.py``). Equal files stay together: they are placed first, in
train while there is room. Groups of a manifest are placed in order of size, the largest first, each
in the split that most lacks the group's classes, so counts are only as exact as the groups allow.
Splits given by the source are kept; copies in an earlier split (train before validation before
test) are left out, so that no test image is trained on.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hpctrain.config import Fold, PackConfig
from hpctrain.data.orders import check_splits, cut, fill, shuffled
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
    labels, together = source.labels, source.duplicate_of
    if is_grouped := bool((source.groups >= 0).any()):
        together = merge_groups(together, source.groups)
    shares: tuple[Fraction, ...] = config.split
    splits, way = source.splits.astype(np.int32), ""
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    if config.fold:
        wanted, way = (
            [_hold_out(source, splits, together, config.fold, config.seed)],
            f" by --fold {config.fold}",
        )
    elif (splits > TRAIN).any():
        wanted = []
    else:  # a source with only train does not give splits
        splits[:] = NO_SPLIT
    if (splits > TRAIN).any() and shares[VALIDATION] and not (splits == VALIDATION).any():
        wanted.append("validation")
        splits[splits == TRAIN] = NO_SPLIT
        shares = (shares[TRAIN], shares[VALIDATION], Fraction(0))
    latest = np.full(int(together.max()) + 1, NO_SPLIT, np.int32)  # given split of each group
    np.maximum.at(latest, together, splits)
    splits[splits < latest[together]] = NO_SPLIT  # left out
    rows = np.flatnonzero(latest[together] == NO_SPLIT)
    rows = shuffled(rows, config.seed, "pack split")
    splits[rows] = _draw(labels[rows], together[rows], shares, is_grouped)
    found = {name: np.flatnonzero(splits == position) for position, name in enumerate(SPLITS)}
    check_splits(found, labels, source.classes, wanted, source.name, way)
    used = ((name, of) for name, of in found.items() if len(of))
    return {name: shuffled(of, config.seed, "pack order", name) for name, of in used}


def _hold_out(
    source: Source, splits: np.ndarray, together: np.ndarray, fold: Fold, seed: int
) -> str:
    """Hold out fold K of N in `splits` (N,): as test, or as validation if the source gives test.

    Every image, except those of a given test, is in one of the N folds, which are stratified and
    divide no group. Returns the name of the split. Raises UsageError if the source gives
    validation.
    """
    if (splits == VALIDATION).any():
        raise UsageError("--fold is for sources that do not give a validation split, as this does")
    number, count = fold
    held_out = VALIDATION if (splits == TEST).any() else TEST
    rows = shuffled(np.flatnonzero(splits != TEST), seed, "pack split")
    folds = _draw(source.labels[rows], together[rows], (Fraction(1, count),) * count, True)
    splits[rows] = np.where(folds == number - 1, held_out, TRAIN)
    return SPLITS[held_out]


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
    """Merge two groupings (N,): images connected by equal numbers in either get equal numbers."""
    numbers = np.arange(len(one))
    groupings = [np.unique(groups, return_inverse=True)[1] for groups in (one, other)]
    while True:
        before = numbers
        for groups in groupings:
            smallest = np.full(len(numbers), len(numbers))
            np.minimum.at(smallest, groups, numbers)
            numbers = smallest[groups]
        if np.array_equal(numbers, before):
            return numbers
