"""What every reduction offers to a step, and the plainest one: a single Allreduce."""

# ruff: noqa: B027 - most reductions have nothing to begin, to keep or to close

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hpctrain.parallel.transport import Transport


class Reduce(ABC):
    """Sums over all ranks what it was made for: the message, or a part of it."""

    transport: Transport

    def begin(self, shards: Sequence[int]) -> None:
        """A step begins in which this rank works through `shards`, one batch of each."""

    def keep(self, shard: int) -> None:
        """The vector holds what this rank's shards gave so far, `shard` being the last of them."""

    @abstractmethod
    def __call__(self) -> None:
        """Sum over all ranks, in place. Collective."""

    def close(self) -> None:
        """After the last step: let hooks and threads go."""


class Plain(Reduce):
    """Sums a vector where it lies. Shards accumulate in it."""

    def __init__(self, transport: Transport, vector: torch.Tensor) -> None:
        self.transport, self._vector = transport, vector

    def __call__(self) -> None:
        """Sum the vector over all ranks, in place. Collective."""
        self.transport.allreduce(self._vector)
