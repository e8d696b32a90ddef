"""Optimizers that see each parameter: their state as tensors, the test before the first step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.errors import OwnCodeError, UsageError
from hpctrain.models import as_bytes
from hpctrain.parallel.message import Group, Message
from hpctrain.training.library_optimizer import (
    LibraryUpdate,
    describe_arguments,
    import_optimizer,
)
from hpctrain.training.optimizer_check import check_optimizer
from tests.support import own_optimizers

OWN = "tests.support.own_optimizers"
RATE = 0.01
FAST = """
    torch:SGD(momentum=0.9,nesterov=True) torch:NAdam(betas=(0.9,0.99)) torch:ASGD torch:Adafactor
    timm:lamb timm:lars timm:muon timm:adan timm:madgrad timm:adafactorbv timm:novograd timm:mars
"""


def network(dtype=torch.float32):
    """Weights in NHWC, of 4, 2, 1 and 0 dimensions, and tied ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4, 1),
        nn.Flatten(),
        nn.Linear(16, 6),
        nn.Linear(6, 16),
    )
    model[5].weight = nn.Parameter(model[4].weight.detach().t().clone())
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model.register_parameter("tied", model[4].bias)
    return model.to(dtype).to(memory_format=torch.channels_last)


def make_update(text, dtype=torch.float32, weight_decay=0.01):
    """Two rates, with and without weight decay: four groups."""
    model = network(dtype)
    groups = {
        name: Group(0.5 if name[0] in "0s" else 1.0, weight_decay if p.ndim > 1 else 0.0)
        for name, p in model.named_parameters()
    }
    message = Message(model, 16, 0, 1, groups)
    return LibraryUpdate(import_optimizer(text), RATE, message), message


def run(update, message, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        drawn = torch.randn(message.gradients.shape, generator=generator, dtype=torch.float64)
        message.gradients.copy_(0.01 * drawn)
        update.set_rate(RATE / (1 + step))
        update(torch.zeros(()))


def as_saved(update):
    """As a checkpoint holds it: contiguous, on the CPU."""
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in update.state().items()
    }


def strides(update):
    return {name: tensor.stride() for name, tensor in update.state().items()}


def check_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(as_bytes(tensor), as_bytes(other[name])), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", [*FAST.split(), f"{OWN}:sgd_with_a_twist"])
def test_bits_are_those_of_a_run_that_was_not_saved(text, dtype):
    whole, its_message = make_update(text, dtype)
    run(whole, its_message, range(40))
    first, message = make_update(text, dtype)
    run(first, message, range(17))
    saved = as_saved(first)
    again, another = make_update(text, dtype)
    another.weights.data.copy_(message.weights.data)
    assert again.load(saved) == saved.keys()
    assert strides(again) == strides(first)
    run(again, another, range(17, 40))
    check_equal(as_saved(again), as_saved(whole))
    check_equal({"weights": another.weights.data}, {"weights": its_message.weights.data})
    assert strides(again) == strides(whole)


def test_state_has_the_names_of_parameters_and_groups():
    update, message = make_update(f"{OWN}:sgd_with_a_twist", torch.float32)
    run(update, message, range(2))
    state = update.state()
    assert state["optimizer.parameter.0.weight.exact"].dtype == torch.float64
    assert state["optimizer.parameter.0.weight.exact"].stride() == network()[0].weight.stride()
    assert state["optimizer.parameter.scale.largest"].dtype == torch.float64
    assert [state[f"optimizer.group.{number}.step"].item() for number in range(4)] == [2] * 4
    assert state["optimizer.other.state.all"].item() == 2
    assert "optimizer.parameter.tied.exact" in state
    assert "optimizer.parameter.4.bias.exact" not in state  # the same parameter


@pytest.mark.parametrize("missing", ["group.0.step", "parameter.scale.exact", "structure"])
def test_state_that_lacks_something_is_refused(missing):
    update, message = make_update(f"{OWN}:sgd_with_a_twist")
    run(update, message, range(2))
    saved = as_saved(update)
    del saved[f"optimizer.{missing}"]
    with pytest.raises(ValueError, match=f"it lacks the tensor 'optimizer.{missing}'"):
        make_update(f"{OWN}:sgd_with_a_twist")[0].load(saved)


def test_state_that_is_not_taken_back_is_refused():
    update, message = make_update("torch:Adam")
    run(update, message, range(2))
    other, _ = make_update(f"{OWN}:ForgetsState")
    with pytest.raises(ValueError, match="does not take back its parameter"):
        other.load(as_saved(update))


def test_a_step_that_does_not_count_changes_nothing():
    update, message = make_update("timm:lamb")
    run(update, message, range(3))
    weights = message.weights.data.clone()
    state = as_saved(update)
    message.gradients.fill_(torch.nan)
    update(torch.ones(()))
    check_equal(as_saved(update), state)
    assert torch.equal(message.weights.data, weights)
    assert weights.isfinite().all()


REFUSED = {
    "CountOutside": "gives other bits in a second run from the same weights, in ",
    "CountOfItsOwn": "gives other bits if it is saved and restored, in ",
    "Noisy": "draws random numbers from torch's default generator,",
    "NoisyByNumpy": "draws random numbers from numpy.random,",
    "NoisyByPython": "draws random numbers from random,",
    "SharesState": "its state optimizer.parameter.* is the tensor optimizer.parameter.*, too",
    "AddsGroup": "its step changes the groups of parameters",
    "DropsFactor": "its step changes the groups of parameters",
    "KeepsGradient": "its state optimizer.parameter.* is .* itself, or its gradient",
    "ReplacesWeights": "its step replaces the tensor of",
    "NeedsClosure": "its step needs a closure",
    "HasModes": "it has modes of training and evaluation",
    "FixedRate": "does not use the learning rate of its groups",
    "KeepsObject": "its state holds parameter.*count, of the type float32",
    "WithoutDecay": "has no weight decay: leave out --weight-decay",
    "ForgetsState": "cannot be resumed: the optimizer does not take back its parameter",
    "Fails": r"its step failed: ValueError: 4-d weights only \(.*own_optimizers.py, line",
    "without_groups": "must keep the groups of parameters",
    "no_optimizer": "must return a torch.optim.Optimizer, not list",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_be_resumed_is_refused(name):
    with pytest.raises(
        (UsageError, OwnCodeError), match=f"^--optimizer {OWN}:{name}.? {REFUSED[name]}"
    ):
        update, _ = make_update(f"{OWN}:{name}")
        check_optimizer(update.make, update.parameters, RATE)


def test_the_check_changes_neither_weights_nor_generators():
    update, message = make_update(f"{OWN}:sgd_with_a_twist")
    weights = message.weights.data.clone()
    states = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    check_optimizer(update.make, update.parameters, RATE)
    assert torch.equal(message.weights.data, weights)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]
    assert not update.optimizer.state


def test_a_rule_that_cannot_take_a_shape_is_refused():
    with pytest.raises(OwnCodeError, match="muon_of_torch failed: .* only supports 2D parameters"):
        make_update(f"{OWN}:muon_of_torch")


def test_weight_decay_is_that_of_the_groups():
    """Also with a class whose own default is another."""
    update, _ = make_update("torch:AdamW", weight_decay=0.25)
    decays = [group["weight_decay"] for group in update.optimizer.param_groups]
    assert sorted(decays) == [0.0, 0.0, 0.25, 0.25]


@pytest.mark.parametrize("name", ["timm:sgd", "timm:sgd(momentum=0.5)"])
def test_momentum_of_timm(name):
    update, _ = make_update(name)
    expected = 0.5 if "(" in name else 0.9  # the default of timm's create_optimizer_v2
    assert {group["momentum"] for group in update.optimizer.param_groups} == {expected}


def test_own_optimizers_are_those_that_are_refused():
    classes = {name for name, kind in vars(own_optimizers).items() if getattr(kind, "step", None)}
    assert classes - {"SGD", "Adam", "Muon", "Optimizer", "Twist", "FailsLater"} <= REFUSED.keys()


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("torch:SGD(momentum=0.9,maximize=True)", "momentum=0.9, dampening=0, maximize=True"),
        ("torch:NAdam", "betas=(0.9, 0.999), eps=1e-08, momentum_decay=0.004"),
        ("timm:lion", "betas=(0.9, 0.99)"),
    ],
)
def test_the_arguments_of_an_optimizer_are_told_without_its_state(text, described):
    update, message = make_update(text)
    run(update, message, range(1))
    assert describe_arguments(update.optimizer) == described
