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
from typing import Any

import h5py
import numpy as np

from hpctrain.data.pack_format import FORMAT, VERSION, content_uuid, ordered, rows_per_block
from hpctrain.data.packing.fill import Part, Room, Sums, fill, slices, total
from hpctrain.data.packing.pages import PAGE
from hpctrain.data.packing.team import Alone, Team, on_root
from hpctrain.files import whole_file

ALONE = Alone()
LIBRARY = ("v110", "v110")  # checksums on metadata, a mark while written, long attributes


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
        parts[name] = Part(labels, slices(images))
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
    team: Team = ALONE,
) -> None:
    """Write all parts with `jobs` threads; `advance` is told the rows of each finished block.
    Collective: every process has all parts."""
    with on_root(team, lambda: whole_file(path)) as temporary:
        name, rooms = team.from_root(lambda: _lay_out(temporary, parts, image_shape))
        sums = team.everywhere(lambda: fill(name, rooms, parts, team, jobs, advance))
        every = team.gather(sums)
        team.from_root(lambda: _finish(name, rooms, total(every), image_shape, classes, provenance))


def _open_hdf5(path: str, mode: str) -> h5py.File:
    return h5py.File(
        path,
        mode,
        libver=LIBRARY,
        locking=False,
        alignment_threshold=PAGE,
        alignment_interval=PAGE,
    )


def _lay_out(
    path: Path | None, parts: dict[str, Part], image_shape: tuple[int, int, int]
) -> tuple[str, list[Room]]:
    """Make the file at `path` with room for all rows; its name and that room."""
    rooms: list[Room] = []
    with _open_hdf5(str(path), "w") as file:
        for name in ordered(parts):
            group, rows = file.create_group(name), len(parts[name].labels)
            for kind, number, row_shape in (
                ("images", h5py.h5t.STD_U8LE, image_shape),
                ("labels", h5py.h5t.STD_I64LE, ()),
            ):
                offset = _allocate(group, kind, number, (rows, *row_shape))
                row_bytes = math.prod(row_shape) * number.get_size()
                rooms.append(Room(name, kind, offset, rows, row_bytes))
    return str(path), rooms


def _finish(
    path: str,
    rooms: list[Room],
    sums: list[Sums],
    image_shape: tuple[int, int, int],
    classes: tuple[str, ...],
    provenance: dict[str, Any],
) -> None:
    """Add checksums and attributes to the file, whose rows are there."""
    checksums = {(room.split, room.kind): s.checksums for room, s in zip(rooms, sums, strict=True)}
    content = {
        room.split: (room.rows, checksums[room.split, "images"], checksums[room.split, "labels"])
        for room in rooms
    }
    with _open_hdf5(path, "r+") as file:
        for room, room_sums in zip(rooms, sums, strict=True):
            name = f"{room.split}/{room.kind}_crc32"
            data = file.create_dataset(name, data=room_sums.checksums)
            data.attrs["rows_per_block"] = rows_per_block(room.row_bytes)
            if (room.split, room.kind) == ("train", "images"):
                pixels = room.rows * image_shape[0] * image_shape[1]
                file.attrs["mean"], file.attrs["std"] = _mean_std(room_sums, pixels)
        file.attrs["format"] = np.bytes_(FORMAT)
        file.attrs["version"] = VERSION
        file.attrs["uuid"] = np.bytes_(content_uuid(image_shape, classes, content))
        file.attrs["classes"] = _texts(classes)
        file.attrs["provenance"] = np.bytes_(json.dumps(provenance))


def _allocate(group: h5py.Group, name: str, number: h5py.h5t.TypeID, shape: tuple[int, ...]) -> int:
    """A contiguous dataset whose bytes exist but are not written yet; its offset in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    return h5py.h5d.create(group.id, name.encode(), number, space, properties).get_offset()


def _mean_std(sums: Sums, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Per channel mean and standard deviation (of the population) in [0, 1]: two (C,) float64."""
    mean, std = [], []
    for value, square in zip(sums.values.tolist(), sums.squares.tolist(), strict=True):
        mean.append(value / (255 * pixels))
        std.append(math.sqrt(pixels * square - value**2) / (255 * pixels))  # integers: exact
    return np.array(mean), np.array(std)


def _texts(names: tuple[str, ...]) -> np.ndarray:
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    return np.array(encoded, h5py.string_dtype("utf-8", max(len(name) for name in encoded)))
