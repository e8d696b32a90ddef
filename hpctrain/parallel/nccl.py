"""NCCL, through CuPy: sums and moves device memory, queued on torch's current stream.

Nothing waits for the host. The ranks meet by an id that MPI broadcasts; afterwards MPI carries only
what is asked of it on the host, and never while a call here is under way on the same device
(NCCL User Guide, "NCCL and MPI": both at once may deadlock).
"""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.errors import RunError
from hpctrain.parallel.mpi import Comm
from hpctrain.parallel.transport import Blocks

NUMBER_TYPES = {torch.float32: "NCCL_FLOAT32", torch.float64: "NCCL_FLOAT64"}
BYTES = "NCCL_UINT8"


class Nccl:
    """One NCCL communicator over all ranks, each with a GPU of its own."""

    def __init__(self, comm: Comm, library: Any = None) -> None:
        """Collective. `library` stands in for cupy.cuda.nccl."""
        self.comm, self._library = comm, library or _cupy_nccl()
        number = comm.bcast(self._library.get_unique_id() if comm.rank == 0 else None)
        self._group = self._library.NcclCommunicator(comm.size, number, comm.rank)

    def allreduce(self, vector: torch.Tensor) -> None:
        """As in Transport."""
        place, add = vector.data_ptr(), self._library.NCCL_SUM
        kind = self._kind(vector)
        self._group.allReduce(place, place, len(vector), kind, add, self._stream(vector))
        self._check()

    def alltoallv(
        self, vector: torch.Tensor, blocks: Blocks, received: torch.Tensor, places: Blocks
    ) -> None:
        """As in Transport: all blocks in one group, which is one launch."""
        stream, kind, width = self._stream(vector), self._kind(vector), vector.element_size()
        self._library.groupStart()
        for rank in range(self.comm.size):
            if blocks[0][rank]:
                place = vector.data_ptr() + width * blocks[1][rank]
                self._group.send(place, blocks[0][rank], kind, rank, stream)
            if places[0][rank]:
                place = received.data_ptr() + width * places[1][rank]
                self._group.recv(place, places[0][rank], kind, rank, stream)
        self._library.groupEnd()
        self._check()

    def allgatherv(self, vector: torch.Tensor, blocks: Blocks) -> None:
        """As in Transport."""
        counts, starts = blocks
        own, size = self.comm.rank, self.comm.size
        send = [0 if r == own else counts[own] for r in range(size)], [starts[own]] * size
        receive = [0 if r == own else counts[r] for r in range(size)], starts
        self.alltoallv(vector, send, vector, receive)

    def _kind(self, vector: torch.Tensor) -> int:
        name = BYTES if vector.dtype == torch.uint8 else NUMBER_TYPES[vector.dtype]
        return int(getattr(self._library, name))

    def _stream(self, vector: torch.Tensor) -> int:
        return torch.cuda.current_stream().cuda_stream if vector.is_cuda else 0

    def _check(self) -> None:
        """RunError where an earlier call failed meanwhile, on whatever rank."""
        try:
            self._group.check_async_error()
        except RuntimeError as error:  # NcclError is one
            self._group.abort()
            raise RunError(
                f"NCCL failed on rank {self.comm.rank} or a rank it talks to: {error}"
            ) from None


def _cupy_nccl() -> Any:
    from cupy.cuda import nccl

    return nccl
