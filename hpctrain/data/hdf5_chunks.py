"""Read the images of a chunked dataset of an external HDF5 file with h5py, slab by slab."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from itertools import pairwise

import h5py
import numpy as np

from hpctrain.data.hdf5 import explain
from hpctrain.data.pack_format import ExternalFile
from hpctrain.errors import RunError

CACHE_BYTES = 64 << 20  # of cached slabs; the last one is kept whatever its size


class Chunks:
    """The images of an external file, stored in chunks.

    A slab consists of all chunks that hold the same images. Every slab that a call needs is read
    once, and the most recent slabs are cached, because the next call often continues within one.
    HDF5 returns zeros for bytes missing at the end of a file, and remembers where chunks were, so
    the file must keep its size and modification time while it is read.
    """

    def __init__(self, source: ExternalFile, file: h5py.File, data: h5py.Dataset) -> None:
        """Read from `data` in the open `file`; both have been checked."""
        self.source, self._file, self._data = source, file, data
        self._modified = self._stat().st_mtime_ns
        self._count = max(1, CACHE_BYTES // (source.chunk_rows * source.image_bytes))
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # by number, newest last
        self._lock = threading.Lock()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read the images `rows` (n,), in that order, into `out` (n, H, W, C). Raises RunError."""
        step = self.source.chunk_rows
        order = np.argsort(rows, kind="stable")  # file order
        slabs = rows[order] // step
        cuts = [0, *(np.flatnonzero(np.diff(slabs)) + 1).tolist(), len(rows)]
        with self._lock:
            for first, stop in pairwise(cuts if len(rows) else ()):
                places, slab = order[first:stop], int(slabs[first])
                images = self._read_slab(slab)  # (m, H, W, C)
                out[places] = self.source.scaled(images[rows[places] - slab * step])
            self._check_unchanged()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._kept.clear()
            self._file.close()

    def _read_slab(self, slab: int) -> np.ndarray:
        """Return the images of a slab, (m, H, W, C), from the cache or the file."""
        if slab in self._kept:
            self._kept.move_to_end(slab)
            return self._kept[slab]
        source, step = self.source, self.source.chunk_rows
        start, stop = slab * step, min(source.rows, (slab + 1) * step)
        try:
            images = self._data[start:stop]
        except Exception as error:  # of many types, from HDF5 and h5py
            self._check_unchanged()
            raise RunError(
                f"{source.path}: images {start:,} to {stop - 1:,} of {source.images} cannot be"
                f" read, the file {explain(error)}"
            ) from None
        self._kept[slab] = source.to_images(images)
        if len(self._kept) > self._count:
            self._kept.popitem(last=False)
        return self._kept[slab]

    def _check_unchanged(self) -> None:
        found, source = self._stat(), self.source
        if found.st_size < source.file_size:
            raise RunError(
                f"{source.path} has {found.st_size:,} bytes, {source.file_size - found.st_size:,}"
                " fewer than when it was opened: it was cut short while in use"
            )
        if found.st_mtime_ns != self._modified:
            raise RunError(f"{source.path} was changed while in use")

    def _stat(self) -> os.stat_result:
        return os.fstat(self._file.id.get_vfd_handle())
