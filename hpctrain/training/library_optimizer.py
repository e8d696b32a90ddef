"""Optimizers of torch.optim and timm.optim, and those of a function of the user's own.

After the reduction all ranks hold the same gradients. Any optimizer that computes from them, its
weights and its state alone thus gives the same bits on all ranks. It is made on views of the flat
weights, one for each parameter, in one group of parameters for each `Group` of the message; their
gradients are views of the reduced gradients. Its state is saved by optimizer_state.py, and tested
before the first step by optimizer_check.py.

In contrast to torch's fused optimizers it cannot skip an update on the device: whether a step
counts is read on the host before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.config.functions import call_guarded, import_function
from hpctrain.config.parts import Part, build_part, find_part, is_part, load_class, taken_by
from hpctrain.errors import UsageError
from hpctrain.parallel.message import Group, Message
from hpctrain.training.optimizer import FUSED, set_rates
from hpctrain.training.optimizer_state import PREFIX, collect_state, restore_state, without_compiler

TIMM_MOMENTUM = 0.9  # of timm's create_optimizer_v2, for optimizers that have one
#: Entries of a group that are settings of hpctrain's own, or change nothing of what is computed.
UNSHOWN = {"params", "lr", "lr_scale", "weight_decay", "foreach", "capturable", "differentiable"}
UNSHOWN |= {"fused", "max_lr_snapshot"}  # the largest rate so far, which timm keeps in groups


class LibraryUpdate:
    """The update of the weights by an optimizer that sees each parameter."""

    def __init__(self, make: Maker, rate: float, message: Message) -> None:
        """Make the optimizer with a learning rate. Raises UsageError."""
        self.make = make
        self.parameters = view_parameters(message)
        self.optimizer = make(self.parameters, rate)
        self._names = names_of(self.parameters)
        self._step = guarded_step(self.make.flag, self.optimizer)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        set_rates(self.optimizer, rate)

    def __call__(self, skipped: Tensor) -> None:
        """Update the weights unless `skipped` (), for which this waits, is 1."""
        if not skipped.item():
            self._step()

    def state(self) -> dict[str, Tensor]:
        """Return all state as tensors by name, without copying."""
        return collect_state(self.optimizer, self._names)

    def load(self, tensors: Mapping[str, Tensor]) -> Collection[str]:
        """Restore the state of a checkpoint, and return the names of its tensors.

        Raises ValueError if the optimizer does not take it.
        """
        saved = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        restore_state(self.optimizer, self._names, saved)
        return saved.keys()


class NamedParameter(NamedTuple):
    """A parameter as an optimizer sees it."""

    name: str
    group: Group
    parameter: nn.Parameter  # with its gradient


class Maker(NamedTuple):
    """How an optimizer is made."""

    flag: str  # with which errors begin: "--optimizer timm:lamb"
    make: Callable[..., Any]  # of groups of parameters, and `lr`

    def __call__(self, parameters: Sequence[NamedParameter], rate: float) -> Optimizer:
        """Return an optimizer with a learning rate; `parameters` are in the order of their groups.

        Raises UsageError if it is none, or needs what a step does not give.
        """
        param_groups = []
        for group, some in groupby(parameters, key=lambda named: named.group):
            of_group = [named.parameter for named in some]
            entries = {"params": of_group, "lr": rate * group.lr_scale, **group._asdict()}
            param_groups.append(entries)
        expected = [identify_group(group) for group in param_groups]
        with without_compiler():
            optimizer = self.make(param_groups, lr=rate)
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise UsageError(f"{self.flag}: must return a torch.optim.Optimizer, not {kind}")
        if reason := find_unsuitable(optimizer):
            raise UsageError(f"{self.flag}: {reason}")
        if groups_of(optimizer) != expected:
            raise UsageError(
                f"{self.flag}: must keep the groups of parameters that it is given, with their"
                " entries"
            )
        return optimizer


def groups_of(optimizer: Optimizer) -> list[tuple[Any, list[int]]]:
    """Return `identify_group` of each group of parameters."""
    return [identify_group(group) for group in optimizer.param_groups]


def identify_group(group: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """Return the factor of the learning rate of a group, and the identities of its parameters."""
    return group.get("lr_scale"), [id(parameter) for parameter in group["params"]]


def find_unsuitable(optimizer: Optimizer) -> str:
    """Return why a step cannot use an optimizer; "" if it can."""
    required = [
        parameter.name
        for parameter in inspect.signature(optimizer.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        return (
            f"its step needs a {required[0]}, to compute the loss anew; a step has one forward and"
            " backward"
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        return "it has modes of training and evaluation, of which weights would be validated"
    if getattr(optimizer, "is_second_order", False):
        return "it needs gradients of gradients"
    return ""


def import_optimizer(text: str | None) -> Maker | None:
    """Import the optimizer that --optimizer names, of a library or the user's own; None for others.

    Raises UsageError if it is not there, or cannot be called so.
    """
    if text is None or text in FUSED:
        return None
    if is_part("optimizer", text):
        return maker_of_part(find_part("optimizer", text))
    function = import_function(text, "--optimizer")
    function.check_arguments("function(params, lr)", [], lr=0.1)
    return Maker(function.setting, function.__call__)


def maker_of_part(part: Part) -> Maker:
    """Return how an optimizer of a library is made. Raises UsageError."""
    part = with_usual_momentum(part)
    filled = taken_by(part, {"weight_decay": 0.0})  # each group has its own

    def make(param_groups: Sequence[dict[str, Any]], lr: float) -> Any:
        return build_part(part, params=param_groups, lr=lr, **filled)

    return Maker(part.flag, make)


def with_usual_momentum(part: Part) -> Part:
    """Return a part with the momentum that timm gives its optimizers by default, if they have one.

    Their classes have 0; timm's names stand for them with 0.9.
    """
    if part.library != "timm":
        return part
    load_class(part)  # explains why timm cannot be imported
    from timm.optim import get_optimizer_info

    if not get_optimizer_info(part.name).has_momentum or "momentum" in part.kwargs:
        return part
    return part._replace(kwargs={**part.kwargs, "momentum": TIMM_MOMENTUM})


def view_parameters(message: Message) -> list[NamedParameter]:
    """Return the parameters of a message as views of its weights and gradients."""
    parameters = []
    for group, span in message.layout.groups:
        for segment in message.layout.segments:
            if span.start <= segment.offset < span.stop:
                parameter = nn.Parameter(segment.of(message.weights.data))
                parameter.grad = segment.of(message.gradients)
                parameters.append(NamedParameter(segment.name, group, parameter))
    return parameters


def guarded_step(flag: str, optimizer: Optimizer) -> Callable[[], Any]:
    """Return the optimizer's `step`; if it fails, the error is one line (OwnCodeError)."""
    step = optimizer.step
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):  # its decorators import the compiler
        step = torch.no_grad()(partial(inspect.unwrap(kind.step), optimizer))
    return partial(call_guarded, f"{flag}: its step", step)


def describe_arguments(optimizer: Optimizer) -> str:
    """Return the arguments of an optimizer, given or not, but switches that are off."""
    group = optimizer.param_groups[0]
    shown = {key: value for key, value in group.items() if key not in UNSHOWN}
    plain = (int, float, str, tuple, list)
    return ", ".join(
        f"{key}={value}"
        for key, value in shown.items()
        if isinstance(value, plain) and value is not False
    )


def names_of(parameters: Sequence[NamedParameter]) -> dict[Tensor, str]:
    """Return the names of parameters, for `collect_state`."""
    return {named.parameter: named.name for named in parameters}
