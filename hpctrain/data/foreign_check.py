"""Open an HDF5 file of somebody else and check what its two data sets are: images and labels.

As in ``pack_check.py`` nothing may lead to other files: every component of a path is a hard link,
no data set is virtual or stored externally, and no filter plug-in is loaded. What is declared must
be there: a data set of one piece lies within the file, one in chunks has all its chunks.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from hpctrain.data.foreign_filters import MOST_FILTERS, NAMES, DamagedChunk, read_chunks
from hpctrain.data.hdf5_words import cause
from hpctrain.data.pack_format import Foreign
from hpctrain.errors import UsageError

os.environ.setdefault("HDF5_PLUGIN_PRELOAD", "::")  # a file may name filter plug-ins: load none
import h5py

TYPES = {
    "uint8": (h5py.h5t.STD_U8LE, h5py.h5t.STD_U8BE),
    "float16": (h5py.h5t.IEEE_F16LE,),
    "float32": (h5py.h5t.IEEE_F32LE,),
    "float64": (h5py.h5t.IEEE_F64LE,),
}
DIMENSIONS = {"NHWC": 4, "NCHW": 4, "NHW": 3}
CHUNK_BYTES = 1 << 30  # a whole row of chunks is held in memory
LABEL_BYTES = 1 << 31  # all labels are
NAMED = 8  # members of a group that are listed where a name is not found


class Unfit(Exception):
    """The file was opened but cannot be trained on; the text says why."""


def inspect(
    path: str, images: str, labels: str, layout: str | None
) -> tuple[Foreign, tuple[int, ...], np.ndarray]:
    """What an absolute path holds, the images' shape as stored, and all labels (N,) int64.

    Raises UsageError, one line naming the file and the cause.
    """
    with told(path), open_file(path) as file:
        data, meant = find(file, images), find(file, labels)
        found = _describe(file, path, data, meant, layout)
        values = _labels(meant, found)
        found = _with(found, labels_crc32=zlib.crc32(values.data.cast("B")))
        return found, data.shape, values


def read_labels(foreign: Foreign) -> np.ndarray:
    """All labels, (N,) int64. Raises UsageError where the file is not the one that was checked."""
    with told(foreign.path), open_file(foreign.path) as file:
        check_same(file, foreign)
        values = _labels(find(file, foreign.labels), foreign)
        if zlib.crc32(values.data.cast("B")) != foreign.labels_crc32:
            raise Unfit("its labels are not those that were checked: it was replaced meanwhile")
        return values


def check_same(file: h5py.File, foreign: Foreign) -> h5py.Dataset:
    """The images, if the file is still what was found when it was checked. Raises Unfit."""
    size = length(file)
    if size != foreign.file_size:
        raise Unfit(
            f"it has {size:,} bytes here, but {foreign.file_size:,} when it was checked: give"
            " every rank the same finished file"
        )
    data = find(file, foreign.images)
    here = _describe(file, foreign.path, data, find(file, foreign.labels), foreign.layout)
    fixed = ("labels_crc32", "run_rows", "split", "seed")
    if _with(here, **{name: getattr(foreign, name) for name in fixed}) != foreign:
        raise Unfit("it is not the file that was checked: it was replaced meanwhile")
    return data


def open_file(path: str) -> h5py.File:
    """The file, read-only, unlocked (it never changes), without HDF5's own cache of chunks."""
    return h5py.File(path, "r", locking=False, rdcc_nbytes=0)


def length(file: h5py.File) -> int:
    """Bytes that the file has now."""
    return os.fstat(file.id.get_vfd_handle()).st_size


@contextmanager
def told(path: str) -> Iterator[None]:
    """Any failure to make sense of the file -> one UsageError."""
    try:
        yield
    except UsageError:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(f"{path} cannot be opened: {os.strerror(error.errno or 0)}") from None
    except Unfit as error:
        raise UsageError(f"{path}: {error}") from None
    except DamagedChunk as error:
        raise UsageError(f"{path} is damaged: {error}; copy it again") from None
    except Exception as error:  # damaged metadata makes HDF5 and h5py raise many kinds
        raise UsageError(f"{path} {cause(error, 'copy it again')}") from None


def find(file: h5py.File, name: str) -> h5py.Dataset:
    """The data set of this path, every component of which is a hard link. Raises Unfit."""
    node: Any = file
    for part in [p for p in name.split("/") if p not in ("", ".")]:
        where = f"{node.name.rstrip('/')}/{part}"
        link = node.get(part, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            raise Unfit(f"there is no data set {name}{_members(node)}")
        if not isinstance(link, h5py.HardLink):
            raise Unfit(f"{where} is a link to elsewhere, which is not followed")
        if node.get(part, getclass=True) not in (h5py.Group, h5py.Dataset):
            raise Unfit(f"{where} is neither a group nor a data set")
        node = node[part]
    if not isinstance(node, h5py.Dataset):
        raise Unfit(f"{name or repr(name)} is a group, not a data set{_members(node)}")
    return node


def _members(node: h5py.HLObject) -> str:
    if not isinstance(node, h5py.Group):
        return f": {node.name} is a data set itself"
    names = list(islice(node, NAMED + 1))
    more = ", ..." if len(names) > NAMED else ""
    return f"; {node.name} holds {', '.join(names[:NAMED]) or 'nothing'}{more}"


def _with(found: Foreign, **fields: Any) -> Foreign:
    return Foreign(**{**vars(found), **fields})


def _describe(
    file: h5py.File, path: str, data: h5py.Dataset, labels: h5py.Dataset, layout: str | None
) -> Foreign:
    """What the images are. Raises Unfit."""
    file_size = length(file)
    dtype = _type(data)
    layout, shape = _shape(data, layout)
    chunk_rows = _check_storage(data, file_size)
    return Foreign(
        path,
        file_size,
        data.name,
        labels.name,
        layout,
        dtype,
        data.shape[0],
        shape,
        offset=-1 if chunk_rows else data.id.get_offset(),
        chunk_rows=chunk_rows,
        labels_crc32=0,
    )


def _type(data: h5py.Dataset) -> str:
    kind = data.id.get_type()
    for name, wanted in TYPES.items():
        if any(kind.equal(one) for one in wanted):
            return name
    raise Unfit(
        f"the images {data.name} are {_type_name(data)}, which is not read: only"
        f" {', '.join(TYPES)}, little endian"
    )


def _type_name(data: h5py.Dataset) -> str:
    try:
        big = " big endian" if data.dtype.str.startswith(">") else ""
        return f"{data.dtype.name}{big}"
    except TypeError:  # one that numpy does not have
        return "of another type"


def _shape(data: h5py.Dataset, layout: str | None) -> tuple[str, tuple[int, int, int]]:
    """The layout, and (H, W, C). Raises Unfit."""
    shape: tuple[int, ...] = data.shape or ()
    given, layout = layout, layout or ("NHW" if len(shape) == 3 else "NHWC")
    if len(shape) != DIMENSIONS[layout] or 0 in shape:
        raise Unfit(
            f"the images {data.name} have shape {shape}, which is not {layout}:"
            " (N, H, W, C), (N, C, H, W) with --layout NCHW, or (N, H, W)"
        )
    if given is None and layout == "NHWC" and shape[1] in (1, 3) and shape[3] > 4:
        raise Unfit(
            f"the images {data.name} have shape {shape}, which looks like (N, C, H, W): say which"
            " it is with --layout NCHW or --layout NHWC"
        )
    if layout == "NHW":
        return layout, (shape[1], shape[2], 1)
    if layout == "NCHW":
        return layout, (shape[2], shape[3], shape[1])
    return layout, (shape[1], shape[2], shape[3])


def _check_storage(data: h5py.Dataset, file_size: int) -> int:
    """The rows that a chunk spans, 0 where the data are one piece. Raises Unfit."""
    properties, name = data.id.get_create_plist(), data.name
    storage = properties.get_layout()
    if storage == h5py.h5d.VIRTUAL:
        raise Unfit(f"{name} is a virtual data set, made of others, which is not read")
    if properties.get_external_count():
        raise Unfit(f"{name} is stored in other files, which are not read")
    there, declared = data.id.get_storage_size(), data.size * data.id.get_type().get_size()
    if storage == h5py.h5d.CHUNKED:
        _check_chunks(data, there, file_size)
        return int(data.chunks[0])
    offset = data.id.get_offset()
    if storage != h5py.h5d.CONTIGUOUS or offset is None:
        what = "within its header" if storage == h5py.h5d.COMPACT else "nowhere, it was not written"
        raise Unfit(f"{name} is stored {what}: only one piece or chunks are read")
    if there != declared or offset + there > file_size:
        raise Unfit(f"{name} says {declared:,} bytes, which the file does not hold")
    return 0


def _check_chunks(data: h5py.Dataset, there: int, file_size: int) -> None:
    properties, name = data.id.get_create_plist(), data.name
    if properties.get_nfilters() > MOST_FILTERS:
        raise Unfit(f"{name} has {properties.get_nfilters()} filters: at most {MOST_FILTERS}")
    for number in range(properties.get_nfilters()):
        code, _, _, text = properties.get_filter(number)
        if code not in NAMES:
            label = f"{code} ({text.decode('ascii', 'replace')})" if text else str(code)
            raise Unfit(
                f"{name} is compressed by the filter {label}, which is not read: only gzip, lzf,"
                " shuffle and fletcher32"
            )
    grid = [-(-n // c) for n, c in zip(data.shape, data.chunks, strict=True)]
    written = data.id.get_num_chunks()
    if written != math.prod(grid) or there > file_size:
        raise Unfit(f"{name} was not written to its end: {written:,} of {math.prod(grid):,} chunks")
    widest = [max(n, c) for n, c in zip(data.shape[1:], data.chunks[1:], strict=True)]
    size = data.chunks[0] * math.prod(widest) * data.id.get_type().get_size()
    if size > CHUNK_BYTES:
        raise Unfit(
            f"{name} has chunks of {data.chunks[0]:,} rows, {size:,} bytes, that had to be held in"
            f" memory whole: at most {CHUNK_BYTES:,} are read"
        )


def _labels(data: h5py.Dataset, found: Foreign) -> np.ndarray:
    """All labels, (N,) int64. Raises Unfit."""
    shape, name = data.shape or (), data.name
    if not isinstance(data.id.get_type(), h5py.h5t.TypeIntegerID):
        raise Unfit(f"the labels {name} are {_type_name(data)}, not integers")
    if shape[:1] != (found.rows,) or shape[1:] not in ((), (1,)):
        raise Unfit(
            f"the labels {name} have shape {shape}, not ({found.rows},) or ({found.rows}, 1) as"
            f" there are {found.rows:,} images in {found.images}"
        )
    if (size := 8 * found.rows) > LABEL_BYTES:
        raise Unfit(f"{found.rows:,} labels take {size:,} bytes; the limit is {LABEL_BYTES:,}")
    chunked = _check_storage(data, found.file_size)
    values = read_chunks(data, 0, found.rows, found.file_size) if chunked else data[...]
    values = values.reshape(-1)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= found.rows:
        raise Unfit(
            f"the labels {name} go from {low} to {high}: they are to be 0 ... K-1, with no more"
            f" classes than the {found.rows:,} images"
        )
    return np.ascontiguousarray(values, np.int64)
