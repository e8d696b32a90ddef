"""Gradients sent in bfloat16: two roundings, half the bytes, everything else exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import make_sum
from tests.support.packs import write_entries
from tests.support.short import records
from tests.support.simulated import on_simulated_ranks


def vectors_of(size, length, steps=1):
    generator = torch.Generator().manual_seed(size + length)
    return torch.randn(steps, size, length, generator=generator)


def sum_of(transport, vectors, narrow):
    """The sums of a rank in some steps, and the bytes that it sends."""
    vector = torch.empty(vectors.shape[-1])
    reduce, sums = make_sum(transport, vector, narrow=narrow), []
    for step in vectors:
        vector.copy_(step[transport.comm.rank])
        reduce()
        sums.append(vector.clone())
    return torch.stack(sums), sum(transport.sent)


@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize(
    ("gradients", "rest"), [(1, 1), (64, 0), (64, 6), (640, 101), (6464, 7), (300_000, 5)]
)
def test_gradients_are_rounded_before_and_after_a_sum_in_float32_and_the_rest_never(
    size, gradients, rest
):
    """On all ranks alike, wherever the borders of slices fall; and hardly more is sent than there
    is.
    """
    vectors = vectors_of(size, gradients + rest, steps=2)
    wide, plain = vectors[..., :gradients].bfloat16().double(), vectors[..., gradients:].double()
    exact = torch.cat([wide, plain], dim=2).sum(1)
    error = 2**-23 * size * torch.cat([wide, plain], dim=2).abs().sum(1)
    error[:, :gradients] += exact[:, :gradients].abs() * 2**-8
    found = on_simulated_ranks(size, lambda transport: sum_of(transport, vectors, gradients))
    first = found[0][0]
    assert all(torch.equal(sums, first) for sums, _ in found)
    assert ((first - exact).abs() <= error).all()
    assert torch.equal(first[:, :gradients], first[:, :gradients].bfloat16().float())
    if size <= 3:  # few enough for one order of additions
        narrow = sum(vectors[..., :gradients].bfloat16().float().unbind(1)).bfloat16().float()
        bits = torch.cat([narrow, sum(vectors[..., gradients:].unbind(1))], dim=1)
        assert torch.equal(first, bits) != torch.equal(
            narrow, sum(vectors.unbind(1))[:, :gradients]
        )
    there_and_back = 2 * (1 - 1 / size) * (2 * gradients + 4 * rest)
    assert sum(sent for _, sent in found) / 2 / size <= there_and_back + 2 * (4 + 4) * size


def test_one_rank_rounds_nothing():
    vectors = vectors_of(1, 100)
    ((found, sent),) = on_simulated_ranks(1, lambda transport: sum_of(transport, vectors, 64))
    assert torch.equal(found, vectors[0]) and not sent


@pytest.mark.ranks
@pytest.mark.parametrize("overlap", [0, 2])
def test_numbers_after_the_gradients_are_not_rounded(comm, overlap):
    """Otherwise the counts of samples would not be exact."""
    message = hp.Message(
        nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 3)), 5, comm.rank, comm.size
    )
    message.tensor[message.layout.length :] = 2.0**20 + 1
    reduce = hp.choose_reduce(comm, message, comm_dtype="bf16", overlap=overlap)
    reduce.begin([0])
    reduce.accumulate(0)
    reduce()
    reduce.close()
    assert set(message.tensor[message.layout.length :].tolist()) == {comm.size * (2.0**20 + 1)}


@pytest.mark.ranks
def test_float64_is_refused(comm):
    message = hp.Message(nn.Linear(3, 2).double(), 0, comm.rank, comm.size)
    with pytest.raises(hp.UsageError, match="--comm-dtype bf16 .*float64"):
        hp.choose_reduce(comm, message, comm_dtype="bf16")


@pytest.mark.ranks(3)
def test_a_network_learns_as_well(comm, short):
    one, other = (
        hp.train(**short | {"run": dtype, "comm_dtype": dtype}).figures["test_loss"]
        for dtype in ("fp32", "bf16")
    )
    assert one != other == pytest.approx(one, rel=0.02)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_entries_of_targets_are_counted_exactly_and_learned_as_well(comm, short, task):
    """A fourth of the entries is unknown. The first loss is that of equal weights."""
    path = Path(short["data"]).with_name("entries.h5")
    if comm.rank == 0:
        write_entries(path, task, train=slice(100), test=slice(100, 140))
    comm.Barrier()
    first, tested = {}, {}
    for dtype in ("fp32", "bf16"):
        settings = short | {"data": str(path), "task": task, "run": dtype, "comm_dtype": dtype}
        result = hp.train(**settings)
        first[dtype] = next(step["loss"] for step in records(settings) if step["kind"] == "step")
        tested[dtype] = result.figures["test_loss"]
    assert first["bf16"] == pytest.approx(first["fp32"], rel=1e-6)
    assert tested["fp32"] != tested["bf16"] == pytest.approx(tested["fp32"], rel=0.02)
