"""Transports: how ranks exchange the data of a step, in host or device memory, and which is used.

Work that was queued on torch's current stream before a call is complete when its bytes are sent,
and work queued afterwards sees its result. `reduce.py` builds the one communication of a step from
these calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.memory import empty_on_host
from hpctrain.parallel.device import zeros_for_messages
from hpctrain.parallel.gpus import RankDevice, choose_transport, load_nccl
from hpctrain.parallel.mpi import LARGEST, MPI, Comm, allgather, is_gpu_aware, library, on_all
from hpctrain.streams import Stream, new_stream, record_event, use_stream
from hpctrain.watchdog import waiting

PACKED_BYTES = 1 << 20  # most in a message of several vectors: packing more takes too long
MPI_TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
NCCL_TYPES = {  # ncclDataType_t
    torch.float32: 7,
    torch.float64: 8,
}
NCCL_SUM = 0  # ncclRedOp_t
Messages = Sequence[tuple[int, list[torch.Tensor]]]  # other ranks, and the vectors of a message


class Transport:
    """Sums and moves contiguous vectors of float32 or float64. All calls are collective.

    Other types raise KeyError. This base class is for a single rank, which sends nothing.
    """

    name = "none"
    reason = ""  # why it was chosen
    note = ""  # what users are told of the GPUs

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def allreduce(self, vector: torch.Tensor) -> None:
        """Sum `vector` over all ranks, in place."""

    def prepare(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Return a function that sends messages to some ranks and receives others, as often as it
        is called (MPI's persistent communication, but for every transport).

        A message consists of vectors, of the same lengths where it is received. No two share
        memory. Those from one rank are received in the order in which it sends them.
        """
        return lambda: None


class HostMemory(Transport):
    """MPI on host memory, in place. What is too large for one message is sent in several."""

    name = "mpi"
    largest = LARGEST  # bytes of one message between two ranks, and of one Allreduce
    packed = PACKED_BYTES

    def allreduce(self, vector: torch.Tensor) -> None:
        for piece in self._pieces(vector):
            self.comm.Allreduce(MPI.IN_PLACE, self._buffer(piece))

    def prepare(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        sent = self._to_mpi(sends)
        received = self._to_mpi(receives)
        if len(sent) == len(received) == 1:
            [(sendbuf, dest)] = sent
            [(recvbuf, source)] = received
            return partial(self.comm.Sendrecv, sendbuf, dest, recvbuf=recvbuf, source=source)

        def exchange() -> None:
            requests = [self.comm.Irecv(buffer, source) for buffer, source in received]
            requests += [self.comm.Isend(buffer, dest) for buffer, dest in sent]
            MPI.Request.Waitall(requests)

        return exchange

    def _to_mpi(self, messages: Messages) -> list[tuple[list[Any], int]]:
        """Return messages for mpi4py, each with the rank that it goes to or comes from.

        Several short vectors are one message, which MPI packs while it sends: its datatype is kept
        until MPI ends.
        """
        buffers: list[tuple[list[Any], int]] = []
        for rank, vectors in messages:
            size = sum(vector.nbytes for vector in vectors)
            if len(vectors) > 1 and size <= min(self.packed, self.largest):
                datatype = MPI_TYPES[vectors[0].dtype].Create_hindexed(
                    [len(vector) for vector in vectors],
                    [vector.data_ptr() for vector in vectors],
                )
                buffers.append(([MPI.BOTTOM, 1, datatype.Commit()], rank))
            else:
                pieces = [piece for vector in vectors for piece in self._pieces(vector)]
                buffers += [(self._buffer(piece), rank) for piece in pieces]
        return buffers

    def _pieces(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the pieces of a vector that are small enough for a message, in order."""
        if vector.nbytes <= self.largest:
            return [vector]
        return vector.split(self.largest // vector.element_size())

    def _buffer(self, vector: torch.Tensor) -> list[Any]:
        """Return the vector as a buffer for mpi4py."""
        datatype = MPI_TYPES[vector.dtype]  # else MPI would take bfloat16 for bytes, and sum these
        return [vector.numpy(), datatype]


class DeviceMemory(HostMemory):
    """MPI on device memory. An MPI that is not GPU-aware crashes."""

    name = "mpi-gpu"
    packed = 0  # MPI packs device memory slowly, if it can at all

    def allreduce(self, vector: torch.Tensor) -> None:
        record_event(vector.device).synchronize()  # MPI does not know about streams
        super().allreduce(vector)

    def prepare(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        exchange = super().prepare(sends, receives)
        devices = {vector.device for _, vectors in (*sends, *receives) for vector in vectors}

        def synchronized() -> None:
            for device in devices:
                record_event(device).synchronize()
            exchange()

        return synchronized

    def _buffer(self, vector: torch.Tensor) -> list[Any]:
        datatype = MPI_TYPES[vector.dtype]
        return [vector.detach(), datatype]  # by DLPack, for which mpi4py does not synchronize

    def check(self, device: torch.device) -> None:
        """Raise UsageError on all ranks if MPI says that it takes no memory of GPUs, or sums wrong.

        Collective.
        """
        advice = f"--reduce mpi-gpu: {library()} {{}}; --reduce host works with any MPI"
        with on_all(self.comm):
            if not is_gpu_aware(rocm=bool(torch.version.hip)):
                raise UsageError(advice.format("is not GPU-aware"))
        vector = zeros_for_messages(16, torch.float32, device).fill_(self.comm.rank)
        self.allreduce(vector)
        with on_all(self.comm):
            if not bool((vector == self.comm.size * (self.comm.size - 1) // 2).all()):
                raise UsageError(advice.format("was given device memory and returned a wrong sum"))


class Pinned(HostMemory):
    """GPU memory through pinned host memory, which is kept for the whole run: with any MPI."""

    name = "host"
    piece_bytes = 16 << 20  # of an Allreduce

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self._kept: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._down: Stream = None

    def allreduce(self, vector: torch.Tensor) -> None:
        """Sum piece by piece; most messages have one piece.

        Pieces are copied to the host on a separate stream, so that the next ones arrive while one
        is summed and copied back.
        """
        ready = record_event(vector.device)
        length = self.piece_bytes // vector.element_size()
        host = self._host_memory(vector.data_ptr(), len(vector), vector)
        pieces = list(zip(vector.split(length), host.split(length), strict=True))
        self._down = self._down or new_stream(vector.device)
        copied = []
        with use_stream(self._down):
            ready.wait()
            for piece, staged in pieces:
                staged.copy_(piece, non_blocking=True)
                copied.append(record_event(vector.device))
        for (piece, staged), event in zip(pieces, copied, strict=True):
            event.synchronize()
            super().allreduce(staged)
            piece.copy_(staged, non_blocking=True)

    def prepare(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """Exchange through one block of host memory, which those of the same size share."""
        messages = [*sends, *receives]
        vectors = [vector for _, parts in messages for vector in parts]
        if not vectors:
            return super().prepare(sends, receives)
        lengths = [len(vector) for vector in vectors]
        host = self._host_memory(0, sum(lengths), vectors[0])
        copies = list(zip(vectors, host.split(lengths), strict=True))
        border = sum(len(parts) for _, parts in sends)
        copies_down = copies[:border]
        copies_up = copies[border:]
        blocks = host.split([sum(map(len, parts)) for _, parts in messages])
        staged = [(rank, [block]) for (rank, _), block in zip(messages, blocks, strict=True)]
        exchange = super().prepare(staged[: len(sends)], staged[len(sends) :])

        def through_host() -> None:
            for vector, block in copies_down:
                block.copy_(vector, non_blocking=True)
            record_event(vectors[0].device).synchronize()
            exchange()
            for vector, block in copies_up:
                vector.copy_(block, non_blocking=True)

        return through_host

    def _host_memory(self, address: int, length: int, like: torch.Tensor) -> torch.Tensor:
        """Return host memory for vectors at an address, the same in each call."""
        key = address, length, like.dtype
        if key not in self._kept:
            self._kept[key] = empty_on_host((length,), like.dtype, like.device)
        return self._kept[key]


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Nccl(Transport):
    """One NCCL communicator over all ranks, each with a GPU of its own.

    The library is the one that torch's library for GPUs has loaded; on AMD GPUs it is RCCL, which
    has the same functions (NCCL User Guide, "NCCL API"). Nothing synchronizes with the host. MPI is
    used for host memory only, and never while a call of NCCL is in progress on the same device
    ("NCCL and MPI": both at once may deadlock). The communicator is neither destroyed nor aborted:
    both may wait for a peer that is gone. The end of the process, which MPI_Abort or MPI_Finalize
    causes on all ranks, frees it.
    """

    name = "nccl"

    def __init__(self, comm: Comm, path: str = "") -> None:
        """Collective, on the current GPU of this thread. `path`: of another library."""
        super().__init__(comm)
        self._library = load_nccl(path)
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._comm = ctypes.c_void_p()
        unique_id = UniqueId()
        if comm.rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        with waiting():
            unique_id = UniqueId.from_buffer_copy(comm.bcast(bytes(unique_id), 0))
            self._call(
                "ncclCommInitRank",
                ctypes.byref(self._comm),
                comm.size,
                unique_id,
                comm.rank,
            )

    def allreduce(self, vector: torch.Tensor) -> None:
        self._queue(
            "ncclAllReduce",
            vector,
            NCCL_SUM,
            ctypes.c_void_p(vector.data_ptr()),  # of the sum: in place
        )
        self._check()

    def prepare(self, sends: Messages, receives: Messages) -> Callable[[], None]:
        """All vectors are exchanged in one group, which is a single launch."""
        calls = [("ncclSend", rank, vectors) for rank, vectors in sends]
        calls += [("ncclRecv", rank, vectors) for rank, vectors in receives]
        return partial(self._exchange, calls)

    def _exchange(self, calls: Sequence[tuple[str, int, list[torch.Tensor]]]) -> None:
        self._call("ncclGroupStart")
        try:
            for name, rank, vectors in calls:
                for vector in vectors:
                    self._queue(name, vector, rank)
        finally:  # a group that is left open would swallow all later calls
            self._call("ncclGroupEnd")
        self._check()

    def _queue(self, name: str, vector: torch.Tensor, what: int, *first: ctypes.c_void_p) -> None:
        """Queue a call for a vector on torch's current stream; `what` is an operation or a peer."""
        stream = 0
        if vector.is_cuda:
            stream = torch.cuda.current_stream(vector.device).cuda_stream
        self._call(
            name,
            *first,
            ctypes.c_void_p(vector.data_ptr()),
            ctypes.c_size_t(len(vector)),
            NCCL_TYPES[vector.dtype],
            what,
            self._comm,
            ctypes.c_void_p(stream),
        )

    def _check(self) -> None:
        """Raise RunError if an earlier call has failed since, on any rank."""
        code = ctypes.c_int()
        self._call("ncclCommGetAsyncError", self._comm, ctypes.byref(code))
        self._raise("an earlier call of NCCL", code.value)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function. ctypes takes Python's integers for a C int."""
        self._raise(name, getattr(self._library, name)(*arguments))

    def _raise(self, name: str, code: int) -> None:
        """Raise RunError with NCCL's message if `code`, which `name` returned, is an error."""
        if code == 0:
            return
        messages = (self._library.ncclGetErrorString(code), self._library.ncclGetLastError(None))
        text = ": ".join(
            message.decode(errors="replace").strip() for message in messages if message
        )
        raise RunError(f"{name} failed on this rank or a rank it talks to: {text}")


TRANSPORTS: dict[str, Callable[[Comm], Transport]] = {
    kind.name: kind for kind in (Transport, HostMemory, DeviceMemory, Pinned, Nccl)
}


def open_transport(comm: Comm, device: torch.device, wanted: str) -> Transport:
    """Open the transport for messages on `device`, according to --reduce. Collective.

    Raises UsageError on all ranks as `choose_transport` does, and if MPI takes no memory of GPUs
    with "mpi-gpu".
    """
    ranks = allgather(comm, RankDevice.find(device))
    with on_all(comm):
        chosen = choose_transport(ranks, wanted)
    transport = TRANSPORTS[chosen.name](comm)
    transport.reason = chosen.reason
    transport.note = chosen.note
    if isinstance(transport, DeviceMemory):
        transport.check(device)
    return transport
