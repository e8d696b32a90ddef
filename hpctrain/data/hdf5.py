"""HDF5 files: open them, find out where a dataset is stored, and read what has no offset.

What HDF5 would read as zeros is refused: bytes beyond the end of the file, chunks that were never
written, and virtual or external data whose sources are missing, short or not mapped.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import h5py
import numpy as np

from hpctrain.data.pack import Stored
from hpctrain.data.split import File
from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.text import listed

with suppress(ImportError):
    import hdf5plugin  # noqa: F401  # registers its filters: Blosc, Zstandard, Bitshuffle, ...

CACHE_BYTES, SLOTS = 64 << 20, 10007  # of HDF5's chunk cache; it holds all chunks of some rows


class Unusable(Exception):
    """The file was opened but its content cannot be used; the text gives the reason."""


@contextmanager
def open_hdf5(path: str) -> Iterator[h5py.File]:
    """Open the file for reading in a ``with`` block.

    Any error in the block is raised as one UsageError that names the file.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except UsageError:
        raise
    except Unusable as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # of many types, for corrupt metadata
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else first_line(error)
        raise UsageError(f"{path} is not a readable HDF5 file: {reason}") from None


def find_dataset(file: h5py.Group, name: str) -> h5py.Dataset:
    """Return the dataset of this path, which may be a link to another file. Raises Unusable."""
    found, parts = file.get(name), name.strip("/").split("/")
    for way in ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]:
        if way in file and file.get(way) is None:
            raise Unusable(f"{way} leads nowhere: {file.get(way, getlink=True)!r}")
    if found is None:
        raise Unusable(f"there is no dataset {name!r}; it holds {listed(file)}")
    if not isinstance(found, h5py.Dataset):
        raise Unusable(f"{name} is not a dataset")
    return found


def locate(data: h5py.Dataset, sizes: dict[str, int]) -> Stored:
    """Return where a dataset is stored; all of it must be there. Raises Unusable.

    The sizes of all files that hold it are added to `sizes`.
    """
    path, name = os.path.abspath(os.fsdecode(data.file.filename)), data.name
    sizes[path] = os.path.getsize(path)
    properties, found = data.id.get_create_plist(), Stored(name, str(data.dtype), data.shape)
    kind = properties.get_layout()
    if kind == h5py.h5d.VIRTUAL:
        return found._replace(chunk_rows=_check_sources(data, path, sizes))
    if properties.get_external_count():
        _check_external(data, path, sizes)
        return found
    if kind == h5py.h5d.CHUNKED:
        filters = [properties.get_filter(n)[0] for n in range(properties.get_nfilters())]
        if missing := [code for code in filters if not h5py.h5z.filter_avail(code)]:
            raise Unusable(
                f"{name} needs HDF5's filter {missing[0]}, which is not installed: pip install"
                " hdf5plugin may provide it"
            )
        grid = zip(data.shape, data.chunks, strict=True)
        chunks, written = math.prod(-(-n // c) for n, c in grid), data.id.get_num_chunks()
        if written != chunks:
            raise Unusable(f"{name} is incomplete: {written:,} of {chunks:,} chunks")
        return found._replace(chunk_rows=int(data.chunks[0]))
    if kind == h5py.h5d.COMPACT:
        return found
    if (offset := data.id.get_offset()) is None:
        raise Unusable(f"{name} was never written: the file does not hold its values")
    return found._replace(offset=offset)


def _check_external(data: h5py.Dataset, path: str, sizes: dict[str, int]) -> None:
    """Raise Unusable unless the raw files of a dataset hold all its bytes."""
    properties, missing = data.id.get_create_plist(), data.size * data.id.get_type().get_size()
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", os.path.dirname(path))
    for number in range(properties.get_external_count()):
        name, offset, size = properties.get_external(number)
        raw = os.path.abspath(os.path.join(prefix, os.fsdecode(name)))
        sizes[raw] = os.path.getsize(raw) if os.path.isfile(raw) else 0
        size = min(size, missing)  # the last one may be unlimited
        if offset + size > sizes[raw]:
            raise Unusable(
                f"{data.name} is stored in {raw}, which is missing or has fewer than"
                f" {offset + size:,} bytes"
            )
        missing -= size


def _check_sources(data: h5py.Dataset, path: str, sizes: dict[str, int]) -> int:
    """Check the sources of a virtual dataset; return the most rows of a chunk of one.

    Raises Unusable for a source that is missing or too short, and for values that no source holds.
    """
    if prefix := os.environ.get("HDF5_VDS_PREFIX"):  # HDF5 then looks at several places
        raise Unusable(f"sources may be elsewhere by HDF5_VDS_PREFIX={prefix}: unset it")
    properties, rows = data.id.get_create_plist(), 0
    mapped = h5py.h5s.create_simple(data.shape)
    mapped.select_none()
    for number in range(properties.get_virtual_count()):
        name = os.fsdecode(properties.get_virtual_filename(number))
        places = (os.path.join(os.path.dirname(path), name), name)  # where HDF5 looks
        found = path if name == "." else next(filter(os.path.isfile, places), None)
        where = f"{data.name} is made of other datasets, and {name}"
        if found is None:
            raise Unusable(f"{where} is missing")
        space, chosen = (
            properties.get_virtual_vspace(number),
            properties.get_virtual_srcspace(number),
        )
        with open_hdf5(os.path.abspath(found)) as file:
            source = find_dataset(file, os.fsdecode(properties.get_virtual_dsetname(number)))
            if chosen.shape:
                last = chosen.get_select_bounds()[1]
                is_within = len(last) == source.ndim and (np.array(last) < source.shape).all()
            else:  # all of the source
                is_within = source.size == space.get_select_npoints()
            if not is_within:
                raise Unusable(f"{where} has too few values: {source.name} is {source.shape}")
            rows = max(rows, locate(source, sizes).chunk_rows)
        if space.get_select_type() == h5py.h5s.SEL_ALL:
            mapped.select_all()
        elif space.is_regular_hyperslab():
            start, stride, count, block = space.get_regular_hyperslab()
            mapped.select_hyperslab(start, count, stride, block, h5py.h5s.SELECT_OR)
        else:
            raise Unusable(f"{where} has a selection that is not a regular hyperslab")
    if (held := mapped.get_select_npoints()) != data.size:
        raise Unusable(f"{data.name} has {data.size:,} values, and its sources hold {held:,}")
    return rows


class Rows:
    """The rows of a dataset that is not stored in one piece, read by h5py. Thread-safe.

    HDF5 caches the chunks that were read last, because the next call often continues within one.
    It returns zeros for bytes missing at the end of a file, and remembers where chunks were, so the
    file must not change while it is read. (Sources of a virtual dataset and raw files are compared
    when it is opened, and not again.)
    """

    def __init__(self, path: str, stored: Stored, sizes: dict[str, int]) -> None:
        """Open the file. Raises UsageError if it or a source is not the one that was checked."""
        for each, size in sizes.items():
            File(each, size).close()
        self._path, self._lock = path, threading.Lock()
        cached = max(CACHE_BYTES, 2 * stored.chunk_rows * stored.row_bytes)
        self._file = h5py.File(path, "r", locking=False, rdcc_nbytes=cached, rdcc_nslots=SLOTS)
        self._data, self._state = self._file[stored.dataset], self._read_state()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read `rows` (n,), in that order, into `out` (n, ...), as stored. Raises RunError."""
        order = np.argsort(rows, kind="stable")  # file order
        cuts = np.flatnonzero(np.diff(rows[order]) != 1) + 1
        with self._lock:
            for places in np.split(order, cuts) if len(rows) else ():
                first = int(rows[places[0]])
                out[places] = self._read_run(first, first + len(places))
            self._check_unchanged()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _read_run(self, start: int, stop: int) -> np.ndarray:
        try:
            return np.asarray(self._data[start:stop])
        except Exception as error:  # of many types, from HDF5 and h5py
            self._check_unchanged()
            for row in range(start, stop) if stop - start > 1 else ():
                self._read_run(row, row + 1)  # raises the error of the first that has one
            raise RunError(
                f"{self._path}: row {start:,} of {self._data.name} cannot be read:"
                f" {first_line(error)}"
            ) from None

    def _read_state(self) -> tuple[int, int]:
        state = os.fstat(self._file.id.get_vfd_handle())
        return state.st_size, state.st_mtime_ns

    def _check_unchanged(self) -> None:
        if self._read_state() != self._state:
            raise RunError(f"{self._path} was changed or cut short while in use")
