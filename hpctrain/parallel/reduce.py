"""reduce(message): the one communication of a step.

MPI sums host memory in place (`Direct`). A GPU message is staged through pinned host memory that
is kept for the whole run (`Staged`): any MPI works then, and Open MPI's own path for device
pointers does the same copies, into pageable memory. `InTreeOrder` adds in an order that belongs to
the shards (tree.py, exchange.py), `NarrowWire` sends less (wire.py). Nothing else in a step waits
for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from hpctrain.parallel.device import pinned_like, synchronize
from hpctrain.parallel.exchange import Exchange
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import MPI, MPI_TYPES, Comm
from hpctrain.parallel.tree import Subtrees, subtrees
from hpctrain.parallel.wire import NarrowWire


class Reduce(Protocol):
    """The one communication of a step: after the call every rank holds the sum."""

    def keep(self, shard: int) -> None:
        """The message holds what this rank's shards gave so far, `shard` being the last of them."""

    def __call__(self, message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""


def allreduce(comm: Comm, array: np.ndarray) -> None:
    """Sum a host array of float32 or float64 over all ranks, in place. Collective."""
    comm.Allreduce(MPI.IN_PLACE, [array, MPI_TYPES[array.dtype.name]])


def broadcast(comm: Comm, tensor: torch.Tensor) -> None:
    """Give all ranks the values that rank 0 holds, in place. Collective."""
    host = tensor.detach().cpu()
    comm.Bcast([host.numpy(), MPI.BYTE])
    tensor.data.copy_(host)


class Direct:
    """Sum messages in host memory where they lie. Shards accumulate in the message."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def keep(self, shard: int) -> None:
        """Nothing to do: the next shard adds to the message."""

    def __call__(self, message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""
        allreduce(self.comm, message.array)


class Staged:
    """Sum messages through a host copy of their size, pinned on GPU machines."""

    def __init__(self, comm: Comm, message: Message) -> None:
        self.comm, self.host = comm, pinned_like(message.tensor)

    def keep(self, shard: int) -> None:
        """Nothing to do: the next shard adds to the message."""

    def __call__(self, message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""
        self.host.copy_(message.tensor, non_blocking=True)
        synchronize(message.device)
        allreduce(self.comm, self.host.numpy())
        message.tensor.copy_(self.host, non_blocking=True)


class InTreeOrder:
    """Sum messages in tree order: the same bits however many ranks carry the shards."""

    def __init__(self, comm: Comm, message: Message, runs: Sequence[range]) -> None:
        """`runs` are the shards that each rank carries, together 0 ... S-1."""
        spans = [subtrees(run, (0, runs[-1].stop)) for run in runs]
        self.subtrees = Subtrees(runs[comm.rank], spans[comm.rank], message.tensor)
        dtype = np.dtype(message.array.dtype.name)
        self.exchange = Exchange(comm, spans, len(message.tensor), dtype)
        self._alone = comm.size == 1
        gpu = message.device.type != "cpu" and not self._alone
        self._hosts = [pinned_like(message.tensor) for _ in spans[comm.rank]] if gpu else None

    def keep(self, shard: int) -> None:
        """Take the leaf of `shard` into the tree; the message is zero for the next one."""
        self.subtrees.keep(shard)

    def __call__(self, message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""
        sums = self.subtrees.finish()
        if self._alone:
            return  # the tree's root is the message
        if self._hosts is None:
            self.exchange([tensor.numpy() for tensor in sums])
        else:
            for host, tensor in zip(self._hosts, sums, strict=True):
                host.copy_(tensor, non_blocking=True)
            synchronize(message.device)
            self.exchange([host.numpy() for host in self._hosts])
            message.tensor.copy_(self._hosts[-1], non_blocking=True)
        self.subtrees.release(sums)


def choose_reduce(
    comm: Comm, message: Message, runs: Sequence[range] | None = None, wire: str = "fp32"
) -> Reduce:
    """The reduction for this message: in tree order where `runs`, the shards that each rank
    carries, are given; with the `wire` "bf16" gradients travel in half the bytes; else one
    Allreduce, in place on the CPU, staged on a GPU.
    """
    if runs is not None:
        return InTreeOrder(comm, message, runs)
    if wire == "bf16":
        return NarrowWire(comm, message)
    return Staged(comm, message) if message.device.type == "cuda" else Direct(comm)
