"""Load the batches of one rank: they are read and augmented in the background.

A thread (never a forked process: MPI is running) gathers the samples of the next steps into a
reused buffer and makes the network's input of them. On a GPU this overlaps with the kernels of
training (streams.py). The thread continues across the end of an epoch: the content of a batch is a
pure function of (seed, epoch, step, shard).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from hpctrain.cores import make_pool
from hpctrain.data.orders import BlockOrder, Order
from hpctrain.data.partition import random_key
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.split import Bad, Split, describe_first
from hpctrain.errors import RunError
from hpctrain.streams import Event, Upload, copy_to_device, start_thread

CPU = torch.device("cpu")
AHEAD = 3  # steps that are prefetched
HEAD_START = 0.002  # seconds
READ_BUFFER = 256 << 20  # bytes
PIECE_ROWS = 1 << 14  # kept samples read at a time: each takes 100 bytes more then

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Batch:
    """The samples of one shard in one step."""

    shard: int
    images: torch.Tensor  # (m_j, C, H, W)
    targets: torch.Tensor  # (m_j, ...): of the split, or what the pipeline's stage makes of them
    key: int  # for the random numbers of this step and shard


class Kept(NamedTuple):
    """Samples that are kept in memory, those of a window or all."""

    images: np.ndarray  # (n, H, W, C), as they are stored
    targets: np.ndarray  # (n, ...)


# the batches of a step, the event after which they are ready, and the samples that are not usable
Ready = tuple[list[Batch], Event, Bad]


def read_images(split: Split, indices: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Read the images of these samples of a split, as they are stored, (n, H, W, C)."""
    images = np.empty((len(indices), *split.image_shape), split.dtype)
    split.gather(np.asarray(indices), images)
    return torch.from_numpy(images)


def read_samples(
    split: Split, indices: Sequence[int] | np.ndarray, pipeline: Pipeline | None = None
) -> torch.Tensor:
    """Read these samples of a split as the network's input, (n, C, H, W).

    `pipeline` makes it of the images; None = float32 in [0, 1] on the CPU.
    """
    return (pipeline or Pipeline()).inputs(read_images(split, indices), divisor=split.divisor)


class Prefetcher(Iterator[Made]):
    """Iterate over `make(item)` for each item, computed in order by a thread, `count` items ahead.

    If the next result is ready, the thread first leaves the interpreter to the consumer for
    `head_start` seconds, so that later work does not delay the kernels of the current step. An
    error is raised in place of the result of its item, and ends the iteration. `device` is the
    thread's current one.

    Not a generator: Python closes those wherever it collects garbage, and to wait for a thread
    there can deadlock, for example inside ``Thread.start``.
    """

    def __init__(
        self,
        make: Callable[[Item], Made],
        items: Iterable[Item],
        count: int = 1,
        head_start: float = 0.0,
        device: torch.device = CPU,
    ) -> None:
        self._make = make
        self._items = iter(items)
        self._count = count
        self._head_start = head_start
        self._wanted = threading.Event()
        self._waiting: deque[Future[Made]] = deque()
        self._thread = start_thread("prefetch", device)

    def __next__(self) -> Made:
        for item in islice(self._items, self._count + 1 - len(self._waiting)):
            self._waiting.append(self._thread.submit(self._work, item))
        if not self._waiting:
            self.close()
            raise StopIteration
        if not self._waiting[0].done():
            self._wanted.set()
        try:
            return self._waiting[0].result()  # unnamed: a reference would keep its memory too long
        except BaseException:
            self.close()
            raise
        finally:
            if self._waiting:
                self._waiting.popleft()
            self._wanted.clear()

    def close(self) -> None:
        """End the iteration and the thread, and wait for it; needed after stopping early."""
        self._items = iter(())
        self._wanted.set()
        self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _work(self, item: Any) -> Made:
        is_ready = self._waiting and self._waiting[0].done()
        self._wanted.wait(self._head_start if is_ready else 0.0)
        return self._make(item)


class ReadOptions(NamedTuple):
    """How a loader reads images."""

    read_buffer: int = READ_BUFFER  # bytes; samples that fit are read once and kept
    random_crop: float = 0.0  # least share of an image's area in its random crops; 0 = all of it
    device: torch.device | str = "cpu"  # equal to the pipeline's


class Loader:
    """Loads the batches of the shards that are assigned to this rank.

    All samples that the shards may read are read once and kept, if they fit into the read buffer.
    Otherwise a `BlockOrder` reads windows: the next one of every shard while one is used. Other
    orders, and random crops of JPEG files, read each sample when it is needed. Random crops of
    stored pixels are made of what was read.
    """

    def __init__(
        self,
        split: Split,
        order: Order,
        shards: Sequence[int],
        pipeline: Pipeline | None = None,
        epochs: int = 0,
        options: ReadOptions = ReadOptions(),  # noqa: B008
    ) -> None:
        """Read consecutive `shards` of `split` in an `order`, which holds partition and seed.

        `pipeline` makes inputs and targets; None = images as float32 in [0, 1] on the CPU, and
        targets. `epochs` is their number: the first steps of the next one are prefetched before one
        ends.
        """
        self.split = split
        self.order = order
        self.partition = order.partition
        self.pipeline = pipeline or Pipeline()
        self.epochs = epochs
        self._options = options
        self._decodes_crops = bool(options.random_crop and split.pack.fit)
        self.shards = range(shards[0], shards[-1] + 1)
        self._prefetch: Prefetcher[Ready] | None = None
        # The epoch and step that it yields next, between two epochs.
        self._following: tuple[int, int] | None = None
        self._thread = make_pool(1, "windows")
        self._windows: dict[tuple[int, int, int], Future[Kept]] = {}
        self._bad = Bad()  # unusable ones among all samples that were read
        count = sum(self.partition.shares[j] for j in shards)
        self._upload = Upload((count, *split.image_shape), split.dtype, options.device)

    def close(self) -> None:
        """End the reading threads and free all that they have read. The next epoch starts anew."""
        self._end_prefetch()
        self._thread.shutdown(cancel_futures=True)
        self._thread = make_pool(1, "windows")
        self._windows = {}
        self.__dict__.pop("_kept", None)

    def epoch(
        self, epoch: int, first_step: int = 0, bad: Bad | None = None
    ) -> Iterator[list[Batch]]:
        """Yield the steps of an epoch from `first_step` on: each is a batch per shard with samples.

        Samples of a step that are corrupt or not finite are described in `bad` before it is
        yielded; without it, RunError is raised. Other errors of the reading thread are raised here.
        It ends if the iterator is closed early; else it continues with the next epoch.
        """
        if self._prefetch is None or self._following != (epoch, first_step):
            self._end_prefetch()
            places = (
                (number, step)
                for number in range(epoch, max(self.epochs, epoch + 1))
                for step in range(first_step if number == epoch else 0, self.partition.steps)
            )
            device = self._upload.device
            self._prefetch = Prefetcher(self._read_step, places, AHEAD, HEAD_START, device)
        prefetch = self._prefetch
        steps = self.partition.steps
        self._following = None
        reads_on = False
        try:
            for step in range(first_step, steps):
                batches, ready, unusable = next(prefetch)
                if bad is not None:
                    bad |= unusable
                elif text := describe_first([unusable]):
                    raise RunError(text)
                self._upload.take(ready, [t for b in batches for t in (b.images, b.targets)])
                if step + 1 == steps and epoch + 1 < self.epochs:
                    self._following = (epoch + 1, 0)
                    reads_on = True
                yield batches
        finally:
            if not reads_on and self._prefetch is prefetch:
                self._end_prefetch()

    def _end_prefetch(self) -> None:
        if self._prefetch:
            self._prefetch.close()
            self._prefetch = None

    def _read_step(self, place: tuple[int, int]) -> Ready:
        """Make the batches of (epoch, step): all images are uploaded in one copy."""
        epoch, step = place
        counts = {j: n for j in self.shards if (n := self.partition.count(step, j))}
        images = self._upload.buffer(sum(counts.values()))
        done = 0
        keys: list[int] = []
        parts = [np.empty(0, np.int64)]
        kept: list[np.ndarray] = []  # targets
        for shard, count in counts.items():
            key = random_key(self.order.seed, "batch", epoch, step, shard)
            first = epoch, shard, step * self.partition.shares[shard]
            indices, targets = self._read(first, key, images[done : done + count])
            parts.append(indices)
            if targets is not None:
                kept.append(targets)
            keys.append(key)
            done += count
        samples = np.concatenate(parts)
        if kept:
            on_host = torch.from_numpy(np.concatenate(kept))
        else:
            on_host = torch.from_numpy(self.split.read_targets(samples, self._bad))
        bad = Bad()
        if self._bad:
            bad |= {index: self._bad[index] for index in self._bad.keys() & {*samples.tolist()}}

        def make(images: torch.Tensor) -> list[Batch]:
            sizes = [*counts.values()]
            divisor = self.split.divisor
            uploaded = copy_to_device(on_host, images.device)
            parts = zip(counts, keys, images.split(sizes), uploaded.split(sizes), strict=True)
            return [
                Batch(shard, *self.pipeline.make(stored, targets_of, key, divisor), key)
                for shard, key, stored, targets_of in parts
            ]

        batches = self._upload.make(done, make) if done else []
        return batches, self._upload.record_event(), bad

    @cached_property
    def _kept(self) -> Kept | None:
        """All samples that the shards may read, if they fit into the read buffer."""
        reach = self.order.reach(self.shards)
        self.split.hold(reach)
        size = len(reach) * self.split.pack.sample_bytes
        if self._decodes_crops or size > self._options.read_buffer:
            return None
        return self._load(np.arange(reach.start, reach.stop))

    def _read(
        self, place: tuple[int, int, int], key: int, out: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Read samples of a shard; return their indices, (n,) int64, and their targets, (n, ...).

        Targets that are not kept are None. The images are read into `out` (n, H, W, C). `place`:
        epoch, shard, and the position of the first one in the shard's epoch.
        """
        least_share = self._options.random_crop
        if not least_share:
            return self._read_whole(place, out)
        from hpctrain.data.images import draw_crops  # imports Pillow

        crops = draw_crops(least_share, len(out), random_key(key, "crop"))
        if self._decodes_crops:
            indices = self.order.samples(*place, len(out))
            self.split.gather(indices, out, crops, bad=self._bad)
            return indices, None
        read = self._read_whole(place, out)
        self.split.crop(out, crops)
        return read

    def _read_whole(
        self, place: tuple[int, int, int], out: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Implement `_read` without random crops."""
        order = self.order
        if self._kept is None and isinstance(order, BlockOrder):
            return self._read_windows(order, place, out)
        indices = order.samples(*place, len(out))
        if self._kept is not None:
            places = indices - order.reach(self.shards).start
            return indices, self._take(self._kept, places, out)
        self.split.gather(indices, out, bad=self._bad)
        return indices, None

    def _take(self, kept: Kept, places: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the images at these places (n,) into `out`, and return their targets, (n, ...)."""
        np.take(kept.images, places, axis=0, out=out, mode="clip")
        return kept.targets[places]

    def _read_windows(
        self, order: BlockOrder, place: tuple[int, int, int], out: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Implement `_read` with windows, of which a shard has at most two in memory."""
        epoch, shard, first = place
        done = 0
        indices = []
        targets = []
        for window, places in order.windows(epoch, shard, first, len(out)):
            chosen = window.order(places)
            part = out[done : done + len(places)]
            # The window is not assigned to a name, which would keep it alive too long.
            key = epoch, shard, window.number
            targets.append(self._take(self._window(order, *key), chosen, part))
            indices.append(window.samples[chosen])
            done += len(places)
        return np.concatenate(indices), np.concatenate(targets)

    def _window(self, order: BlockOrder, epoch: int, shard: int, number: int) -> Kept:
        """Return the samples of a window in reading order, and free the windows before it."""
        is_last = number + 1 == order.count(shard)
        keys = [(epoch, shard, number)]
        if not is_last:
            keys.append((epoch, shard, number + 1))
        elif epoch + 1 < self.epochs:
            keys.append((epoch + 1, shard, 0))
        for key in [k for k in self._windows if k[1] == shard and k not in keys]:
            del self._windows[key]
        for key in keys:
            if key not in self._windows:
                self._windows[key] = self._thread.submit(self._load, order.window(*key).samples)
        return self._windows[keys[0]].result()

    def _load(self, indices: np.ndarray) -> Kept:
        images = np.empty((len(indices), *self.split.image_shape), self.split.dtype)
        for start in range(0, len(indices), PIECE_ROWS):
            part = slice(start, start + PIECE_ROWS)
            self.split.gather(indices[part], images[part], bad=self._bad)
        return Kept(images, self.split.read_targets(indices, self._bad))
