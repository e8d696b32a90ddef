"""One rank's batches, read and augmented in the background.

A thread (never a forked process: MPI is running) gathers the samples of the next steps into reused
buffers and turns them into what the network takes, so that a batch is ready before it is needed,
on a GPU beside the kernels that train (streams.py). It reads on over the border of epochs: what a
batch holds is a pure function of (seed, epoch, step, shard).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from hpctrain.data.augment import Augmentation, augment, to_input
from hpctrain.data.cache import SampleCache
from hpctrain.data.jpeg import draw_crops
from hpctrain.data.orders import Order
from hpctrain.data.partition import Partition, random_key
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.streams import Event, Upload, copy_to_device

AHEAD = 3  # steps that are read before they are needed
HEAD_START = 0.002  # seconds
READ_BUFFER = 256 << 20  # bytes

Item = TypeVar("Item")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Batch:
    """What one shard learns from in one step."""

    shard: int
    images: torch.Tensor  # (m_j, C, H, W)
    targets: torch.Tensor  # labels (m_j,) int64, or what `pair` makes of them
    key: int  # of this step's and shard's random numbers


Part = tuple[np.ndarray, int]  # samples of a split (n,), and the key of their random numbers
Ready = tuple[list[Batch], Event]  # the batches of a step, and when they are
# images (m_j, H, W, C) and the key of their random numbers -> network input (m_j, C, H, W),
# a copy: the images' memory is used again for the next batch
Prepare = Callable[[torch.Tensor, int], torch.Tensor]
# network input, labels (m_j,) and the key -> input and target
Pair = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def make_prepare(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    scaling: tuple[torch.Tensor, torch.Tensor] | None = None,
    augmentation: Augmentation = Augmentation(),  # noqa: B008
) -> Prepare:
    """How images become the network's input on `device`: augmented, scaled, laid out.

    `scaling` is mean and standard deviation by channel, (C,) each; None leaves [0, 1].
    """
    mean, std = (values.to(device) for values in scaling) if scaling else (None, None)

    def prepare(images: torch.Tensor, key: int) -> torch.Tensor:
        images = augment(images.to(device), augmentation, random_key(key, "augment"))
        return to_input(images, mean, std, dtype, channels_last)

    return prepare


def read_samples(
    split: Split, indices: Sequence[int] | np.ndarray, prepare: Prepare | None = None
) -> torch.Tensor:
    """The network's input for these samples of a split, (n, C, H, W), without augmentation.

    `prepare` makes it from images; None stands for float32 in [0, 1] on the CPU.
    """
    images = np.empty((len(indices), *split.image_shape), split.dtype)  # (n, H, W, C)
    split.gather(np.asarray(indices), images)
    return (prepare or make_prepare())(torch.from_numpy(images), 0)


def keep_usable(split: Split, indices: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Those of the samples `indices` (n,) that can be used; their images come first in `images`
    (n, H, W, C).
    """
    usable = split.bad.usable(indices)
    if usable is None:
        return indices
    indices = indices[usable]
    images[: len(indices)] = images[usable]
    return indices


def make_pairs(
    upload: Upload, split: Split, parts: Sequence[Part], prepare: Prepare, pair: Pair
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Input and target of each part on the device. The images of all parts lie in the buffer of
    `upload`, one part after the other: they go there by one copy, and their labels by one.
    """
    sizes = [len(indices) for indices, _ in parts]
    labels = torch.from_numpy(split.labels[np.concatenate([indices for indices, _ in parts])])

    def work(images: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        targets_of = copy_to_device(labels, images.device).split(sizes)
        own = zip(parts, images.split(sizes), targets_of, strict=True)
        return [pair(prepare(rows, key), targets, key) for (_, key), rows, targets in own]

    return upload.make(sum(sizes), work)


def ahead(
    make: Callable[[Item], Made], items: Iterable[Item], count: int = 1, head_start: float = 0.0
) -> Generator[Made, None, None]:
    """What `make` gives for each item, made in order by a thread, `count` before they are needed.

    While the next one is ready, the thread leaves the interpreter to its user for `head_start`
    seconds: what it makes for a later step should not delay the kernels of this one. An error is
    raised for its own item. When this generator is closed the thread has ended.
    """
    waiting: deque[Future[Made]] = deque()
    wanted = threading.Event()

    def work(item: Item) -> Made:
        wanted.wait(head_start if waiting and waiting[0].done() else 0.0)
        return make(item)

    def take() -> Made:
        if not waiting[0].done():
            wanted.set()
        try:
            return waiting[0].result()  # has no name here: its memory would be missing for the next
        finally:
            waiting.popleft()
            wanted.clear()

    with ThreadPoolExecutor(1, "ahead") as thread:
        try:
            for item in items:
                waiting.append(thread.submit(work, item))
                if len(waiting) > count:
                    yield take()
            while waiting:
                yield take()
        finally:
            wanted.set()
            thread.shutdown(cancel_futures=True)


class Loader:
    """The batches of the shards that are assigned to this rank."""

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
        min_samples: int = 1,
        device: torch.device | str = "cpu",
        epochs: int = 0,
    ) -> None:
        """Read consecutive `shards` of `partition` from `split`.

        `prepare` makes the network's input from images; None stands for float32 in [0, 1] on the
        CPU. `pair` makes the target; None stands for the labels. `order` says which samples come
        when; None stands for a new order of each shard's own samples in every epoch. Memory for
        samples is bounded by `read_buffer` bytes; what fits into it is read once and kept. With
        `random_crop` every image is a random crop of its file, of at least that share of the area:
        UsageError unless the samples are JPEG files. Where bad samples are skipped, a shard that
        keeps fewer than `min_samples` of a step has no batch. What `prepare` gets lies on `device`.
        `epochs`: how many there will be; the steps of the next one are read ahead before one ends.
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
        self._min_samples, self._device = min_samples, device
        self._prefetch: Generator[Ready, None, None] | None = None  # between epochs
        self._following = (0, 0)  # epoch and step that it gives next
        self._cache: SampleCache | None = None
        self.assign_shards(shards)

    def assign_shards(self, shards: Sequence[int]) -> None:
        """Read these consecutive shards from the next epoch on."""
        self.close()
        self.shards = range(shards[0], shards[-1] + 1)
        count = sum(self.partition.shares[j] for j in shards)
        shape = (count, *self.split.image_shape)
        self._upload = Upload(shape, self.split.dtype, self._device)

    def close(self) -> None:
        """End the reading thread, and forget what it has read. A new epoch begins it again."""
        self._end_prefetch()
        if self._cache:
            self._cache.close()
            self._cache = None

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Batch]]:
        """The steps of an epoch from `first_step` on: for each, a batch per shard with samples.

        An error of the reading thread (a file cut short) is raised here. Where the epoch ends, the
        thread reads on; where it is left early, the thread ends.
        """
        steps = self.partition.steps
        if self._prefetch is None or self._following != (epoch, first_step):
            self._end_prefetch()
            steps_from = self._steps_from(epoch, first_step)
            self._prefetch = ahead(self._read_step, steps_from, AHEAD, HEAD_START)
        prefetch, self._prefetch = self._prefetch, None
        try:
            for step in range(first_step, steps):
                batches, made = next(prefetch)
                self._upload.take(made, [t for b in batches for t in (b.images, b.targets)])
                if step + 1 == steps and epoch + 1 < self.epochs:
                    self._prefetch, self._following = prefetch, (epoch + 1, 0)
                yield batches
        finally:
            if self._prefetch is not prefetch:
                prefetch.close()

    def _end_prefetch(self) -> None:
        if self._prefetch:
            self._prefetch.close()
            self._prefetch = None

    def _steps_from(self, epoch: int, first_step: int) -> Iterator[tuple[int, int]]:
        """The steps that the thread reads, each with its epoch."""
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
                crops = draw_crops(self._random_crop, count, random_key(key, "crop"))
            indices = self._cache.gather(epoch, shard, first, images, crops)
            indices = keep_usable(self.split, indices, images)
            if len(indices) >= min(count, self._min_samples):
                parts[shard], used = (indices, key), used + len(indices)
        made: list[Batch] = []
        if parts:
            own = list(parts.values())
            pairs = make_pairs(self._upload, self.split, own, self.prepare, self.pair)
            made = [
                Batch(shard, *pair, key)
                for (shard, (_, key)), pair in zip(parts.items(), pairs, strict=True)
            ]
        return made, self._upload.record_event()
