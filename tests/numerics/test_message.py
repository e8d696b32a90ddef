"""The message: where gradients of any shape lie, what the ranks count and clock, what is finite."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import hpctrain as hp
from tests.support.api import task_class


def add_up(messages):
    """Sum the messages of all ranks, as an Allreduce does."""
    total = torch.stack([message.tensor for message in messages]).sum(0)
    for message in messages:
        message.tensor.copy_(total)


def messages_of(size, model=None, **sums):
    models = [model or nn.Linear(3, 2) for _ in range(size)]
    return [hp.Message(net, 5, rank, size, sums=sums) for rank, net in enumerate(models)]


@st.composite
def networks(draw):
    """Parameters of any shapes, strides and type, some of them frozen, some of them tied."""
    shapes = st.lists(st.integers(1, 9), max_size=4)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    net = nn.Module()
    for number in range(draw(st.integers(1, 8))):
        values = torch.randn(draw(shapes), dtype=dtype)
        if values.dim() == 4 and draw(st.booleans()):
            values = values.contiguous(memory_format=torch.channels_last)
        elif values.dim() > 1 and draw(st.booleans()):
            values = values.transpose(0, 1)
        net.register_parameter(f"p{number}", nn.Parameter(values))
        getattr(net, f"p{number}").requires_grad = number == 0 or draw(st.booleans())
    net.tied = net.p0
    return net


@given(networks(), st.integers(0, 7), st.integers(1, 5))
def test_every_parameter_has_a_place_of_its_own_in_weights_and_gradients(net, channels, size):
    """At multiples of 64 numbers, as kernels like it, with the strides that it had."""
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    strides = {name: torch.empty_like(p).stride() for name, p in net.named_parameters()}
    message = hp.Message(net, channels, size - 1, size)
    message.zero()
    owners = torch.zeros(len(message.gradients), dtype=torch.int64)
    gradients = {}
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name])
        if parameter.requires_grad:
            assert parameter.stride() == strides[name]
            gradients[name] = torch.randn_like(parameter)
            offset = (parameter.data_ptr() - message.weights.data_ptr()) // parameter.itemsize
            assert offset % 64 == 0
            owners.as_strided(parameter.shape, parameter.stride(), offset).add_(1)
    assert owners.max() == 1 and owners.sum() == sum(g.numel() for g in gradients.values())
    assert len(owners) < owners.sum() + 64 * len(gradients), "no gradient of what is frozen"
    for _ in range(2):
        for name, gradient in gradients.items():
            net.get_parameter(name).grad = gradient.clone()
        message.add_gradients()
        assert all(parameter.grad is None for parameter in net.parameters())
    assert not message.tensor[len(message.gradients) :].any()
    with torch.no_grad():
        message.weights -= 0.5 * message.gradients  # as an optimizer updates them
    for name, parameter in net.named_parameters():
        moved = before[name] - gradients[name] if name in gradients else before[name]
        torch.testing.assert_close(parameter.detach(), moved)
    assert not message.gradients[owners == 0].any()


@pytest.mark.parametrize("size", [1, 3, 10])
def test_each_rank_sends_its_seconds_in_every_step(size):
    messages, found, sent = messages_of(size), [], []
    for step in range(3):
        compute = [rank + step / 8 for rank in range(size)]
        waited = [1.0 if rank == size // 2 else 0.25 for rank in range(size)]
        for message, *seconds in zip(messages, compute, waited, strict=True):
            message.zero()
            message.set_seconds(*seconds)
        add_up(messages)
        found += [message.totals() for message in messages]
        sent += [(compute, waited)] * size
    assert [(total.compute.tolist(), total.data.tolist()) for total in found] == sent


def test_counts_and_flags_are_summed_and_the_loss_of_a_rank_is_not():
    messages = messages_of(3, correct=int, error=float)
    for rank, message in enumerate(messages):
        message.zero()
        message.add_sums(4, loss=torch.tensor(1.0), correct=2, error=torch.tensor(0.25))
        loss = torch.tensor(math.nan if rank == 1 else 2.0)
        message.add_sums(4, rank, loss=loss, correct=rank, error=0.0)
        message.request("preempted", *["stop"] * (rank == 2), *["save"] * (rank > 0))
    add_up(messages)
    totals = [message.totals() for message in messages]
    assert [total.own for total in totals] == [3.0, pytest.approx(math.nan, nan_ok=True), 3.0]
    for total in totals:
        assert math.isnan(total.loss)
        assert (total.rows, total.irregular) == (24, 3)
        assert total.named == {"correct": 9, "error": 0.75}
        assert type(total.named["correct"]) is int
        assert (total.stop, total.preempted, total.save) == (1, 3, 2)
    messages[1].zero()
    assert messages[1].totals().own == messages[1].totals().stop == 0


@given(st.data(), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_one_number_that_is_not_finite_anywhere_is_seen(data, bad):
    (message,) = messages_of(1)
    message.zero()
    message.tensor.copy_(torch.randn(len(message.tensor)))
    message.skipped.zero_()
    assert message.finite() and not message.totals().skipped
    place = data.draw(st.integers(0, message.skipped.storage_offset() - 1))
    message.tensor[place] = bad
    assert not message.finite() and message.totals().skipped
    message.tensor[place] = 0
    assert message.finite()


def test_after_a_step_that_is_not_finite_none_counts_if_it_is_to_last():
    (message,) = messages_of(1)
    message.tensor[3] = math.inf
    assert not message.finite(lasting=True)
    message.zero()
    assert not message.finite(lasting=True)


def test_more_known_entries_than_float32_counts_divide_the_gradients_exactly():
    """As of 10,000 classes: float32 holds odd numbers to 2^24 only. One of the shards has none."""
    counts = [2**24 + 1, 0, 3 * 2**23 + 4095, 1]
    divisor = 2**27
    messages = messages_of(2, weight_blocks=int)
    task = task_class("regress")(names=("a",))
    for rank, message in enumerate(messages):
        message.zero()
        for count in counts[2 * rank : 2 * rank + 2]:
            weights = torch.tensor([count])
            sums = {"weight": task.weight_sum(weights), "weight_blocks": weights.sum() // 4096}
            message.add_sums(1, loss=torch.ones(()), **sums)
    add_up(messages)
    first = messages[0]
    assert first.weight() == sum(counts) == first.totals().weight
    first.gradients.fill_(1.0)
    first.weigh_gradients(divisor)
    expected = torch.tensor(divisor / sum(counts))
    torch.testing.assert_close(first.gradients.max(), expected, rtol=1e-7, atol=0)
    first.zero()
    first.gradients.fill_(1.0)
    first.weigh_gradients(divisor)
    assert first.gradients.eq(1).all()  # no entry is known
