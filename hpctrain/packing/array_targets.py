"""The labels that ``hp.write_pack`` is given, as the targets of a pack.

    labels of a split               and          targets
    (N,) integers or truth values   K classes    class
    (N, K) of 0, 1, and unknown     K classes    classes
    (N,) or (N, T) numbers          T columns    values

Unknown entries are NaN, or 255 of classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpctrain.data.outliers import target_notes
from hpctrain.data.targets import UNKNOWN, Targets
from hpctrain.errors import UsageError, first_line
from hpctrain.text import brief, counted, listed

SLAB_VALUES = 1 << 20  # whose rounding is measured at a time: 16 MiB of each copy
FILLED = {"class": "0", "classes": str(UNKNOWN), "values": "numpy.nan"}  # advice by kind


class ArrayTargets(NamedTuple):
    """The targets of all samples of a pack."""

    targets: Targets
    rows: dict[str, np.ndarray]  # (n, ...) by split, as they are stored
    notes: list[str]  # on entries that were changed or are unknown, or may not be meant


def check_targets(
    labels_of: Mapping[str, Any],
    samples: Mapping[str, int | None],
    classes: Sequence[str] | None,
    columns: Sequence[str] | None,
) -> ArrayTargets:
    """Return the targets of all splits, whose labels these are. Raises UsageError.

    samples: images of each split; None = as many as labels. One of `classes` and `columns` is given
    and names what the labels are of.
    """
    arrays = {split: _as_array(split, labels) for split, labels in labels_of.items()}
    targets = choose_targets(classes, columns, arrays["train"])
    rows: dict[str, np.ndarray] = {}
    notes = list[str]()
    for split, values in arrays.items():
        if isinstance(labels_of[split], np.ma.MaskedArray):
            raise UsageError(
                f"labels of {split} are a masked array: fill it, as in"
                f" .filled({FILLED[targets.kind]})"
            )
        count = samples[split]
        if count is None:  # as many images are expected to come
            count = len(values) if values.ndim else 0
        if targets.kind == "class":
            rows[split] = _check_class(split, values, count, targets)
        elif targets.kind == "classes":
            rows[split] = _check_classes(split, values, count, targets)
        else:
            rows[split] = _check_values(split, values, count, targets, notes)
    if targets.kind != "class":
        _refuse_unknown(targets, rows["train"])
        notes += _describe_unknown(targets, rows)
    if targets.kind == "values":
        notes += target_notes(targets.names, rows["train"], "give NaN in its place")
    if targets.kind == "classes" and _are_one_hot(rows):
        notes.append(
            "each row of labels has a single 1: they are kept as several classes, for --task"
            " multilabel; labels.argmax(1) makes one class an image of them, for --task classify"
        )
    return ArrayTargets(targets, rows, notes)


def choose_targets(
    classes: Sequence[str] | None, columns: Sequence[str] | None, labels: np.ndarray
) -> Targets:
    """Return the kind of the labels of train, and the names of their classes or columns.

    Raises UsageError.
    """
    if (classes is None) == (columns is None):
        raise UsageError(
            "give either the names of the classes, as in classes=['cat', 'dog'], or those of the"
            " columns of values, as in columns=['age']"
        )
    if classes is None:
        assert columns is not None
        if isinstance(columns, str):
            raise UsageError(f"columns {columns!r}: give a list of names, as in [{columns!r}]")
        return Targets("values", _check_names("column", columns))
    names = _check_names("class", classes)
    is_table = labels.ndim == 2 and labels.shape[1] == len(names)
    return Targets("classes" if is_table else "class", names)


def _check_names(noun: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes or columns. Raises UsageError if one is empty or not unique."""
    plural = {"class": "classes", "column": "columns"}[noun]
    names = tuple(names)
    is_named = all(isinstance(name, str) and name for name in names)
    if not names or not is_named or len({*names}) < len(names):
        raise UsageError(f"{plural} {brief([*names])}: give each {noun} a name of its own")
    return names


def _as_array(split: str, labels: Any) -> np.ndarray:
    try:
        return np.asarray(labels)
    except ValueError as error:  # of lists of different lengths
        raise UsageError(f"labels of {split} are no array: {first_line(error)}") from None


def _check_class(split: str, values: np.ndarray, samples: int, targets: Targets) -> np.ndarray:
    """Return the classes (N,) int32 of a split. Raises UsageError."""
    classes = len(targets.names)
    is_valid = False
    numbers = ""
    if values.dtype.kind in "biu" and values.size > 0:
        low = int(values.min())
        high = int(values.max())
        is_valid = 0 <= low <= high < classes
        numbers = f" from {low} to {high}"
    if values.shape != (samples,) or not is_valid:
        advice = ""
        if values.size == samples and values.ndim > 1:
            advice = "; labels.reshape(-1) has this shape"
        elif values.ndim == 2:
            advice = (
                "; of one-hot ones, labels.argmax(1); where images have several classes,"
                f" ({samples:,}, {classes}) of 0 and 1"
            )
        elif values.dtype.kind in "USO":
            advice = "; of names, numpy.unique(labels, return_inverse=True) gives classes and these"
        elif values.dtype.kind == "f":
            advice = "; of values, give columns=['name'] and no classes"
        raise UsageError(
            f"labels of {split} are {values.dtype} of shape {values.shape}{numbers}: expected"
            f" {samples:,} integers from 0 to {classes - 1}{advice}"
        )
    return values.astype(targets.dtype)


def _check_classes(split: str, values: np.ndarray, samples: int, targets: Targets) -> np.ndarray:
    """Return which classes the samples of a split have, (N, K) uint8. Raises UsageError."""
    expected = f"0, 1, and NaN or {UNKNOWN} where unknown"
    _check_shape(split, values, samples, targets, expected)
    stored = np.full(values.shape, UNKNOWN, targets.dtype)
    stored[values == 0] = 0
    stored[values == 1] = 1
    is_unknown = (values == UNKNOWN) | (values != values)  # NaN differs from itself
    _refuse(split, values, (stored == UNKNOWN) & ~is_unknown, targets, f"expected {expected}")
    return stored


def _check_values(
    split: str, values: np.ndarray, samples: int, targets: Targets, notes: list[str]
) -> np.ndarray:
    """Return the values (N, T) float32 of a split; add notes on those that were rounded.

    Raises UsageError.
    """
    if values.ndim == 1 and len(targets.names) == 1:
        values = values[:, np.newaxis]
    _check_shape(split, values, samples, targets, "numbers, and NaN where unknown")
    _refuse(split, values, np.isinf(values), targets, "expected finite values, and NaN for unknown")
    with np.errstate(over="ignore", under="ignore"):
        stored = values.astype(targets.dtype)
    stored[np.isnan(stored)] = np.nan  # one of all that there are: equal values give equal bytes
    _refuse(split, values, np.isinf(stored), targets, "too large for float32: give another unit")
    count, largest = _measure_rounding(values, stored)
    if count:
        notes.append(
            f"{count:,} of {values.size:,} labels of {split} are rounded to float32, by at most"
            f" {largest:.1g} of their size"
        )
    return stored


def _measure_rounding(values: np.ndarray, stored: np.ndarray) -> tuple[int, float]:
    """Return how many values (N, T) are stored as others, and the largest relative difference."""
    count = 0
    largest = 0.0
    step = max(1, SLAB_VALUES // values.shape[1])
    for start in range(0, len(values), step):
        exact = values[start : start + step].astype(np.longdouble)
        errors = np.abs(stored[start : start + step] - exact)
        is_rounded = errors > 0  # not NaN
        count += int(is_rounded.sum())
        ratios = errors[is_rounded] / np.abs(exact[is_rounded])
        largest = float(ratios.max(initial=largest))
    return count, largest


def _check_shape(
    split: str, values: np.ndarray, samples: int, targets: Targets, expected: str
) -> None:
    """Raise UsageError unless there are numbers for each sample and class or column."""
    shape = (samples, *targets.shape)
    if values.dtype.kind not in "biuf" or values.shape != shape or not samples:
        raise UsageError(
            f"labels of {split} are {values.dtype} of shape {values.shape}: expected"
            f" {samples:,} rows of {len(targets.names):,}, one entry for each {targets.noun}:"
            f" {expected}"
        )


def _refuse(
    split: str, values: np.ndarray, is_wrong: np.ndarray, targets: Targets, advice: str
) -> None:
    """Raise UsageError that names the first wrong entry, if there is one."""
    if not is_wrong.any():
        return
    row, column = np.argwhere(is_wrong)[0].tolist()
    raise UsageError(
        f"labels of {split} hold {values[row, column]:g} in row {row:,} for"
        f" {targets.names[column]} ({counted(int(is_wrong.sum()), 'such label')}): {advice}"
    )


def _refuse_unknown(targets: Targets, train: np.ndarray) -> None:
    """Raise UsageError if all entries of a class or a column in train are unknown."""
    counts = np.count_nonzero(~targets.is_unknown(train), axis=0)
    targets.check_known("labels of train", counts, counted(len(train), "image"))


def _describe_unknown(targets: Targets, rows: Mapping[str, np.ndarray]) -> list[str]:
    """Return a line on the unknown entries of each split that has some."""
    notes = list[str]()
    for split, stored in rows.items():
        unknown = targets.is_unknown(stored)
        if unknown.any():
            counts = zip(targets.names, unknown.sum(axis=0).tolist(), strict=True)
            names = [f"{name} {count:,}" for name, count in counts if count]
            text = f"{unknown.sum():,} of {unknown.size:,} labels of {split} are unknown"
            empty = int(unknown.all(axis=1).sum())
            if empty:
                text += f", among them all of {counted(empty, 'image')}"
            notes.append(f"{text}: {listed(names)}")
    return notes


def _are_one_hot(rows: Mapping[str, np.ndarray]) -> bool:
    """Whether each image has one of several classes (n, K), and none is unknown."""
    has_one = [(stored.sum(axis=1, dtype=np.int64) == 1).all() for stored in rows.values()]
    return all(has_one) and rows["train"].shape[1] > 1
