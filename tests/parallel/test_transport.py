"""Every transport gives what MPI gives on host memory; NCCL is the stand-in of tests/gpu."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import LARGEST, MPI
from hpctrain.parallel.nccl import Library, Nccl
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.reduce import Bfloat16Reduce, Plain
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Pinned, mpi_type
from hpctrain.parallel.tree import TreeAllreduce, TreeReduce
from tests.support.nccl import build

pytestmark = pytest.mark.mpi

MAKERS = {
    "host memory": HostMemory,
    "host memory, in pieces": lambda comm: HostMemory(comm, 8),
    "pinned": Pinned,
    "pinned, in pieces": lambda comm: Pinned(comm, piece_bytes=64),
    "device memory": DeviceMemory,
    "NCCL": lambda comm: Nccl(comm, Library(built())),
}


@functools.cache
def built():
    return build(Path(tempfile.mkdtemp(prefix="hpctrain-nccl-")))


@pytest.fixture(params=list(MAKERS))
def transport(request, comm):
    return MAKERS[request.param](comm)


def numbers(rank, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 16, 1003])
def test_sums(comm, transport, dtype, length):
    vector = numbers(comm.rank, length, dtype)
    address = vector.data_ptr()
    for _ in range(2):  # the second time with memory that is kept
        transport.allreduce(vector)
    total = comm.size * sum(numbers(rank, length, dtype) for rank in range(comm.size))
    assert torch.allclose(vector, total, rtol=1e-5) and vector.data_ptr() == address


@pytest.mark.parametrize("old", [False, True], ids=["", "without ncclAlltoAll"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_blocks_go_where_they_should(comm, transport, dtype, old, monkeypatch):
    has = Library.has
    monkeypatch.setattr(Library, "has", lambda library, name: not old and has(library, name))
    vector = torch.tensor([16 * comm.rank + peer for peer in range(comm.size) for _ in range(3)])
    received = torch.zeros(3 * comm.size, dtype=dtype)
    for _ in range(2):
        transport.alltoall(vector.to(dtype), received)
    expected = [16 * peer + comm.rank for peer in range(comm.size) for _ in range(3)]
    assert received.tolist() == expected or comm.size == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_go_to_the_ranks_that_they_are_for(comm, transport, dtype):
    """Rank r sends r + 1 vectors to every other rank, but rank 0 none to the last one."""
    size, rank = comm.size, comm.rank

    def message(a, b):
        return [numbers(100 * a + b, a + b + n + 1, dtype) for n in range(a + 1)]

    for _ in range(2):  # the second time with memory that is kept
        peers = [peer for peer in range(size) if peer != rank and {peer, rank} != {0, size - 1}]
        last = [size - 1] if rank == 0 < size - 1 else []
        sends = [(peer, message(rank, peer)) for peer in peers + [0] * (rank == size - 1 > 0)]
        expected = [(peer, message(peer, rank)) for peer in peers + last]
        receives = [(peer, [torch.empty_like(v) for v in vectors]) for peer, vectors in expected]
        transport.exchange(sends, receives)
        for (_, found), (_, wanted) in zip(receives, expected, strict=True):
            assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_everybody_gets_the_blocks_of_all(comm, transport, dtype):
    vector = torch.zeros(3 * comm.size, dtype=dtype)
    vector[3 * comm.rank : 3 * comm.rank + 3] = comm.rank + 1
    for _ in range(2):
        transport.allgather(vector)
    assert vector.tolist() == [rank + 1 for rank in range(comm.size) for _ in range(3)]


def message_of(comm, leaf):
    message = Message(nn.Linear(31, 7), 5, comm.rank, comm.size)
    message.tensor.copy_(numbers(leaf, len(message.tensor)))
    return message


def halves(message):
    return message.gradients, message.tensor[len(message.gradients) :]


def test_every_way_to_sum_gives_the_bits_of_host_memory(comm, transport):
    shards = 2 * comm.size + 1
    runs = assign_shards(shards, comm.size)
    for make in (
        lambda way, message: TreeReduce(way, message.tensor, runs),
        lambda way, message: Bfloat16Reduce(way, *halves(message)),
        lambda way, message: Plain(way, message.tensor),
    ):
        found = []
        for way in (HostMemory(comm), transport):
            message = message_of(comm, 0)
            reduce = make(way, message)
            for shard in runs[comm.rank]:
                message.tensor.copy_(numbers(shard, len(message.tensor)))
                reduce.accumulate(shard)
            reduce()
            found.append(message.tensor.clone())
        if isinstance(reduce, Plain):
            assert torch.allclose(*found, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(*found)


def test_a_large_message_is_summed_in_pieces(comm):
    class Counting(HostMemory):
        lengths = ()

        def allreduce(self, vector):
            self.lengths = (*self.lengths, len(vector))
            super().allreduce(vector)

    pinned = Pinned(comm, piece_bytes=40)
    pinned._host = Counting(comm)
    pinned.allreduce(numbers(comm.rank, 25))
    assert pinned._host.lengths == (10, 10, 5)


class Sizes:
    """A communicator of 3 ranks that sends nothing and notes the bytes of each message."""

    rank, size = 1, 3

    def __init__(self):
        self.sent, self.received = [], []

    def Allreduce(self, _, message):
        self.sent.append(len(message[0]) * message[1].Get_size())

    def Isend(self, message, rank):
        self.sent.append(len(message[0]) * message[1].Get_size())
        return MPI.REQUEST_NULL

    def Irecv(self, message, rank):
        self.received.append(len(message[0]) * message[1].Get_size())
        return MPI.REQUEST_NULL


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_no_message_has_more_numbers_than_mpi_can_count(dtype):
    """MPI counts in 32 bits before version 4. The vectors take no memory."""
    length = 3 * (2**31 + 5)
    vector, size = torch.zeros(1, dtype=dtype).expand(length), dtype.itemsize
    own, block = vector[: length // 3], length // 3 * size
    for call, sent, received in (
        (lambda way: way.allreduce(vector), length * size, 0),
        (lambda way: way.exchange([(0, [own])], [(2, [own, own])]), block, 2 * block),
        (lambda way: way.alltoall(vector, vector), 3 * block, 3 * block),
        (lambda way: way.allgather(vector), 2 * block, 2 * block),
    ):
        comm = Sizes()
        call(HostMemory(comm))
        assert (sum(comm.sent), sum(comm.received)) == (sent, received)
        assert max(comm.sent + comm.received) <= LARGEST < 2**31


class Copies(TorchDispatchMode):
    """Counts the copies between tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function is torch.ops.aten.copy_.default
        return function(*arguments, **(options or {}))


def test_one_copy_down_and_one_up_for_each_vector(comm):
    class Watched(Pinned):
        counts = ()

        def exchange(self, sends, receives):
            with Copies() as copies:
                super().exchange(sends, receives)
            self.counts = (*self.counts, copies.count)
            assert copies.count == sum(len(vectors) for _, vectors in (*sends, *receives))

        def alltoall(self, *arguments):
            with Copies() as copies:
                super().alltoall(*arguments)
            self.counts = (*self.counts, copies.count)

    pinned, message = Watched(comm), message_of(comm, 0)
    runs = assign_shards(3 * comm.size - 1, comm.size)
    reduce = TreeReduce(pinned, message.tensor, runs)
    for shard in runs[comm.rank]:
        reduce.accumulate(shard)
    reduce()
    Bfloat16Reduce(pinned, *halves(message))()
    assert comm.size == 1 or pinned.counts[-1] == 2


def test_pinned_memory_holds_what_is_sent_and_received(comm):
    pinned, vector = Pinned(comm), numbers(comm.rank, 1200)
    exchange = TreeAllreduce(pinned, assign_shards(comm.size, comm.size), vector)
    for _ in range(2):
        exchange([vector])
    assert sum(map(len, pinned._kept.values())) == 2 * 1200 * (comm.size - 1) / comm.size


def test_a_group_of_nccl_is_one_launch(comm):
    class Counting(Library):
        calls = ()

        def __call__(self, name, *arguments):
            self.calls = (*self.calls, name)
            super().__call__(name, *arguments)

    library = Counting(built())
    nccl = Nccl(comm, library)
    runs = assign_shards(comm.size, comm.size)
    vector = numbers(comm.rank, 10)
    TreeAllreduce(nccl, runs, vector)([vector])
    rounds = 2 * (comm.size > 1) + 2 * (comm.size > 3)
    assert library.calls.count("ncclGroupStart") == library.calls.count("ncclGroupEnd") == rounds
    assert library.calls.count("ncclAllReduce") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_what_mpi_would_add_up_wrongly_is_refused(comm, dtype):
    with pytest.raises(TypeError, match="cannot sum"):
        HostMemory(comm).allreduce(torch.zeros(3, dtype=dtype))
    assert mpi_type(torch.zeros(1)).Get_size() == 4
    assert np.dtype(np.float64).itemsize == mpi_type(torch.zeros(1).double()).Get_size()
