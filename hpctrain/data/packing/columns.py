"""The datasets that ``pack`` writes: which rows they take, and what gives those rows.

Of every split these are its pixels and labels, or its JPEG files, their offsets and labels
(``pack_format.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, NamedTuple

import numpy as np

from hpctrain.data.pack_format import ordered, rows_per_block
from hpctrain.data.packing.team import Team, part
from hpctrain.data.pread import gather_rows, read_exactly

Fetch = Callable[[int, int], np.ndarray]  # rows start to stop, C-contiguous


class Column(NamedTuple):
    """A dataset to write: uint8 or int64 by its `dtype`."""

    split: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Fetch
    images: Callable[[int, int], int] | None = None  # how many end in rows start to stop
    summed: bool = False  # whether its values are summed by channel

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def block_rows(self) -> int:
        """Rows that share a checksum."""
        return rows_per_block(self.row_bytes)


class Placed(NamedTuple):
    """One split to write, (n,) each: labels, and where its images lie in the scratch file."""

    labels: np.ndarray
    places: np.ndarray  # rows of pixels, or first bytes of files
    sizes: np.ndarray | None = None  # bytes of files


def pixel_columns(
    split: str, labels: np.ndarray, image_shape: tuple[int, int, int], fetch: Fetch
) -> list[Column]:
    """A split of (n, H, W, C) uint8 pixels that `fetch` gives, and its labels (n,)."""
    shape = (len(labels), *image_shape)
    images = Column(split, "images", "u1", shape, fetch, lambda start, stop: stop - start, True)
    return [images, _numbers(split, "labels", labels)]


def file_columns(split: str, placed: Placed, store: BinaryIO) -> list[Column]:
    """A split of JPEG files, which lie in the scratch file, their offsets and their labels."""
    assert placed.sizes is not None
    offsets = np.zeros(len(placed.labels) + 1, np.int64)
    np.cumsum(placed.sizes, out=offsets[1:])

    def ended(start: int, stop: int) -> int:
        return int(np.diff(np.searchsorted(offsets[1:], (start, stop), side="right"))[0])

    fetch = _file_bytes(store, placed.places, offsets)
    return [
        Column(split, "bytes", "u1", (int(offsets[-1]),), fetch, ended),
        _numbers(split, "offsets", offsets),
        _numbers(split, "labels", placed.labels),
    ]


def stored_columns(
    parts: dict[str, Placed], image_shape: tuple[int, int, int], store: BinaryIO
) -> list[Column]:
    """All splits, whose images lie in the scratch file."""
    columns: list[Column] = []
    for split in ordered(parts):
        placed = parts[split]
        if placed.sizes is not None:
            columns += file_columns(split, placed, store)
        else:
            fetch = _pixel_rows(store, placed.places, image_shape)
            columns += pixel_columns(split, placed.labels, image_shape, fetch)
    return columns


def image_counts(columns: list[Column], team: Team) -> tuple[int, int]:
    """The images of all columns, and how many of them end in blocks of this process."""
    total = own = 0
    for column in columns:
        if column.images:
            rows, step = column.shape[0], column.block_rows
            blocks = part(-(-rows // step), team)
            total += column.images(0, rows)
            own += column.images(min(blocks.start * step, rows), min(blocks.stop * step, rows))
    return total, own


def slices(rows: np.ndarray) -> Fetch:
    """Reads rows of an array."""
    return lambda start, stop: np.ascontiguousarray(rows[start:stop])


def _numbers(split: str, name: str, values: np.ndarray) -> Column:
    return Column(split, name, "<i8", values.shape, slices(np.ascontiguousarray(values, "<i8")))


def _pixel_rows(store: BinaryIO, places: np.ndarray, shape: tuple[int, int, int]) -> Fetch:
    """Reads the rows at `places` (n,) of the scratch file as if they lay in that order."""

    def fetch(start: int, stop: int) -> np.ndarray:
        block = np.empty((stop - start, *shape), np.uint8)
        data = block.data.cast("B")
        gather_rows("the scratch file", store.fileno(), 0, places[start:stop], data)
        return block

    return fetch


def _file_bytes(store: BinaryIO, places: np.ndarray, offsets: np.ndarray) -> Fetch:
    """Reads bytes of the files that begin at `places` (n,) as if they lay in that order."""

    def fetch(start: int, stop: int) -> np.ndarray:
        block = np.empty(stop - start, np.uint8)
        first, last = np.searchsorted(offsets, (start, stop - 1), side="right") - 1
        for i in range(first, last + 1):
            begin, end = max(start, int(offsets[i])), min(stop, int(offsets[i + 1]))
            place = int(places[i]) + begin - int(offsets[i])
            data = block[begin - start : end - start].data
            read_exactly("the scratch file", store.fileno(), [data], place)
        return block

    return fetch
