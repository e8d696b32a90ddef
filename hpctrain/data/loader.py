"""One rank's batches, read and augmented in the background.

A thread (never a forked process: MPI is running) gathers the rows of the next steps into reused
buffers and turns them into what the network takes, so that a batch is ready before it is needed,
on a GPU beside the kernels that train (upload.py). What a batch holds is a pure function of (seed,
epoch, step, shard).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from hpctrain.data.augment import augment, to_input
from hpctrain.data.orders import ByPartition, Order
from hpctrain.data.partition import Partition
from hpctrain.data.source import Croppable, Reader, Source, as_kept, make_reader
from hpctrain.data.upload import Upload, sent
from hpctrain.errors import UsageError
from hpctrain.keys import random_key
from hpctrain.streams import Event

AHEAD = 2  # steps that are ready before they are needed
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


Part = tuple[np.ndarray, int]  # rows of a split (n,), and the key of their random numbers
Ready = tuple[list[Batch], Event]  # the batches of a step, and when they are
# rows (m_j, H, W, C) and the key of their random numbers -> network input (m_j, C, H, W),
# a copy: the rows' memory is used again for the next batch
Prepare = Callable[[torch.Tensor, int], torch.Tensor]
# network input, labels (m_j,) and the key -> input and target
Pair = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def make_prepare(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    scaling: tuple[torch.Tensor, torch.Tensor] | None = None,
    flip: bool = False,
    shift: int = 0,
) -> Prepare:
    """How rows become the network's input on `device`: augmented, scaled, laid out.

    `scaling` is mean and standard deviation by channel, (C,) each; None leaves [0, 1].
    """
    mean, std = (values.to(device) for values in scaling) if scaling else (None, None)

    def prepare(images: torch.Tensor, key: int) -> torch.Tensor:
        images = augment(images.to(device), flip, shift, random_key(key, "augment"))
        return to_input(images, mean, std, dtype, channels_last)

    return prepare


def read_rows(
    source: Source, rows: Sequence[int] | np.ndarray, prepare: Prepare | None = None
) -> torch.Tensor:
    """The network's input for these rows of a split, (n, C, H, W), without augmentation.

    `prepare` makes it from rows; None stands for float32 in [0, 1] on the CPU.
    """
    images = np.empty((len(rows), *source.image_shape), source.dtype)  # (n, H, W, C)
    source.gather(np.asarray(rows), images)
    return (prepare or make_prepare())(torch.from_numpy(images), 0)


def keep_usable(source: Source, rows: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Those of `rows` (n,) that can be used; of `images` (n, H, W, C) theirs come first."""
    usable = source.bad.usable(rows)
    if usable is None:
        return rows
    rows = rows[usable]
    images[: len(rows)] = images[usable]
    return rows


def make_pairs(
    upload: Upload, source: Source, parts: Sequence[Part], prepare: Prepare, pair: Pair
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Input and target of each part on the device. The rows of all parts lie in the buffer of
    `upload`, one part after the other: they go there by one copy, and their labels by one.
    """
    sizes = [len(rows) for rows, _ in parts]
    labels = torch.from_numpy(source.labels[np.concatenate([rows for rows, _ in parts])])

    def work(images: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = zip(parts, images.split(sizes), sent(labels, images.device).split(sizes), strict=True)
        return [pair(prepare(rows, key), targets, key) for (_, key), rows, targets in own]

    return upload.make(sum(sizes), work)


def ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """What `make` gives for each item, made by a thread while the one before is used."""
    with ThreadPoolExecutor(1, "ahead") as thread:
        waiting: Future[Made] | None = None
        for item in items:
            following = thread.submit(make, item)
            if waiting:
                yield waiting.result()
            waiting = following
        if waiting:
            yield waiting.result()


class Loader:
    """The batches of the shards that this rank carries."""

    def __init__(
        self,
        source: Source,
        partition: Partition,
        shards: Sequence[int],
        seed: int = 0,
        prepare: Prepare | None = None,
        pair: Pair | None = None,
        order: Order | None = None,
        read_buffer: int = READ_BUFFER,
        random_crop: float = 0.0,
        least_rows: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """Read consecutive `shards` of `partition` from `source`.

        `prepare` makes the network's input from rows; None stands for float32 in [0, 1] on the
        CPU. `pair` makes the target; None stands for the labels. `order` says which rows come
        when; None stands for a new order of each shard's own rows in every epoch. Memory for rows
        is bounded by `read_buffer` bytes; what fits into it is read once and kept. With
        `random_crop` every image is a random part of its file, of at least that share of the area:
        UsageError unless the rows are files. Where bad rows are left out, a shard that keeps fewer
        than `least_rows` of a step has no batch. What `prepare` gets lies on `device`.
        """
        self._cropped: Croppable | None = None
        if random_crop:
            if not isinstance(source, Croppable):
                raise UsageError(
                    "--random-crop cuts image files as they are decoded, but these rows are pixels:"
                    " pack with --encoding jpeg"
                )
            self._cropped = source
        self.source, self.partition = source, partition
        self.seed, self.prepare = seed, prepare or make_prepare()
        self.pair = pair or (lambda images, labels, key: (images, labels))
        self.order = order or ByPartition(partition, seed)
        self._read_buffer, self._random_crop = read_buffer, random_crop
        self._least_rows, self._device = least_rows, device
        self._reader: Reader | None = None
        self.carry(shards)

    def carry(self, shards: Sequence[int]) -> None:
        """Read these consecutive shards from the next epoch on."""
        self.shards = range(shards[0], shards[-1] + 1)
        most = sum(self.partition.shares[j] for j in shards)
        shape = (most, *self.source.image_shape)
        self._upload = Upload(shape, self.source.dtype, self._device)
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Batch]]:
        """The steps of an epoch from `first_step` on: for each, a batch per shard with rows.

        An error of the reading thread (a file cut short) is raised here.
        """
        ready: queue.Queue[Ready | BaseException | None] = queue.Queue(AHEAD)
        closed, wanted = threading.Event(), threading.Event()

        def put(item: Ready | BaseException | None) -> None:
            while not closed.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def read() -> None:
            try:
                reader = self._reader = self._reader or self._make_reader()
                for step in range(first_step, self.partition.steps):
                    # Preparing needs the interpreter, which the step needs to get going: let it
                    # start its kernels first, unless it waits for this very batch.
                    wanted.wait(0.0 if ready.empty() else HEAD_START)
                    if closed.is_set():
                        return
                    # No name holds the step here: its memory would be missing for the next.
                    put(self._step(reader, epoch, step))
                put(None)
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=read, name="loader", daemon=True)
        thread.start()
        try:
            while True:
                if ready.empty():
                    wanted.set()
                item = ready.get()
                wanted.clear()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                batches, made = item
                self._upload.take(made, [t for b in batches for t in (b.images, b.targets)])
                yield batches
        finally:
            closed.set()
            wanted.set()
            thread.join()

    def _make_reader(self) -> Reader:
        stored = as_kept(self.source, self._random_crop)
        return make_reader(stored, self.order, self.shards, self._read_buffer)

    def _step(self, reader: Reader, epoch: int, step: int) -> Ready:
        shards = {j: n for j in self.shards if (n := self.partition.count(step, j))}
        room, used, parts = self._upload.room(sum(shards.values())), 0, dict[int, Part]()
        for shard, count in shards.items():
            key = random_key(self.seed, "batch", epoch, step, shard)
            images, first = room[used : used + count], step * self.partition.shares[shard]
            rows = keep_usable(
                self.source, self._read(reader, epoch, shard, first, images, key), images
            )
            if len(rows) >= min(count, self._least_rows):
                parts[shard], used = (rows, key), used + len(rows)
        made: list[Batch] = []
        if parts:
            each = make_pairs(
                self._upload, self.source, list(parts.values()), self.prepare, self.pair
            )
            made = [
                Batch(shard, *pair, key)
                for (shard, (_, key)), pair in zip(parts.items(), each, strict=True)
            ]
        return made, self._upload.record_event()

    def _read(
        self, reader: Reader, epoch: int, shard: int, first: int, images: np.ndarray, key: int
    ) -> np.ndarray:
        """The rows at the places first ... of the shard's epoch into `images` (n, H, W, C); their
        numbers in the split, (n,).
        """
        if not self._cropped:
            return reader.read(epoch, shard, first, images)
        files = np.empty(len(images), object)
        rows = reader.read(epoch, shard, first, files)
        self._cropped.decode(files, rows, images, self._random_crop, random_key(key, "crop"))
        return rows
