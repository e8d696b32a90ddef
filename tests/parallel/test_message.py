"""The message after the gradients: seconds by rank, own losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.parallel.message import SCALARS, Message
from hpctrain.training.steps import time_shares


def of_rank(rank, size):
    return Message(nn.Linear(3, 2), 5, rank, size)


def add_up(messages):
    """Sum the messages of all ranks, as an Allreduce does."""
    total = torch.stack([message.tensor for message in messages]).sum(0)
    for message in messages:
        message.tensor.copy_(total)


@pytest.mark.parametrize("size", [1, 3, 10])
def test_each_rank_sends_its_seconds_in_every_step(size):
    ranks = range(size)
    messages = [of_rank(rank, size) for rank in ranks]
    rest = len(messages[0].tensor) - messages[0].layout.length - messages[0].moments.numel()
    assert rest == len(SCALARS) + 2 * size
    for step in range(3):
        for rank, message in zip(ranks, messages, strict=True):
            message.zero()
            message.set_seconds(rank + step / 8, 1.0 if rank == size // 2 else 0.25)
        add_up(messages)
        for message in messages:
            totals = message.totals()
            assert len(totals.compute) == len(totals.data) == size
            assert totals.compute.tolist() == [rank + step / 8 for rank in ranks]
            others = [1.0 if rank == size // 2 else 0.25 for rank in ranks]
            assert totals.data.tolist() == others
        busy = totals.compute + totals.data
        shares, slowest = time_shares(totals, 100.0)
        assert slowest == busy.argmax()
        assert shares == pytest.approx(
            {
                "data": totals.data[slowest],
                "compute": totals.compute[slowest],
                "reduce": 100 - (busy[slowest] - busy[0]),
                "idle": busy[slowest] - busy.mean(),
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
