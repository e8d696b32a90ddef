"""One rank's batches, read and augmented in the background.

A thread (never a forked process: MPI is running) gathers the rows of the next steps into reused
uint8 buffers and turns them into what the network takes, so that a batch is ready before it is
needed. What a batch holds is a pure function of (seed, epoch, step, shard).
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hpctrain.data.augment import augment, to_input
from hpctrain.data.partition import Partition
from hpctrain.keys import random_key

AHEAD = 2  # steps that are ready before they are needed
HEAD_START = 0.002  # seconds
READ_BUFFER = 256 << 20  # bytes


class Source(Protocol):
    """What the loader reads from: rows of one split (packed.Rows)."""

    labels: np.ndarray  # (N,) int64

    @property
    def image_shape(self) -> tuple[int, int, int]: ...  # (H, W, C)

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Batch:
    """What one shard learns from in one step."""

    shard: int
    images: torch.Tensor  # (m_j, C, H, W)
    targets: torch.Tensor  # labels (m_j,) int64, or what `pair` makes of them
    key: int  # of this step's and shard's random numbers


# uint8 rows (m_j, H, W, C) and the key of their random numbers -> network input (m_j, C, H, W),
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
    """How uint8 rows become the network's input on `device`: augmented, scaled, laid out.

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

    `prepare` makes it from uint8 rows; None stands for float32 in [0, 1] on the CPU.
    """
    images = np.empty((len(rows), *source.image_shape), dtype=np.uint8)  # (n, H, W, C)
    source.gather(np.asarray(rows), images)
    return (prepare or make_prepare())(torch.from_numpy(images), 0)


class Resident:
    """Consecutive rows of a split, read once and kept in memory."""

    def __init__(self, source: Source, first: int, count: int) -> None:
        self.labels, self.image_shape, self._first = source.labels, source.image_shape, first
        self._images = np.empty((count, *source.image_shape), dtype=np.uint8)  # (n, H, W, C)
        source.gather(np.arange(first, first + count), self._images)

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the rows `indices` (n,), counted as in the split, into `out` (n, H, W, C)."""
        return np.take(self._images, indices - self._first, axis=0, out=out, mode="clip")


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
        read_buffer: int = READ_BUFFER,
    ) -> None:
        """Read consecutive `shards` of `partition` from `source`.

        `prepare` makes the network's input from uint8 rows; None stands for float32 in [0, 1] on
        the CPU. `pair` makes the target; None stands for the labels. Partitions of up to
        `read_buffer` bytes are read once and kept.
        """
        self.source, self.partition, self.shards = source, partition, shards
        self.seed, self.prepare = seed, prepare or make_prepare()
        self.pair = pair or (lambda images, labels, key: (images, labels))
        largest = max((partition.shares[j] for j in shards), default=0)
        self._buffer = np.empty((largest, *source.image_shape), dtype=np.uint8)  # (m_j, H, W, C)
        rows = sum(partition.sizes()[j] for j in shards)
        self._keep = rows * math.prod(source.image_shape) <= read_buffer

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Batch]]:
        """The steps of an epoch from `first_step` on: for each, a batch per shard with rows.

        An error of the reading thread (a file cut short) is raised here.
        """
        ready: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(AHEAD)
        closed = threading.Event()

        def put(item: list[Batch] | BaseException | None) -> None:
            while not closed.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def read() -> None:
            try:
                self._make_resident()
                orders = {j: self.partition.order(self.seed, epoch, j) for j in self.shards}
                for step in range(first_step, self.partition.steps):
                    # Preparing needs the interpreter, which the step needs to get going: let it
                    # start its kernels first, unless it waits for this very batch.
                    if closed.wait(0.0 if ready.empty() else HEAD_START):
                        return
                    put([b for b in (self._batch(epoch, step, j, orders[j]) for j in orders) if b])
                put(None)
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=read, name="loader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            closed.set()
            thread.join()

    def _make_resident(self) -> None:
        if self._keep and not isinstance(self.source, Resident):
            first = self.partition.start(self.shards[0])
            count = sum(self.partition.sizes()[j] for j in self.shards)
            self.source = Resident(self.source, first, count)

    def _batch(self, epoch: int, step: int, shard: int, order: np.ndarray) -> Batch | None:
        rows = order[self.partition.slice(step, shard)]
        if len(rows) == 0:
            return None
        images = self._buffer[: len(rows)]
        self.source.gather(rows, images)
        key = random_key(self.seed, "batch", epoch, step, shard)
        inputs = self.prepare(torch.from_numpy(images), key)
        labels = torch.from_numpy(self.source.labels[rows]).to(inputs.device)
        return Batch(shard, *self.pair(inputs, labels, key), key)
