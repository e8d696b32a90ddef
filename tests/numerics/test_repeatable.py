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
    "first_images": "output (does it keep something of earlier images",
    "first_in_training": "output",
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


#: Networks whose output for an image depends on more than the image, and what is said of them.
COUPLED = {
    "mean": "the other images of the batch (computed before layer linear, Linear)",
    "zeros": "the other images of the batch (computed before layer linear, Linear)",
    "softmax": "the other images of the batch (forward of Coupled)",
    "sorting": "the other images of the batch (forward of Coupled)",
    "sums_before": "its place in the batch (forward of Coupled)",
    "neighbour": "the other images of the batch (forward of Coupled)",
    "place": "its place in the batch (forward of Coupled)",
    "size": "the number of images in the batch (forward of Coupled)",
    "draws": "torch's random numbers (forward of Coupled)",
    "groups": "the other images of the batch (forward of Coupled)",
    "attention": "the other images of the batch (layer layer, MultiheadAttention, by design:"
    " without batch_first=True",
    "statistics": "the other images of the batch (layer layer, BatchNorm1d, by design: with"
    " track_running_stats=False",
    "training": "torch's random numbers (layer layer, Dropout, which the network's own train()",
}
OTHERS = {
    "input": "changes its input in place in training mode",
    "nothing": "is not finite before the first step",
    "one": "output of shape (10,) for 1 image in evaluation mode",
    "no_gradient": "depends on none of its trained parameters",
    "freezing": "changes requires_grad",
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


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [*COUPLED, *OTHERS])
def test_a_network_that_looks_beyond_the_image_is_refused(comm, short, kind):
    with pytest.raises(hp.UsageError) as caught:
        hp.train(**short | {"model": f"tests.support.nets:coupled_{kind}"})
    text = str(caught.value)
    if kind in COUPLED:
        said = "in evaluation mode the network's output for an image depends on "
        assert text.startswith(said + COUPLED[kind])
    assert {**COUPLED, **OTHERS}[kind] in text and "\n" not in text
    assert comm.allgather(text) == [text] * comm.size


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["float64", "frozen_complex64", "frozen_int64"])
def test_images_have_the_type_of_the_network(comm, short, kind):
    """That of its first parameter that is no integer; complex numbers are pairs of such."""
    settings = short | {"model": f"tests.support.nets:typed_{kind}", "epochs": 1}
    assert hp.train(**settings).status == "done"
    assert hp.evaluate(short["runs_dir"] + "/a", trust_code=True, threads=1).rows == 23


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("typed_float16", "parameter first is float16: .* --precision bf16"),
        ("typed_bfloat16", "parameter first is bfloat16: .* --precision bf16"),
        ("typed_complex64", "parameter first is complex64: .* torch.view_as_complex"),
        ("MixedTypes", "mix types, linear.weight float32, linear.bias float64: use one"),
        ("on_meta", "linear.weight is on the device meta"),
    ],
)
def test_types_that_cannot_be_trained_are_named(comm, short, model, said):
    with pytest.raises(hp.UsageError, match=said):
        hp.train(**short | {"model": f"tests.support.nets:{model}"})


@pytest.mark.ranks(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["digits", "resnet50", "tests.support.nets:Tiny"])
def test_rounding_and_zero_weights_are_no_reason_to_refuse(comm, short, model, precision):
    settings = short | {"model": model, "precision": precision, "test": False}
    assert hp.train(**settings | {"dry_run": True}).status == "planned"


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
