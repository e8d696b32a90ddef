"""A network's answer depends on its input alone. What changes from call to call is found before the
first step, named and refused, and looking for it leaves no trace.
"""

from __future__ import annotations

import random

import pytest
import torch

import hpctrain as hp
from tests.support.api import check_repeats
from tests.support.short import digest

REFUSED = {
    "queue": "output",
    "hidden": "output",
    "hidden_cycle": "output",
    "draws": "output",
    "counting_buffer": "buffer late",
    "evaluation_buffer": "buffer late",
    "made_later": "buffer mask",
    "made_in_training": "mask of the network is not there before",
    "tuple": "tuple",
    "none": "mask of the network is not there before",
    "none_in_training": "mask of the network is not there before",
    "registered_in_training": "scale of the network is not there before",
    "RecomputedNorm": "batch-norm layer second.1 does not run exactly once",
}


def network(kind: str) -> dict[str, str]:
    return {"model": f"tests.support.nets:{'remembering_' * kind.islower()}{kind}"}


@pytest.mark.ranks
@pytest.mark.parametrize("kind", REFUSED)
def test_a_network_that_changes_from_call_to_call_is_refused(comm, short, kind):
    with pytest.raises(hp.UsageError) as caught:
        hp.train(**short | network(kind))
    text = str(caught.value)
    assert REFUSED[kind] in text and "\n" not in text
    assert comm.allgather(text) == [text] * comm.size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["counter", "flag", "cache", "made_once", "drops", "frozen"])
def test_a_network_whose_output_follows_from_its_input_is_trained(comm, short, kind):
    settings = short | network(kind) | {"test": False}
    for epochs in (1, 2):  # the second one by another launch
        result = hp.train(**settings | {"epochs": epochs})
        assert (result.exit_code, result.epoch) == (0, epochs)


@pytest.mark.ranks(3)
def test_comparing_ranks_leaves_no_trace(comm, fixed):
    """In weights, buffers, optimizer and all figures, however often ranks compare their state."""
    settings = fixed | network("drops")
    found = {
        digest(comm, settings | {"run": every, "checkpoint_every": every})
        for every in ("10m", "1step")
    }
    assert len(found) == 1


class Noisy(torch.nn.Module):
    """Adds in another order each time, as atomic additions of a GPU may; may count its calls."""

    def __init__(self, counts: bool):
        super().__init__()
        self.linear, self.counts = torch.nn.Linear(35, 3), counts
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += self.counts
        return self.linear(x.flatten(1)) + 1e-7 * random.random()


@pytest.mark.parametrize("counts", [False, True])
def test_where_sums_come_in_any_order_only_buffers_are_compared(counts):
    model = Noisy(counts).train()
    images, norms = torch.rand(5, 1, 5, 7), hp.BatchNorms(model)
    if counts:
        with pytest.raises(hp.UsageError, match="buffer calls changed"):
            check_repeats(norms, model, images, 3, False)
    else:
        check_repeats(norms, model, images, 3, False)
    with pytest.raises(hp.UsageError, match="output .* changed"):
        check_repeats(norms, model, images, 3, True)


def test_an_output_that_is_not_a_number_is_the_same_again():
    norms = hp.BatchNorms(torch.nn.Linear(35, 3))
    check_repeats(norms, lambda x: x * torch.nan, torch.rand(5, 3), 3, True)


@pytest.mark.ranks
@pytest.mark.parametrize("model", ["WithPut", "Recomputed"])
def test_what_has_no_deterministic_form_is_refused_by_name(comm, fixed, model):
    """A backward within backward has one."""
    settings = fixed | {"model": f"tests.support.nets:{model}", "epochs": 1}
    if model == "WithPut":
        with pytest.raises(hp.UsageError, match="--deterministic: put_ does not have"):
            hp.train(**settings)
        settings["deterministic"] = False
    assert hp.train(**settings).exit_code == 0
