"""Write a pack (``pack_format.py``): HDF5 lays out the file, threads fill it by byte offset.

The datasets are contiguous, allocated at once and aligned to 4,096 bytes; nothing in the file
depends on time, place or the number of threads, so equal rows give equal bytes. Mean and standard
deviation come from exact integer sums.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpctrain.data.pack_format import FORMAT, VERSION, content_uuid, ordered, rows_per_block
from hpctrain.files import whole_file

ALIGNMENT = 4096
LIBRARY = ("v110", "v110")  # checksums on metadata, a mark while written, long attributes


Fetch = Callable[[int, int], np.ndarray]  # rows start to stop, C-contiguous


class Part(NamedTuple):
    """One split to write: labels (N,) int64, and what gives its images (n, H, W, C) uint8."""

    labels: np.ndarray
    fetch: Fetch


class Column(NamedTuple):
    """A dataset to write: its name, uint8 or int64, its shape, and what gives its rows."""

    name: str
    dtype: type
    shape: tuple[int, ...]
    fetch: Fetch


class Sums(NamedTuple):
    """What is known of rows once they are written."""

    checksums: np.ndarray  # (blocks,) uint32, CRC-32 of each block
    values: np.ndarray  # (C,) uint64, sum of the pixels of each channel
    squares: np.ndarray  # (C,) uint64, sum of their squares


def write_pack(
    path: str | os.PathLike[str],
    splits: dict[str, tuple[np.ndarray, np.ndarray]],
    classes: Sequence[str],
    provenance: dict[str, Any],
) -> None:
    """Arrays -> pack: per split (images (N, H, W, C) uint8, labels (N,) int64), one named train.

    Whole or not there; an existing file is replaced. Raises ValueError where arrays do not fit
    together, OSError where the file cannot be written.
    """
    shapes = {images.shape[1:] for images, _ in splits.values()}
    if "train" not in splits or len(shapes) != 1:
        raise ValueError(f"splits {list(splits)} with image shapes {shapes}: train, and one shape")
    parts: dict[str, Part] = {}
    for name, (images, labels) in splits.items():
        if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != (len(images),):
            raise ValueError(f"{name}: {images.dtype} {images.shape}, labels {labels.shape}")
        if images.size == 0 or not 0 <= labels.min() <= labels.max() < len(classes):
            raise ValueError(f"{name}: no images, or labels beyond the {len(classes)} classes")
        parts[name] = Part(labels, _slices(images))
    height, width, channels = shapes.pop()
    write_parts(Path(path), parts, (height, width, channels), tuple(classes), provenance)


def write_parts(
    path: Path,
    parts: dict[str, Part],
    image_shape: tuple[int, int, int],
    classes: tuple[str, ...],
    provenance: dict[str, Any],
    jobs: int = 1,
    advance: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write all parts with `jobs` threads; `advance` is told the rows of each finished block."""
    sums: dict[str, tuple[int, list[np.ndarray]]] = {}
    with new_file(path) as file, ThreadPoolExecutor(jobs) as threads:
        for name in ordered(parts):
            labels = np.ascontiguousarray(parts[name].labels, "<i8")  # (N,)
            group = file.create_group(name)
            images = Column("images", np.uint8, (len(labels), *image_shape), parts[name].fetch)
            image_sums = store(group, images, threads, advance, channel_sums)
            label_sums = store(group, numbers("labels", labels), threads)
            sums[name] = (len(labels), [image_sums.checksums, label_sums.checksums])
            if name == "train":
                pixels = len(labels) * image_shape[0] * image_shape[1]
                found = mean_std(image_sums.values, image_sums.squares, pixels)
                file.attrs["mean"], file.attrs["std"] = found
        describe(file, VERSION, content_uuid(image_shape, classes, sums), classes, provenance)


@contextmanager
def new_file(path: Path) -> Iterator[h5py.File]:
    """An empty HDF5 file that becomes `path` when all is on disk."""
    with (
        whole_file(path) as temporary,
        h5py.File(
            temporary,
            "w",
            libver=LIBRARY,
            locking=False,
            alignment_threshold=ALIGNMENT,
            alignment_interval=ALIGNMENT,
        ) as file,
    ):
        yield file


def describe(
    file: h5py.File,
    version: int,
    identity: str,
    classes: tuple[str, ...],
    provenance: dict[str, Any],
) -> None:
    """The root attributes that every pack has, but mean and std."""
    file.attrs["format"] = np.bytes_(FORMAT)
    file.attrs["version"] = version
    file.attrs["uuid"] = np.bytes_(identity)
    file.attrs["classes"] = _texts(classes)
    file.attrs["provenance"] = np.bytes_(json.dumps(provenance))


def numbers(name: str, values: np.ndarray) -> Column:
    """A column of (n,) int64 that are in memory."""
    return Column(name, np.int64, values.shape, _slices(values))


def _slices(rows: np.ndarray) -> Fetch:
    return lambda start, stop: np.ascontiguousarray(rows[start:stop])


def store(
    group: h5py.Group,
    column: Column,
    threads: ThreadPoolExecutor,
    advance: Callable[[int], None] = lambda rows: None,
    summed: Callable[[np.ndarray], tuple[Any, Any]] = lambda block: ((), ()),
) -> Sums:
    """Make a dataset and its checksums in `group`, filled with all rows of `column`."""
    kind = h5py.h5t.STD_U8LE if column.dtype is np.uint8 else h5py.h5t.STD_I64LE
    rows, *row_shape = column.shape
    row_bytes = math.prod(row_shape) * kind.get_size()
    block_rows = rows_per_block(row_bytes)
    offset = _allocate(group, column.name, kind, column.shape)
    descriptor = os.open(group.file.filename, os.O_WRONLY | os.O_CLOEXEC)

    def store_block(start: int) -> tuple[int, Any, Any]:
        block = column.fetch(start, min(rows, start + block_rows))
        _write(descriptor, block.data.cast("B"), offset + start * row_bytes)
        advance(len(block))
        return zlib.crc32(block.data), *summed(block)

    try:
        blocks = list(threads.map(store_block, range(0, rows, block_rows)))
    finally:
        os.close(descriptor)
    checksums, values, squares = zip(*blocks, strict=True)
    data = group.create_dataset(f"{column.name}_crc32", data=np.array(checksums, "<u4"))
    data.attrs["rows_per_block"] = block_rows
    return Sums(data[:], np.sum(values, axis=0), np.sum(squares, axis=0))


def _allocate(group: h5py.Group, name: str, number: h5py.h5t.TypeID, shape: tuple[int, ...]) -> int:
    """A contiguous dataset whose bytes exist but are not written yet; its offset in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    return h5py.h5d.create(group.id, name.encode(), number, space, properties).get_offset()


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def channel_sums(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and sum of squares per channel of (n, H, W, C) uint8: two (C,) uint64, exact."""
    channels = block.shape[-1]
    wide = np.uint32 if len(block) <= 2**16 else np.uint64  # 2^16 * 255^2 < 2^32
    values = block.reshape(len(block), -1).astype(wide)  # (n, H * W * C)
    total = values.sum(axis=0, dtype=wide)
    squares = np.square(values, out=values).sum(axis=0, dtype=wide)
    by_channel = (
        sums.reshape(-1, channels).sum(axis=0, dtype=np.uint64) for sums in (total, squares)
    )
    return next(by_channel), next(by_channel)


def mean_std(values: np.ndarray, squares: np.ndarray, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (of the population) in [0, 1], (C,) float64 each, from the sum
    of the values of each channel and the sum of their squares."""
    mean, std = [], []
    for value, square in zip(values.tolist(), squares.tolist(), strict=True):
        mean.append(value / (255 * pixels))
        std.append(math.sqrt(pixels * square - value**2) / (255 * pixels))  # integers: exact
    return np.array(mean), np.array(std)


def _texts(names: tuple[str, ...]) -> np.ndarray:
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    return np.array(encoded, h5py.string_dtype("utf-8", max(len(name) for name in encoded)))
