"""Columns with one number per sample: labels and JPEG file offsets.

A rank of a training reads the numbers of the samples that its shards may use once, and keeps them;
all others are read on demand.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.data.checks import Checks, ReadInto, as_bytes
from hpctrain.data.pack_format import Pack
from hpctrain.errors import RunError, UsageError

PIECE_ROWS = 1 << 20  # rows read at a time from a whole column


def pieces(rows: int) -> Iterator[np.ndarray]:
    """Yield 0 ... rows-1 in consecutive pieces, (n,) int64."""
    for start in range(0, rows, PIECE_ROWS):
        yield np.arange(start, min(rows, start + PIECE_ROWS))


class Column:
    """A column of a split of a pack, (n,) int64. Reading is thread-safe."""

    kind, more = "", 0  # its name, and how many more values than samples it has

    def __init__(self, pack: Pack, split: str, checks: Checks, read: ReadInto) -> None:
        """`read` reads bytes of the pack; `checks` verify each block when it is first read."""
        self._pack, self._split, self._read = pack, split, read
        self._column = pack.columns(split)[self.kind]
        self._checksums = checks.checksums(split, self.kind, self._column)
        self._held = 0, np.empty(0, np.int64)  # the first row in memory, and all rows there

    def __len__(self) -> int:
        return self._column.rows

    def hold(self, rows: range) -> None:
        """Keep the values of `rows` in memory; drop others."""
        if (self._held[0], len(self._held[1])) == (rows.start, len(rows)):
            return
        self._held = 0, np.empty(0, np.int64)
        held = np.empty(len(rows), np.int64)
        for part in pieces(len(rows)):
            held[part] = self.take(rows.start + part)
        self._held = rows.start, held

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the values of `rows` (n,), (n,) int64.

        Raises RunError if they cannot be read or are corrupt.
        """
        first, held = self._held
        places = rows - first
        if len(held) and places.min(initial=0) >= 0 and places.max(initial=0) < len(held):
            return held[places]
        if not (np.diff(rows) > 0).all():
            ascending, places = np.unique(rows, return_inverse=True)
            return self._read_rows(ascending)[places]
        return self._read_rows(rows)

    def _read_rows(self, rows: np.ndarray) -> np.ndarray:
        """Read `rows` (n,), which ascend; consecutive ones are read together."""
        values, size = np.empty(len(rows), np.int64), self._column.row_bytes
        if not len(rows):
            return values
        if not 0 <= rows[0] <= rows[-1] < len(self):
            raise IndexError(f"rows {rows[0]} to {rows[-1]} requested of {len(self)} {self.kind}")
        start, stop = int(rows[0]) * size, (int(rows[-1]) + 1) * size
        self._pack.check_held(self._split, self.kind, start, stop)
        into, cuts = as_bytes(values), (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
        self._verify(rows * size)
        for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            start = self._column.offset + int(rows[first]) * size
            self._read([into[first * size : last * size]], start)
        return values

    def _verify(self, starts: np.ndarray) -> None:
        """Verify the blocks of the values at bytes `starts` (n,). Raises RunError if corrupt."""
        if self._checksums is None:
            return
        found = self._checksums.find_corrupt(starts, starts + self._column.row_bytes, self._read)
        if (corrupt := found[found >= 0]).size:
            what = self._checksums.describe(int(corrupt.min()))
            raise RunError(f"{self._pack.path}: {what}; copy or pack it again")


class LabelColumn(Column):
    """The labels of a split."""

    kind = "labels"

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the labels of `rows` (n,), (n,) int64. Raises UsageError if one is no class."""
        labels, classes = super().take(rows), len(self._pack.classes)
        low, high = labels.min(initial=0), labels.max(initial=0)
        if not 0 <= low <= high < classes:
            raise UsageError(
                f"{self._pack.path}: labels of split {self._split!r} go from {low} to {high}, but"
                f" there are {classes} classes, 0 to {classes - 1}: the file is corrupt, pack it"
                " again"
            )
        return labels


class OffsetColumn(Column):
    """The byte offsets of the JPEG files of a split, and the end of the last one."""

    kind, more = "offsets", 1

    def spans(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and the end of the file of each of `samples` (n,), n > 0.

        Raises UsageError if the offsets do not divide the split's bytes into files.
        """
        rows, places = np.unique(np.concatenate([samples, samples + 1]), return_inverse=True)
        offsets, layout = self.take(rows), self._pack.splits[self._split]
        ends = {0: 0, layout.samples: layout.files_bytes}  # the first offset and the last one
        outer = [(rows[0], offsets[0]), (rows[-1], offsets[-1])]
        if (
            (offsets[1:] <= offsets[:-1]).any()
            or not 0 <= offsets[0] < offsets[-1] <= layout.files_bytes
            or any(ends.get(int(row), offset) != offset for row, offset in outer)
        ):
            raise UsageError(
                f"{self._pack.path}: offsets of split {self._split!r} do not divide its"
                f" {layout.files_bytes:,} bytes into {layout.samples:,} files: the file is corrupt,"
                " pack it again"
            )
        starts, stops = offsets[places].reshape(2, -1)
        return starts, stops
