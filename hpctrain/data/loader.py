"""One rank's batches, read and augmented in the background.

A thread (never a forked process: MPI is running) gathers the rows of the next steps into reused
uint8 buffers and turns them into what the network takes, so that a batch is ready before it is
needed. What a batch holds is a pure function of (seed, epoch, step, shard).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hpctrain.data.augment import augment, to_input
from hpctrain.data.partition import Partition
from hpctrain.keys import random_key

AHEAD = 2  # steps that are ready before they are needed


class Source(Protocol):
    """What the loader reads from: rows of one split (packed.Rows)."""

    labels: np.ndarray  # (N,) int64

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Batch:
    """What one shard learns from in one step."""

    shard: int
    images: torch.Tensor  # (m_j, C, H, W)
    labels: torch.Tensor  # (m_j,) int64
    key: int  # of this step's and shard's random numbers


# uint8 rows (m_j, H, W, C) and the key of their random numbers -> network input (m_j, C, H, W)
Prepare = Callable[[torch.Tensor, int], torch.Tensor]


def make_prepare(
    device: torch.device,
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


class Loader:
    """The batches of the shards that this rank carries."""

    def __init__(
        self,
        source: Source,
        image_shape: tuple[int, int, int],
        partition: Partition,
        shards: range,
        seed: int,
        prepare: Prepare,
    ) -> None:
        self.source, self.partition, self.shards = source, partition, shards
        self.seed, self.prepare = seed, prepare
        largest = max((partition.shares[j] for j in shards), default=0)
        self._buffer = np.empty((largest, *image_shape), dtype=np.uint8)  # (max m_j, H, W, C)

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
                orders = {j: self.partition.order(self.seed, epoch, j) for j in self.shards}
                for step in range(first_step, self.partition.steps):
                    if closed.is_set():
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

    def _batch(self, epoch: int, step: int, shard: int, order: np.ndarray) -> Batch | None:
        rows = order[self.partition.slice(step, shard)]
        if len(rows) == 0:
            return None
        images = self._buffer[: len(rows)]
        self.source.gather(rows, images)
        key = random_key(self.seed, "batch", epoch, step, shard)
        return Batch(
            shard,
            self.prepare(torch.from_numpy(images), key),
            torch.from_numpy(self.source.labels[rows]),
            key,
        )
