"""Draw splits that are stratified by the targets of samples: pure functions of targets and a seed.

    class     each class is divided by the shares with the largest remainder method, so its counts
              are exact
    classes   iterative stratification of label sets (Sechidis, Tsoumakas and Vlahavas 2011): the
              class with the fewest samples left is divided first. A class is 1 or it is not:
              unknown entries count as neither
    values    the tenths of each column by size are its classes, divided like those of label sets:
              so every split has its share of small and large values of each column, whatever their
              correlation. Unknown values are in no tenth

Where several samples must stay together, groups are placed whole, each in the split that most lacks
its classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, Self

import numpy as np

from hpctrain.data.orders import shuffled
from hpctrain.data.targets import Targets
from hpctrain.errors import UsageError
from hpctrain.text import counted, listed

TENTHS = 10  # strata of a column of values
TRAIN = "train"
Shares = tuple[Fraction, ...]


class Strata(Protocol):
    """What samples must be divided by: the classes of N samples, of K in all."""

    def __len__(self) -> int: ...

    def take(self, rows: np.ndarray) -> Self:
        """Return the strata of these samples (n,), in this order."""

    def wanted(self, shares: Shares, is_rotated: bool) -> np.ndarray:
        """Return how many samples of each stratum each of S splits should have, (R, S).

        With `is_rotated`, equal shares get the remainders in turn.
        """

    def count(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of these samples in each stratum, (R,)."""

    def fill(self, room: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Distribute all samples, in random order, over the splits; return the split (N,) of each.

        `room` (R, S) is what is left of `wanted`.
        """


@dataclass(frozen=True)
class ByClass:
    """Samples of one class each: the strata are the classes."""

    labels: np.ndarray  # (N,) 0 ... K-1
    classes: int  # K

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> ByClass:
        return ByClass(self.labels[rows], self.classes)

    def wanted(self, shares: Shares, is_rotated: bool = False) -> np.ndarray:
        counts = np.bincount(self.labels, minlength=self.classes).tolist()
        wanted = np.array([divide_by_shares(count, shares) for count in counts])
        if is_rotated:  # else the first folds get the remainder of every class
            first = np.cumsum([0, *counts]) % len(shares)
            rows = zip(wanted, first, strict=False)
            wanted = np.array([np.roll(row, by) for row, by in rows])
        return wanted

    def count(self, rows: np.ndarray) -> np.ndarray:
        return np.bincount(self.labels[rows], minlength=self.classes)

    def fill(self, room: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Implement `Strata`: of class k, the first `room[k, 0]` samples are in split 0, ...

        If there is room for more than all samples of a class, the largest rooms are reduced.
        """
        splits = np.empty(len(self), np.int32)
        by_class = np.argsort(self.labels, kind="stable")
        counts = np.bincount(self.labels, minlength=self.classes).tolist()
        start = 0
        for places, count in zip(room.tolist(), counts, strict=True):
            places = [max(0, part) for part in places]
            while sum(places) > count:
                places[places.index(max(places))] -= 1
            splits[by_class[start : start + count]] = np.repeat(np.arange(len(places)), places)
            start += count
        return splits


@dataclass(frozen=True)
class LabelSets:
    """Samples of any number of classes each: the strata are the classes, and that of all samples.

    Sample i has the classes ``labels[starts[i]:starts[i + 1]]``.
    """

    starts: np.ndarray  # (N + 1,) int64
    labels: np.ndarray  # (M,) int32, 0 ... K-1
    classes: int  # K

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> np.ndarray:
        """The number of classes of each sample, (N,)."""
        return np.diff(self.starts)

    def entries(self, rows: np.ndarray) -> np.ndarray:
        """Return the places in `labels` of the classes of these samples (n,), (m,)."""
        sizes = self.starts[rows + 1] - self.starts[rows]
        offsets = self.starts[rows] - (np.cumsum(sizes) - sizes)
        return np.repeat(offsets, sizes) + np.arange(sizes.sum())

    def take(self, rows: np.ndarray) -> LabelSets:
        sizes = self.sizes[rows]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        return LabelSets(starts, self.labels[self.entries(rows)], self.classes)

    def wanted(self, shares: Shares, is_rotated: bool = False) -> np.ndarray:
        """Implement `Strata`: exact shares, (K + 1, S) float64, with any remainders."""
        parts = np.array([float(share / sum(shares)) for share in shares])
        return self.count(np.arange(len(self)))[:, None] * parts

    def count(self, rows: np.ndarray) -> np.ndarray:
        counts = np.bincount(self.labels[self.entries(rows)], minlength=self.classes)
        return np.append(counts, len(rows))

    def fill(self, room: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Implement `Strata` by iterative stratification; ties are broken by row number.

        All samples left of the class that has the fewest are divided at once: which split the next
        of them would be given to does not depend on their other classes. The remainders go to the
        splits that would be furthest behind in samples of any class.
        """
        splits = np.full(len(self), -1, np.int32)
        room = room.astype(np.float64)
        left = np.bincount(self.labels, minlength=self.classes)
        rows_of = np.repeat(np.arange(len(self)), self.sizes)
        rows_of = rows_of[np.argsort(self.labels, kind="stable")]
        ends = np.cumsum(left).tolist()
        starts = [0, *ends[:-1]]
        while left.any():
            rarest = int(np.where(left, left, len(self) + 1).argmin())
            rows = rows_of[starts[rarest] : ends[rarest]]
            rows = rows[splits[rows] < 0]
            present = wanted[rarest] - room[rarest]
            parts = divide_rows(len(rows), room[rarest], room[-1], wanted[-1], present)
            splits[rows] = np.repeat(np.arange(len(parts)), parts)
            entries = self.entries(rows)
            numbers = np.repeat(splits[rows], self.sizes[rows]).astype(np.int64)
            numbers += self.labels[entries].astype(np.int64) * len(parts)
            placed = np.bincount(numbers, minlength=self.classes * len(parts))
            placed = placed.reshape(self.classes, len(parts))
            room[:-1] -= placed
            room[-1] -= parts
            left -= placed.sum(1)
        rows = np.flatnonzero(splits < 0)  # of no class
        parts = divide_rows(len(rows), room[-1], room[-1], wanted[-1], None)
        splits[rows] = np.repeat(np.arange(len(parts)), parts)
        return splits


def divide_rows(
    count: int,
    lacking: np.ndarray,
    room: np.ndarray,
    all_rows: np.ndarray,
    present: np.ndarray | None,
) -> np.ndarray:
    """Divide `count` samples of a class by what each split lacks of it, (S,); return counts (S,).

    `room` (S,) is what the splits lack of all samples, of which they should have `all_rows` (S,).
    If the class is `present` (S,) so often, each split that has room gets one of it first, the
    largest split before all others. No split gets more than it has room for, rounded up.
    """
    if not count:
        return np.zeros(len(room), np.int64)
    shares = all_rows / max(all_rows.sum(), 1)
    wanted = np.maximum(lacking, 0)
    if not wanted.sum():
        wanted = shares
    exact = wanted * (count / wanted.sum())
    parts = np.floor(exact + 1e-9).astype(np.int64)
    rest = count - int(parts.sum())
    behind = room - parts - shares * (room.sum() - count)
    behind[wanted == 0] = -np.inf
    parts[np.argsort(-behind, kind="stable")[:rest]] += 1
    if present is not None:
        spread_class(parts, present, room, shares)
    limit = np.ceil(np.maximum(room, 0) - 1e-9).astype(np.int64)
    excess = int(np.maximum(parts - limit, 0).sum())
    parts = np.minimum(parts, limit)
    for split in np.argsort(parts - limit, kind="stable").tolist():
        moved = min(excess, int(limit[split] - parts[split]))
        parts[split] += moved
        excess -= moved
    return parts


def spread_class(
    parts: np.ndarray, present: np.ndarray, room: np.ndarray, shares: np.ndarray
) -> None:
    """Change `parts` (S,) of a class so that each split that has room gets one of it."""
    for split in np.argsort(-shares, kind="stable").tolist():
        totals = present + parts
        is_largest = shares[split] > np.delete(shares, split).max(initial=0)
        is_free = (parts > 0) & ((totals > 1.5) | is_largest)
        if totals[split] < 0.5 and shares[split] and room[split] >= 1 and is_free.any():
            parts[np.where(is_free, totals, -1).argmax()] -= 1
            parts[split] += 1


def strata_of(targets: Targets, rows: np.ndarray) -> Strata:
    """Return by what samples with these targets (N, ...) are divided."""
    if targets.kind == "class":
        return ByClass(rows, len(targets.names))
    if targets.kind == "classes":
        return label_sets([rows], len(targets.names))
    return value_sets(rows)


def label_sets(pieces: Iterable[np.ndarray], classes: int) -> LabelSets:
    """Return the classes of samples whose entries are 1, of pieces (n, K) of any other values."""
    sizes = [np.empty(0, np.int64)]
    labels = [np.empty(0, np.int32)]
    for piece in pieces:
        is_in = piece == 1
        sizes.append(np.count_nonzero(is_in, axis=1))
        labels.append(np.nonzero(is_in)[1].astype(np.int32))
    starts = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    return LabelSets(starts, np.concatenate(labels), classes)


def value_sets(values: np.ndarray) -> LabelSets:
    """Return the tenths of all columns in which values (N, T) are; NaN, unknown, is in none.

    Equal values are in one tenth. Column t has the strata 10 t to 10 t + 9.
    """
    samples, columns = values.shape
    strata = np.full((samples, columns), -1, np.int32)
    for column in range(columns):
        ordered = np.sort(values[~np.isnan(values[:, column]), column])
        places = len(ordered) * np.arange(1, TENTHS) // TENTHS
        if len(ordered):
            is_known = ~np.isnan(values[:, column])
            tenths = np.searchsorted(ordered[places], values[is_known, column], "right")
            strata[is_known, column] = column * TENTHS + tenths
    is_known = strata >= 0
    starts = np.concatenate([[0], np.cumsum(np.count_nonzero(is_known, axis=1))])
    return LabelSets(starts, strata[is_known], columns * TENTHS)


def divide_by_shares(count: int, shares: Shares) -> list[int]:
    """Divide `count` by `shares` into integers with that sum; largest remainders are rounded up."""
    total = sum(shares)
    exact = [count * share / total for share in shares]
    counts = [int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts


def assign(strata: Strata, shares: Shares, seed: int) -> np.ndarray:
    """Return the split of every sample: (N,) indices into SPLITS."""
    rows = shuffled(np.arange(len(strata)), seed, "pack split")
    chosen = strata.take(rows)
    wanted = chosen.wanted(shares, is_rotated=False)
    splits = np.empty(len(strata), np.int32)
    splits[rows] = chosen.fill(wanted, wanted)
    return splits


def assign_groups(strata: Strata, groups: np.ndarray, shares: Shares, balanced: bool) -> np.ndarray:
    """Return the split (n,) of each sample, in random order. Equal `groups` (n,) are not divided.

    They are placed in order of size, the largest first: if `balanced`, or of label sets, each in
    the split that most lacks its classes, else in the first that has room.
    """
    balanced = balanced or isinstance(strata, LabelSets)
    wanted = strata.wanted(shares, is_rotated=balanced and len(set(shares)) == 1)  # (R, S)
    room = wanted.copy()
    splits = np.empty(len(strata), np.int32)
    is_single = np.bincount(groups)[groups] == 1
    by_group: dict[int, list[int]] = {}
    for row in np.flatnonzero(~is_single).tolist():
        by_group.setdefault(int(groups[row]), []).append(row)
    for members in sorted(by_group.values(), key=len, reverse=True):
        need = strata.count(np.array(members))  # (R,)
        fits = (room >= need[:, None]).all(axis=0) & (room.sum(axis=0) > 0)
        if balanced:
            lack = np.where(wanted > 0, room / np.maximum(wanted, 1), -1.0)
            split = int(np.argmax(need @ lack))
        elif fits.any():
            split = int(np.argmax(fits))
        else:
            split = int(np.argmax(room.sum(axis=0)))
        splits[members] = split
        room[:, split] -= need
    splits[is_single] = strata.take(np.flatnonzero(is_single)).fill(room, wanted)
    return splits


def check_splits(
    rows: Mapping[str, np.ndarray],
    strata: Strata,
    classes: Sequence[str],
    wanted: Iterable[str],
    source: str,
    way: str = "",
    advice: str = "",
) -> list[str]:
    """Raise UsageError if a `wanted` split has no sample, or train none of a class of `ByClass`.

    `rows` are the samples of each split, `strata` those of all; `classes` name them, and are () of
    values. `way`: how they were drawn. The error ends with `advice`, by default a larger share.
    Returns notes on classes of label sets, of which train or a wanted split has no sample.
    """
    wanted = [*wanted]
    for name in wanted:
        if not len(rows[name]):
            raise UsageError(
                f"--split leaves none of {len(strata):,} images of {source} for {name}{way}:"
                f" {advice or 'give it a larger share or more images'}"
            )
    totals = strata.count(np.arange(len(strata)))[: len(classes)]
    if isinstance(strata, ByClass):
        trained = strata.count(rows[TRAIN])
        for label in np.flatnonzero(trained == 0)[:1].tolist():
            raise UsageError(
                f"class {classes[label]} of {source} has no image in train{way}:"
                f" {advice or 'give train a larger share, or the class more images'}"
            )
        return []
    notes = list[str]()
    for name in dict.fromkeys((TRAIN, *wanted)):
        counts = strata.count(rows[name])[: len(classes)]
        rare = np.flatnonzero((counts == 0) & (totals > 0)).tolist()
        if rare:
            texts = [f"{classes[label]} ({counted(int(totals[label]), 'image')})" for label in rare]
            count = f"{len(rare):,} of {len(classes):,} classes"
            notes.append(f"{name} has no image of {count}{way}: {listed(texts)}")
    return notes
