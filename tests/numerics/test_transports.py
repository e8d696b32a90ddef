"""Every transport gives what MPI gives on host memory; NCCL is the stand-in of tests/gpu."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from tests.support.api import assign_shards, make_sum
from tests.support.transports import MAKERS

EVERY = pytest.mark.parametrize("transport", MAKERS)
RANKS = pytest.mark.ranks(1, 2, 3)


def numbers(seed, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


@RANKS
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_allreduce_sums_in_place(comm, transport, dtype):
    way = MAKERS[transport](comm)
    for length in (1, 16, 1003):
        vector = numbers(comm.rank, length, dtype)
        address = vector.data_ptr()
        for _ in range(2):  # the second time with memory that is kept
            way.allreduce(vector)
        total = comm.size * sum(numbers(rank, length, dtype) for rank in range(comm.size))
        assert torch.allclose(vector, total, rtol=1e-5) and vector.data_ptr() == address


@RANKS
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_go_to_the_ranks_that_they_are_for(comm, transport, dtype):
    """Rank r sends r + 1 vectors to every other rank, but rank 0 none to the last one."""
    way, size, rank = MAKERS[transport](comm), comm.size, comm.rank

    def message(a, b):
        return [numbers(100 * a + b, 40 * (a + b + n) + 1, dtype) for n in range(a + 1)]

    for _ in range(2):  # the second time with memory that is kept
        others = [peer for peer in range(size) if peer != rank]
        sends = [(peer, message(rank, peer)) for peer in others if (rank, peer) != (0, size - 1)]
        expected = [(peer, message(peer, rank)) for peer in others if (peer, rank) != (0, size - 1)]
        receives = [(peer, [torch.empty_like(v) for v in vectors]) for peer, vectors in expected]
        way.prepare(sends, receives)()
        for (_, found), (_, wanted) in zip(receives, expected, strict=True):
            assert all(map(torch.equal, found, wanted))


@RANKS
@EVERY
@pytest.mark.parametrize("kind", ["tree", "uneven tree", "bf16", "plain"])
def test_every_way_to_sum_gives_the_bits_of_host_memory(comm, transport, kind):
    shards, found = 2 * comm.size + 3, []
    runs = assign_shards(shards, comm.size, range(comm.size, 0, -1) if "uneven" in kind else ())
    how = {"bf16": {"narrow": 256}, "plain": {}}.get(kind, {"runs": runs})
    for way in (MAKERS["host memory"](comm), MAKERS[transport](comm)):
        vector = torch.zeros(259)
        reduce = make_sum(way, vector, **how)
        for _ in range(2):
            vector.zero_()
            for shard in runs[comm.rank]:
                vector += numbers(shard, 259)
                reduce.accumulate(shard)
            reduce()
        found.append(vector)
    total = sum(numbers(shard, 259) for shard in range(shards))
    rounding = (1e-2, 1e-1) if kind == "bf16" else (1e-5, 1e-6)
    assert torch.allclose(found[1], total, *rounding)
    assert torch.equal(*found) or kind == "plain"
    assert len(set(comm.allgather(found[1].numpy().tobytes()))) == 1


@RANKS
@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_what_a_transport_would_add_up_wrongly_is_refused(comm, transport, dtype):
    with pytest.raises(KeyError, match="torch"):
        MAKERS[transport](comm).allreduce(torch.zeros(3, dtype=dtype))


class Noting:
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


def test_no_message_has_more_bytes_than_mpi_can_count():
    """MPI counts in 32 bits before version 4. The vectors take no memory."""
    length = 3 * (2**29 + 5)
    vector = torch.zeros(1).expand(length)
    own, block = vector[: length // 3], length // 3 * 4
    for call, sent, received in (
        (lambda way: way.allreduce(vector), length * 4, 0),
        (lambda way: way.prepare([(0, [own])], [(2, [own, own])])(), block, 2 * block),
    ):
        comm = Noting()
        call(MAKERS["host memory"](comm))
        assert (sum(comm.sent), sum(comm.received)) == (sent, received)
        assert max(comm.sent + comm.received) < 2**31
