"""HDF5 files: open them, find out where a dataset is stored, read what has no offset.

What HDF5 would read as zeros is refused: bytes beyond the end of the file, chunks that were never
written, and virtual or external data whose sources are missing, short or not mapped.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate

import h5py
import numpy as np

from hpctrain.data.stored import File, Stored
from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.text import listed

with suppress(ImportError):
    import hdf5plugin  # noqa: F401  # registers its filters: Blosc, Zstandard, Bitshuffle, ...

CACHE_BYTES = 64 << 20  # size of HDF5's chunk cache, which holds all chunks of some rows
SLOTS = 10007  # hash slots of this cache


class Unusable(Exception):
    """The file was opened but its content cannot be used; the text gives the reason."""


@contextmanager
def open_hdf5(path: str) -> Iterator[h5py.File]:
    """Open the file for reading; any error in the block is a UsageError that names the file."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except UsageError:
        raise
    except Unusable as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # corrupt metadata raise many types
        reason = first_line(error)
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)
        elif isinstance(error, OSError):
            reason = name_other_format(path) or reason
        raise UsageError(f"{path} is not a readable HDF5 file: {reason}") from None


def name_other_format(path: str) -> str:
    """Return which format a file has that is no HDF5, and what to do with it; "" if unknown."""
    from hpctrain.data.formats import name_format  # imports Pillow
    from hpctrain.data.listing import is_hdf5, read_start

    if is_hdf5(path):  # a damaged one
        return ""
    other = name_format(read_start(path))
    return other and f"it is {other}"


def link_target(file: h5py.Group, name: str) -> str:
    """Return where a link leads, which may be another file."""
    link = file.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        return f"{link.path} in {os.fsdecode(link.filename)}"
    return str(link.path)


def find_dataset(file: h5py.Group, name: str) -> h5py.Dataset:
    """Return the dataset of this path, which may be a link to another file. Raises Unusable."""
    data = file.get(name)
    if isinstance(data, h5py.Dataset):
        return data
    for way in accumulate(name.strip("/").split("/"), "{}/{}".format):
        if way in file and file.get(way) is None:
            raise Unusable(f"{way} leads nowhere: it is a link to {link_target(file, way)}")
    if data is None:
        hint = ""
        if "," in name:
            hint = "; hp.write_pack makes channels of several datasets"
        raise Unusable(f"there is no dataset {name!r}; it holds {listed(file)}{hint}")
    raise Unusable(f"{name} is not a dataset")


def locate_dataset(data: h5py.Dataset, sizes: dict[str, int]) -> Stored:
    """Return where a dataset is stored; all of it must be there. Raises Unusable.

    The sizes of all files that hold it are added to `sizes`.
    """
    path = os.path.abspath(os.fsdecode(data.file.filename))
    sizes[path] = os.path.getsize(path)
    stored = Stored(dataset=data.name, dtype=str(data.dtype), shape=data.shape)
    if data.is_virtual:
        return stored._replace(chunk_rows=_check_sources(data, path, sizes))
    if data.external:
        _check_external(data, path, sizes)
        return stored
    if data.chunks:
        _check_chunks(data)
        return stored._replace(chunk_rows=int(data.chunks[0]))
    offset = data.id.get_offset()
    if offset is None and not data.id.get_storage_size():
        raise Unusable(f"{data.name} was never written: the file does not hold its values")
    return stored._replace(offset=offset or 0)  # 0: compact, inside the metadata


def locate_in_one_piece(
    group: h5py.Group,
    name: str,
    dtype: str,
    shape: tuple[int, ...] | None = None,
) -> Stored:
    """Return where a dataset of a pack is stored; by default, it has one axis of any length.

    Raises Unusable unless it has this type and shape, and an offset in the file.
    """
    stored = locate_dataset(find_dataset(group, name), {})
    if shape is None:
        shape = stored.shape[:1]
    if np.dtype(stored.dtype) != np.dtype(dtype) or stored.shape != shape:
        raise Unusable(f"{stored.dataset} is {stored.dtype} {stored.shape}, not {dtype} {shape}")
    if not stored.offset:
        raise Unusable(f"{stored.dataset} is not stored in one piece, as in a pack")
    return stored


def _check_chunks(data: h5py.Dataset) -> None:
    """Raise Unusable unless all chunks of a dataset were written, and can be read."""
    properties = data.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code = properties.get_filter(number)[0]
        if not h5py.h5z.filter_avail(code):
            raise Unusable(
                f"{data.name} needs HDF5's filter {code}, which is not installed: pip install"
                " hdf5plugin may provide it"
            )
    chunks = math.prod(-(-n // c) for n, c in zip(data.shape, data.chunks, strict=True))
    written = data.id.get_num_chunks()
    if written != chunks:
        raise Unusable(f"{data.name} is incomplete: {written:,} of {chunks:,} chunks")


def _check_external(data: h5py.Dataset, path: str, sizes: dict[str, int]) -> None:
    """Raise Unusable unless the raw files of a dataset hold all its bytes."""
    missing = data.size * data.id.get_type().get_size()
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", os.path.dirname(path))
    for name, offset, size in data.external:
        raw = os.path.abspath(os.path.join(prefix, name))
        sizes[raw] = 0
        if os.path.isfile(raw):
            sizes[raw] = os.path.getsize(raw)
        size = min(size, missing)  # the last one may be unlimited
        if offset + size > sizes[raw]:
            raise Unusable(
                f"{data.name} is stored in {raw}, which is missing or has not"
                f" {offset + size:,} bytes"
            )
        missing -= size


def _check_sources(data: h5py.Dataset, path: str, sizes: dict[str, int]) -> int:
    """Check the sources of a virtual dataset; return the most rows of a chunk of one.

    Raises Unusable for a source that is missing or too short, and for values that none holds.
    """
    prefix = os.environ.get("HDF5_VDS_PREFIX")
    if prefix:  # HDF5 then looks at several places
        raise Unusable(f"sources may be elsewhere by HDF5_VDS_PREFIX={prefix}: unset it")
    rows = 0
    mapped = h5py.h5s.create_simple(data.shape)
    mapped.select_none()
    for space, name, dataset, selection in data.virtual_sources():
        where = f"{data.name} is made of other datasets, and {name}"
        holder = _find_source(name, path)
        if holder is None:
            raise Unusable(f"{where} is missing")
        with open_hdf5(holder) as file:
            source = find_dataset(file, dataset)
            if not _holds(source, selection, space.get_select_npoints()):
                raise Unusable(f"{where} has too few values: {source.name} is {source.shape}")
            rows = max(rows, locate_dataset(source, sizes).chunk_rows)
        if space.get_select_type() == h5py.h5s.SEL_ALL:
            mapped.select_all()
        elif space.is_regular_hyperslab():
            start, stride, count, block = space.get_regular_hyperslab()
            mapped.select_hyperslab(start, count, stride, block, h5py.h5s.SELECT_OR)
        else:
            raise Unusable(f"{where} has a selection that is not a regular hyperslab")
    covered = mapped.get_select_npoints()
    if covered != data.size:
        raise Unusable(f"{data.name} has {data.size:,} values, and its sources hold {covered:,}")
    return rows


def _find_source(name: str, path: str) -> str | None:
    """Return the file `name` of a virtual dataset in the file at `path`, or None."""
    if name == ".":
        return path
    beside = os.path.join(os.path.dirname(path), name)
    for candidate in (beside, name):  # in the order of HDF5
        if os.path.isfile(candidate):
            return os.path.abspath(candidate)
    return None


def _holds(source: h5py.Dataset, selection: h5py.h5s.SpaceID, values: int) -> bool:
    """Whether a source of a virtual dataset has room for a selection of so many values."""
    if not selection.shape:  # all of the source
        return bool(source.size == values)
    last = selection.get_select_bounds()[1]
    return len(last) == source.ndim and bool((np.array(last) < source.shape).all())


class Hdf5Rows:
    """The rows of a dataset that is not stored in one piece, read by h5py: a `RowReader`.

    The file must not change while it is read: HDF5 returns zeros for bytes that are missing.
    (Sources of virtual datasets and raw files are compared when it is opened, and not again.)
    """

    def __init__(
        self, path: str, stored: Stored, sizes: dict[str, int], cached: int | None = None
    ) -> None:
        """Open the file, with a chunk cache of `cached` bytes; by default, it suits one file.

        `stored` may have an axis N, of one row, that the dataset lacks. Raises UsageError if the
        file or a source is not the one that was checked.
        """
        for name, size in sizes.items():
            File(name, size).close()
        self._path = path
        self._lock = threading.Lock()
        # HDF5 caches what was read last, of each source of a virtual dataset: calls continue there.
        if cached is None:
            cached = max(CACHE_BYTES, 2 * stored.chunk_rows * stored.row_bytes) // len(sizes)
        self._file = h5py.File(
            path,
            "r",
            locking=False,
            rdcc_nbytes=cached,
            rdcc_nslots=SLOTS,
        )
        self._data = self._file[stored.dataset]
        self._is_sample = self._data.ndim < len(stored.shape)
        self._state = self._read_state()

    def read(self, rows: np.ndarray, out: np.ndarray, places: np.ndarray | None = None) -> None:
        """Implement `RowReader`: in file order, a run of consecutive rows at once."""
        if len(rows) == 0:
            return
        order = np.argsort(rows, kind="stable")
        cuts = np.flatnonzero(np.diff(rows[order]) != 1) + 1
        with self._lock:
            for run in np.split(order, cuts):
                first = int(rows[run[0]])
                in_result = run if places is None else places[run]
                out[in_result] = self._read_run(first, first + len(run))
            self._check_unchanged()

    def read_ahead(self, rows: np.ndarray) -> None:
        """Do nothing: where the bytes of a row are is known to HDF5 alone."""

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _read_run(self, start: int, stop: int) -> np.ndarray:
        try:
            if self._is_sample:
                return np.asarray(self._data)[np.newaxis]
            return np.asarray(self._data[start:stop])
        except Exception as error:  # HDF5 and h5py raise many types
            self._check_unchanged()
            if stop - start > 1:
                for row in range(start, stop):
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
