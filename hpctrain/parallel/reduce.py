"""The one communication of a step: reductions sum the message, or parts of it, over all ranks.

    Plain            one Allreduce
    Bfloat16Reduce   gradients are sent in bfloat16
    TreeReduce       the same bits on any number of ranks (tree.py)
    Overlapped       one reduction per segment of the gradients, while backward runs (overlap.py)

A `Transport` moves the bytes (transport.py). Nothing else in a step waits for the device.

MPI has no bfloat16 (Open MPI would add its bytes as numbers without an error). In `Bfloat16Reduce`
every rank therefore sends each other rank the slice which that rank owns, the owner
adds the slices in float32, and the sums return in bfloat16 (Allgather). This sends as many bytes
as a ring; a gradient is rounded twice, to 8 significant bits. Moments, counts and seconds are sent
unrounded in the same two calls. Every rank owns one block of the send buffer: its slice of the rest
of the message, then its slice of the gradients. All blocks have the same length, so they are rows
of matrices: copying, sending and adding all of them takes few operations for any number of ranks.
The last blocks may be longer than what is left of the vectors.
"""

# ruff: noqa: B027 - most reductions have nothing to begin, to keep or to close

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.device import empty
from hpctrain.parallel.mpi import LARGEST, MPI, Comm
from hpctrain.parallel.transport import HostMemory, Transport

AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 62}  # numbers converted at once: fit a core's cache
Pair = tuple[torch.Tensor, torch.Tensor]


class Reduce(ABC):
    """Sums a message, or a part of it, over all ranks."""

    transport: Transport

    def begin(self, shards: Sequence[int]) -> None:
        """Begin a step in which this rank processes one batch of each of `shards`."""

    def accumulate(self, shard: int) -> None:
        """Accumulate what the vector holds after this rank has processed `shard`."""

    @abstractmethod
    def __call__(self) -> None:
        """Sum over all ranks, in place. Collective."""

    def close(self) -> None:
        """Release hooks and threads, after the last step."""


class Plain(Reduce):
    """Sums a vector in place. Shards accumulate in it."""

    def __init__(self, transport: Transport, vector: torch.Tensor) -> None:
        self.transport, self._vector = transport, vector

    def __call__(self) -> None:
        """Sum the vector over all ranks, in place. Collective."""
        self.transport.allreduce(self._vector)


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


class Bfloat16Reduce(Reduce):
    """Sums gradients, which are sent in bfloat16, and the rest of a message unrounded."""

    def __init__(self, transport: Transport, gradients: torch.Tensor, rest: torch.Tensor) -> None:
        """One of the vectors may be empty. Raises UsageError if the model is not float32."""
        if gradients.dtype != torch.float32:
            raise UsageError(
                f"--comm-dtype bf16 is for float32 models; this one is {gradients.dtype}"
            )
        self.transport, self.rank, self.size = transport, transport.comm.rank, transport.comm.size
        many, few = _width(len(gradients), self.size, 2), _width(len(rest), self.size, 1)
        block = 2 * many + 4 * few  # bytes that each rank owns
        # the send buffer, which also takes the result; and the slices received from all ranks
        self._all, self._sent = (
            empty((block * self.size,), torch.uint8, gradients.device).zero_() for _ in range(2)
        )
        narrow, plain = _parts(self._all, self.size, few, block)
        self._own = narrow[self.rank], plain[self.rank]
        self._copies = [*_rows(gradients, narrow), *_rows(rest, plain)]
        out, into = (each.tensor_split(self.size) for each in (self._all, self._sent))
        # in an order that differs by rank, so that no rank receives from all others at first
        others = [(self.rank + ahead) % self.size for ahead in range(1, self.size)]
        self._slices = [(r, [out[r]]) for r in others], [(r, [into[r]]) for r in others[::-1]]
        self._kept = into[self.rank], out[self.rank]
        narrow, self._received = _parts(self._sent, self.size, few, block)
        self._sums = empty((many,), torch.float32, gradients.device)
        width = max(1, AT_ONCE[gradients.device.type] // self.size)
        self._columns = [
            (narrow[:, start : start + width], self._sums[start : start + width])
            for start in range(0, many, width)
        ]

    def __call__(self) -> None:
        """Sum both vectors over all ranks, in place. Collective."""
        if self.size == 1:
            return
        for vector, block in self._copies:
            block.copy_(vector)  # rounds to nearest
        to, own = self._kept
        to.copy_(own)
        self.transport.exchange(*self._slices)
        narrow, plain = self._own
        torch.sum(self._received, 0, out=plain)
        for column, total in self._columns:
            torch.sum(column, 0, dtype=torch.float32, out=total)
        narrow.copy_(self._sums)
        self.transport.allgather(self._all)
        for vector, block in self._copies:
            vector.copy_(block)


def _width(length: int, ranks: int, unit: int) -> int:
    """Return the longest slice that a rank has of `length` numbers, a multiple of `unit`."""
    return -(-length // (ranks * unit)) * unit


def _parts(buffer: torch.Tensor, ranks: int, few: int, block: int) -> Pair:
    """View the slices of the gradients, bfloat16, and of the rest, float32, (ranks, n) each."""
    matrix = buffer.view(ranks, block)
    return matrix[:, 4 * few :].view(torch.bfloat16), matrix[:, : 4 * few].view(torch.float32)


def _rows(vector: torch.Tensor, matrix: torch.Tensor) -> list[Pair]:
    """Pair a vector (n,) with the rows of a matrix that hold it: whole rows, and part of one."""
    width = matrix.shape[1]
    if not width:
        return []
    whole, left = divmod(len(vector), width)
    pairs = [(vector[: whole * width].view(whole, width), matrix[:whole])]
    return [*pairs, (vector[whole * width :], matrix[whole, :left])] if left else pairs
