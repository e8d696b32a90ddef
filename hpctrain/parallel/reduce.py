"""The one communication of a step: reductions sum the message, or parts of it, over all ranks.

    Plain         one Allreduce
    Bfloat16Reduce    gradients travel in bfloat16
    TreeReduce   the same bits on any number of ranks (tree.py)
    Overlapped    one reduction for each segment of the gradients, while backward runs (overlap.py)

A `Transport` moves the bytes (transport.py). Nothing else in a step waits for the device.

MPI has no bfloat16 (Open MPI would add its bytes up as numbers without an error), so every rank of
`Bfloat16Reduce` sends each other rank the slice that this one owns (Alltoallv), the owner adds the
slices up in float32, and the sums go back in bfloat16 (Allgatherv). As many bytes as a ring sends;
a gradient is rounded twice, to 8 significant bits. Moments, counts and slots travel in the same two
calls as they are. Every rank has one block of the buffer that travels: its slice of what is not
gradients, then its slice of them. All blocks are as long, so they are rows of matrices: copying
all, and adding all up, are few operations whatever the number of ranks; what is beyond the ends of
the vectors, in the last blocks, is not sent.
"""

# ruff: noqa: B027 - most reductions have nothing to begin, to keep or to close

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.device import empty
from hpctrain.parallel.message import ALIGNMENT
from hpctrain.parallel.mpi import MPI, Comm
from hpctrain.parallel.transport import HostMemory, Transport

AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 62}  # numbers widened at once: in a core's cache
Pair = tuple[torch.Tensor, torch.Tensor]


class Reduce(ABC):
    """Sums over all ranks what it was made for: the message, or a part of it."""

    transport: Transport

    def begin(self, shards: Sequence[int]) -> None:
        """A step begins in which this rank works through `shards`, one batch of each."""

    def accumulate(self, shard: int) -> None:
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


def allreduce(comm: Comm, array: np.ndarray) -> None:
    """Sum a host array of float32 or float64 over all ranks, in place. Collective."""
    HostMemory(comm).allreduce(torch.from_numpy(array))


def broadcast(comm: Comm, tensor: torch.Tensor) -> None:
    """Give all ranks the values that rank 0 holds, in place. Collective."""
    host = tensor.detach().cpu().contiguous()
    comm.Bcast([host.flatten().view(torch.uint8).numpy(), MPI.BYTE])  # NumPy lacks some types
    tensor.data.copy_(host)


class Bfloat16Reduce(Reduce):
    """Sums gradients, rounded to bfloat16 where they travel, and the rest of a message as it is."""

    def __init__(self, transport: Transport, gradients: torch.Tensor, rest: torch.Tensor) -> None:
        """One of the vectors may be empty. UsageError for a model that is not float32."""
        if gradients.dtype != torch.float32:
            raise UsageError(
                f"--comm-dtype bf16 is for float32 models; this one is {gradients.dtype}"
            )
        self.transport, self.rank, self.size = transport, transport.comm.rank, transport.comm.size
        many, few = _width(len(gradients), self.size, ALIGNMENT), _width(len(rest), self.size, 1)
        block = 4 * few + 2 * many  # bytes
        starts = [block * rank for rank in range(self.size)]
        ends = [_end(rank, (rest, few), (gradients, many)) for rank in range(self.size)]
        self._blocks, self._places = (ends, starts), ([ends[self.rank]] * self.size, starts)
        # what goes out, then what came back; and the slices that all ranks sent here
        self._all, self._sent = (
            empty((block * self.size,), torch.uint8, gradients.device).zero_() for _ in range(2)
        )
        narrow, plain = _parts(self._all, self.size, few, block)
        self._own = narrow[self.rank], plain[self.rank]
        self._copies = [*_rows(gradients, narrow), *_rows(rest, plain)]
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
            block.copy_(vector)  # rounds to the nearest
        self.transport.alltoallv(self._all, self._blocks, self._sent, self._places)
        narrow, plain = self._own
        torch.sum(self._received, 0, out=plain)
        for column, total in self._columns:
            torch.sum(column, 0, dtype=torch.float32, out=total)
        narrow.copy_(self._sums)
        self.transport.allgatherv(self._all, self._blocks)
        for vector, block in self._copies:
            vector.copy_(block)


def _width(length: int, ranks: int, unit: int) -> int:
    """The longest slice of `length` that a rank has, a multiple of `unit`."""
    return -(-length // (ranks * unit)) * unit


def _end(rank: int, rest: tuple[torch.Tensor, int], gradients: tuple[torch.Tensor, int]) -> int:
    """Bytes of a rank's block up to the end of what there is, of two vectors and their widths."""
    own, wide = (
        max(0, min(width, len(vector) - rank * width)) for vector, width in (rest, gradients)
    )
    return 4 * rest[1] + 2 * wide if wide else 4 * own


def _parts(buffer: torch.Tensor, ranks: int, few: int, block: int) -> Pair:
    """The slices of gradients, bfloat16, and of the rest, float32, (ranks, n) each."""
    matrix = buffer.view(ranks, block)
    return matrix[:, 4 * few :].view(torch.bfloat16), matrix[:, : 4 * few].view(torch.float32)


def _rows(vector: torch.Tensor, matrix: torch.Tensor) -> list[Pair]:
    """Where a vector (n,) lies in a matrix row by row: whole rows, and a part of one."""
    width = matrix.shape[1]
    if not width:
        return []
    whole, left = divmod(len(vector), width)
    pairs = [(vector[: whole * width].view(whole, width), matrix[:whole])]
    return [*pairs, (vector[whole * width :], matrix[whole, :left])] if left else pairs
