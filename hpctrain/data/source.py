"""Where rows come from, and how they reach a batch's buffer.

A `Source` gives the rows of one split, whatever the file: ``packed.Rows`` reads a pack by byte
offset. A `Reader` fills the loader's buffer with the rows at some places of an epoch, by an
`Order`: row by row, or by windows that are read ahead in long runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from hpctrain.data.orders import Blocks, Order


class Source(Protocol):
    """Rows of one split."""

    labels: np.ndarray  # (N,) int64
    dtype: np.dtype  # of images: uint8, or floats that are used as they are

    @property
    def image_shape(self) -> tuple[int, int, int]: ...  # (H, W, C)

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """The rows `indices` (n,), in that order, into `out` (n, H, W, C) of `dtype`; returns it.
        Thread-safe. RunError where they cannot be read.
        """


class Opened(Source, Protocol):
    """A source that is closed by leaving a ``with`` block."""

    def __enter__(self) -> Opened: ...

    def __exit__(self, *error: Any) -> None: ...


class Resident:
    """Consecutive rows of a split, read once and kept in memory."""

    def __init__(self, source: Source, first: int, count: int) -> None:
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

    def __init__(self, source: Source, order: Order) -> None:
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

    def __init__(self, source: Source, order: Blocks, shards: Sequence[int]) -> None:
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


def make_reader(source: Source, order: Order, shards: range, buffer: int) -> Reader:
    """How these shards read: rows that they may reach and that fit into `buffer` bytes are kept in
    memory; else windows are read ahead, or single rows.
    """
    reach = order.reach(shards)
    row_bytes = int(np.prod(source.image_shape)) * source.dtype.itemsize
    if len(reach) * row_bytes <= buffer:
        return RowByRow(Resident(source, reach.start, len(reach)), order)
    if isinstance(order, Blocks):
        return ByWindow(source, order, shards)
    return RowByRow(source, order)
