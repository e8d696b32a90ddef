"""The update of the weights: what is frozen, groups of parameters, optimizers, rate, clipping.

A pattern of --freeze, --lr-factors or --no-decay is a shell pattern (fnmatch) of a name in the
network's state dict, such as "layer1.0.conv1.weight"; the name of a module stands for everything in
it.

The optimizers of this module are torch's fused ones (others: library_optimizer.py): one kernel for
the whole vector, and an update that can be skipped on the device. If ``optimizer.found_inf``, a
zero-dimensional float32 tensor, is 1, ``step`` leaves weights, momenta and step counters unchanged,
without synchronizing with the host. Only the value 1 skips the update.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Adam, AdamW, Optimizer

from hpctrain.config import Config, Patterns
from hpctrain.errors import UsageError
from hpctrain.parallel.message import Group
from hpctrain.plan import Plan
from hpctrain.text import listed

FUSED: dict[str, type[Any]] = {"sgdm": SGD, "adam": Adam, "adamw": AdamW}
NORMS = _NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm


class FusedUpdate:
    """The update of the weights by a fused optimizer, which sees those of a group as one vector."""

    def __init__(
        self, name: str, lr: float, config: Config, groups: Sequence[tuple[nn.Parameter, Group]]
    ) -> None:
        self.optimizer = make_optimizer(name, lr, config, groups)
        self._groups = groups

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        set_rates(self.optimizer, rate)

    def __call__(self, skipped: Tensor) -> None:
        """Update the weights; nothing changes if `skipped` (), on the device, is 1."""
        gate_update(self.optimizer, skipped)
        self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name, without copying."""
        tensors = {}
        for number, (weights, _) in enumerate(self._groups):
            group = f"{number}." if len(self._groups) > 1 else ""
            for name, value in sorted(self.optimizer.state[weights].items()):
                tensors[f"optimizer.{group}{name}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> Collection[str]:
        """Return the names of the tensors that are restored: none, all can be copied in place."""
        return ()


def set_rates(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rates of the groups of parameters, by their factors."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def make_optimizer(
    name: str, lr: float, config: Config, groups: Sequence[tuple[nn.Parameter, Group]]
) -> Optimizer:
    """Make the optimizer `name` with learning rate `lr` and the other settings of `config`.

    sgdm: v <- momentum v + g + weight_decay w, w <- w - lr v. adam and adamw: torch's defaults for
    betas (0.9, 0.999) and eps (1e-8). Each group has its own weight decay and factor of the
    learning rate, `lr_scale`. All state is there from the beginning, zero.
    """
    param_groups = [
        {"params": [weights], "lr_scale": group.lr_scale, "weight_decay": group.weight_decay}
        for weights, group in groups
    ]
    base = FUSED[name]
    momentum = {"momentum": config.momentum} if name == "sgdm" else {}
    # Without torch's decorators: they import the compiler on each rank even if nothing is compiled,
    # which takes longer than importing torch itself.
    step = torch.no_grad()(inspect.unwrap(base.step))
    add = inspect.unwrap(base.add_param_group)
    kind: type[Any] = type(base.__name__, (base,), {"step": step, "add_param_group": add})
    optimizer: Optimizer = kind(param_groups, lr=lr, fused=True, **momentum)
    # A step that is skipped creates the state. torch leaves a momentum buffer uninitialised then.
    gate_update(optimizer, torch.ones((), device=groups[0][0].device))
    step(optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    return optimizer


def learning_rate(config: Config, plan: Plan, step: int) -> float:
    """Return the learning rate of global step 0, 1, ... of T.

    In W steps of warm-up it rises linearly from `warmup_from` to 1 of the plan's rate R, which step
    W has (Goyal et al. 2017, arXiv:1706.02677, 2.2). The schedule counts from there, as torch's
    SequentialLR does. "cosine": min + (R - min) (1 + cos(pi (step - W) / (T - 1 - W))) / 2, which
    is --min-lr in the last step (Loshchilov and Hutter 2016, arXiv:1608.03983). "step": torch's
    StepLR, at least --min-lr. "one-cycle": torch's OneCycleLR with a constant momentum, 30 % of the
    steps from 1/25 to 1 of R, then down to 1/250,000 (Smith and Topin 2017, arXiv:1708.07120).
    """
    most = plan.learning_rate
    least = config.min_lr
    after = step - plan.warmup_steps
    if config.schedule == "one-cycle":
        last = plan.steps - 1
        peak = 0.3 * plan.steps - 1
        if step <= peak:
            return most / 25 + (most - most / 25) * (1 - cosine(step / peak))
        return most / 25e4 + (most - most / 25e4) * cosine((step - peak) / (last - peak))
    if after < 0:
        return most * (plan.warmup_from + (1 - plan.warmup_from) * step / plan.warmup_steps)
    if config.schedule == "cosine":
        last = plan.steps - 1 - plan.warmup_steps
        return least + (most - least) * cosine(after / max(1, last))
    if config.schedule == "step":
        drops = after // (config.step_epochs * plan.steps_per_epoch)
        return max(least, most * 0.1**drops)
    return most


def cosine(progress: float) -> float:
    """Return half a period of a cosine, from 1 at 0 to 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def gate_update(optimizer: Optimizer, skipped: Tensor) -> None:
    """Make the next `step` change nothing if `skipped`, a scalar tensor on the device, is 1."""
    # torch's own GradScaler sets this attribute; its type stubs do not declare it.
    optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]


def clip_gradient(flat_gradient: Tensor, max_norm: float) -> Tensor:
    """Scale the gradient in place to at most `max_norm` (L2) and return its norm before that.

    Nothing is copied to the host. Partial norms of 4096 values are summed in float64: one float32
    sum over the 25 million gradients of a ResNet-50 is off by 1e-3.
    """
    even = flat_gradient.numel() // 4096 * 4096
    parts = torch.linalg.vector_norm(flat_gradient[:even].view(-1, 4096), dim=1)
    tail = torch.linalg.vector_norm(flat_gradient[even:])
    norm = torch.linalg.vector_norm(torch.cat([parts, tail[None]]), dtype=torch.float64)
    norm = norm.to(flat_gradient.dtype)
    flat_gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def freeze(model: nn.Module, patterns: Patterns | None) -> str:
    """Freeze what the patterns of --freeze match, and return a note on it; "" without patterns.

    A batch-norm layer whose running statistics match is in evaluation mode from then on: it
    normalises with them and does not change them. Raises UsageError if a pattern matches nothing,
    or if nothing remains to be trained.
    """
    if patterns is None:
        return ""
    first = first_names(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = [*dict.fromkeys([*model.state_dict(), *first])]
    selected = set().union(*(select("--freeze", pattern, names) for pattern in patterns))
    matched = {first.get(name, name) for name in selected}
    frozen = [parameter for name, parameter in trained.items() if name in matched]
    if len(frozen) == len(trained):
        last = [*trained][-1].rpartition(".")[0]
        raise UsageError(f"--freeze {patterns}: it freezes all parameters; leave out {last}, say")
    for parameter in frozen:
        parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if f"{name}.running_mean".lstrip(".") in matched:
            module.eval()
    size = sum(parameter.nbytes for parameter in frozen) / 1e6
    return (
        f"--freeze: {len(frozen)} of {len({*first.values()})} parameters are frozen: the message of"
        f" a step is without the {size:,.3f} MB of their gradients"
    )


def parameter_groups(model: nn.Module, config: Config) -> dict[str, Group]:
    """Return the group of each trainable parameter by name.

    Raises UsageError if a pattern matches nothing.
    """
    first = first_names(model)
    scales = dict.fromkeys(first.values(), 1.0)
    for pattern, factor in config.lr_factors or ():
        scales |= {first[name]: factor for name in select("--lr-factors", pattern, [*first])}
    undecayed: set[str] = set()
    for pattern in config.no_decay or ():
        if pattern == "norm":  # all parameters of normalization layers, torch's own and others
            undecayed |= {
                f"{prefix}.{name}".lstrip(".")
                for prefix, module in model.named_modules()
                if isinstance(module, NORMS) or "norm" in type(module).__name__.lower()
                for name, _ in module.named_parameters(recurse=False)
            }
        elif pattern == "bias":
            undecayed |= {name for name in first if name.endswith("bias")}
        else:
            undecayed |= select("--no-decay", pattern, [*first])
    undecayed = {first[name] for name in undecayed}
    return {
        name: Group(scales[name], 0.0 if name in undecayed else config.weight_decay)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def select(flag: str, pattern: str, names: Sequence[str]) -> set[str]:
    """Return the names that match a pattern. Raises UsageError if there is none."""
    selected = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
    if not selected:
        tops = listed(dict.fromkeys(name.partition(".")[0] for name in names), 12)
        raise UsageError(f"{flag} {pattern}: no name in the network matches; it has {tops}")
    return selected


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the name by which `named_parameters` yields each parameter, tied ones by any name."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every}
