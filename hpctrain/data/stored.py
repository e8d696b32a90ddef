"""Arrays in files: where they are stored, and how their rows are read.

Of an array in one piece, rows are read by preadv(2) at their byte offsets (`OffsetRows`), without
HDF5: this holds neither the library's lock nor the interpreter's, takes 1 to 2 microseconds per row
instead of 30, and reports a truncated file as an error instead of a signal, unlike a memory map.
Others are read by HDF5 (``hdf5.py``). Both kinds of readers are a `RowReader`.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain.errors import RunError, UsageError

READ_AHEAD = 128 << 10  # bytes of one request; Linux may read only so much of a longer one


class Stored(NamedTuple):
    """An array (N, ...) in an HDF5 file."""

    dataset: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0  # position of its first byte; 0: chunked, compact, virtual or external storage
    chunk_rows: int = 0  # rows of a chunk; 0 = there are none

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    def byte_range(self, start: int, stop: int) -> range:
        """Return where rows `start` to `stop` lie in the file; there must be an offset."""
        return range(self.offset + start * self.row_bytes, self.offset + stop * self.row_bytes)


class RowReader(Protocol):
    """Reads the rows of a stored array (N, ...). Thread-safe."""

    def read(self, rows: np.ndarray, out: np.ndarray, places: np.ndarray | None = None) -> None:
        """Read `rows` (n,), in that order, into the C-contiguous `out` (n, ...), as stored.

        With `places` (n,), they are read to these of `out` (m, ...). Raises RunError.
        """

    def read_ahead(self, rows: np.ndarray) -> None:
        """Ask the kernel for rows (n,) that are read soon, without waiting for them."""

    def close(self) -> None:
        """Close the file."""


def as_bytes(array: np.ndarray) -> memoryview:
    """Return a writable view of the memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


class File:
    """A file that is read at offsets. Reading is thread-safe."""

    def __init__(self, path: str, size: int) -> None:
        """Open the file. Raises UsageError if it cannot be opened or is not `size` bytes long."""
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{path} cannot be opened: {error.strerror}") from None
        status = os.fstat(self._descriptor)
        size_here = status.st_size
        self.modified = status.st_mtime_ns
        if size_here != size:
            self.close()
            raise UsageError(
                f"{path} has {size_here:,} bytes here, but {size:,} when it was checked: give every"
                " rank the same finished file"
            )

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on. Raises RunError."""
        while True:
            try:
                count = os.preadv(self._descriptor, (buffer,), offset)
            except OSError as error:
                raise RunError(
                    f"{self.path}: reading at byte {offset:,} failed: {error.strerror}"
                ) from None
            if count == len(buffer):
                return
            if count == 0:
                raise RunError(f"{self.path} was cut short while in use: no byte {offset:,}")
            buffer = buffer[count:]
            offset += count

    def read_ahead(self, offset: int, size: int) -> None:
        """Ask the kernel for bytes that are read soon, without waiting for them."""
        with suppress(OSError):  # some file systems cannot do it
            for start in range(offset, offset + size, READ_AHEAD):
                part = min(READ_AHEAD, offset + size - start)
                os.posix_fadvise(self._descriptor, start, part, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class OffsetRows:
    """The rows of an array that is stored in one piece, from its offset on: a `RowReader`."""

    def __init__(self, file: File, stored: Stored) -> None:
        """Read `stored` in an opened file, which `close` closes."""
        self._file = file
        self._offset = stored.offset
        self._row_bytes = stored.row_bytes

    def read(self, rows: np.ndarray, out: np.ndarray, places: np.ndarray | None = None) -> None:
        """Implement `RowReader`: in file order, a run of consecutive rows by one preadv."""
        buffer = as_bytes(out)
        starts, offsets, sizes = self._runs(rows, places)
        for start, offset, size in zip(starts, offsets, sizes, strict=True):
            self._file.read(buffer[start : start + size], offset)

    def read_ahead(self, rows: np.ndarray) -> None:
        _, offsets, sizes = self._runs(rows)
        for offset, size in zip(offsets, sizes, strict=True):
            self._file.read_ahead(offset, size)

    def close(self) -> None:
        self._file.close()

    def _runs(
        self, rows: np.ndarray, places: np.ndarray | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Divide `rows` (n,) into runs that are consecutive in the file and in the request.

        Returns where each run begins in the bytes of the result, where in the file, and its bytes.
        """
        if len(rows) == 0:
            return [], [], []
        order = np.argsort(rows, kind="stable")
        in_file = rows[order]
        in_result = order if places is None else places[order]
        cuts = np.flatnonzero((np.diff(in_file) != 1) | (np.diff(in_result) != 1)) + 1
        bounds = np.concatenate([[0], cuts, [len(rows)]])
        first = bounds[:-1]
        starts = in_result[first] * self._row_bytes
        offsets = self._offset + in_file[first] * self._row_bytes
        sizes = np.diff(bounds) * self._row_bytes
        return starts.tolist(), offsets.tolist(), sizes.tolist()
