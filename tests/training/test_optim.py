"""Optimizers on one flat vector: trajectories, the gate, schedules, clipping, refusals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.config import Config, check_settings
from hpctrain.errors import UsageError
from hpctrain.parallel.layout import Group
from hpctrain.training.optimizer import clip_gradient, gate_update, learning_rate, set_learning_rate
from hpctrain.training.optimizer import make_optimizer as make_by_name

OPTIMIZERS = ("sgdm", "adam", "adamw")
LENGTH = 101


def gradients(steps: int, dtype: torch.dtype = torch.float64) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield torch.randn(LENGTH, generator=generator, dtype=dtype)


def weights(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, LENGTH, dtype=dtype))


def make_optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [(each, Group(weight_decay=config.weight_decay)) for each in parameters]
    return make_by_name(config.optimizer or "sgdm", 0.01, config, groups)


def run(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, grads: Iterator[torch.Tensor]
) -> torch.Tensor:
    for number, gradient in enumerate(grads):
        set_learning_rate(optimizer, 0.01 / (1 + number))
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach().clone()


def plain(name: str, parameter: nn.Parameter, decay: float) -> torch.optim.Optimizer:
    """Torch's own loop over elements, not fused."""
    options = {"weight_decay": decay, "foreach": False, "fused": False}
    if name == "sgdm":
        return torch.optim.SGD([parameter], lr=1, momentum=0.7, nesterov=False, **options)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind([parameter], lr=1, betas=(0.9, 0.999), eps=1e-8, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectory_is_that_of_the_plain_optimizer(name: str) -> None:
    config = Config(optimizer=name, momentum=0.7, weight_decay=0.1)
    ours, theirs, other = weights(), weights(), weights()
    result = run(make_optimizer(config, [ours]), ours, gradients(7))
    expected = run(plain(name, theirs, 0.1), theirs, gradients(7))
    without = run(plain(name, other, 0.0), other, gradients(7))
    torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-14)
    assert (result - without).abs().max() > 1e-6


def test_sgd_without_momentum() -> None:
    parameter = weights()
    result = run(make_optimizer(Config(momentum=0.0), [parameter]), parameter, gradients(1))
    torch.testing.assert_close(result, weights() - 0.01 * next(gradients(1)))


def snapshot(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[torch.Tensor]:
    state = optimizer.state[parameter]
    return [parameter.detach().clone(), *(state[key].clone() for key in sorted(state))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gate_leaves_weights_and_state_untouched(name: str, dtype: torch.dtype) -> None:
    parameter = weights(dtype)
    optimizer = make_optimizer(Config(optimizer=name, weight_decay=0.1), [parameter])
    run(optimizer, parameter, gradients(2, dtype))
    before = snapshot(optimizer, parameter)
    assert len(before) == (2 if name == "sgdm" else 4)

    parameter.grad = torch.full((LENGTH,), math.nan, dtype=dtype)
    gate_update(optimizer, torch.tensor(1.0))
    optimizer.step()
    assert all(map(torch.equal, snapshot(optimizer, parameter), before))

    parameter.grad = next(gradients(1, dtype))
    gate_update(optimizer, torch.tensor(0.0))
    optimizer.step()
    assert not any(map(torch.equal, snapshot(optimizer, parameter), before))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gated_first_step_is_as_if_it_had_not_been(name: str) -> None:
    results = []
    for gated in (True, False):
        parameter = weights()
        optimizer = make_optimizer(Config(optimizer=name), [parameter])
        if gated:
            # What a fresh buffer might find in memory.
            junk = [torch.full((LENGTH,), 1e30, dtype=torch.float64) for _ in range(20)]
            del junk
            parameter.grad = torch.full((LENGTH,), math.inf, dtype=torch.float64)
            gate_update(optimizer, torch.tensor(1.0))
            optimizer.step()
        gate_update(optimizer, torch.tensor(0.0))
        results.append(run(optimizer, parameter, gradients(3)))
    assert torch.equal(*results)
    assert not torch.equal(results[0], weights())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_carries_on_with_the_same_bits(name: str) -> None:
    config = Config(optimizer=name)
    straight, resumed, forgetful = weights(), weights(), weights()
    expected = run(make_optimizer(config, [straight]), straight, gradients(5))
    first = make_optimizer(config, [resumed])
    list_of_gradients = list(gradients(5))
    run(first, resumed, iter(list_of_gradients[:2]))
    forgetful.data.copy_(resumed)
    second, third = make_optimizer(config, [resumed]), make_optimizer(config, [forgetful])
    second.load_state_dict(first.state_dict())
    for step in (2, 3, 4):
        for optimizer, parameter in ((second, resumed), (third, forgetful)):
            set_learning_rate(optimizer, 0.01 / (1 + step))
            parameter.grad = list_of_gradients[step].clone()
            optimizer.step()
    assert torch.equal(resumed, expected)
    assert not torch.equal(forgetful, expected)


def rate(config, lr, step, steps_per_epoch=7, epochs=9, warmup_steps=0):
    """The learning rate of a step of a plan with these figures."""
    steps = {"steps_per_epoch": steps_per_epoch, "steps": steps_per_epoch * epochs}
    warm = {"warmup_steps": warmup_steps, "warmup_from": 0.2}
    return learning_rate(config, SimpleNamespace(learning_rate=lr, **steps, **warm), step)


def test_constant_and_step_schedules() -> None:
    assert {rate(Config(), 0.3, step, 7, 20) for step in range(140)} == {0.3}
    config = Config(schedule="step", step_epochs=3)
    by_epoch = [rate(config, 0.8, step, 7, 9) for step in range(0, 63, 7)]
    assert by_epoch == pytest.approx([0.8] * 3 + [0.08] * 3 + [0.008] * 3)
    edges = [rate(config, 0.8, step, 7, 9) for step in (20, 21)]
    assert edges == pytest.approx([0.8, 0.08])


def test_cosine_schedule() -> None:
    config = Config(schedule="cosine")
    rates = [rate(config, 0.8, step, 7, 10) for step in range(71)]
    assert rates[0] == 0.8
    assert rates[35] == pytest.approx(0.4)
    assert rates[69] == pytest.approx(0.4 * (1 - math.cos(math.pi / 70)))
    assert rates[70] == 0.0 == rate(config, 0.8, 99, 7, 10)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("length", [1, 101, 4096, 3 * 4096 + 17])
def test_clip_agrees_with_torch(length: int) -> None:
    gradient = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_([parameter], 0.01)
    clipped = gradient.clone()
    norm = clip_gradient(clipped, 0.01)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(clipped, parameter.grad)
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-3)

    small = gradient.clone()
    clip_gradient(small, 1.01 * norm.item())
    assert torch.equal(small, gradient)
    assert not torch.equal(clipped, gradient)


def test_norm_of_a_long_gradient_is_accurate() -> None:
    gradient = torch.rand(3_000_017, generator=torch.Generator().manual_seed(6))
    exact = gradient.double().norm().item()
    assert clip_gradient(gradient, 1e-3).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr": 0.0}, "--lr 0.0: give a number above 0"),
        ({"lr": -1.0}, "--lr -1.0"),
        ({"lr": math.nan}, "--lr nan"),
        ({"lr": math.inf}, "--lr inf"),
        ({"momentum": 1.0}, r"--momentum 1.0: give a number in \[0, 1\)"),
        ({"momentum": -0.1}, "--momentum -0.1"),
        ({"weight_decay": -1e-4}, "--weight-decay -0.0001: give 0 or more"),
        ({"label_smoothing": 1.0}, "--label-smoothing 1.0"),
        ({"clip_norm": 0.0}, "--clip-norm 0.0"),
        ({"step_epochs": 0}, "--step-epochs 0: give 1 or more"),
        ({"optimizer": "sgd"}, "--optimizer sgd: there are sgdm, adam, adamw"),
        ({"schedule": "linear"}, "--schedule linear: there are constant, cosine, step"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        check_settings(dataclasses.replace(Config(), **settings))


def test_settings_in_range_are_accepted() -> None:
    check_settings(Config())
    extremes = Config(lr=1e-9, momentum=0.0, label_smoothing=0.99, clip_norm=1e-3, step_epochs=1)
    check_settings(dataclasses.replace(extremes, weight_decay=5.0))


def test_warm_up_rises_in_a_straight_line():
    rates = [rate(Config(), 2.0, step, warmup_steps=4) for step in range(6)]
    assert rates == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    step_schedule = Config(schedule="step", step_epochs=1)
    assert rate(step_schedule, 2.0, 2, 2, warmup_steps=4) == pytest.approx(0.12)
