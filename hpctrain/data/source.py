"""Where rows come from, and how they reach a batch's buffer.

A `Source` gives the rows of one split, whatever the file: ``packed.Rows`` reads a pack by byte
offset, ``encoded.Encoded`` decodes JPEG files. A `Reader` fills the loader's buffer with the rows
at some places of an epoch, by an `Order`: row by row, or by windows that are read ahead in long
runs. It handles whatever a `Stored` holds: images, or files that are decoded later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hpctrain.data.bad_rows import BadRows
from hpctrain.data.orders import Blocks, Order


class Stored(Protocol):
    """Rows of one split, as they are read: images, or (of shape ()) the bytes of files."""

    labels: np.ndarray  # (N,) int64
    dtype: np.dtype  # of images: uint8, or floats that are used as they are

    @property
    def image_shape(self) -> tuple[int, ...]: ...  # (H, W, C) or ()

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """The rows `indices` (n,), in that order, into `out` (n, H, W, C) of `dtype`; returns it.
        Thread-safe. RunError where they cannot be read.
        """


class Source(Stored, Protocol):
    """Images of one split."""

    bad: BadRows  # those met so far; what `gather` gives of them has no meaning

    @property
    def image_shape(self) -> tuple[int, int, int]: ...  # (H, W, C)


@runtime_checkable
class Croppable(Source, Protocol):
    """Images that are made of files as they are read, and so can be parts of what a file holds."""

    @property
    def files(self) -> Stored: ...

    def decode(
        self, files: np.ndarray, rows: np.ndarray, out: np.ndarray, least: float, key: int
    ) -> np.ndarray:
        """A random part of each of the `files` (n,) of `rows` (n,) into `out` (n, H, W, C), of at
        least the share `least` of its area, by `key` and its place; returns `out`.
        """


class Opened(Source, Protocol):
    """A source that is closed by leaving a ``with`` block."""

    def extent(self, rows: range) -> tuple[int, int]:
        """Where these rows lie among the bytes of the split's images: first, and after the last."""

    def close(self) -> None:
        """Close the file; labels stay."""

    def __enter__(self) -> Opened: ...

    def __exit__(self, *error: Any) -> None: ...


class Resident:
    """Consecutive rows of a split, read once and kept in memory."""

    def __init__(self, source: Stored, first: int, count: int) -> None:
        self.labels, self.image_shape, self.dtype = source.labels, source.image_shape, source.dtype
        self._first = first
        self._images = np.empty((count, *source.image_shape), source.dtype)  # (n, H, W, C)
        source.gather(np.arange(first, first + count), self._images)

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the rows `indices` (n,), counted as in the split, into `out` (n, H, W, C)."""
        return np.take(self._images, indices - self._first, axis=0, out=out, mode="clip")


class Reader(Protocol):
    """Fills a buffer with the rows of a shard's step."""

    def read(self, epoch: int, shard: int, first: int, out: np.ndarray) -> np.ndarray:
        """The rows at the places first ... of the shard's epoch into `out` (n, H, W, C); their
        numbers in the split, (n,) int64.
        """

    def close(self) -> None:
        """End what runs in the background."""


class RowByRow:
    """Reads the rows that are asked for, wherever they lie."""

    def __init__(self, source: Stored, order: Order) -> None:
        self.source, self.order = source, order

    def read(self, epoch: int, shard: int, first: int, out: np.ndarray) -> np.ndarray:
        """The rows at the places first ... of the shard's epoch into `out` (n, H, W, C)."""
        rows = self.order.rows(epoch, shard, first, len(out))
        self.source.gather(rows, out)
        return rows

    def close(self) -> None:
        """Nothing runs in the background."""


class ByWindow:
    """Reads windows of long runs, the next one of every shard while this one is used."""

    def __init__(self, source: Stored, order: Blocks, shards: Sequence[int]) -> None:
        self.source, self.order = source, order
        self._windows: dict[tuple[int, int, int], Future[np.ndarray]] = {}
        self._thread = ThreadPoolExecutor(1, "windows")

    def read(self, epoch: int, shard: int, first: int, out: np.ndarray) -> np.ndarray:
        """The rows at the places first ... of the shard's epoch into `out` (n, H, W, C)."""
        done, found = 0, []
        for window, places in self.order.windows(epoch, shard, first, len(out)):
            chosen = window.order(places)
            images = self._images(epoch, shard, window.number)
            np.take(images, chosen, axis=0, out=out[done : done + len(chosen)], mode="clip")
            found.append(window.rows[chosen])
            done += len(chosen)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._thread.shutdown(cancel_futures=True)
        self._windows.clear()

    def _images(self, epoch: int, shard: int, number: int) -> np.ndarray:
        """The rows of a window, in the order of reading; those before it are forgotten."""
        for key in [k for k in self._windows if k[1] == shard and k[::2] != (epoch, number)]:
            if key[::2] != (epoch, number + 1):
                del self._windows[key]
        found = self._begin(epoch, shard, number).result()
        if number + 1 < self.order.count(shard):
            self._begin(epoch, shard, number + 1)
        return found

    def _begin(self, epoch: int, shard: int, number: int) -> Future[np.ndarray]:
        key = (epoch, shard, number)
        if key not in self._windows:
            rows = self.order.rows_of(epoch, shard, number)
            self._windows[key] = self._thread.submit(self._load, rows)
        return self._windows[key]

    def _load(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self.source.image_shape), self.source.dtype)
        return self.source.gather(rows, out)


def as_kept(source: Source, random_crop: float) -> Stored:
    """What readers read ahead and keep: images, or for random parts of them their files."""
    return source.files if random_crop and isinstance(source, Croppable) else source


def held_bytes(source: Stored) -> int:
    """Memory that a row takes; of files, which differ, the mean."""
    pixels = math.prod(source.image_shape) * source.dtype.itemsize
    return int(getattr(source, "row_bytes", pixels))


def make_reader(source: Stored, order: Order, shards: range, buffer: int) -> Reader:
    """How these shards read: rows that they may reach and that fit into `buffer` bytes are kept in
    memory; else windows are read ahead, or single rows.
    """
    reach = order.reach(shards)
    if len(reach) * held_bytes(source) <= buffer:
        return RowByRow(Resident(source, reach.start, len(reach)), order)
    if isinstance(order, Blocks):
        return ByWindow(source, order, shards)
    return RowByRow(source, order)
