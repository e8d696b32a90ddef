"""Load the batches of one rank: they are read and augmented in the background.

A thread (never a forked process: MPI is running) gathers the samples of the next steps into a
reused buffer and makes the network's input of them, so that a batch is ready before it is needed.
On a GPU this overlaps with the kernels of training (streams.py). The thread continues across the
end of an epoch: the content of a batch is a pure function of (seed, epoch, step, shard).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from hpctrain.data.augment import Augmentation, augment, to_input
from hpctrain.data.cache import SampleCache
from hpctrain.data.orders import Order
from hpctrain.data.partition import Partition, random_key
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.streams import Event, Upload, copy_to_device

AHEAD = 3  # steps that are prefetched
HEAD_START = 0.002  # seconds
READ_BUFFER = 256 << 20  # bytes

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Batch:
    """The samples of one shard in one step."""

    shard: int
    images: torch.Tensor  # (m_j, C, H, W)
    targets: torch.Tensor  # labels (m_j,) int64, or the targets that `pair` returns
    key: int  # for the random numbers of this step and shard


Part = tuple[np.ndarray, int]  # samples of a split (n,), and the key for their random numbers
Ready = tuple[list[Batch], Event]  # the batches of a step, and the event after which they are ready
# images (m_j, H, W, C) and the key for their random numbers -> network input (m_j, C, H, W),
# a copy: the memory of the images is reused for the next batch
Prepare = Callable[[torch.Tensor, int], torch.Tensor]
# network input, labels (m_j,) and the key -> input and target
Pair = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def make_prepare(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    scaling: Sequence[torch.Tensor | Sequence[float]] | None = None,
    augmentation: Augmentation = Augmentation(),  # noqa: B008
) -> Prepare:
    """Return a function that augments images and scales them to the network's input on `device`.

    `scaling` is the mean and standard deviation per channel, (C,) each; None = values in [0, 1].
    """
    mean, std = (torch.as_tensor(v).to(device) for v in scaling) if scaling else (None, None)

    def prepare(images: torch.Tensor, key: int) -> torch.Tensor:
        images = augment(images.to(device), augmentation, random_key(key, "augment"))
        return to_input(images, mean, std, dtype, channels_last)

    return prepare


def read_samples(
    split: Split, indices: Sequence[int] | np.ndarray, prepare: Prepare | None = None
) -> torch.Tensor:
    """Read these samples of a split as the network's input, (n, C, H, W), without augmentation.

    `prepare` converts the images; None = to float32 in [0, 1] on the CPU.
    """
    images = np.empty((len(indices), *split.image_shape), split.dtype)  # (n, H, W, C)
    split.gather(np.asarray(indices), images)
    return (prepare or make_prepare())(torch.from_numpy(images), 0)


def make_pairs(
    upload: Upload, split: Split, parts: Sequence[Part], prepare: Prepare, pair: Pair
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the input and target of each part on the device.

    The images of all parts are in the buffer of `upload`, one part after the other. They are
    uploaded in one copy, and their labels in another.
    """
    sizes = [len(indices) for indices, _ in parts]
    labels = torch.from_numpy(split.read_labels(np.concatenate([part for part, _ in parts])))

    def work(images: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        targets_of = copy_to_device(labels, images.device).split(sizes)
        own = zip(parts, images.split(sizes), targets_of, strict=True)
        return [pair(prepare(rows, key), targets, key) for (_, key), rows, targets in own]

    return upload.make(sum(sizes), work)


class Ahead(Iterator[Made]):
    """Iterate over `make(item)` for each item, computed in order by a thread, `count` items ahead.

    If the next result is ready, the thread first leaves the interpreter to the consumer for
    `head_start` seconds, so that work for a later step does not delay the kernels of the current
    one. An error is raised in place of the result of its item, and ends the iteration.

    This is no generator, because Python closes those at any place where it collects garbage. To
    wait for a thread there can deadlock, for example inside ``Thread.start``.
    """

    def __init__(
        self,
        make: Callable[[Item], Made],
        items: Iterable[Item],
        count: int = 1,
        head_start: float = 0.0,
    ) -> None:
        self._make, self._items, self._count = make, iter(items), count
        self._head_start, self._wanted = head_start, threading.Event()
        self._waiting: deque[Future[Made]] = deque()
        self._thread = ThreadPoolExecutor(1, "ahead")

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
        """End the iteration and the thread, and wait for it. The iteration's owner has to call it
        if it stops early.
        """
        self._items = iter(())
        self._wanted.set()
        self._thread.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _work(self, item: Any) -> Made:
        is_ready = self._waiting and self._waiting[0].done()
        self._wanted.wait(self._head_start if is_ready else 0.0)
        return self._make(item)


class Loader:
    """Loads the batches of the shards that are assigned to this rank."""

    def __init__(
        self,
        split: Split,
        partition: Partition,
        shards: Sequence[int],
        seed: int = 0,
        prepare: Prepare | None = None,
        pair: Pair | None = None,
        order: Order | None = None,
        read_buffer: int = READ_BUFFER,
        random_crop: float = 0.0,
        device: torch.device | str = "cpu",
        epochs: int = 0,
    ) -> None:
        """Read consecutive `shards` of `partition` from `split`.

        `prepare` converts images, on `device`, to the network's input; None = to float32 in [0, 1]
        on the CPU. `pair` turns that and the labels into input and target; None = unchanged.
        `order` is the order of the samples; None = a new order of each shard's own samples in every
        epoch. The cache of samples takes at most `read_buffer` bytes; if all fit, they are read
        once. With `random_crop`, every image is a random crop of its file with at least that share
        of the area; raises UsageError unless the samples are JPEG files. `epochs` is the number of
        epochs; the first steps of the next epoch are prefetched before one ends.
        """
        if random_crop and not split.pack.encoded:
            raise UsageError(
                "--random-crop cuts image files as they are decoded, but this split holds pixels:"
                " pack with --encoding jpeg"
            )
        self.split, self.partition, self.epochs = split, partition, epochs
        self.seed, self.prepare = seed, prepare or make_prepare()
        self.pair = pair or (lambda images, labels, key: (images, labels))
        self.order = order or Order(partition, seed)
        self._read_buffer, self._random_crop = read_buffer, random_crop
        self._prefetch: Ahead[Ready] | None = None
        # The epoch and step that it yields next, between two epochs.
        self._following: tuple[int, int] | None = None
        self._cache: SampleCache | None = None
        self.shards = range(shards[0], shards[-1] + 1)
        count = sum(partition.shares[j] for j in shards)
        self._upload = Upload((count, *split.image_shape), split.dtype, device)

    def close(self) -> None:
        """End the reading thread and free all that it has read. The next epoch starts a new one."""
        self._end_prefetch()
        if self._cache:
            self._cache.close()
            self._cache = None

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the steps of an epoch from `first_step` on: each is a batch per shard with samples.

        Errors of the reading thread (such as a truncated file) are raised here. At the end of an
        epoch the thread continues with the next one, if any; if the iterator is closed early, the
        thread ends.
        """
        if self._prefetch is None or self._following != (epoch, first_step):
            self._end_prefetch()
            steps_from = self._steps_from(epoch, first_step)
            self._prefetch = Ahead(self._read_step, steps_from, AHEAD, HEAD_START)
        prefetch, steps = self._prefetch, self.partition.steps
        self._following, reads_on = None, False
        try:
            for step in range(first_step, steps):
                batches, made = next(prefetch)
                self._upload.take(made, [t for b in batches for t in (b.images, b.targets)])
                if step + 1 == steps and epoch + 1 < self.epochs:
                    self._following, reads_on = (epoch + 1, 0), True
                yield batches
        finally:
            if not reads_on and self._prefetch is prefetch:
                self._end_prefetch()

    def _end_prefetch(self) -> None:
        if self._prefetch:
            self._prefetch.close()
            self._prefetch = None

    def _steps_from(self, epoch: int, first_step: int) -> Iterator[tuple[int, int]]:
        """Yield (epoch, step) of the steps that the thread reads."""
        for number in range(epoch, max(self.epochs, epoch + 1)):
            first = first_step if number == epoch else 0
            yield from ((number, step) for step in range(first, self.partition.steps))

    def _read_step(self, place: tuple[int, int]) -> Ready:
        epoch, step = place
        if self._cache is None:
            how = self._read_buffer, self._random_crop > 0, self.epochs
            self._cache = SampleCache(self.split, self.order, self.shards, *how)
        shards = {j: n for j in self.shards if (n := self.partition.count(step, j))}
        buffer, used, parts = self._upload.buffer(sum(shards.values())), 0, dict[int, Part]()
        for shard, count in shards.items():
            key = random_key(self.seed, "batch", epoch, step, shard)
            images, first = buffer[used : used + count], step * self.partition.shares[shard]
            crops = None
            if self._random_crop:
                from hpctrain.data.jpeg import draw_crops

                crops = draw_crops(self._random_crop, count, random_key(key, "crop"))
            indices = self._cache.gather(epoch, shard, first, images, crops)
            parts[shard], used = (indices, key), used + count
        made: list[Batch] = []
        if parts:
            own = list(parts.values())
            pairs = make_pairs(self._upload, self.split, own, self.prepare, self.pair)
            made = [
                Batch(shard, *pair, key)
                for (shard, (_, key)), pair in zip(parts.items(), pairs, strict=True)
            ]
        return made, self._upload.record_event()
