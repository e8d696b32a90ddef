"""An external HDF5 file, such as others make: what its images and labels are, and its chunks.

Everything is checked as ``hdf5.py`` says, before a value is read.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from dataclasses import replace

import h5py
import numpy as np

from hpctrain.data.hdf5 import (
    Unusable,
    check_storage,
    explain,
    file_size,
    find_dataset,
    open_hdf5,
    open_unchecked,
    usage_errors,
)
from hpctrain.data.hdf5_chunks import read_chunks
from hpctrain.data.pack_format import ExternalFile
from hpctrain.data.partition import READ_BYTES
from hpctrain.errors import RunError

TYPES = {
    "uint8": (h5py.h5t.STD_U8LE, h5py.h5t.STD_U8BE),
    "float16": (h5py.h5t.IEEE_F16LE,),
    "float32": (h5py.h5t.IEEE_F32LE,),
    "float64": (h5py.h5t.IEEE_F64LE,),
}
DIMENSIONS = {"NHWC": 4, "NCHW": 4, "NHW": 3}
MAX_LABEL_BYTES = 1 << 31  # all labels are held in memory
CACHE_BYTES = 64 << 20  # of slabs kept, besides the last


def inspect(
    path: str, images: str, labels: str, layout: str | None
) -> tuple[ExternalFile, tuple[int, ...], np.ndarray]:
    """What an absolute path holds, the images' shape as stored, and all labels (N,) int64.

    Raises UsageError, one line naming the file and the cause.
    """
    with open_hdf5(path) as file:
        data, target = find_dataset(file, images), find_dataset(file, labels)
        found = _describe(file, path, data, target, layout)
        values = _read_labels(target, found)
        return replace(found, labels_crc32=_crc32(values)), data.shape, values


def read_labels(source: ExternalFile) -> np.ndarray:
    """All labels, (N,) int64. Raises UsageError where the file is not the one that was checked."""
    with open_hdf5(source.path) as file:
        check_same(file, source)
        values = _read_labels(find_dataset(file, source.labels), source)
        if _crc32(values) != source.labels_crc32:
            raise Unusable("its labels are not those that were checked: it was replaced meanwhile")
        return values


def check_same(file: h5py.File, source: ExternalFile) -> h5py.Dataset:
    """The images, if the file is still what was found when it was checked. Raises Unusable."""
    size = file_size(file)
    if size != source.file_size:
        raise Unusable(
            f"it has {size:,} bytes here, but {source.file_size:,} when it was checked: give"
            " every rank the same finished file"
        )
    data = find_dataset(file, source.images)
    target = find_dataset(file, source.labels)
    here = _describe(file, source.path, data, target, source.layout)
    fixed = ("labels_crc32", "block_rows", "split", "seed")
    if replace(here, **{name: getattr(source, name) for name in fixed}) != source:
        raise Unusable("it is not the file that was checked: it was replaced meanwhile")
    return data


def check_unchanged(source: ExternalFile) -> None:
    """UsageError where the file is not the one that was checked."""
    with open_hdf5(source.path) as file:
        check_same(file, source)


def _crc32(values: np.ndarray) -> int:
    return zlib.crc32(values.data.cast("B"))


def _describe(
    file: h5py.File, path: str, data: h5py.Dataset, labels: h5py.Dataset, layout: str | None
) -> ExternalFile:
    """What the images are. Raises Unusable."""
    size = file_size(file)
    dtype = _type(data)
    layout, shape = _shape(data, layout)
    chunk_rows = check_storage(data, size)
    return ExternalFile(
        path,
        size,
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
    raise Unusable(
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
    """The layout, and (H, W, C). Raises Unusable."""
    shape: tuple[int, ...] = data.shape or ()
    given, layout = layout, layout or ("NHW" if len(shape) == 3 else "NHWC")
    if len(shape) != DIMENSIONS[layout] or 0 in shape:
        raise Unusable(
            f"the images {data.name} have shape {shape}, which is not {layout}:"
            " (N, H, W, C), (N, C, H, W) with --layout NCHW, or (N, H, W)"
        )
    if given is None and layout == "NHWC" and shape[1] in (1, 3) and shape[3] > 4:
        raise Unusable(
            f"the images {data.name} have shape {shape}, which looks like (N, C, H, W): say which"
            " it is with --layout NCHW or --layout NHWC"
        )
    if layout == "NHW":
        return layout, (shape[1], shape[2], 1)
    if layout == "NCHW":
        return layout, (shape[2], shape[3], shape[1])
    return layout, (shape[1], shape[2], shape[3])


def _read_labels(data: h5py.Dataset, found: ExternalFile) -> np.ndarray:
    """All labels, (N,) int64. Raises Unusable."""
    shape, name = data.shape or (), data.name
    if not isinstance(data.id.get_type(), h5py.h5t.TypeIntegerID):
        raise Unusable(f"the labels {name} are {_type_name(data)}, not integers")
    if shape[:1] != (found.rows,) or shape[1:] not in ((), (1,)):
        raise Unusable(
            f"the labels {name} have shape {shape}, not ({found.rows},) or ({found.rows}, 1) as"
            f" there are {found.rows:,} images in {found.images}"
        )
    if (size := 8 * found.rows) > MAX_LABEL_BYTES:
        raise Unusable(
            f"{found.rows:,} labels take {size:,} bytes; the limit is {MAX_LABEL_BYTES:,}"
        )
    chunked = check_storage(data, found.file_size)
    values = read_chunks(data, 0, found.rows, found.file_size) if chunked else data[...]
    values = values.reshape(-1)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= found.rows:
        raise Unusable(
            f"the labels {name} go from {low} to {high}: they are to be 0 ... K-1, with no more"
            f" classes than the {found.rows:,} images"
        )
    return np.ascontiguousarray(values, np.int64)


class Chunks:
    """The images of an external file, stored in chunks.

    A slab is all chunks that hold the same images. Every slab that a call needs is read once,
    neighbours together; the last slabs are kept, so that the next call may go on within one. HDF5
    fills what it misses at the end of a file with zeros, so the file's size is compared after
    every read.
    """

    def __init__(self, source: ExternalFile) -> None:
        self.source = source
        with usage_errors(source.path):
            self._file = open_unchecked(source.path)
            try:
                self._data = check_same(self._file, source)
            except BaseException:
                self._file.close()
                raise
        slab_bytes = source.chunk_rows * source.image_bytes
        self._together = max(1, READ_BYTES // slab_bytes)  # slabs that are read by one call
        self._count = max(1, CACHE_BYTES // slab_bytes)
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # by number, newest last
        self._lock = threading.Lock()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """The images `rows` (n,), in that order, into `out` (n, H, W, C). Raises RunError."""
        order = np.argsort(rows, kind="stable")  # of the file
        slabs = rows[order] // self.source.chunk_rows
        starts = np.flatnonzero(np.diff(slabs, prepend=-1))  # where another slab begins
        with self._lock:
            for group in self._groups(slabs[starts]):
                first, last = (int(number) for number in slabs[starts[group[[0, -1]]]])
                images = self._read_slabs(first, last)  # (m, H, W, C)
                stop = starts[group[-1] + 1] if group[-1] + 1 < len(starts) else len(rows)
                places = order[starts[group[0]] : stop]
                out[places] = images[rows[places] - first * self.source.chunk_rows]

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

    def _read_slabs(self, first: int, last: int) -> np.ndarray:
        """The images of these slabs, (m, H, W, C); the last slab is kept."""
        if first == last and first in self._kept:
            self._kept.move_to_end(first)
            return self._kept[first]
        images = self._load(first, last)
        step = self.source.chunk_rows
        self._kept[last] = images if first == last else images[(last - first) * step :].copy()
        while len(self._kept) > self._count:
            self._kept.popitem(last=False)
        return images

    def _load(self, first: int, last: int) -> np.ndarray:
        source, step = self.source, self.source.chunk_rows
        start, stop = first * step, min(source.rows, (last + 1) * step)
        try:
            images = read_chunks(self._data, start, stop, source.file_size)
        except Exception as error:  # HDF5 and h5py raise many kinds
            self._check_size()
            raise RunError(
                f"{source.path}: images {start:,} to {stop - 1:,} of {source.images} cannot be"
                f" read, the file {explain(error)}"
            ) from None
        self._check_size()
        if source.layout == "NCHW":
            return images.transpose(0, 2, 3, 1)
        return images.reshape(len(images), *source.image_shape)

    def _check_size(self) -> None:
        there = file_size(self._file)
        if there < self.source.file_size:
            raise RunError(
                f"{self.source.path} has {there:,} bytes, {self.source.file_size - there:,} fewer"
                " than when it was opened: it was cut short while in use"
            )
