"""Gradients in bfloat16 on the wire: two roundings, half the bytes, everything else exact."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.config import Config, check_ranges
from hpctrain.errors import UsageError
from hpctrain.parallel.message import Message
from hpctrain.parallel.plain import Plain
from hpctrain.parallel.reduce import choose_reduce
from hpctrain.parallel.transport import HostMemory
from hpctrain.parallel.wire import NarrowWire, _cuts
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from tests.packs import make_pack

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

    def Alltoallv(self, out, back):
        self.calls.append("Alltoallv")
        lengths = out[1][0]
        self.sent += sum(lengths) - lengths[self.rank]
        self._comm.Alltoallv(out, back)

    def Allgatherv(self, out, back):
        self.calls.append("Allgatherv")
        self.sent += (self.size - 1) * back[1][0][self.rank]
        self._comm.Allgatherv(out, back)


def test_the_sum_is_rounded_twice_and_the_rest_is_exact(comm):
    counting = Counting(comm)
    message = filled(comm, comm.rank)
    own = message.tensor.clone()
    length = len(message.gradients)
    NarrowWire(HostMemory(counting), message.gradients, message.tensor[length:])()
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
    assert counting.calls == ["Alltoallv", "Allgatherv"]
    ring = 2 * (comm.size - 1) / comm.size * (2 * length + 4 * len(total))
    assert counting.sent == pytest.approx(ring, rel=0.2)
    assert len(set(comm.allgather(message.tensor.numpy().tobytes()))) == 1


def test_not_for_float64(comm):
    with pytest.raises(UsageError, match="--wire bf16 is for float32 models; this one is .*64"):
        choose_reduce(comm, filled(comm, 0, torch.float64), None, "bf16")
    assert isinstance(choose_reduce(comm, filled(comm, 0)), Plain)


def test_not_with_deterministic():
    with pytest.raises(UsageError, match="--deterministic and --wire bf16 exclude each other"):
        check_ranges(Config(deterministic=True, wire="bf16"))


@pytest.mark.parametrize("length", [0, 64, 128, 640, 6400])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_cuts_cover_everything_once(length, parts):
    cuts = _cuts(length, parts, 64)
    assert (cuts[0].start, cuts[-1].stop) == (0, length)
    assert all(a.stop == b.start for a, b in itertools.pairwise(cuts))
    assert all(cut.start % 64 == 0 for cut in cuts)


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
    for wire in ("fp32", "bf16"):
        loop.train(dataclasses.replace(config, wire=wire, run=wire), comm)
        if comm.rank == 0:
            ends.append(list(read_records(Path(shared_tmp) / wire))[-1])
    if comm.rank == 0:
        assert ends[1]["test_accuracy"] > 0.8
        assert abs(ends[0]["test_accuracy"] - ends[1]["test_accuracy"]) < 0.1
        assert (ends[0]["digest"] == ends[1]["digest"]) == (comm.size == 1)
