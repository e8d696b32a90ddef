"""A test of an optimizer before the first step: does it give the same after save and restore?

An optimizer makes `STEPS` steps with drawn gradients on copies of a few parameters. Another makes
the first `SAVED` of them; a third one takes over its weights and its state, as from a checkpoint,
and makes the others. Each must have the same bits. So an optimizer is refused whose update depends
on what is not in its state, such as a counter of its own or random numbers.

Two more make a few steps, one with another learning rate, one with another weight decay, where
there is any: they must have other weights than the first, or a setting would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.numerics import watch_generators
from hpctrain.text import listed
from hpctrain.training.checksum import tensor_checksum
from hpctrain.training.library_optimizer import (
    Maker,
    NamedParameter,
    groups_of,
    guarded_step,
    names_of,
)
from hpctrain.training.optimizer import set_rates
from hpctrain.training.optimizer_state import collect_state, restore_state

STEPS = 24
SAVED = 7  # steps before the state is saved; odd: what happens every second step is seen
FEW = 3  # steps with another setting
SECOND = 1 << 16  # values of a second parameter of a kind
SIZE = 0.01  # standard deviation of the drawn gradients


class Trial:
    """An optimizer on copies of parameters."""

    def __init__(self, make: Maker, originals: Sequence[NamedParameter], rate: float) -> None:
        self.make = make
        self.rate = rate
        self.parameters = []
        for name, group, original in originals:
            parameter = nn.Parameter(original.detach().clone())
            parameter.grad = torch.zeros_like(parameter)
            self.parameters.append(NamedParameter(name, group, parameter))
        self.optimizer = make(self.parameters, rate)
        self.names = names_of(self.parameters)
        self._groups = groups_of(self.optimizer)
        self._step = guarded_step(make.flag, self.optimizer)

    def run(self, steps: Iterable[int], rate: float = 1.0, decay: float = 1.0) -> None:
        """Make steps with gradients that depend on their number, and a factor of the rate."""
        for group in self.optimizer.param_groups:
            group["weight_decay"] = group["weight_decay"] * decay
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for _, _, parameter in self.parameters:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
                assert parameter.grad is not None
                parameter.grad.copy_(drawn.normal_(std=SIZE, generator=generator))
            set_rates(self.optimizer, self.rate * rate * (1 - step / (2 * STEPS)))
            self._call()

    def _call(self) -> None:
        """Make a step. Raises UsageError if parameters are no longer where they were."""
        before = [(p.data_ptr(), p.grad) for _, _, p in self.parameters]
        self._step()
        if groups_of(self.optimizer) != self._groups:
            raise UsageError(f"{self.make.flag}: its step changes the groups of parameters")
        for (name, _, parameter), (place, gradient) in zip(self.parameters, before, strict=True):
            if parameter.data_ptr() != place or parameter.grad is not gradient:
                raise UsageError(
                    f"{self.make.flag}: its step replaces the tensor of {name} or its gradient:"
                    " update parameters in place"
                )

    def weights(self) -> dict[str, int]:
        """Return the checksum of each parameter by name."""
        return {name: int(tensor_checksum(parameter)) for name, _, parameter in self.parameters}

    def checksums(self) -> dict[str, int]:
        """Return the checksums of parameters and state by name."""
        state = self.state()
        return self.weights() | {name: int(tensor_checksum(t)) for name, t in state.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the state. Raises UsageError if it cannot be saved."""
        try:
            state = collect_state(self.optimizer, self.names)
        except UsageError as error:
            raise UsageError(f"{self.make.flag}: {error}") from None
        storages = {
            tensor.untyped_storage().data_ptr(): name
            for name, _, parameter in self.parameters
            for tensor in (parameter, parameter.grad)
            if tensor is not None and tensor.numel()
        }
        places: dict[int, str] = {}
        for name, tensor in state.items():
            if not tensor.numel():
                continue
            held = storages.get(tensor.untyped_storage().data_ptr())
            if held:
                raise UsageError(
                    f"{self.make.flag}: its state {name} is {held} itself, or its gradient, and no"
                    " copy"
                )
            other = places.setdefault(tensor.data_ptr(), name)
            if other != name:
                raise UsageError(
                    f"{self.make.flag}: its state {name} is the tensor {other}, too: they would be"
                    " two when a run is resumed"
                )
        return state

    def resumed(self) -> Trial:
        """Return a new one with these weights and this state, as a checkpoint would hold it."""
        files = {
            name: tensor.cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in self.state().items()
        }
        other = Trial(self.make, self.parameters, self.rate)
        try:
            restore_state(other.optimizer, other.names, files)
        except ValueError as error:
            raise UsageError(f"{self.make.flag} cannot be resumed: {error}") from error
        return other


def check_optimizer(make: Maker, parameters: Sequence[NamedParameter], rate: float) -> None:
    """Test that an optimizer of these parameters can be resumed, and has the settings' effects.

    Weights and random generators stay as they are. Raises UsageError.
    """
    failure = None
    with watch_generators(parameters[0].parameter.device) as changed:
        try:
            check_trials(make, choose_parameters(parameters), rate)
        except UsageError as error:  # may follow from random numbers
            failure = error
    if changed:
        raise UsageError(
            f"{make.flag}: draws random numbers from {listed(changed)}, whose state ranks do not"
            " share and no checkpoint holds"
        ) from failure
    if failure is not None:
        raise failure


def check_trials(make: Maker, chosen: Sequence[NamedParameter], rate: float) -> None:
    """Compare an optimizer that makes all steps with others, as the module describes."""
    whole = Trial(make, chosen, rate)
    if whole.weights() != {name: int(tensor_checksum(p)) for name, _, p in chosen}:
        raise UsageError(f"{make.flag}: changes weights before its first step")
    whole.run(range(FEW))
    first = whole.weights()
    whole.run(range(FEW, SAVED))
    second = Trial(make, chosen, rate)
    second.run(range(SAVED))
    compare(make.flag, "in a second run from the same weights", whole, second)
    resumed = second.resumed()
    whole.run(range(SAVED, STEPS))
    resumed.run(range(SAVED, STEPS))
    compare(make.flag, "if it is saved and restored", whole, resumed)
    check_effects(make, chosen, rate, first)


def check_effects(
    make: Maker, chosen: Sequence[NamedParameter], rate: float, expected: dict[str, int]
) -> None:
    """Test that other learning rates and weight decays of groups give other weights."""
    trial = Trial(make, chosen, rate)
    trial.run(range(1))
    trial.run(range(1, FEW), rate=0.5)
    if trial.weights() == expected:
        raise UsageError(
            f"{make.flag}: does not use the learning rate of its groups of parameters in each step,"
            " which --lr and --schedule give"
        )
    if any(group.weight_decay for _, group, _ in chosen):
        trial = Trial(make, chosen, rate)
        trial.run(range(FEW), decay=2.0)
        if trial.weights() == expected:
            raise UsageError(f"{make.flag}: has no weight decay: leave out --weight-decay")


def compare(flag: str, when: str, first: Trial, second: Trial) -> None:
    """Raise UsageError unless two trials hold the same weights and state."""
    one = first.checksums()
    other = second.checksums()
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    if names:
        raise UsageError(
            f"{flag}: gives other bits {when}, in {listed(names, 3)}: an update must depend on"
            " weights, gradients and the state that state_dict() returns alone"
        )


def choose_parameters(parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Return the smallest parameter of each kind, by which rules may treat them differently.

    A second one of at most `SECOND` values is chosen, too: state may be shared by those of a kind.
    """
    smallest: dict[tuple[object, ...], list[str]] = {}
    for named in sorted(parameters, key=lambda named: named.parameter.numel()):
        parameter = named.parameter
        rows = parameter.shape[0] if parameter.ndim else 1
        is_tall = rows**2 > parameter.numel()
        kind = (named.group, parameter.ndim, parameter.is_contiguous(), is_tall)
        chosen = smallest.setdefault(kind, [])
        if not chosen or (len(chosen) == 1 and parameter.numel() <= SECOND):
            chosen.append(named.name)
    names = {name for chosen in smallest.values() for name in chosen}
    return [named for named in parameters if named.name in names]
