"""reduce(): the one communication of a step, which sums the message over all ranks.

`Plain` sums a vector by one Allreduce (plain.py). `InTreeOrder` adds in an order that belongs to
the shards (tree.py, exchange.py), `NarrowWire` sends less (wire.py). The vector is the whole
message, or `Overlapped` has one reduction for each segment of it (overlap.py). A `Transport` says
how the bytes travel (transport.py). Nothing else in a step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpctrain.parallel.exchange import Exchange
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import MPI, Comm
from hpctrain.parallel.overlap import Overlapped, cut
from hpctrain.parallel.plain import Plain, Reduce
from hpctrain.parallel.transport import HostMemory, Pinned, Transport
from hpctrain.parallel.tree import Subtrees, subtrees
from hpctrain.parallel.wire import NarrowWire


def allreduce(comm: Comm, array: np.ndarray) -> None:
    """Sum a host array of float32 or float64 over all ranks, in place. Collective."""
    HostMemory(comm).allreduce(torch.from_numpy(array))


def broadcast(comm: Comm, tensor: torch.Tensor) -> None:
    """Give all ranks the values that rank 0 holds, in place. Collective."""
    host = tensor.detach().cpu().contiguous()
    comm.Bcast([host.flatten().view(torch.uint8).numpy(), MPI.BYTE])  # NumPy lacks some types
    tensor.data.copy_(host)


class InTreeOrder(Reduce):
    """Sums a vector in tree order: the same bits however many ranks carry the shards."""

    def __init__(self, transport: Transport, vector: torch.Tensor, runs: Sequence[range]) -> None:
        """`runs` are the shards that each rank carries, together 0 ... S-1."""
        self.transport, rank = transport, transport.comm.rank
        spans = [subtrees(run, (0, runs[-1].stop)) for run in runs]
        self.subtrees = Subtrees(runs[rank], spans[rank], vector)
        self.exchange = Exchange(transport, spans, vector)
        self._alone = transport.comm.size == 1

    def keep(self, shard: int) -> None:
        """Take the leaf of `shard` into the tree; the vector is zero for the next one."""
        self.subtrees.keep(shard)

    def __call__(self) -> None:
        """Sum the vector over all ranks, in place. Collective."""
        sums = self.subtrees.finish()
        if not self._alone:  # else the tree's root is the vector
            self.exchange(sums)
        self.subtrees.release(sums)


def usual_transport(comm: Comm, message: Message) -> Transport:
    """MPI on host memory; through pinned memory where the message lies on a GPU."""
    return Pinned(comm) if message.device.type == "cuda" else HostMemory(comm)


def choose_reduce(
    comm: Comm,
    message: Message,
    runs: Sequence[range] | None = None,
    wire: str = "fp32",
    transport: Transport | None = None,
    overlap: int = 0,
) -> Reduce:
    """The reduction for this message: in tree order where `runs`, the shards that each rank
    carries, are given; with the `wire` "bf16" gradients travel in half the bytes; else one
    Allreduce. Without a `transport`, MPI's, staged from a GPU. With `overlap`, in at most so many
    segments of gradients that are summed while backward runs. UsageError where that cannot be.
    """
    way, length = transport or usual_transport(comm, message), message.layout.length

    def over(span: range) -> Reduce:
        vector = message.tensor[span.start : span.stop]
        if runs is not None:
            return InTreeOrder(way, vector, runs)
        if wire == "bf16":
            border = max(0, length - span.start)
            return NarrowWire(way, vector[:border], vector[border:])
        return Plain(way, vector)

    if not overlap:
        return over(range(len(message.tensor)))
    spans = cut(message.layout, overlap)
    rest = range(length, len(message.tensor))
    return Overlapped(message, spans, [over(span) for span in (*spans, rest)])
