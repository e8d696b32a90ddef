"""Write a pack (``pack_format.py``), in three phases:

1. HDF5 lays out the file with room for all rows, and closes it (the root);
2. threads fill it by byte offset and make checksums and sums (every process its share);
3. HDF5 adds checksums and attributes (the root).

The datasets are contiguous, allocated at once and aligned to 4,096 bytes; nothing in the file
depends on time, place or the number of threads and processes, so equal rows give equal bytes.
Mean and standard deviation come from exact integer sums.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import h5py
import numpy as np

from hpctrain.data.pack_format import (
    ENCODED_VERSION,
    FORMAT,
    JPEG,
    VERSION,
    content_uuid,
    facts_sha256,
    ordered,
)
from hpctrain.data.packing.columns import Column, pixel_columns, slices
from hpctrain.data.packing.fill import Sums, fill, total
from hpctrain.data.packing.pages import PAGE
from hpctrain.data.packing.team import Alone, Team, on_root
from hpctrain.files import whole_file

ALONE = Alone()
LIBRARY = ("v110", "v110")  # checksums on metadata, a mark while written, long attributes


class Content(NamedTuple):
    """What a pack says of its rows. Of JPEG files `fit` is how they are to be fitted and `moments`
    are the sum of the pixels of train by channel and that of their squares; pixels are summed as
    they are written."""

    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    provenance: dict[str, Any]
    fit: str = ""
    moments: tuple[np.ndarray, np.ndarray] | None = None


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
    height, width, channels = shapes.pop()
    columns: list[Column] = []
    for name in ordered(splits):
        images, labels = splits[name]
        if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != (len(images),):
            raise ValueError(f"{name}: {images.dtype} {images.shape}, labels {labels.shape}")
        if images.size == 0 or not 0 <= labels.min() <= labels.max() < len(classes):
            raise ValueError(f"{name}: no images, or labels beyond the {len(classes)} classes")
        columns += pixel_columns(name, labels, (height, width, channels), slices(images))
    content = Content((height, width, channels), tuple(classes), provenance)
    write_columns(Path(path), columns, content)


def write_columns(
    path: Path,
    columns: list[Column],
    content: Content,
    jobs: int = 1,
    advance: Callable[[int], None] = lambda images: None,
    team: Team = ALONE,
) -> None:
    """Write all columns with `jobs` threads; `advance` is told the images of each finished block.
    Collective: every process has all columns."""
    with on_root(team, lambda: whole_file(path)) as file:
        name, offsets = team.call_on_root(lambda: _lay_out(file, columns))
        sums = team.call_on_all(lambda: fill(name, columns, offsets, team, jobs, advance))
        every = team.gather(sums)
        team.call_on_root(lambda: _finish(file, columns, total(every), content))


def _open_hdf5(file: BinaryIO | None, mode: str) -> h5py.File:
    assert file  # on the root it is
    return h5py.File(
        f"/proc/self/fd/{file.fileno()}",  # its name may lead elsewhere by now
        mode,
        libver=LIBRARY,
        locking=False,
        alignment_threshold=PAGE,
        alignment_interval=PAGE,
    )


def _lay_out(new: BinaryIO | None, columns: list[Column]) -> tuple[str, list[int]]:
    """Make room for all columns in the `new` file; its name, and where each begins."""
    with _open_hdf5(new, "w") as file:
        offsets = [_allocate(file.require_group(column.split), column) for column in columns]
    assert new
    return new.name, offsets


def _finish(
    new: BinaryIO | None, columns: list[Column], sums: list[Sums], content: Content
) -> None:
    """Add checksums and attributes to the file, whose rows are there."""
    image_shape, classes, provenance, fit, moments = content
    rows: dict[str, int] = {}
    checksums: dict[str, list[np.ndarray]] = {}
    with _open_hdf5(new, "r+") as file:
        for column, found in zip(columns, sums, strict=True):
            group = file[column.split]
            data = group.create_dataset(f"{column.name}_crc32", data=found.checksums)
            data.attrs["rows_per_block"] = column.block_rows
            checksums.setdefault(column.split, []).append(found.checksums)
            if column.name == "labels":
                rows[column.split] = column.shape[0]
            if column.summed and column.split == "train":
                moments = found.values, found.squares
        assert moments is not None  # of files they are given, of pixels they were made
        pixels = rows["train"] * image_shape[0] * image_shape[1]
        mean, std = _mean_std(*moments, pixels)
        file.attrs["mean"], file.attrs["std"] = mean, std
        file.attrs["format"] = np.bytes_(FORMAT)
        file.attrs["version"] = ENCODED_VERSION if fit else VERSION
        by_split = {name: (rows[name], checksums[name]) for name in rows}
        uuid = content_uuid(image_shape, classes, by_split, fit)
        file.attrs["uuid"] = np.bytes_(uuid)
        file.attrs["classes"] = _texts(classes)
        text = json.dumps(provenance)
        file.attrs["provenance"] = np.bytes_(text)
        sha256 = facts_sha256(uuid, mean.tolist(), std.tolist(), json.loads(text))
        file.attrs["sha256"] = np.bytes_(sha256)
        if fit:
            file.attrs["encoding"] = np.bytes_(JPEG)
            file.attrs["image_shape"] = np.array(image_shape, "<i8")
            file.attrs["fit"] = np.bytes_(fit)


def _allocate(group: h5py.Group, column: Column) -> int:
    """A contiguous dataset whose bytes exist but are not written yet; its offset in the file."""
    kind = h5py.h5t.STD_U8LE if column.dtype == "u1" else h5py.h5t.STD_I64LE
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple(column.shape)
    name = column.name.encode()
    return h5py.h5d.create(group.id, name, kind, space, properties).get_offset()


def _mean_std(
    values: np.ndarray, squares: np.ndarray, pixels: int
) -> tuple[np.ndarray, np.ndarray]:
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
