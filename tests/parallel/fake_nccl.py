"""What `cupy.cuda.nccl` offers, over MPI on host memory: the same calls with the same pointers."""

from __future__ import annotations

import ctypes

import numpy as np

NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 1, 7, 8, 0
KINDS = {NCCL_UINT8: np.uint8, NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}


def memory(pointer, count, kind):
    """The numbers at an address."""
    size = count * np.dtype(KINDS[kind]).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), KINDS[kind])


class FakeNccl:
    """The module; `comm` carries what NCCL would."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64 = NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64
    NCCL_SUM = NCCL_SUM

    def __init__(self, comm):
        self.comm, self.calls, self.group, self.error = comm, [], None, None

    def get_unique_id(self):
        return b"number of rank 0"

    def NcclCommunicator(self, size, number, rank):
        assert (size, number, rank) == (self.comm.size, b"number of rank 0", self.comm.rank)
        return self

    def groupStart(self):
        assert self.group is None
        self.group = []

    def groupEnd(self):
        group, self.group = self.group, None
        self.calls.append("group")
        sends = [(place, n, kind, peer) for way, place, n, kind, peer in group if way == "send"]
        receives = [(place, n, kind, peer) for way, place, n, kind, peer in group if way == "recv"]
        requests = [self.comm.Isend(memory(p, n, kind).copy(), peer) for p, n, kind, peer in sends]
        for place, n, kind, peer in receives:
            self.comm.Recv(memory(place, n, kind), peer)
        for request in requests:
            request.Wait()

    def allReduce(self, source, target, count, kind, operation, stream):
        assert source == target and operation == NCCL_SUM and stream == 0
        self.calls.append("allReduce")
        numbers = memory(source, count, kind)
        numbers[:] = sum(self.comm.allgather(numbers.copy())[1:], self.comm.allgather(numbers)[0])

    def send(self, place, count, kind, peer, stream):
        self.group.append(("send", place, count, kind, peer))

    def recv(self, place, count, kind, peer, stream):
        self.group.append(("recv", place, count, kind, peer))

    def check_async_error(self):
        if self.error:
            raise RuntimeError(self.error)

    def abort(self):
        self.calls.append("abort")
