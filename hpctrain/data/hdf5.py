"""Open HDF5 files, and find and check datasets before a value is read.

What HDF5 would read as zeros is refused: bytes beyond the end of the file, chunks that were never
written, and virtual or external data, whose sources may be missing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import h5py

from hpctrain.errors import UsageError

NAMED = 8  # members of a group that an error message lists


class Unusable(Exception):
    """The file was opened but its content cannot be used; the text gives the reason."""


@contextmanager
def open_hdf5(path: str) -> Iterator[h5py.File]:
    """Open the file for reading in a ``with`` block.

    Any error in the block is raised as one UsageError that names the file.
    """
    with usage_errors(path), open_unchecked(path) as file:
        yield file


def open_unchecked(path: str) -> h5py.File:
    """Open the file read-only, without a lock (it never changes) and without a chunk cache."""
    return h5py.File(path, "r", locking=False, rdcc_nbytes=0)


@contextmanager
def usage_errors(path: str) -> Iterator[None]:
    """Raise any error of the block as one UsageError that names the file."""
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder: make a pack of it with 'hpctrain pack {path}'")
    try:
        yield
    except UsageError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(f"{path} cannot be opened: {os.strerror(error.errno or 0)}") from None
    except Unusable as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # of many types, for corrupt metadata
        raise UsageError(f"{path} {explain(error)}") from None


def explain(error: Exception) -> str:
    """Translate an error of HDF5 into the state of the file, such as "is cut short: ..."."""
    if isinstance(error, MemoryError):
        return f"needs more memory than there is ({error}): make its chunks smaller by h5repack"
    text = str(error)
    if "file signature not found" in text:
        return "is no HDF5 file: make a pack of image files with 'hpctrain pack'"
    sizes = re.search(r"truncated file: eof = (\d+).*stored_eof = (\d+)", text)
    if sizes:
        there, meant = (int(size) for size in sizes.groups())
        return f"is cut short: it has {there:,} of {meant:,} bytes; copy or make it again"
    if "already open for write" in text or "bad object header version" in text:
        return "was not written to its end (or is still being written); copy or make it again"
    inner = re.search(r"\((.*)\)", text)
    reason = (inner.group(1) if inner else text).strip().split("\n")[0]
    return f"is corrupt: {reason or 'HDF5 cannot read it'}; copy or make it again"


def file_size(file: h5py.File) -> int:
    """Return the current size of the file in bytes."""
    return os.fstat(file.id.get_vfd_handle()).st_size


def find_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the dataset of this path, which must be in this file. Raises Unusable."""
    node: Any = file
    for part in filter(None, name.split("/")):
        found = node.get(part) if isinstance(node, h5py.Group) else None
        if found is None:
            raise Unusable(f"there is no dataset {name}{_members(node)}")
        node = found
    if not isinstance(node, h5py.Dataset):
        raise Unusable(f"{name or repr(name)} is no dataset{_members(node)}")
    if node.file.filename != file.filename:
        raise Unusable(f"{name} is a link to another file, {node.file.filename}: not followed")
    return node


def _members(node: h5py.HLObject) -> str:
    if not isinstance(node, h5py.Group):
        return ""
    names = list(islice(node, NAMED + 1))
    more = ", ..." if len(names) > NAMED else ""
    return f"; {node.name} holds {', '.join(names[:NAMED]) or 'nothing'}{more}"


def check_storage(data: h5py.Dataset, size: int) -> int:
    """Check how a dataset of a file of `size` bytes is stored; return the rows per chunk.

    Returns 0 for a contiguous dataset. Raises Unusable for other kinds of storage, and if data are
    missing.
    """
    properties, name = data.id.get_create_plist(), data.name
    storage = properties.get_layout()
    if storage == h5py.h5d.VIRTUAL:
        raise Unusable(f"{name} is a virtual dataset, made of others, which is not read")
    if properties.get_external_count():
        raise Unusable(f"{name} is stored in other files, which are not read")
    stored, declared = data.id.get_storage_size(), data.size * data.id.get_type().get_size()
    if storage == h5py.h5d.CHUNKED:
        _check_chunks(data, stored, size)
        return int(data.chunks[0])
    offset = data.id.get_offset()
    if storage == h5py.h5d.COMPACT:
        raise Unusable(f"{name} is stored within its header: only contiguous or chunked is read")
    if offset is None:
        raise Unusable(f"{name} was never written: the file does not hold its {declared:,} bytes")
    if stored != declared or offset + stored > size:
        raise Unusable(f"{name} says {declared:,} bytes, which the file does not hold")
    return 0


def _check_chunks(data: h5py.Dataset, stored: int, size: int) -> None:
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
    if written != expected or stored > size:
        raise Unusable(f"{name} was not written to its end: {written:,} of {expected:,} chunks")
