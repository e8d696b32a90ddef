"""A cache of samples between a split and its batches.

If all samples that the rank may read fit into memory, they are read once and kept. Otherwise
``--shuffle blocks`` reads windows: the next window of every shard is read while the current one is
used, also across the end of an epoch. Other orders read each sample when it is needed. Images are
kept decoded; for random crops, which differ in every epoch, the JPEG files are kept instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.data.orders import BlockOrder, Order
from hpctrain.data.split import Split

if TYPE_CHECKING:
    from hpctrain.data.jpeg import Crop

WindowKey = tuple[int, int, int]  # epoch, shard, number of the window


def sample_bytes(split: Split, files: bool) -> int:
    """Return the bytes that a cached sample takes: its image, or a JPEG file on average."""
    return split.file_bytes() if files else math.prod(split.image_shape) * split.dtype.itemsize


class SampleCache:
    """Reads the samples of consecutive shards in a given order, with a cache of `max_bytes`."""

    def __init__(
        self,
        split: Split,
        order: Order,
        shards: range,
        max_bytes: int,
        files: bool = False,
        epochs: int = 0,
    ) -> None:
        """With `files`, keep undecoded files. Windows of epochs >= `epochs` are not prefetched."""
        self._split, self._order, self._files, self._epochs = split, order, files, epochs
        self._first, self._kept = 0, None
        reach = order.reach(shards)
        split.hold(reach)
        if len(reach) * sample_bytes(split, files) <= max_bytes:
            self._first = reach.start
            self._kept = self._load(np.arange(reach.start, reach.stop))
        self._windows: dict[WindowKey, Future[np.ndarray]] = {}
        self._thread = ThreadPoolExecutor(1, "windows")

    def gather(
        self, epoch: int, shard: int, first: int, out: np.ndarray, crops: Sequence[Crop] | None
    ) -> np.ndarray:
        """Read a shard's samples from position `first` of its epoch on into `out` (n, H, W, C).

        With `crops` (n,), a crop of each is read. Returns their indices in the split, (n,) int64.
        """
        if self._kept is None and isinstance(self._order, BlockOrder):
            return self._gather_windows(self._order, epoch, shard, first, out, crops)
        indices = self._order.samples(epoch, shard, first, len(out))
        if self._kept is None:
            self._split.gather(indices, out, crops)
        else:
            self._take(self._kept, indices - self._first, indices, out, crops)
        return indices

    def close(self) -> None:
        """End the prefetching thread."""
        self._thread.shutdown(cancel_futures=True)
        self._windows.clear()

    def _take(
        self,
        kept: np.ndarray,
        places: np.ndarray,
        indices: np.ndarray,
        out: np.ndarray,
        crops: Sequence[Crop] | None,
    ) -> None:
        """Copy or decode the samples `indices` (n,), cached at `places` (n,), into `out`."""
        if self._files:
            self._split.gather(indices, out, crops, kept[places])
        else:
            np.take(kept, places, axis=0, out=out, mode="clip")

    def _gather_windows(
        self,
        order: BlockOrder,
        epoch: int,
        shard: int,
        first: int,
        out: np.ndarray,
        crops: Sequence[Crop] | None,
    ) -> np.ndarray:
        """Implement `gather` with windows, of which a shard has at most two in memory."""
        done, found = 0, []
        for window, places in order.windows(epoch, shard, first, len(out)):
            chosen, part = window.order(places), slice(done, done + len(places))
            found.append(window.samples[chosen])
            self._take(
                self._read_window(
                    order, epoch, shard, window.number
                ),  # not assigned to a name, which would keep it alive too long
                chosen,
                found[-1],
                out[part],
                crops[part] if crops else None,
            )
            done += len(places)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _read_window(self, order: BlockOrder, epoch: int, shard: int, number: int) -> np.ndarray:
        """Return the samples of a window in reading order, and free the windows before it."""
        following = (epoch, shard, number + 1)
        if number + 1 == order.count(shard):
            following = (epoch + 1, shard, 0)
        wanted = [(epoch, shard, number)]
        wanted += [following] if following[0] < max(self._epochs, epoch + 1) else []
        for key in [k for k in self._windows if k[1] == shard and k not in wanted]:
            del self._windows[key]
        for key in wanted:
            if key not in self._windows:
                self._windows[key] = self._thread.submit(self._load, order.window(*key).samples)
        return self._windows[wanted[0]].result()

    def _load(self, indices: np.ndarray) -> np.ndarray:
        shape = () if self._files else self._split.image_shape
        dtype = np.dtype(object) if self._files else self._split.dtype
        return self._split.gather(indices, np.empty((len(indices), *shape), dtype))
