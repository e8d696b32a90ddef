"""Transports: how ranks exchange the data of a step, in host or device memory.

Work that was queued on torch's current stream before a call is complete when its bytes are sent,
and work queued afterwards sees its result. `reduce.py` builds the one communication of a step from
these calls.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.errors import UsageError
from hpctrain.parallel import nccl
from hpctrain.parallel.device import choose_device, keep_memory, zeros_for_messages
from hpctrain.parallel.mpi import LARGEST, MPI, Comm, allgather, comm_of_host, library, on_all
from hpctrain.streams import Stream, new_stream, record_event, use_stream
from hpctrain.watchdog import waiting

PIECE_BYTES = 16 << 20  # of a staged Allreduce
PACKED_BYTES = 1 << 20  # most in a message of several vectors: packing more takes too long
MPI_TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
NCCL_TYPES = {torch.float32: 7, torch.float64: 8}  # ncclDataType_t
NCCL_SUM = 0  # ncclRedOp_t
Messages = Sequence[tuple[int, list[torch.Tensor]]]  # other ranks, and the vectors of a message


class Transport:
    """Sums and moves contiguous vectors of float32 or float64. All calls are collective.

    Other types raise KeyError. This base class is for a single rank, which sends nothing.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def allreduce(self, vector: torch.Tensor) -> None:
        """Sum `vector` over all ranks, in place."""

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Send messages to some ranks, and receive others. No two share memory.

        A message consists of vectors, of the same lengths where it is received. Those from one rank
        are received in the order in which it sends them.
        """


class HostMemory(Transport):
    """MPI on host memory, in place. What is too large for one message is sent in several."""

    def __init__(self, comm: Comm, largest: int = LARGEST) -> None:
        """`largest`: bytes of one message between two ranks, and of one Allreduce."""
        super().__init__(comm)
        self._largest = largest

    def allreduce(self, vector: torch.Tensor) -> None:
        for piece in self._pieces(vector):
            self.comm.Allreduce(MPI.IN_PLACE, self._buffer(piece))

    def exchange(self, sends: Messages, receives: Messages) -> None:
        out, into = self._to_mpi(sends), self._to_mpi(receives)
        if len(out) == len(into) == 1:
            (buffer, rank), (received, source) = *out, *into
            self.comm.Sendrecv(buffer, rank, recvbuf=received, source=source)
        else:
            requests = [self.comm.Irecv(*one) for one in into]
            requests += [self.comm.Isend(*one) for one in out]
            MPI.Request.Waitall(requests)
        for (_, *_, kind), _ in (*out, *into):
            if not kind.is_predefined:
                kind.Free()

    def _to_mpi(self, messages: Messages) -> list[tuple[list[Any], int]]:
        """Return messages for mpi4py, each with the rank that it goes to or comes from.

        Several short vectors are one message, which MPI packs while it sends.
        """
        found = []
        for rank, vectors in messages:
            size = sum(vector.nbytes for vector in vectors)
            if len(vectors) > 1 and size <= min(PACKED_BYTES, self._largest):
                places = [vector.data_ptr() for vector in vectors]
                lengths, kind = [len(vector) for vector in vectors], MPI_TYPES[vectors[0].dtype]
                together = kind.Create_hindexed(lengths, places).Commit()
                found.append(([MPI.BOTTOM, 1, together], rank))
            else:
                pieces = [piece for vector in vectors for piece in self._pieces(vector)]
                found += [(self._buffer(piece), rank) for piece in pieces]
        return found

    def _pieces(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the pieces of a vector that are small enough for a message, in order."""
        if vector.nbytes <= self._largest:
            return [vector]
        return vector.split(self._largest // vector.element_size())

    def _buffer(self, vector: torch.Tensor) -> list[Any]:
        """Return the vector as a buffer for mpi4py."""
        kind = MPI_TYPES[vector.dtype]  # else MPI would take bfloat16 for bytes, and sum these
        return [vector.numpy(), kind]


class DeviceMemory(HostMemory):
    """MPI on device memory ("mpi-gpu"). An MPI that is not GPU-aware crashes."""

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Send each vector by itself: MPI packs device memory slowly, if it can at all."""
        alone = ([(r, [v]) for r, vectors in each for v in vectors] for each in (sends, receives))
        super().exchange(*alone)

    def _buffer(self, vector: torch.Tensor) -> list[Any]:
        record_event(vector.device).synchronize()  # MPI does not know about streams
        kind = MPI_TYPES[vector.dtype]
        return [vector.detach(), kind]  # by DLPack, for which mpi4py does not synchronize


class Pinned(HostMemory):
    """GPU memory through pinned host memory, which is kept for the whole run: with any MPI."""

    def __init__(self, comm: Comm, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(comm)
        self._piece_bytes = piece_bytes
        self._kept: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._down: Stream = None

    def allreduce(self, vector: torch.Tensor) -> None:
        """Sum piece by piece; most messages have one piece.

        Pieces are copied to the host on a separate stream, so that the next ones arrive while one
        is summed and copied back.
        """
        ready, length = record_event(vector.device), self._piece_bytes // vector.element_size()
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

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Exchange through one block of host memory, which calls of the same size share."""
        messages = [*sends, *receives]
        vectors = [vector for _, each in messages for vector in each]
        if not vectors:
            return
        lengths, sent = [len(vector) for vector in vectors], sum(len(each) for _, each in sends)
        host = self._host_memory(0, sum(lengths), vectors[0])
        copies = list(zip(vectors, host.split(lengths), strict=True))
        for vector, part in copies[:sent]:
            part.copy_(vector, non_blocking=True)
        record_event(vectors[0].device).synchronize()
        blocks = host.split([sum(map(len, each)) for _, each in messages])
        staged = [(rank, [block]) for (rank, _), block in zip(messages, blocks, strict=True)]
        super().exchange(staged[: len(sends)], staged[len(sends) :])
        for vector, part in copies[sent:]:
            vector.copy_(part, non_blocking=True)

    def _host_memory(self, address: int, length: int, like: torch.Tensor) -> torch.Tensor:
        """Return host memory for vectors at an address, the same in each call."""
        key = address, length, like.dtype
        if key not in self._kept:
            self._kept[key] = torch.zeros(length, dtype=like.dtype, pin_memory=like.is_cuda)
        return self._kept[key]


class Nccl(Transport):
    """One NCCL communicator over all ranks, each with a GPU of its own.

    Nothing synchronizes with the host. MPI is used for host memory only, and never while a call of
    NCCL is in progress on the same device (NCCL User Guide, "NCCL and MPI": both at once may
    deadlock). The communicator is neither destroyed nor aborted: both may wait for a peer that is
    gone. The end of the process, which MPI_Abort or MPI_Finalize causes on all ranks, frees it.
    """

    def __init__(self, comm: Comm, path: str = "") -> None:
        """Collective, on the current GPU of this thread. `path`: of the library."""
        super().__init__(comm)
        self._nccl, self._comm = nccl.Library(path), ctypes.c_void_p()

        number = nccl.UniqueId()
        if comm.rank == 0:
            self._nccl.ncclGetUniqueId(ctypes.byref(number))
        with waiting():
            number = nccl.UniqueId.from_buffer_copy(comm.bcast(bytes(number), 0))
            self._nccl.ncclCommInitRank(ctypes.byref(self._comm), comm.size, number, comm.rank)

    def allreduce(self, vector: torch.Tensor) -> None:
        place, *kind = _numbers(vector)
        self._nccl.ncclAllReduce(place, place, *kind, NCCL_SUM, self._comm, _stream(vector))
        self._check()

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Exchange all vectors in one group, which is a single launch."""
        self._nccl.ncclGroupStart()
        try:
            for call, messages in ((self._nccl.ncclSend, sends), (self._nccl.ncclRecv, receives)):
                for rank, vectors in messages:
                    for vector in vectors:
                        call(*_numbers(vector), rank, self._comm, _stream(vector))
        finally:  # a group that is left open would swallow all later calls
            self._nccl.ncclGroupEnd()
        self._check()

    def _check(self) -> None:
        """Raise RunError if an earlier call has failed since, on any rank."""
        found = ctypes.c_int()
        self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(found))
        self._nccl.check("an earlier call of NCCL", found.value)


def _numbers(vector: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t, int]:
    """Return a vector as arguments of NCCL: address, length, type."""
    kind = NCCL_TYPES[vector.dtype]
    return ctypes.c_void_p(vector.data_ptr()), ctypes.c_size_t(len(vector)), kind


def _stream(vector: torch.Tensor) -> ctypes.c_void_p:
    """Return torch's current stream as an argument of NCCL."""
    on_gpu = vector.is_cuda
    return ctypes.c_void_p(torch.cuda.current_stream(vector.device).cuda_stream if on_gpu else 0)


def open_device(comm: Comm, requested: str) -> torch.device:
    """Choose this rank's device. Collective. Raises UsageError on all ranks as `choose_device`."""
    local_rank = comm_of_host(comm).rank
    with on_all(comm):
        device = choose_device(requested, local_rank)
    keep_memory()
    return device


def open_transport(
    comm: Comm, device: torch.device, wanted: str
) -> tuple[Transport, nccl.Choice, str]:
    """Open the transport for messages on `device`, according to --reduce. Collective.

    Also returns the choice with its reason, and a note if ranks share GPUs. Raises UsageError on
    all ranks as `choose_transport` and `make_transport` do.
    """
    own = nccl.RankDevice(socket.gethostname())
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        own = own._replace(gpu=uuid, nccl=nccl.version())
    ranks = allgather(comm, own)
    with on_all(comm):
        choice = nccl.choose_transport(ranks, wanted)
    return make_transport(choice.name, comm, device), choice, nccl.describe_sharing(ranks)


def make_transport(name: str, comm: Comm, device: torch.device) -> Transport:
    """Make the chosen transport for vectors on `device`. Collective.

    Device memory is given to MPI unless it says that it is not GPU-aware, and then tried. Raises
    UsageError on all ranks if that fails.
    """
    if name != "mpi-gpu":
        ways = {"none": Transport, "mpi": HostMemory, "host": Pinned, "nccl": Nccl}
        return ways[name](comm)
    advice = f"--reduce mpi-gpu: {library()} {{}}; --reduce host works with any MPI"
    with on_all(comm):
        if not is_gpu_aware():
            raise UsageError(advice.format("is not GPU-aware"))
    transport = DeviceMemory(comm)
    vector = zeros_for_messages(16, torch.float32, device).fill_(comm.rank)
    transport.allreduce(vector)
    with on_all(comm):
        if not bool((vector == comm.size * (comm.size - 1) // 2).all()):
            raise UsageError(advice.format("was given device memory and returned a wrong sum"))
    return transport


def is_gpu_aware() -> bool:
    """Ask MPI whether it takes the memory of torch's GPUs. True if it does not tell.

    Open MPI and MPICH have the first function, Cray's and older MPICHs the second.
    """
    mpi, answer = ctypes.CDLL(MPI.__file__), ctypes.c_int(1)
    platform, kind = ("rocm", 2) if torch.version.hip else ("cuda", 0)  # MPIX_GPU_SUPPORT_...
    if ask := getattr(mpi, f"MPIX_Query_{platform}_support", None):
        return bool(ask())
    if ask := getattr(mpi, "MPIX_GPU_query_support", None):
        ask(kind, ctypes.byref(answer))
    return bool(answer.value)
