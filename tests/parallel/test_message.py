"""The message after the gradients: bounded length, slots in turns, own losses."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.parallel import message as module
from hpctrain.parallel.message import MOST_SLOTS, SCALARS, SLOTS, Message
from hpctrain.training.steps import time_shares

MANY = 16_384


def of_rank(rank, size):
    return Message(nn.Linear(3, 2), 5, rank, size)


def add_up(messages):
    """Sum the messages of all ranks, as an Allreduce does."""
    total = torch.stack([message.tensor for message in messages]).sum(0)
    for message in messages:
        message.tensor.copy_(total)


def test_the_length_is_bounded():
    lengths = {}
    for size in (1, 4, 64, 1024, MANY):
        message = of_rank(size - 1, size)
        lengths[size] = len(message.tensor) - message.layout.length - message.moments.numel()
        assert len(message.report().snapshot.array()) == lengths[size] + 1
    rest = len(SCALARS)
    assert lengths == {
        1: rest + 2,
        4: rest + 8,
        64: rest + 128,
        1024: rest + 2 * MOST_SLOTS,
        MANY: rest + 2 * MOST_SLOTS,
    }
    assert len(SLOTS) == 2 and lengths[MANY] < 530


@pytest.mark.parametrize("size", [1, 3, 4, 5, 10])
def test_ranks_send_their_seconds_in_turns(size, monkeypatch):
    monkeypatch.setattr(module, "MOST_SLOTS", 4)
    messages = [of_rank(rank, size) for rank in range(size)]
    turns, warm_up = -(-size // 4), module.WARM_UP
    last = {rank: [] for rank in range(size)}  # what a rank measured since its turn
    expected = np.zeros((size, 2))
    for step in range(warm_up + 9):
        turn = 0 if step < warm_up else (step + 1) % turns
        for rank, message in enumerate(messages):
            message.zero()
            message.set_seconds(rank + step / 8, 1.0 if rank == size // 2 else 0.25)
            last[rank].append((rank + step / 8, 1.0 if rank == size // 2 else 0.25))
            if rank // 4 == turn:
                expected[rank] = np.mean(last[rank], 0)
            if rank // 4 == turn or step < warm_up:
                last[rank].clear()
        add_up(messages)
        for message in messages:
            totals = message.totals()
            found = np.stack([totals.compute, totals.data], 1)
            assert np.allclose(found, expected)
        shares, slowest = time_shares(totals, 100.0)
        busy = totals.compute + totals.data
        assert slowest == busy.argmax() and (busy[slowest] == busy).sum() == 1
        known = busy[busy > 0]
        assert shares == pytest.approx(
            {
                "data": totals.data[slowest],
                "compute": totals.compute[slowest],
                "reduce": 100 - (busy[slowest] - busy[0]),
                "idle": busy[slowest] - known.mean(),
            }
        )


def test_totals_do_not_change_with_later_steps():
    message = of_rank(0, 1)
    message.set_seconds(1.0, 2.0)
    first = message.totals()
    message.zero()
    message.set_seconds(3.0, 4.0)
    assert message.totals().compute == [3.0]
    assert (first.compute, first.data) == ([1.0], [2.0])


def test_warm_up_steps_do_not_make_a_rank_look_slow_later(monkeypatch):
    """They are slow on all ranks, and with three turns a value is kept for three steps."""
    monkeypatch.setattr(module, "MOST_SLOTS", 4)
    messages = [of_rank(rank, 12) for rank in range(12)]
    for step in range(3 * module.WARM_UP):
        for message in messages:
            message.zero()
            message.set_seconds(9.0 if step < module.WARM_UP else 1.0, 0.0)
        add_up(messages)
        totals = messages[0].totals()
        assert (totals.compute[:4] > 0).all(), "rank 0 records a step from the first one on"
        if step >= module.WARM_UP + 2:
            assert totals.compute.tolist() == [1.0] * 12


def test_the_loss_of_a_rank_is_not_reduced():
    messages = [of_rank(rank, 3) for rank in range(3)]
    for rank, message in enumerate(messages):
        message.zero()
        message.add_counts(torch.tensor(1.0), 0, 4)
        message.add_counts(torch.tensor(float("nan") if rank == 1 else 2.0), 0, 4)
    add_up(messages)
    totals = [message.totals() for message in messages]
    assert [total.own for total in totals] == [3.0, pytest.approx(np.nan, nan_ok=True), 3.0]
    assert all(np.isnan(total.loss) and total.rows == 24 for total in totals)
    messages[1].zero()
    assert messages[1].totals().own == 0


def opcodes(work):
    """The number of Python instructions that a call executes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_the_instructions_of_a_step_do_not_grow_with_the_ranks():
    found = {}
    for size in (1, 64, 1024, MANY):
        message = of_rank(size // 2, size)

        def step(message=message):
            message.zero()
            message.set_flags(False)
            message.set_seconds(1.0, 0.5)
            time_shares(message.totals(), 0.25)

        for _ in range(64):  # all ranks have sent theirs
            step()
        found[size] = opcodes(step)
    assert found[1] > 200
    assert max(found.values()) < found[1] + 100, found
