"""Transports: how ranks exchange the data of a step, in host or device memory.

    Transport      one rank: nothing is sent
    HostMemory     MPI sums and moves host memory in place, at most 1 GiB per message
    Pinned         GPU memory is copied through pinned host memory, in pieces, so that copying one,
                   summing the next and copying back another overlap; works with any MPI
    DeviceMemory   device memory is passed to MPI, which must be GPU-aware ("mpi-gpu")
    nccl.Nccl      NCCL sums and moves device memory, queued on torch's stream

All have the same three calls on vectors, in the order of torch's current stream: work queued before
is complete when the bytes are sent, and work queued afterwards sees the result. `reduce.py` builds
the one communication of a step from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hpctrain.parallel.device import pinned
from hpctrain.parallel.mpi import LARGEST, MPI, Comm
from hpctrain.streams import Stream, new_stream, record_event, use_stream

PIECE_BYTES = 16 << 20  # of a staged Allreduce
TYPES = {torch.uint8: MPI.BYTE, torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE}
Messages = Sequence[tuple[int, list[torch.Tensor]]]  # other ranks, and the vectors of a message


class Transport:
    """Sums and moves contiguous vectors of float32, float64 or bytes. All calls are collective.

    This base class is for a single rank, which sends nothing.
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

    def allgather(self, vector: torch.Tensor) -> None:
        """Send this rank's block of `vector` to all ranks, and receive theirs in `vector`."""


def mpi_type(vector: torch.Tensor) -> MPI.Datatype:
    """Return the MPI type of a vector. Raises TypeError unless it is float32, float64 or bytes.

    It is always passed explicitly: otherwise bfloat16 would be taken for bytes, and these summed.
    """
    if vector.dtype not in TYPES:
        raise TypeError(f"MPI cannot sum {vector.dtype}")
    return TYPES[vector.dtype]


class HostMemory(Transport):
    """MPI on host memory, in place. What is too large for one message is sent in several."""

    def __init__(self, comm: Comm, largest: int = LARGEST) -> None:
        """`largest`: bytes of one message between two ranks, and of one Allreduce."""
        super().__init__(comm)
        self._largest = largest

    def _pieces(self, vector: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the pieces of a vector that are small enough for a message, in order."""
        return vector.split(max(1, self._largest // vector.element_size()))

    def _messages(self, vectors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the vectors of one message, or those of several if they are too large for one."""
        if sum(map(len, vectors)) * vectors[0].element_size() <= self._largest:
            return [vectors]
        return [[piece] for vector in vectors for piece in self._pieces(vector)]

    def _buffer(self, vector: torch.Tensor) -> Any:
        """Return the vector as a buffer for mpi4py."""
        return vector.numpy()

    def _message(self, vector: torch.Tensor) -> list[Any]:
        """Return the vector as a message for mpi4py. Raises TypeError as `mpi_type` does."""
        kind = mpi_type(vector)
        return [self._buffer(vector), kind]

    def allreduce(self, vector: torch.Tensor) -> None:
        for piece in self._pieces(vector):
            self.comm.Allreduce(MPI.IN_PLACE, self._message(piece))

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
        """Return messages for mpi4py, each with the rank that it goes to or comes from."""
        parts = ((rank, part) for rank, all_ in messages for part in self._messages(all_))
        return [(self._together(part), rank) for rank, part in parts]

    def _together(self, vectors: list[torch.Tensor]) -> list[Any]:
        """Return vectors as one message for mpi4py. MPI packs them, while it sends."""
        if len(vectors) == 1:
            return self._message(vectors[0])
        places = [vector.data_ptr() for vector in vectors]
        kind = mpi_type(vectors[0]).Create_hindexed([len(v) for v in vectors], places)
        return [MPI.BOTTOM, 1, kind.Commit()]

    def allgather(self, vector: torch.Tensor) -> None:
        if vector.nbytes <= self._largest * self.comm.size:
            self.comm.Allgather(MPI.IN_PLACE, self._message(vector))
            return
        blocks, own = vector.tensor_split(self.comm.size), self.comm.rank
        others = [rank for rank in range(self.comm.size) if rank != own]
        self.exchange([(r, [blocks[own]]) for r in others], [(r, [blocks[r]]) for r in others])


class DeviceMemory(HostMemory):
    """MPI on device memory. An MPI that is not GPU-aware crashes."""

    def _buffer(self, vector: torch.Tensor) -> Any:
        record_event(vector.device).synchronize()  # MPI does not know about streams
        return vector.detach()  # by DLPack, for which mpi4py does not synchronize

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Pack vectors on the device: MPI would copy them one by one, if it can at all."""
        out = [(rank, _packed(vectors)) for rank, vectors in sends]
        into = [(rank, _packed(vectors)) for rank, vectors in receives]
        super().exchange(out, into)
        for (_, vectors), (_, (packed,)) in zip(receives, into, strict=True):
            for vector, part in _parts(vectors, packed):
                if vector.data_ptr() != part.data_ptr():
                    vector.copy_(part)


def _packed(vectors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one vector that holds several; it is the same one if there is one."""
    return vectors if len(vectors) == 1 else [torch.cat(vectors)]


def _parts(
    vectors: list[torch.Tensor], packed: torch.Tensor
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Pair vectors with their parts of one vector that holds all of them."""
    return zip(vectors, packed.split([len(vector) for vector in vectors]), strict=True)


class Pinned(Transport):
    """GPU memory through pinned host memory, which is kept for the whole run."""

    def __init__(self, comm: Comm, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(comm)
        self._piece_bytes = piece_bytes
        self._host = HostMemory(comm)
        self._kept: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._down: Stream | None = None

    def allreduce(self, vector: torch.Tensor) -> None:
        """Sum piece by piece; most messages have one piece.

        Pieces are copied to the host on a separate stream, so that the next ones arrive while one
        is summed and copied back.
        """
        host, step = self._host_of(vector), max(1, self._piece_bytes // vector.element_size())
        spans = [slice(start, start + step) for start in range(0, len(vector), step)]
        down, copied = self._down or new_stream(vector.device), []
        self._down, ready = down, record_event(vector.device)
        with use_stream(down):
            ready.wait()
            for span in spans:
                host[span].copy_(vector[span], non_blocking=True)
                copied.append(record_event(vector.device))
        for span, event in zip(spans, copied, strict=True):
            event.synchronize()
            self._host.allreduce(host[span])
            vector[span].copy_(host[span], non_blocking=True)

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Exchange through one block of host memory, which calls of the same size share."""
        ranks = [rank for rank, _ in (*sends, *receives)]
        lengths = [sum(map(len, vectors)) for _, vectors in (*sends, *receives)]
        if not ranks:
            return
        example = (*sends, *receives)[0][1][0]
        host = self._host_at(0, sum(lengths), example).split(lengths)
        out, into = host[: len(sends)], host[len(sends) :]
        for (_, vectors), packed in zip(sends, out, strict=True):
            for vector, part in _parts(vectors, packed):
                part.copy_(vector, non_blocking=True)
        record_event(example.device).synchronize()
        staged = [(rank, [packed]) for rank, packed in zip(ranks, host, strict=True)]
        self._host.exchange(staged[: len(sends)], staged[len(sends) :])
        for (_, vectors), packed in zip(receives, into, strict=True):
            for vector, part in _parts(vectors, packed):
                vector.copy_(part, non_blocking=True)

    def allgather(self, vector: torch.Tensor) -> None:
        host, size = self._host_of(vector), len(vector) // self.comm.size
        own = slice(size * self.comm.rank, size * (self.comm.rank + 1))
        host[own].copy_(vector[own], non_blocking=True)
        record_event(vector.device).synchronize()
        self._host.allgather(host)
        vector.copy_(host, non_blocking=True)

    def _host_of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return host memory of the vector's size, the same one for each call with it."""
        return self._host_at(vector.data_ptr(), len(vector), vector)

    def _host_at(self, address: int, length: int, example: torch.Tensor) -> torch.Tensor:
        key = address, length, example.dtype
        if key not in self._kept:
            self._kept[key] = pinned(length, example.dtype, example.device)
        return self._kept[key]
