"""HDF5 files: open them, find out where a dataset is stored, and read what has no offset.

What HDF5 would read as zeros is refused: bytes beyond the end of the file, chunks that were never
written, and virtual or external data whose sources are missing, short or not mapped.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice, pairwise
from typing import Any

import h5py
import numpy as np

from hpctrain.data.pack import Stored
from hpctrain.data.split import File
from hpctrain.errors import RunError, UsageError

with suppress(ImportError):
    import hdf5plugin  # noqa: F401  # registers its filters: Blosc, Zstandard, Bitshuffle, ...

NAMED = 8  # members of a group that an error message lists
SLAB_BYTES = 1 << 17  # of rows that are read at once where there are no chunks
CACHE_BYTES = 64 << 20  # of cached slabs; the last one is kept whatever its size
MOST_COMPARED = 16  # files that a call looks at


class Unusable(Exception):
    """The file was opened but its content cannot be used; the text gives the reason."""


@contextmanager
def open_hdf5(path: str) -> Iterator[h5py.File]:
    """Open the file for reading in a ``with`` block.

    Any error in the block is raised as one UsageError that names the file.
    """
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder: make a pack of it with 'hpctrain pack {path}'")
    try:
        with open_unchecked(path) as file:
            yield file
    except UsageError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(f"{path} cannot be opened: {os.strerror(error.errno or 0)}") from None
    except Unusable as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # of many types, for corrupt metadata
        raise UsageError(f"{path} {explain(error)}") from None


def open_unchecked(path: str) -> h5py.File:
    """Open the file read-only, without a lock (it never changes) and without a chunk cache."""
    return h5py.File(path, "r", locking=False, rdcc_nbytes=0)


def explain(error: Exception) -> str:
    """Translate an error of HDF5 into the state of the file, such as "is cut short: ..."."""
    if isinstance(error, MemoryError):
        return f"needs more memory than there is ({error}): make its chunks smaller by h5repack"
    text = str(error)
    if "file signature not found" in text:
        return "is not an HDF5 file: make a pack of image files with 'hpctrain pack'"
    sizes = re.search(r"truncated file: eof = (\d+).*stored_eof = (\d+)", text)
    if sizes:
        there, meant = (int(size) for size in sizes.groups())
        return f"is cut short: it has {there:,} of {meant:,} bytes; copy or make it again"
    if "already open for write" in text or "bad object header version" in text:
        return "is incomplete (or is still being written); copy or make it again"
    inner = re.search(r"\((.*)\)", text)
    reason = (inner.group(1) if inner else text).strip().split("\n")[0]
    return f"is corrupt: {reason or 'HDF5 cannot read it'}; copy or make it again"


def find_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the dataset of this path, which may be a link to another file. Raises Unusable."""
    node: Any = file
    for part in filter(None, name.split("/")):
        found = node.get(part) if isinstance(node, h5py.Group) else None
        if found is None and isinstance(node, h5py.Group) and part in [*node]:
            raise Unusable(f"{name}: {part} is a link, to {_target(node, part)}, which is missing")
        if found is None:
            raise Unusable(f"there is no dataset {name}{_members(node)}")
        node = found
    if not isinstance(node, h5py.Dataset):
        raise Unusable(f"{name or repr(name)} is not a dataset{_members(node)}")
    return node


def has_name(file: h5py.File, name: str) -> bool:
    """Whether the file has this path, or a link on the way there points at nothing."""
    parts = name.strip("/").split("/")
    ways = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return name in file or any(way in file and file.get(way) is None for way in ways)


def _target(group: h5py.Group, name: str) -> str:
    """Return what a link points at."""
    value = group.id.links.get_val(name.encode())
    parts = value[::-1] if isinstance(value, tuple) else (value,)  # of another file, or of this one
    return " of ".join(map(os.fsdecode, parts))


def _members(node: h5py.HLObject) -> str:
    if not isinstance(node, h5py.Group):
        return ""
    names = list(islice(node, NAMED + 1))
    more = ", ..." if len(names) > NAMED else ""
    return f"; {node.name} holds {', '.join(names[:NAMED]) or 'nothing'}{more}"


def locate(data: h5py.Dataset, sizes: dict[str, int]) -> Stored:
    """Return where a dataset is stored; all of it must be there. Raises Unusable.

    The sizes of all files that hold it are added to `sizes`.
    """
    path, name = os.path.abspath(os.fsdecode(data.file.filename)), data.name
    sizes[path] = os.path.getsize(path)
    properties = data.id.get_create_plist()
    kind, declared = properties.get_layout(), data.size * data.id.get_type().get_size()
    found = Stored(name, str(data.dtype), data.shape)
    if kind == h5py.h5d.VIRTUAL:
        return found._replace(chunk_rows=_check_sources(data, path, sizes))
    if properties.get_external_count():
        _check_external(data, path, declared, sizes)
        return found
    if kind == h5py.h5d.CHUNKED:
        _check_chunks(data)
        return found._replace(chunk_rows=int(data.chunks[0]))
    if kind == h5py.h5d.COMPACT:
        return found
    if (offset := data.id.get_offset()) is None:
        raise Unusable(f"{name} was never written: the file does not hold its {declared:,} bytes")
    return found._replace(offset=offset)


def _check_chunks(data: h5py.Dataset) -> None:
    """Raise Unusable unless all chunks were written, by filters that HDF5 has here."""
    properties, name = data.id.get_create_plist(), data.name
    for number in range(properties.get_nfilters()):
        code, _, _, text = properties.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            raise Unusable(
                f"{name} is compressed by filter {code} ({text.decode('ascii', 'replace')}), which"
                " HDF5 does not have here: pip install hdf5plugin may provide it"
            )
    expected = math.prod(-(-n // c) for n, c in zip(data.shape, data.chunks, strict=True))
    written = data.id.get_num_chunks()
    if written != expected:
        raise Unusable(f"{name} is incomplete: {written:,} of {expected:,} chunks")


def _check_external(data: h5py.Dataset, path: str, declared: int, sizes: dict[str, int]) -> None:
    """Raise Unusable unless the raw files of a dataset hold all its bytes."""
    properties, there = data.id.get_create_plist(), 0
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", os.path.dirname(path))
    for number in range(properties.get_external_count()):
        name, offset, size = properties.get_external(number)
        raw = os.path.abspath(os.path.join(prefix, os.fsdecode(name)))
        if not os.path.isfile(raw):
            raise Unusable(f"{data.name} is stored in {raw}, which is missing")
        sizes[raw] = os.path.getsize(raw)
        size = min(size, declared - there)  # the last one may be unlimited
        if offset + size > sizes[raw]:
            raise Unusable(
                f"{data.name} is stored in {raw}, which has {sizes[raw]:,} bytes, not"
                f" {offset + size:,}"
            )
        there += size


def _check_sources(data: h5py.Dataset, path: str, sizes: dict[str, int]) -> int:
    """Check the sources of a virtual dataset; return the most rows of a chunk of one.

    Raises Unusable for a source that is missing or too short, and for values that no source holds.
    """
    properties, rows = data.id.get_create_plist(), 0
    mapped = h5py.h5s.create_simple(data.shape)
    mapped.select_none()
    for number in range(properties.get_virtual_count()):
        name = os.fsdecode(properties.get_virtual_filename(number))
        space, source = properties.get_virtual_vspace(number), _find_source(name, path)
        where = f"{data.name} is made of other datasets, and {name}"
        if source is None:
            raise Unusable(f"{where} is missing")
        with open_hdf5(source) as file:
            part = find_dataset(file, os.fsdecode(properties.get_virtual_dsetname(number)))
            values = space.get_select_npoints()
            if not _is_within(properties.get_virtual_srcspace(number), values, part):
                raise Unusable(f"{where} has too few values: {part.name} is {part.shape}")
            rows = max(rows, locate(part, sizes).chunk_rows)
        if space.get_select_type() == h5py.h5s.SEL_ALL:
            mapped.select_all()
        elif space.is_regular_hyperslab():
            start, stride, count, block = space.get_regular_hyperslab()
            mapped.select_hyperslab(start, count, stride, block, h5py.h5s.SELECT_OR)
        else:
            raise Unusable(f"{where} has a selection that is not a regular hyperslab")
    if (held := mapped.get_select_npoints()) != data.size:
        raise Unusable(
            f"{data.name} is made of other datasets, which hold {held:,} of its {data.size:,}"
            " values"
        )
    return rows


def _find_source(name: str, path: str) -> str | None:
    """Return the path of a source of the virtual dataset in the file `path`, as HDF5 finds it."""
    if name == ".":
        return path
    if prefix := os.environ.get("HDF5_VDS_PREFIX"):  # HDF5 then looks at several places
        raise Unusable(f"{name} may be elsewhere by HDF5_VDS_PREFIX={prefix}: unset it")
    places = (os.path.join(os.path.dirname(path), name), name)
    return next((os.path.abspath(place) for place in places if os.path.isfile(place)), None)


def _is_within(space: h5py.h5s.SpaceID, values: int, source: h5py.Dataset) -> bool:
    """Whether the source has all the values that a virtual dataset selects of it."""
    if not space.shape:  # all
        return source.size == values
    _, last = space.get_select_bounds()
    return len(last) == source.ndim and all(
        end < n for end, n in zip(last, source.shape, strict=True)
    )


class Slabs:
    """The rows of a dataset that is not stored in one piece, read by h5py. Thread-safe.

    A slab consists of all chunks that hold the same rows or, without chunks, of a few rows. Every
    slab that a call needs is read once, and the most recent slabs are cached, because the next call
    often continues within one.
    HDF5 returns zeros for bytes missing at the end of a file, and remembers where chunks were, so
    the files must keep their sizes and modification times while they are read. They are compared
    in every call, 16 files at a time: of N sources, one that changes is noticed N / 16 calls later.
    """

    def __init__(self, path: str, stored: Stored, sizes: dict[str, int]) -> None:
        """Open the file. Raises UsageError if it is not the one that was checked."""
        self._path, self._stored = path, stored
        for each, size in sizes.items():
            File(each, size).close()
        states = [(each, os.stat(each)) for each in sizes]
        self._states, self._compared = cycle(states), min(len(states), MOST_COMPARED)
        self._file = open_unchecked(path)
        self._data = self._file[stored.dataset]
        self._step = stored.chunk_rows or max(1, SLAB_BYTES // stored.row_bytes)
        self._count = max(1, CACHE_BYTES // (self._step * stored.row_bytes))
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # by number, newest last
        self._lock = threading.Lock()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read `rows` (n,), in that order, into `out` (n, ...), as stored. Raises RunError."""
        step = self._step
        order = np.argsort(rows, kind="stable")  # file order
        slabs = rows[order] // step
        cuts = [0, *(np.flatnonzero(np.diff(slabs)) + 1).tolist(), len(rows)]
        with self._lock:
            for first, stop in pairwise(cuts if len(rows) else ()):
                places, slab = order[first:stop], int(slabs[first])
                out[places] = self._read_slab(slab)[rows[places] - slab * step]
            self._check_unchanged()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._kept.clear()
            self._file.close()

    def _read_slab(self, slab: int) -> np.ndarray:
        """Return the rows of a slab, (m, ...), from the cache or the file."""
        if slab in self._kept:
            self._kept.move_to_end(slab)
            return self._kept[slab]
        stored, step = self._stored, self._step
        start, stop = slab * step, min(stored.shape[0], (slab + 1) * step)
        try:
            rows = self._data[start:stop]
        except Exception as error:  # of many types, from HDF5 and h5py
            self._check_unchanged()
            raise RunError(
                f"{self._path}: rows {start:,} to {stop - 1:,} of {stored.dataset} cannot be"
                f" read, the file {explain(error)}"
            ) from None
        self._kept[slab] = rows
        if len(self._kept) > self._count:
            self._kept.popitem(last=False)
        return rows

    def _check_unchanged(self) -> None:
        for path, before in islice(self._states, self._compared):
            try:
                now = os.stat(path)
            except OSError as error:
                raise RunError(f"{path} was removed while in use: {error.strerror}") from None
            if now.st_size < before.st_size:
                raise RunError(
                    f"{path} has {now.st_size:,} bytes, {before.st_size - now.st_size:,} fewer than"
                    " when it was opened: it was cut short while in use"
                )
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise RunError(f"{path} was changed while in use")
