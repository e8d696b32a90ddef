"""What external HDF5 files hold as targets of several classes, or of values; rank 0 reads it.

    classes   0 and 1, as truth values, integers or floats (N, K), or (N,) of each of K datasets;
              unknown: NaN, -1, 255, and the fill values that the dataset names
    values    integers or floats (N,) or (N, T) of each dataset; unknown: NaN and fill values

All are read once, to draw splits by them and to check them. Those that are long are read again, in
training, where they are (``target_rows.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import h5py
import numpy as np

from hpctrain.data.hdf5 import Unusable, find_dataset, locate_dataset
from hpctrain.data.outliers import target_notes
from hpctrain.data.stored import Stored
from hpctrain.data.target_rows import (
    INVALID,
    MARKS,
    TargetColumns,
    convert_targets,
    mark_unknown,
)
from hpctrain.data.targets import TargetKind, Targets
from hpctrain.tasks.facts import task_that_learns
from hpctrain.text import counted, listed

# Attributes of netCDF
SCALE_ATTRIBUTES = ("scale_factor", "add_offset", "_Unsigned")
FILL_VALUES = ("_FillValue", "missing_value")
PIECE = 8 << 20  # bytes of targets that are read at a time
MOST_BYTES = 8 << 30  # of all targets, which rank 0 holds while it draws splits
ROUNDED = 1e-3  # of the standard deviation: rounding to float32 by more is said


class FileTargets(NamedTuple):
    """The targets of a file: of K classes, or in K columns."""

    names: tuple[str, ...]
    targets: np.ndarray  # (N, K), as a pack stores them
    parts: tuple[TargetColumns, ...]
    notes: list[str]


def dataset_names(labels: str, split: str) -> list[str]:
    """Return the datasets of targets that are named, separated by commas."""
    return [name.strip().replace("{split}", split) for name in labels.split(",")]


def read_file_targets(
    file: h5py.File, names: Sequence[str], samples: int, kind: TargetKind, sizes: dict[str, int]
) -> FileTargets:
    """Read the targets of all samples from these datasets. Raises Unusable.

    The sizes of all files that hold them are added to `sizes`.
    """
    parts = list[TargetColumns]()
    columns = list[np.ndarray]()
    texts = list[str]()
    notes = list[str]()
    short = [name.strip("/").rpartition("/")[2] for name in names]
    if len({*short}) < len(short):
        short = [name.strip("/") for name in names]
    for name, text in zip(names, short, strict=True):
        data = find_dataset(file, name)
        check_numbers(data, kind)
        part = locate_columns(data, samples, kind, sizes)
        values, said = read_columns(data, part, kind)
        notes += said
        unapplied = [attribute for attribute in SCALE_ATTRIBUTES if attribute in data.attrs]
        if unapplied:
            notes.append(f"not applied to {data.name}: {listed(unapplied)}")
        parts.append(part)
        columns.append(values)
        count = values.shape[1]
        texts += [text] if count == 1 else [f"{text}[{column}]" for column in range(count)]
    if len({*texts}) < len(texts):
        raise Unusable(f"--targets {','.join(names)} names a dataset twice")
    return FileTargets(tuple(texts), np.concatenate(columns, axis=1), tuple(parts), notes)


def check_numbers(data: h5py.Dataset, kind: TargetKind) -> None:
    """Raise Unusable unless a dataset holds truth values, integers or floats."""
    task = f"--task {task_that_learns(kind)}"
    needed = "numbers"
    if kind == "classes":
        needed = "0 and 1 of each class, (N, K)"
    stored = str(data.dtype)
    if h5py.check_string_dtype(data.dtype):
        stored = "strings"
    elif h5py.check_enum_dtype(data.dtype):
        stored = "an enumeration"
    elif data.dtype.kind in "biuf":
        return
    raise Unusable(f"the targets {data.name} are {stored}, and {task} learns {needed}")


def locate_columns(
    data: h5py.Dataset, samples: int, kind: TargetKind, sizes: dict[str, int]
) -> TargetColumns:
    """Return where a dataset of targets is stored. Raises Unusable if its shape does not fit."""
    shape = data.shape
    if samples == 1 and shape[:1] != (1,):  # a file that is one image
        shape = (1, *shape)
    if len(shape) not in (1, 2) or shape[0] != samples or 0 in shape:
        advice = ""
        if len(shape) == 2 and shape[1] == samples:
            advice = f"; write them anew, file['new'] = file['{data.name}'][:].T"
        raise Unusable(
            f"the targets {data.name} have shape {data.shape}, and {samples:,} images need"
            f" ({samples},) or ({samples}, K){advice}"
        )
    size = math.prod(shape) * Targets(kind, ()).dtype.itemsize
    if size > MOST_BYTES:
        raise Unusable(
            f"the targets {data.name} of {samples:,} images are {size / 2**30:.1f} GiB, and splits"
            f" are drawn by at most {MOST_BYTES / 2**30:.0f} GiB: name fewer columns"
        )
    stored = locate_dataset(data, sizes)
    if not is_plain(data):
        stored = stored._replace(offset=0)
    fills = list[float]()
    for attribute in FILL_VALUES:
        values = np.asarray(data.attrs.get(attribute, ())).reshape(-1).tolist()
        fills += [value for value in values if isinstance(value, int | float) and value == value]
    return TargetColumns(
        path=os.path.abspath(os.fsdecode(data.file.filename)),
        stored=stored._replace(shape=shape, chunk_rows=min(stored.chunk_rows, samples)),
        fills=tuple(dict.fromkeys(fills)),
    )


def is_plain(data: h5py.Dataset) -> bool:
    """Whether values are stored as NumPy has them: bfloat16, or integers of 12 bits, are not."""
    stored = data.id.get_type()
    if data.dtype.kind == "b":
        return bool(stored.get_size() == 1)
    return bool(stored.equal(h5py.h5t.py_create(data.dtype)))


def read_columns(
    data: h5py.Dataset, part: TargetColumns, kind: TargetKind
) -> tuple[np.ndarray, list[str]]:
    """Read a dataset of targets, (N, k), and notes on what is unknown or rounded.

    Raises Unusable for an entry that targets of this kind cannot have.
    """
    stored = part.stored
    samples = stored.shape[0]
    columns = math.prod(stored.shape[1:])
    targets = np.empty((samples, columns), Targets(kind, ()).dtype)
    unit = max(1, stored.chunk_rows)
    step = unit * max(1, PIECE // (unit * stored.row_bytes))
    unknown = set[str]()
    rounding = np.zeros(columns)
    is_one = data.ndim < len(stored.shape) or data.shape[:1] != (samples,)
    for start in range(0, samples, step):
        values = np.asarray(data[...] if is_one else data[start : start + step])
        values = values.reshape(-1, columns)
        piece = convert_targets(kind, values, part.fills)
        check_entries(data.name, start, values, piece, kind)
        unknown |= find_marks(kind, values, part.fills)
        if kind == "values":
            error = np.abs(piece.astype(np.float64) - values)
            rounding = np.fmax(rounding, np.nan_to_num(error).max(axis=0))
        targets[start : start + step] = piece
    notes = list[str]()
    if unknown:
        verb = "stands" if len(unknown) == 1 else "stand"
        notes.append(f"{listed(sorted(unknown))} {verb} for unknown in {data.name}")
    if rounding.any() and is_rounded(targets, rounding):
        notes.append(
            f"values of {data.name} are rounded to float32, by more than a thousandth of their"
            " standard deviation: subtract a constant"
        )
    return targets, notes


def is_rounded(values: np.ndarray, rounding: np.ndarray) -> bool:
    """Whether rounding of columns (T,) of values (N, T) is not small beside their deviation."""
    for column, error in zip(values.T, rounding.tolist(), strict=True):
        known = column[~np.isnan(column)].astype(np.float64)
        if len(known) > 1 and error > ROUNDED * known.std():
            return True
    return False


def check_entries(
    name: str, start: int, values: np.ndarray, targets: np.ndarray, kind: TargetKind
) -> None:
    """Raise Unusable for a stored value (n, K) that cannot be a target, converted to `targets`.

    `start` is the row of the first.
    """
    if kind == "values":
        wrong = np.isinf(targets)
    else:
        wrong = targets == INVALID
    if not wrong.any():
        return
    row, column = np.argwhere(wrong)[0].tolist()
    value = values[row, column]
    place = f"row {start + row}"
    if values.shape[1] > 1:
        place += f", column {column}"
    if kind == "classes":
        other = "--task regress"
        if values.shape[1] == 1 and float(value).is_integer():
            other = "--task classify"
        raise Unusable(
            f"the targets {name} hold {value:g} in {place}: a class is 1 or 0, and unknown are NaN,"
            f" {listed(MARKS)} and fill values; {other} learns other numbers"
        )
    why = "too large for float32" if np.isfinite(value) else "not finite; NaN stands for unknown"
    raise Unusable(f"the targets {name} hold {value:g} in {place}, {why}")


def find_marks(kind: TargetKind, values: np.ndarray, fills: tuple[float, ...]) -> set[str]:
    """Return the stored values (n, K), beside NaN, that mark unknown entries."""
    marked = np.unique(values[mark_unknown(kind, values, fills)])
    return {f"{value:g}" for value in marked.tolist() if value == value}


def check_known(path: str, targets: Targets, entries: np.ndarray) -> list[str]:
    """Raise UsageError for a class, or column, of which all `entries` (N, K) are unknown.

    Returns notes on the number of unknown entries, on values that may stand for unknown, and on
    classes that no known entry has, or all have.
    """
    unknown = np.count_nonzero(targets.is_unknown(entries), axis=0)
    targets.check_known(path, len(entries) - unknown, counted(len(entries), "training image"))
    notes = list[str]()
    if unknown.any():
        texts = [
            f"{targets.names[column]} {unknown[column]:,}" for column in np.flatnonzero(unknown)
        ]
        notes.append(
            f"{unknown.sum():,} of {entries.size:,} entries are unknown ({listed(texts)}): they are"
            " in no loss and no figure"
        )
    if targets.kind == "values":
        notes += target_notes(targets.names, entries, "write NaN in its place")
    elif targets.kind == "classes":
        for value in (1, 0):
            never = np.flatnonzero(~(entries == value).any(axis=0)).tolist()
            if never:
                names = listed(targets.names[label] for label in never)
                notes.append(
                    f"{len(never):,} of {len(targets.names):,} classes are {value} in no image:"
                    f" {names}"
                )
    return notes


def describe_columns(parts: Sequence[TargetColumns]) -> str:
    """Return the format of datasets of targets, in which files of a set must agree."""
    texts = []
    for part in parts:
        columns = math.prod(part.stored.shape[1:])
        text = f"{columns} of {np.dtype(part.stored.dtype).name}"
        if part.fills:
            text += f" without {listed(part.fills)}"
        texts.append(text)
    return " and ".join(texts)


def stored_format(part: TargetColumns) -> tuple[str, str, tuple[int, ...], tuple[float, ...]]:
    """Return what files of a set have in common in a dataset of targets."""
    return part.stored.dataset, part.stored.dtype, part.stored.shape[1:], part.fills


def columns_of_set(
    pattern: str, formats: Sequence[Sequence[object]], samples: int
) -> list[TargetColumns]:
    """Return the datasets of targets of a set of files, given their `stored_format`."""
    return [
        TargetColumns(
            path=pattern,
            stored=Stored(str(name), str(dtype), (samples, *shape)),  # type: ignore[misc]
            fills=tuple(fills),  # type: ignore[arg-type]
        )
        for name, dtype, shape, fills in formats
    ]
