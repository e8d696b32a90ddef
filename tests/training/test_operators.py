"""What a step asks of torch, beside a plain loop: on a GPU each operator is a kernel or more."""

from __future__ import annotations

import pytest
import torch

from scripts.benchmarks.operators import CASES, count_step, make_steps


@pytest.mark.parametrize("name", CASES)
def test_a_step_asks_for_few_operators_more_than_a_plain_loop(name, tmp_path):
    network, shape, most = CASES[name]
    ours, plain = map(count_step, make_steps(tmp_path, network, shape, "cpu").values())
    assert plain.dispatched > 70 and plain.computing > 30
    assert plain.dispatched < ours.dispatched <= most * plain.dispatched
    # one of them copies the totals to the host: the plain loop reads no loss
    assert ours.computing <= plain.computing + 31, ours.names - plain.names


def test_counted_are_all_but_views_and_allocations():
    def step():
        a = torch.empty(6)
        a.view(2, 3).t().add_(1)
        return torch._foreach_add([a, a], 1)

    assert count_step(step)[:2] == (5, 2)
