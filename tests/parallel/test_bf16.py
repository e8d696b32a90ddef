"""Gradients communicated in bfloat16: two roundings, half the bytes, everything else exact."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.config import Config, check_settings
from hpctrain.errors import UsageError
from hpctrain.parallel import reduce as reduction
from hpctrain.parallel.choose import choose_reduce
from hpctrain.parallel.message import Message
from hpctrain.parallel.reduce import Bfloat16Reduce, Plain
from hpctrain.parallel.transport import HostMemory
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from tests.support.packs import make_pack

pytestmark = pytest.mark.mpi


def filled(comm, rank, dtype=torch.float32):
    """A message as `rank` would have filled it, for all ranks of `comm` to know."""
    model = nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 3)).to(dtype)
    message = Message(model, 5, comm.rank, comm.size)
    message.zero()
    generator = torch.Generator().manual_seed(rank)
    message.tensor.copy_(torch.randn(len(message.tensor), generator=generator))
    return message


class Counting:
    """A communicator that counts what is sent through it."""

    def __init__(self, comm):
        self._comm, self.size, self.rank = comm, comm.size, comm.rank
        self.calls, self.sent = [], 0

    def Alltoall(self, out, back):
        self.calls.append("Alltoall")
        self.sent += (self.size - 1) * len(out[0]) // self.size
        self._comm.Alltoall(out, back)

    def Allgather(self, out, back):
        self.calls.append("Allgather")
        self.sent += (self.size - 1) * len(back[0]) // self.size
        self._comm.Allgather(out, back)


def test_the_sum_is_rounded_twice_and_the_rest_is_exact(comm):
    counting = Counting(comm)
    message = filled(comm, comm.rank)
    own = message.tensor.clone()
    length = len(message.gradients)
    Bfloat16Reduce(HostMemory(counting), message.gradients, message.tensor[length:])()
    everybody = [filled(comm, rank) for rank in range(comm.size)]
    if comm.size == 1:
        assert torch.equal(message.tensor, own)
        return
    narrow = sum(m.gradients.bfloat16().float() for m in everybody).bfloat16().float()
    assert torch.equal(message.gradients, narrow)
    plain = sum(m.gradients for m in everybody)
    assert not torch.equal(message.gradients, plain)
    scale = sum(m.gradients.abs() for m in everybody)
    assert ((message.gradients - plain).abs() <= scale * 2**-7).all()
    tails = [m.tensor[length:] for m in everybody]
    total = tails[0].clone()
    for tail in tails[1:]:
        total += tail
    assert torch.equal(message.tensor[length:], total)
    assert counting.calls == ["Alltoall", "Allgather"]
    ring = 2 * (comm.size - 1) / comm.size * (2 * length + 4 * len(total))
    assert counting.sent == pytest.approx(ring, rel=0.2)
    assert len(set(comm.allgather(message.tensor.numpy().tobytes()))) == 1


@pytest.mark.parametrize("overlap", [0, 2])
def test_numbers_after_the_gradients_are_not_rounded(comm, overlap):
    """Otherwise the counts of samples would not be exact."""
    message = filled(comm, comm.rank)
    length = message.layout.length
    message.tensor[length:] = 2.0**20 + 1
    reduce = choose_reduce(comm, message, comm_dtype="bf16", overlap=overlap)
    reduce.begin([0])
    reduce.accumulate(0)
    reduce()
    reduce.close()
    assert set(message.tensor[length:].tolist()) == {comm.size * (2.0**20 + 1)}


def test_not_for_float64(comm):
    with pytest.raises(
        UsageError, match="--comm-dtype bf16 is for float32 models; this one is .*64"
    ):
        choose_reduce(comm, filled(comm, 0, torch.float64), None, "bf16")
    assert isinstance(choose_reduce(comm, filled(comm, 0)), Plain)


def test_not_with_deterministic():
    with pytest.raises(
        UsageError, match="--deterministic and --comm-dtype bf16 exclude each other"
    ):
        check_settings(Config(deterministic=True, comm_dtype="bf16"))


class Threads:
    """A transport between threads of this process, one for each of its ranks."""

    def __init__(self, rank, size, board, barrier):
        self.comm = SimpleNamespace(rank=rank, size=size)
        self._board, self._barrier = board, barrier
        self.bytes = 0

    def alltoall(self, vector, received):
        own = self.comm.rank
        self._board[own] = vector.clone().split(len(vector) // self.comm.size)
        self.bytes += len(vector)
        self._barrier.wait()
        for rank, block in enumerate(received.split(len(vector) // self.comm.size)):
            block.copy_(self._board[rank][own])
        self._barrier.wait()

    def allgather(self, vector):
        block = vector.view(self.comm.size, -1)[self.comm.rank]
        self.alltoall(block.repeat(self.comm.size), vector)


@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize(("gradients", "rest"), [(0, 1), (64, 0), (64, 6), (640, 101), (6464, 7)])
def test_slices_are_added_in_float32(monkeypatch, size, gradients, rest):
    """And rounded once more, wherever the borders of slices fall, the same on all ranks; hardly
    more is sent than there is.
    """
    monkeypatch.setattr(reduction, "AT_ONCE", {"cpu": 100})
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(2, size, gradients + rest, generator=generator)
    wide, plain = vectors[..., :gradients].bfloat16().float(), vectors[..., gradients:]
    exact = torch.cat([wide, plain], dim=2).double().sum(1)
    error = 2**-23 * size * torch.cat([wide, plain], dim=2).abs().sum(1)
    error[:, :gradients] += exact[:, :gradients].abs() * 2**-8
    board, barrier, found = [None] * size, threading.Barrier(size), torch.zeros_like(vectors)

    def work(rank):
        transport = Threads(rank, size, board, barrier)
        vector = torch.empty(gradients + rest)
        reduce = Bfloat16Reduce(transport, vector[:gradients], vector[gradients:])
        for step in range(2):
            vector.copy_(vectors[step, rank])
            reduce()
            found[step, rank] = vector
        return transport.bytes

    with ThreadPoolExecutor(size) as pool:
        sent = sum(pool.map(work, range(size))) / 2 / size
    assert torch.equal(found, found[:, :1].expand(2, size, -1))
    assert ((found[:, 0] - exact).abs() <= error).all()
    rounded = found[:, 0, :gradients]
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert sent <= 2 * (2 * gradients + 4 * rest) + 2 * (4 + 4) * size


def test_a_network_learns_as_well(comm, shared_tmp):
    if comm.rank == 0:
        make_pack(shared_tmp / "pack.h5", {"train": 101, "test": 53})
    comm.Barrier()
    config = Config(
        data=str(shared_tmp / "pack.h5"),
        runs_dir=str(shared_tmp),
        epochs=12,
        batch_size=16,
        threads=1,
        progress="none",
    )
    ends = []
    for dtype in ("fp32", "bf16"):
        loop.train(dataclasses.replace(config, comm_dtype=dtype, run=dtype), comm)
        if comm.rank == 0:
            ends.append(list(read_records(Path(shared_tmp) / dtype))[-1])
    if comm.rank == 0:
        assert ends[1]["test_accuracy"] > 0.8
        assert abs(ends[0]["test_accuracy"] - ends[1]["test_accuracy"]) < 0.1
        assert (ends[0]["digest"] == ends[1]["digest"]) == (comm.size == 1)
