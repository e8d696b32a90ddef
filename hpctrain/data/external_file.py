"""Inspect an external HDF5 file, made by other programs: find and check its images and labels.

Everything is checked as described in ``hdf5.py`` before a value is read.
"""

from __future__ import annotations

import math
import os
import zlib
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import h5py
import numpy as np

from hpctrain.data.hdf5 import (
    Unusable,
    check_storage,
    file_size,
    find_dataset,
    open_hdf5,
    open_unchecked,
    usage_errors,
)
from hpctrain.data.hdf5_chunks import Chunks
from hpctrain.data.pack_format import LAYOUTS, SPLITS, ExternalFile
from hpctrain.errors import UsageError

with suppress(ImportError):
    import hdf5plugin  # noqa: F401  # registers its filters: Blosc, Zstandard, Bitshuffle, ...

TYPES = ("uint8", "uint16", "float16", "float32", "float64")  # little endian
MATLAB = b"MATLAB 7.3 MAT-file"  # first bytes of files of version 7.3; HDF5 follows
# Fields that `_describe` does not set.
NOT_OF_IMAGES = (
    *("labels_path", "labels", "labels_crc32", "label_values"),
    *("scale", "block_rows", "split", "seed"),
)
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
    "testing": "test",
}


def inspect(path: str, images: str, labels: str, layout: str | None) -> tuple[ExternalFile, Any]:
    """Inspect the file at an absolute path; return its description and all labels (N,) int64.

    `images` and `labels` are datasets of it, or FILE:DATASET of a file in the same folder. Labels
    are returned as stored. Raises UsageError (one line that names the file and the cause).
    """
    (path, images), (labels_path, labels) = locate(path, images), locate(path, labels)
    with open_hdf5(path) as file:
        data = find_dataset(file, images)
        found = replace(_describe(file, path, data, layout), labels_path=labels_path)
        with open_hdf5(labels_path) as other:
            target = find_dataset(other, labels)
            found = replace(found, labels=target.name)
            values = _read_labels(other, target, found)
        return replace(found, labels_crc32=_crc32(values)), values


def locate(path: str, name: str) -> tuple[str, str]:
    """Return the file and the dataset of `name`: in the file `path`, or FILE:DATASET.

    FILE must be in the same folder. No other file is read, because a saved network, which may come
    from anywhere, may contain the name.
    """
    file, colon, dataset = name.partition(":")
    if not colon or "/" in file:
        return path, name
    return os.path.join(os.path.dirname(path), file), dataset


def find_splits(path: str, images: str, labels: str) -> dict[str, tuple[str, str]]:
    """Return the images and labels of each split that exists, where "{split}" is its name.

    Raises UsageError if there are no images of train.
    """
    found: dict[str, tuple[str, str]] = {}
    for alias in sorted(SPLIT_NAMES):
        names = images.replace("{split}", alias), labels.replace("{split}", alias)
        place, dataset = locate(path, names[0])
        if os.path.exists(place):
            with open_hdf5(place) as file, suppress(Unusable):
                find_dataset(file, dataset)
                found[SPLIT_NAMES[alias]] = names
    if "train" not in found:
        raise UsageError(
            f"{path}: --images {images}: there is no such dataset of train; {{split}} stands for"
            f" {', '.join(SPLIT_NAMES)}"
        )
    return {name: found[name] for name in SPLITS if name in found}


def read_labels(source: ExternalFile) -> np.ndarray:
    """Read the classes of all samples, (N,) int64.

    Raises UsageError if the file is not the one that was checked.
    """
    with open_hdf5(source.labels_path) as file:
        values = _read_labels(file, find_dataset(file, source.labels), source)
        if _crc32(values) != source.labels_crc32:
            raise Unusable("its labels are not those that were checked: it was replaced meanwhile")
    if not source.label_values:
        return values
    return np.searchsorted(np.array(source.label_values), values)


def check_same(file: h5py.File, source: ExternalFile) -> h5py.Dataset:
    """Return the dataset of the images; raise Unusable if the file changed since it was checked."""
    size = file_size(file)
    if size != source.file_size:
        raise Unusable(
            f"it has {size:,} bytes here, but {source.file_size:,} when it was checked: give"
            " every rank the same finished file"
        )
    data = find_dataset(file, source.images)
    here = _describe(file, source.path, data, source.layout)
    if replace(here, **{name: getattr(source, name) for name in NOT_OF_IMAGES}) != source:
        raise Unusable("it is not the file that was checked: it was replaced meanwhile")
    return data


def check_unchanged(source: ExternalFile) -> None:
    """Raise UsageError if the file is not the one that was checked."""
    with open_hdf5(source.path) as file:
        check_same(file, source)


def open_chunks(source: ExternalFile) -> Chunks:
    """Open the chunks of the file. Raises UsageError if it is not the one that was checked."""
    with usage_errors(source.path), ExitStack() as stack:
        file = stack.enter_context(open_unchecked(source.path))
        chunks = Chunks(source, file, check_same(file, source))
        stack.pop_all()  # left open
        return chunks


def _crc32(values: np.ndarray) -> int:
    return zlib.crc32(values.data.cast("B"))


def _describe(file: h5py.File, path: str, data: h5py.Dataset, layout: str | None) -> ExternalFile:
    """Describe the images. Raises Unusable."""
    size, dtype = file_size(file), _type(data)
    layout, shape = _shape(data, layout, _is_matlab(path))
    chunk_rows = check_storage(data, size)
    return ExternalFile(
        path,
        size,
        data.name,
        path,
        "",
        layout,
        dtype,
        data.shape[0],
        shape,
        offset=-1 if chunk_rows else data.id.get_offset(),
        chunk_rows=chunk_rows,
    )


def _is_matlab(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MATLAB)) == MATLAB


def _type(data: h5py.Dataset) -> str:
    name, own = str(data.dtype), h5py.h5t.py_create(data.dtype)
    # h5py gives types without an equal in NumPy, such as bfloat16, the name of a wider one.
    if name in TYPES and data.dtype.itemsize > 1 and not own.equal(data.id.get_type()):
        name += ", or a type like it"
    if name not in TYPES:
        raise Unusable(
            f"the images {data.name} are {name}, which is not read: only {', '.join(TYPES)}, little"
            " endian"
        )
    return name


def _shape(
    data: h5py.Dataset, layout: str | None, matlab: bool
) -> tuple[str, tuple[int, int, int]]:
    """Return the layout and the shape (H, W, C). Raises Unusable."""
    shape: tuple[int, ...] = data.shape or ()
    usual = {3: "NWH", 4: "NCWH"} if matlab else {3: "NHW", 4: "NHWC"}
    given, layout = layout, layout or usual.get(len(shape), "NHWC")
    axes = LAYOUTS[layout]
    if len(shape) != len(axes) or 0 in shape:
        raise Unusable(
            f"the images {data.name} have shape {shape}, which is not {layout}:"
            " (N, H, W, C), (N, C, H, W) with --layout NCHW, or (N, H, W)"
        )
    if given is None and layout == "NHWC" and shape[1] in (1, 3) and shape[3] > 4:
        raise Unusable(
            f"the images {data.name} have shape {shape}, which looks like (N, C, H, W): say which"
            " it is with --layout NCHW or --layout NHWC"
        )
    height, width, channels = (*(shape[axis] for axis in axes[1:]), 1)[:3]
    return layout, (height, width, channels)


def _read_labels(file: h5py.File, data: h5py.Dataset, found: ExternalFile) -> np.ndarray:
    """Read all labels, (N,) int64. Raises Unusable."""
    shape: tuple[int, ...] = data.shape or ()
    name = data.name
    if data.dtype.kind not in "iuf":
        raise Unusable(f"the labels {name} are {data.dtype}, not numbers")
    flat = math.prod(shape) == found.rows and max(shape, default=0) == found.rows
    if not flat and (len(shape) != 2 or shape[0] != found.rows or shape[1] < 2):
        raise Unusable(
            f"the labels {name} have shape {shape}, not ({found.rows},) or one-hot ({found.rows},"
            f" K), as there are {found.rows:,} images in {found.images}"
        )
    check_storage(data, file_size(file))
    values = data[...]
    if not flat:
        hot = (values == 1).sum(axis=1)
        if not ((hot == 1) & ((values == 0).sum(axis=1) == shape[1] - 1)).all():
            row = int(np.flatnonzero((hot != 1) | ((values != 0).sum(axis=1) != 1))[0])
            raise Unusable(f"the labels {name} are not one-hot: row {row} is not one 1 and zeros")
        return np.ascontiguousarray(values.argmax(axis=1), np.int64)
    values = values.reshape(-1)
    if values.dtype.kind == "f":
        wrong = np.flatnonzero(~(np.isfinite(values) & (np.abs(values) < 2**53)))
        wrong = wrong if len(wrong) else np.flatnonzero(values != np.round(values))
        if len(wrong):
            row = int(wrong[0])
            raise Unusable(f"the labels {name} are no whole numbers: row {row} is {values[row]:g}")
    elif int(values.max()) > np.iinfo(np.int64).max:
        raise Unusable(f"the labels {name} go up to {int(values.max())}, beyond 64 bits")
    return np.array(values, np.int64)
