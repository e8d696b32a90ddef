"""How the bytes of a step travel between ranks, wherever they lie.

    Transport      one rank: nothing travels
    HostMemory     MPI sums and moves host memory where it lies
    Pinned         GPU memory goes through pinned host memory, in pieces, so that copying one,
                   summing the next and copying back another overlap; works with any MPI
    DeviceMemory   MPI is given device memory, which a GPU-aware one takes ("mpi-gpu")
    nccl.Nccl      NCCL sums and moves device memory, queued on torch's stream

All offer the same three calls on vectors, in order of torch's current stream: what was queued
before is done when the bytes leave, and what is queued after sees the result. `reduce.py` makes
of them the one communication of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.parallel.device import pinned
from hpctrain.parallel.mpi import MPI, Comm
from hpctrain.streams import Stream, current_stream

PIECE_BYTES = 16 << 20  # of a staged Allreduce
TYPES = {torch.uint8: MPI.BYTE, torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
Blocks = tuple[Sequence[int], Sequence[int]]  # by rank: how many numbers, and from where on


class Transport:
    """Sums and moves contiguous vectors of float32, float64 or bytes. All calls are collective.

    This one is for a single rank, which has nobody to exchange anything with.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def allreduce(self, vector: torch.Tensor) -> None:
        """Sum `vector` over all ranks, in place."""

    def alltoallv(
        self, vector: torch.Tensor, blocks: Blocks, received: torch.Tensor, places: Blocks
    ) -> None:
        """Send every rank its block of `vector`; put what comes from each to its place of
        `received`. What lies between the places may change.
        """

    def allgatherv(self, vector: torch.Tensor, blocks: Blocks) -> None:
        """Give all ranks this rank's own block of `vector`, and put theirs beside it."""


def mpi_type(vector: torch.Tensor) -> MPI.Datatype:
    """The MPI type of a vector's numbers, never left to be found out: MPI takes bfloat16 for bytes
    and adds them up. TypeError for any other than float32, float64 and bytes.
    """
    if vector.dtype not in TYPES:
        raise TypeError(f"MPI cannot sum {vector.dtype}")
    return TYPES[vector.dtype]


class HostMemory(Transport):
    """MPI on host memory, where it lies."""

    def _buffer(self, vector: torch.Tensor) -> Any:
        """The vector as mpi4py takes it."""
        return vector.numpy()

    def _message(self, vector: torch.Tensor, *blocks: Blocks) -> list[Any]:
        """The vector as a message of mpi4py. TypeError as `mpi_type`."""
        kind = mpi_type(vector)
        return [self._buffer(vector), *blocks, kind]

    def allreduce(self, vector: torch.Tensor) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, self._message(vector))

    def alltoallv(
        self, vector: torch.Tensor, blocks: Blocks, received: torch.Tensor, places: Blocks
    ) -> None:
        self.comm.Alltoallv(self._message(vector, blocks), self._message(received, places))

    def allgatherv(self, vector: torch.Tensor, blocks: Blocks) -> None:
        self.comm.Allgatherv(MPI.IN_PLACE, self._message(vector, blocks))


class DeviceMemory(HostMemory):
    """MPI is given device memory. Only where it was found to take it: others crash."""

    def _buffer(self, vector: torch.Tensor) -> Any:
        current_stream(vector.device).synchronize()  # MPI knows nothing of streams
        return vector.detach()  # by DLPack, which mpi4py does not wait for


class Pinned(Transport):
    """GPU memory through pinned host memory that is kept for the whole run."""

    def __init__(self, comm: Comm, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(comm)
        self._piece_bytes = piece_bytes
        self._host = HostMemory(comm)
        self._kept: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._down: Stream | None = None

    def allreduce(self, vector: torch.Tensor) -> None:
        """Sum piece by piece; most messages have one piece. Pieces are
        copied down on a stream of their own, so that the next ones come while one is summed and
        copied back.
        """
        host, step = self._host_of(vector), max(1, self._piece_bytes // vector.element_size())
        spans = [slice(start, start + step) for start in range(0, len(vector), step)]
        down, copied = self._down or Stream(vector.device), []
        self._down = down
        down.wait_stream(current_stream(vector.device))
        with down.select():
            for span in spans:
                host[span].copy_(vector[span], non_blocking=True)
                copied.append(down.record_event())
        for span, event in zip(spans, copied, strict=True):
            event.synchronize()
            self._host.allreduce(host[span])
            vector[span].copy_(host[span], non_blocking=True)

    def alltoallv(
        self, vector: torch.Tensor, blocks: Blocks, received: torch.Tensor, places: Blocks
    ) -> None:
        out, into = self._host_of(vector), self._host_of(received)
        out.copy_(vector, non_blocking=True)
        current_stream(vector.device).synchronize()
        self._host.alltoallv(out, blocks, into, places)
        parts = [(start, start + count) for count, start in zip(*places, strict=True) if count]
        if parts:  # one copy, whatever lies between them
            span = slice(min(start for start, _ in parts), max(end for _, end in parts))
            received[span].copy_(into[span], non_blocking=True)

    def allgatherv(self, vector: torch.Tensor, blocks: Blocks) -> None:
        host = self._host_of(vector)
        counts, starts = blocks
        own = slice(starts[self.comm.rank], starts[self.comm.rank] + counts[self.comm.rank])
        host[own].copy_(vector[own], non_blocking=True)
        current_stream(vector.device).synchronize()
        self._host.allgatherv(host, blocks)
        vector.copy_(host, non_blocking=True)

    def _host_of(self, vector: torch.Tensor) -> torch.Tensor:
        """Host memory of the vector's size, the same one whenever it comes."""
        key = vector.data_ptr(), len(vector), vector.dtype
        if key not in self._kept:
            self._kept[key] = pinned(len(vector), vector.dtype, vector.device)
        return self._kept[key]
