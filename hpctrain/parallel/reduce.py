"""The one communication of a step: reductions sum the message, or parts of it, over all ranks.

    Reduce           one Allreduce
    Bfloat16Reduce   gradients are sent in bfloat16
    TreeReduce       the same bits on any number of ranks (tree.py)
    Overlapped       one reduction per segment of the gradients, while backward runs (overlap.py)

A `Transport` moves the bytes (transport.py). Nothing else in a step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.device import empty
from hpctrain.parallel.mpi import LARGEST, MPI, Comm
from hpctrain.parallel.transport import HostMemory, Transport

AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 62}  # pairs converted at once: fit a core's cache


class Reduce:
    """Sums a vector over all ranks in place, by one Allreduce. Shards accumulate in it."""

    def __init__(self, transport: Transport, vector: torch.Tensor) -> None:
        self.transport = transport
        self._vector = vector

    def begin(self, shards: Sequence[int]) -> None:
        """Begin a step in which this rank processes one batch of each of `shards`."""

    def accumulate(self, shard: int) -> None:
        """Accumulate what the vector holds after this rank has processed `shard`."""

    def __call__(self) -> None:
        """Sum over all ranks, in place. Collective."""
        self.transport.allreduce(self._vector)

    def close(self) -> None:
        """Release hooks and threads, after the last step."""


class Bfloat16Reduce(Reduce):
    """Sums a vector whose first numbers, gradients, are sent in bfloat16, and the rest unrounded.

    MPI has no bfloat16 (Open MPI would add its bytes as numbers without an error). Every rank
    therefore sends each other rank the slice which that rank owns, the owner adds the slices in
    float32, and sends the sums, in bfloat16 again, to all. This takes as many bytes as a ring; a
    gradient is rounded twice, to 8 significant bits.
    """

    def __init__(self, transport: Transport, vector: torch.Tensor, gradients: int) -> None:
        """`gradients`: how many there are. Raises UsageError if the model is not float32."""
        super().__init__(transport, vector)
        if vector.dtype != torch.float32:
            raise UsageError(f"--comm-dtype bf16 is for float32 models; this one is {vector.dtype}")
        rank = transport.comm.rank
        size = transport.comm.size
        rest = len(vector) - gradients
        # what is sent, and takes the sums: the rest, then the gradients, two in each number
        sent = empty((rest + (gradients + 1) // 2,), torch.float32, vector.device).zero_()
        narrow = sent[rest:].view(torch.bfloat16)[:gradients]
        self._copies = [(vector[gradients:], sent[:rest]), (vector[:gradients], narrow)]
        slices = sent.tensor_split(size)
        mine = slices[rank]
        received = empty((size, len(mine)), torch.float32, vector.device)  # the slices of all ranks
        self._kept = mine, received[rank]
        # in an order that differs by rank, so that no rank receives from all others at first
        others = [(rank + ahead) % size for ahead in range(1, size)]
        theirs = [(peer, [slices[peer]]) for peer in others if len(slices[peer])]
        arriving = [(peer, [received[peer]]) for peer in others if len(mine)]
        self._scatter = transport.prepare(theirs, arriving)
        self._gather = transport.prepare([(peer, [mine]) for peer, _ in arriving], theirs)
        border = min(max(0, rest - sum(map(len, slices[:rank]))), len(mine))
        self._plain = received[:, :border], mine[:border]
        step = max(1, AT_ONCE[vector.device.type] // size)
        spans = [slice(start, start + step) for start in range(border, len(mine), step)]
        self._narrow = [
            (received[:, span].view(torch.bfloat16), mine[span].view(torch.bfloat16))
            for span in spans
        ]

    def __call__(self) -> None:
        """Sum the vector over all ranks, in place. Collective."""
        if self.transport.comm.size == 1:
            return
        for numbers, place in self._copies:
            place.copy_(numbers)  # rounds to nearest
        mine, kept = self._kept
        kept.copy_(mine)
        self._scatter()
        rows, total = self._plain
        torch.sum(rows, 0, out=total)
        for rows, total in self._narrow:
            total.copy_(torch.sum(rows, 0, dtype=torch.float32))
        self._gather()
        for numbers, place in self._copies:
            numbers.copy_(place)


def allreduce(comm: Comm, array: np.ndarray) -> None:
    """Sum a host array of float32 or float64 over all ranks, in place. Collective."""
    HostMemory(comm).allreduce(torch.from_numpy(array))


def broadcast(comm: Comm, tensor: torch.Tensor) -> None:
    """Copy the values of rank 0 to all ranks, in place. Collective."""
    host = tensor.detach().cpu().contiguous()
    data = host.flatten().view(torch.uint8).numpy()  # NumPy lacks some types
    for start in range(0, len(data), LARGEST):
        comm.Bcast([data[start : start + LARGEST], MPI.BYTE])
    tensor.data.copy_(host)
