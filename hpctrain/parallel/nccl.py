"""NCCL or RCCL: sums and moves device memory, queued on torch's current stream.

Nothing waits for the host. The ranks meet by an id that MPI broadcasts; afterwards MPI carries only
what is asked of it on the host, and never while a call here is under way on the same device
(NCCL User Guide, "NCCL and MPI": both at once may deadlock).

A communicator is neither destroyed nor aborted: both may wait for a peer that is gone. The end of
the process, which MPI_Abort or MPI_Finalize brings to all ranks, frees what it holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_int, c_void_p

import torch

from hpctrain.errors import RunError
from hpctrain.parallel.mpi import Comm, call_on_root
from hpctrain.parallel.nccl_library import Library, UniqueId
from hpctrain.parallel.transport import Blocks
from hpctrain.watchdog import waiting

NUMBER_TYPES = {torch.uint8: 1, torch.float32: 7, torch.float64: 8}  # ncclDataType_t
SUM = 0  # ncclRedOp_t


class Nccl:
    """One NCCL communicator over all ranks, each with a GPU of its own."""

    def __init__(self, comm: Comm, library: Library | None = None) -> None:
        """Collective, on the current GPU of this thread."""
        self.comm, self._call = comm, library or Library()
        number = UniqueId.from_buffer_copy(call_on_root(comm, self._call.unique_id))
        self._group = c_void_p()
        with waiting():
            self._call("ncclCommInitRank", ctypes.byref(self._group), comm.size, number, comm.rank)

    def allreduce(self, vector: torch.Tensor) -> None:
        """As in Transport."""
        place, where = vector.data_ptr(), (self._group, _stream(vector))
        self._call("ncclAllReduce", place, place, len(vector), _type(vector), SUM, *where)
        self._check()

    def alltoallv(
        self, vector: torch.Tensor, blocks: Blocks, received: torch.Tensor, places: Blocks
    ) -> None:
        """As in Transport: all blocks in one group, which is one launch."""
        kind, width, where = _type(vector), vector.element_size(), (self._group, _stream(vector))
        with self._one_launch():
            for rank in range(self.comm.size):
                for name, memory, (counts, starts) in (
                    ("ncclSend", vector, blocks),
                    ("ncclRecv", received, places),
                ):
                    if counts[rank]:
                        place = memory.data_ptr() + width * starts[rank]
                        self._call(name, place, counts[rank], kind, rank, *where)
        self._check()

    def allgatherv(self, vector: torch.Tensor, blocks: Blocks) -> None:
        """As in Transport."""
        counts, starts = blocks
        own, size = self.comm.rank, self.comm.size
        send = [0 if r == own else counts[own] for r in range(size)], [starts[own]] * size
        receive = [0 if r == own else counts[r] for r in range(size)], starts
        self.alltoallv(vector, send, vector, receive)

    @contextmanager
    def _one_launch(self) -> Iterator[None]:
        """A group of calls; it is closed also where one of them fails."""
        self._call("ncclGroupStart")
        try:
            yield
        except RunError as error:
            with suppress(RunError):  # says the same again
                self._call("ncclGroupEnd")
            raise error
        self._call("ncclGroupEnd")

    def _check(self) -> None:
        """RunError where an earlier call failed meanwhile, on whatever rank."""
        found = c_int()
        self._call("ncclCommGetAsyncError", self._group, ctypes.byref(found))
        if found.value:
            self._call.fail("an earlier call of NCCL", found.value)


def _type(vector: torch.Tensor) -> int:
    """TypeError for what is not float32, float64 or bytes."""
    if vector.dtype not in NUMBER_TYPES:
        raise TypeError(f"NCCL is not asked to sum {vector.dtype}")
    return NUMBER_TYPES[vector.dtype]


def _stream(vector: torch.Tensor) -> int:
    return torch.cuda.current_stream(vector.device).cuda_stream if vector.is_cuda else 0
