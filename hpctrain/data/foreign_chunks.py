"""Rows of a data set in chunks, read in whole chunks (``foreign_filters.py``).

A slab is all chunks that hold the same rows. Every slab that a call needs is read once, neighbours
together; the last slabs are kept, so that the next call may go on in the middle of one. HDF5 fills
what it misses at the end of a file with zeros, so the file's length is looked at after every read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from hpctrain.data.foreign_check import check_same, length, open_file, told
from hpctrain.data.foreign_filters import DamagedChunk, read_chunks
from hpctrain.data.hdf5_words import cause
from hpctrain.data.pack_format import Foreign
from hpctrain.data.partition import RUN_BYTES
from hpctrain.errors import RunError

CACHE_BYTES = 64 << 20  # of slabs kept, besides the last


class Chunks:
    """Rows that are stored in chunks."""

    def __init__(self, foreign: Foreign) -> None:
        self.foreign = foreign
        with told(foreign.path):
            self._file = open_file(foreign.path)
            try:
                self._data = check_same(self._file, foreign)
            except BaseException:
                self._file.close()
                raise
        slab_bytes = foreign.chunk_rows * foreign.row_bytes
        self._together = max(1, RUN_BYTES // slab_bytes)  # slabs that are read by one call
        self._most = max(1, CACHE_BYTES // slab_bytes)
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # by number, newest last
        self._lock = threading.Lock()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """The rows (n,), in that order, into `out` (n, H, W, C). Raises RunError."""
        order = np.argsort(rows, kind="stable")  # of the file
        slabs = rows[order] // self.foreign.chunk_rows
        starts = np.flatnonzero(np.diff(slabs, prepend=-1))  # where another slab begins
        with self._lock:
            for group in self._groups(slabs[starts]):
                first, last = (int(number) for number in slabs[starts[group[[0, -1]]]])
                images = self._slabs(first, last)  # (m, H, W, C)
                stop = starts[group[-1] + 1] if group[-1] + 1 < len(starts) else len(rows)
                places = order[starts[group[0]] : stop]
                out[places] = images[rows[places] - first * self.foreign.chunk_rows]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._kept.clear()
            self._file.close()

    def _groups(self, slabs: np.ndarray) -> list[np.ndarray]:
        """Places of slabs (k,), ascending, that are read together: neighbours, at most so many;
        one that is kept stands alone.
        """
        groups: list[list[int]] = []
        for place, slab in enumerate(slabs.tolist()):
            previous = int(slabs[place - 1]) if place else -2
            apart = slab != previous + 1 or slab in self._kept or previous in self._kept
            if apart or len(groups[-1]) >= self._together:
                groups.append([])
            groups[-1].append(place)
        return [np.array(group) for group in groups]

    def _slabs(self, first: int, last: int) -> np.ndarray:
        """The rows of these slabs, (m, H, W, C); the last is kept."""
        if first == last and first in self._kept:
            self._kept.move_to_end(first)
            return self._kept[first]
        images = self._load(first, last)
        step = self.foreign.chunk_rows
        alone = images if first == last else images[(last - first) * step :].copy()
        self._kept[last] = alone
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return images

    def _load(self, first: int, last: int) -> np.ndarray:
        found, step = self.foreign, self.foreign.chunk_rows
        start, stop = first * step, min(found.rows, (last + 1) * step)
        try:
            images = read_chunks(self._data, start, stop, found.file_size)
        except Exception as error:  # HDF5 and h5py raise many kinds
            self._check_length()
            known = isinstance(error, DamagedChunk)
            why = f"is damaged: {error}" if known else cause(error, "copy it again")
            raise RunError(
                f"{found.path}: images {start:,} to {stop - 1:,} of {found.images} cannot be read,"
                f" the file {why}"
            ) from None
        self._check_length()
        if found.layout == "NCHW":
            return images.transpose(0, 2, 3, 1)
        return images.reshape(len(images), *found.image_shape)

    def _check_length(self) -> None:
        there = length(self._file)
        if there < self.foreign.file_size:
            raise RunError(
                f"{self.foreign.path} has {there:,} bytes, {self.foreign.file_size - there:,} fewer"
                " than when it was opened: it was cut short while in use"
            )
