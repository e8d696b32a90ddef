"""Read what a pack says of itself, by HDF5, and check all that a reader by byte offset relies on.

A pack comes from anywhere (``hdf5.py``), and every dataset must be contiguous bytes of its file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import uuid

import h5py
import numpy as np

from hpctrain.data.hdf5 import Unusable, check_storage, find_dataset, open_hdf5
from hpctrain.data.pack_format import (
    ENCODED_VERSION,
    FITS,
    FORMAT,
    JPEG,
    MAX_SIDE,
    VERSION,
    Pack,
    SplitLayout,
    ordered,
)
from hpctrain.errors import UsageError
from hpctrain.typed import parse_json

MAX_ATTRIBUTE_BYTES = 2**26  # larger than any honest attribute, small enough to read
MAX_BLOCK_BYTES = 2**26  # bytes that share a checksum; packs are written with about 2**20


def read_pack(path: str) -> Pack:
    """The checked pack of an absolute path, its labels not yet read. Raises UsageError."""
    with open_hdf5(path) as file:
        encoded = _check_format(path, file) == ENCODED_VERSION
        classes = tuple(name.decode("utf-8", "surrogateescape") for name in _text(file, "classes"))
        size = os.path.getsize(path)
        read_split = _files if encoded else _pixels
        found = [read_split(file, name, size) for name in ordered(file)]
        if not found or not classes:
            raise Unusable("it holds no images" if not found else "it names no classes")
        shapes = {_decoded_shape(file)} if encoded else {shape for _, shape in found}
        if len(shapes) > 1:
            raise Unusable(f"its splits differ in image shape: {sorted(shapes)}")
        height, width, channels = shapes.pop()
        mean, std = _numbers(file, "mean", channels), _numbers(file, "std", channels)
        provenance = parse_json(_text(file, "provenance")[0])
        if not isinstance(provenance, dict):
            raise Unusable("its provenance is no table")
        identity = str(uuid.UUID(_text(file, "uuid")[0].decode()))
        shape = (height, width, channels)
        splits = {split.name: split for split, _ in found}
        sha256 = _text(file, "sha256")[0].decode() if "sha256" in file.attrs else ""
        pack = Pack(path, identity, size, shape, classes, splits, mean, std, provenance)
        return dataclasses.replace(pack, fit=_fit(file) if encoded else "", sha256=sha256)


def _pixels(file: h5py.File, name: str, size: int) -> tuple[SplitLayout, tuple[int, ...]]:
    """A split that holds pixels, and the shape of its images."""
    images = _dataset(file, f"{name}/images", h5py.h5t.STD_U8LE, 4, size)
    labels = _dataset(file, f"{name}/labels", h5py.h5t.STD_I64LE, 1, size)
    rows = images.shape[0]
    if labels.shape[0] != rows:
        raise Unusable(f"{name} has {rows} images but {labels.shape[0]} labels")
    return SplitLayout(name, rows, images.id.get_offset(), labels.id.get_offset()), images.shape[1:]


def _files(file: h5py.File, name: str, size: int) -> tuple[SplitLayout, tuple[int, ...]]:
    """A split that holds JPEG files; they have no shape of their own."""
    data = _dataset(file, f"{name}/bytes", h5py.h5t.STD_U8LE, 1, size)
    offsets = _dataset(file, f"{name}/offsets", h5py.h5t.STD_I64LE, 1, size)
    labels = _dataset(file, f"{name}/labels", h5py.h5t.STD_I64LE, 1, size)
    rows = labels.shape[0]
    if offsets.shape[0] != rows + 1:
        raise Unusable(f"{name} has {rows} labels but {offsets.shape[0]} offsets, not {rows + 1}")
    starts = [dataset.id.get_offset() for dataset in (data, labels, offsets)]
    return SplitLayout(name, rows, starts[0], starts[1], data.shape[0], starts[2]), ()


def _decoded_shape(file: h5py.File) -> tuple[int, ...]:
    """The shape (H, W, C) that files are decoded to, within what packing allows."""
    values = _attribute(file, "image_shape")
    if values.dtype.kind != "i" or values.shape != (3,):
        raise Unusable("attribute 'image_shape' is not 3 numbers")
    height, width, channels = values.tolist()
    if not 1 <= min(height, width) <= max(height, width) <= MAX_SIDE or channels not in (1, 3):
        raise Unusable(f"attribute 'image_shape' says {width}x{height}x{channels}")
    return height, width, channels


def _fit(file: h5py.File) -> str:
    fit = _text(file, "fit")[0].decode("ascii", "replace")
    if fit not in FITS:
        raise Unusable(f"attribute 'fit' is {fit!r}, not one of {', '.join(FITS)}")
    return fit


def read_checksums(pack: Pack) -> dict[tuple[str, str], tuple[np.ndarray, int]]:
    """By split and column: the CRC-32 of every block, and the rows of a block."""
    sums: dict[tuple[str, str], tuple[np.ndarray, int]] = {}
    with open_hdf5(pack.path) as file:
        for name in pack.splits:
            for kind, column in pack.columns(name).items():
                data = _dataset(file, f"{name}/{kind}_crc32", h5py.h5t.STD_U32LE, 1, pack.file_size)
                block_rows = int(data.attrs["rows_per_block"])
                if block_rows < 1 or data.shape[0] != math.ceil(column.rows / block_rows):
                    raise Unusable(f"{name}/{kind}_crc32 does not cover the {column.rows} rows")
                if (block_rows - 1) * column.row_bytes > MAX_BLOCK_BYTES:  # it is read as one piece
                    raise Unusable(f"{name}/{kind}_crc32 says {block_rows:,} rows_per_block")
                sums[name, kind] = (data[:], block_rows)
    return sums


def is_pack(path: str) -> bool:
    """Whether this is an HDF5 file that has the format mark, whatever else is wrong with it."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _marked(file)
    except Exception:  # damaged metadata makes HDF5 and h5py raise many kinds
        return False


def _marked(file: h5py.File) -> bool:
    mark = file.attrs.get("format")
    return isinstance(mark, bytes | np.bytes_) and mark == FORMAT.encode()


def _check_format(path: str, file: h5py.File) -> int:
    """The format mark first: everything else is only meant where it is there. The version."""
    if not _marked(file):
        raise UsageError(
            f"{path} is an HDF5 file but not a pack (no attribute format = {FORMAT!r}); make one"
            " with 'hpctrain pack', or train on it as it is with --images and --labels"
        )
    version = int(file.attrs["version"])
    if version not in (VERSION, ENCODED_VERSION):
        raise UsageError(
            f"{path} is a pack of format version {version}, this hpctrain reads versions {VERSION}"
            f" and {ENCODED_VERSION}: use the hpctrain that made it, or pack again"
        )
    if version == ENCODED_VERSION and (encoding := _text(file, "encoding")[0]) != JPEG.encode():
        raise UsageError(
            f"{path} holds images encoded as {encoding.decode('ascii', 'replace')!r}, this hpctrain"
            f" reads {JPEG!r}: use the hpctrain that made it, or pack again"
        )
    return version


def _dataset(
    file: h5py.File, name: str, kind: h5py.h5t.TypeID, dimensions: int, file_size: int
) -> h5py.Dataset:
    """A dataset that is plain bytes of this file: readable by its offset."""
    data = find_dataset(file, name)
    if not data.id.get_type().equal(kind) or data.ndim != dimensions or 0 in data.shape:
        raise Unusable(f"{data.name} is {data.dtype} of shape {data.shape}")
    if check_storage(data, file_size):
        raise Unusable(f"{data.name} is stored in chunks, which those of a pack never are")
    return data


def _attribute(file: h5py.File, name: str) -> np.ndarray:
    if name not in file.attrs:
        raise Unusable(f"attribute {name!r} is missing")
    if file.attrs.get_id(name).get_storage_size() > MAX_ATTRIBUTE_BYTES:
        raise Unusable(f"attribute {name!r} is larger than {MAX_ATTRIBUTE_BYTES:,} bytes")
    return np.atleast_1d(file.attrs[name])


def _text(file: h5py.File, name: str) -> list[bytes]:
    values = _attribute(file, name)
    if values.dtype.kind != "S" or values.ndim != 1 or not len(values):
        raise Unusable(f"attribute {name!r} is no text")
    return [bytes(value) for value in values]


def _numbers(file: h5py.File, name: str, count: int) -> tuple[float, ...]:
    values = _attribute(file, name)
    if values.dtype.kind != "f" or values.shape != (count,) or not np.isfinite(values).all():
        raise Unusable(f"attribute {name!r} is not {count} finite numbers")
    return tuple(float(value) for value in values)
