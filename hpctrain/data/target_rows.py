"""Targets of external HDF5 files that are read on demand: rows of datasets, side by side.

Targets of at most HELD_BYTES a sample are sent to all ranks and held. Of longer ones, rank 0 sends
where they are stored, and a rank reads those of its batches as it reads images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hpctrain.data.file_set import FileSet, FileSetRows
from hpctrain.data.stored import File, OffsetRows, RowReader, Stored
from hpctrain.data.targets import UNKNOWN, TargetKind, Targets

MARKS = (-1, UNKNOWN)  # stored values by which classes are unknown, beside NaN and fill values
INVALID = 254  # what becomes of an entry of classes that is neither 0, 1 nor unknown


class TargetColumns(NamedTuple):
    """A dataset of targets, of one column or several."""

    path: str  # of the file that holds it; of a set, its pattern
    stored: Stored  # (N,) or (N, k)
    fills: tuple[float, ...]  # stored values, beside NaN, that mark unknown entries
    files: FileSet | None = None  # those with its rows, in a set


class ExternalTargets(NamedTuple):
    """Where the targets of external files are stored."""

    kind: TargetKind
    parts: tuple[TargetColumns, ...]
    probe: int = 0  # CRC-32 of those of `probe_rows`


class TargetRows:
    """Reads targets (n, K) of the rows of external files. Thread-safe."""

    def __init__(self, targets: ExternalTargets, sizes: Mapping[str, int]) -> None:
        """Open the files, whose bytes are `sizes`. Raises UsageError."""
        self._targets = targets
        self._readers: list[RowReader] = []
        try:
            for part in targets.parts:
                self._readers.append(open_columns(part, sizes, len(targets.parts)))
        except BaseException:
            self.close()
            raise

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the targets of rows (n,), as a pack stores them. Raises RunError."""
        columns = []
        for part, reader in zip(self._targets.parts, self._readers, strict=True):
            values = np.empty((len(rows), *part.stored.shape[1:]), part.stored.dtype)
            reader.read(rows, values)
            columns.append(convert_targets(self._targets.kind, values, part.fills))
        return np.concatenate(columns, axis=1)

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            reader.close()


def open_columns(part: TargetColumns, sizes: Mapping[str, int], readers: int) -> RowReader:
    """Return the reader of a dataset of targets, one of several `readers`. Raises UsageError."""
    if part.files is not None:
        return FileSetRows(part.files, part.stored, readers)
    if part.stored.offset:
        return OffsetRows(File(part.path, sizes[part.path]), part.stored)
    from hpctrain.data.hdf5 import Hdf5Rows  # imports h5py

    return Hdf5Rows(part.path, part.stored, dict(sizes))


def mark_unknown(kind: TargetKind, values: np.ndarray, fills: tuple[float, ...]) -> np.ndarray:
    """Return which stored values (n, ...) mark unknown entries."""
    is_unknown = np.zeros(values.shape, bool)
    if values.dtype.kind == "f":
        is_unknown |= np.isnan(values)
    marks = fills
    if kind == "classes":
        marks += MARKS
    for mark in marks:
        is_unknown |= values == mark
    return is_unknown


def convert_targets(kind: TargetKind, values: np.ndarray, fills: tuple[float, ...]) -> np.ndarray:
    """Return stored values (n, ...) as a pack stores targets: classes (n, K), or values (n, T)."""
    values = values.reshape(len(values), math.prod(values.shape[1:]))
    is_unknown = mark_unknown(kind, values, fills)
    dtype = Targets(kind, ()).dtype
    if kind == "values":
        with np.errstate(over="ignore"):  # infinite values are refused where they are checked
            converted = values.astype(dtype)
        converted[is_unknown] = np.nan
        return converted
    classes = np.full(values.shape, INVALID, dtype)
    classes[values == 0] = 0
    classes[values == 1] = 1
    classes[is_unknown] = UNKNOWN
    return classes
