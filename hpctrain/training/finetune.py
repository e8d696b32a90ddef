"""Fine-tuning: which parameters are frozen, and the groups that the optimizer updates alike.

A pattern is a shell pattern (fnmatch) of a name in the network's state dict, such as
"layer1.0.conv1.weight"; the name of a module stands for everything in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hpctrain.config import Config, learning_rate_factors, patterns
from hpctrain.errors import UsageError
from hpctrain.parallel.layout import Group
from hpctrain.parallel.message import Message
from hpctrain.text import listed


def select(flag: str, pattern: str, names: Sequence[str]) -> set[str]:
    """Return the names that match a pattern. Raises UsageError if there is none."""
    found = {n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"{pattern}.*")}
    if not found:
        tops = listed(dict.fromkeys(name.partition(".")[0] for name in names), 12)
        raise UsageError(
            f"{flag} {pattern}: no name in the network matches; the network has {tops}"
        )
    return found


def freeze(model: nn.Module, names: str | None) -> list[nn.Parameter]:
    """Freeze what the patterns of --freeze match, and return the parameters that it froze.

    A batch-norm layer whose running statistics match is in evaluation mode from then on: it
    normalises with them and does not change them. Raises UsageError if a pattern matches nothing,
    or if nothing remains to be trained.
    """
    if names is None:
        return []
    first = _first_names(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = [*dict.fromkeys([*model.state_dict(), *first])]
    found = set().union(*(select("--freeze", each, known) for each in patterns(names, "--freeze")))
    matched = {first.get(name, name) for name in found}
    frozen = [parameter for name, parameter in trained.items() if name in matched]
    if len(frozen) == len(trained):
        last = [*trained][-1].rpartition(".")[0]
        raise UsageError(f"--freeze {names}: it freezes all parameters; leave out {last}, say")
    for parameter in frozen:
        parameter.requires_grad_(False)
    for name, module in model.named_modules():
        if f"{name}.running_mean".lstrip(".") in matched:
            module.eval()
    return frozen


def describe_frozen(frozen: Sequence[nn.Parameter], message: Message) -> str:
    """Return a note on the `frozen` parameters and the message without them; "" if none is."""
    if not frozen:
        return ""
    return (
        f"--freeze: {len(frozen)} of {len(message.parameters)} parameters are frozen: the message"
        f" of a step has {message.tensor.nbytes / 1e6:,.3f} MB, without the"
        f" {sum(p.nbytes for p in frozen) / 1e6:,.3f} MB of their gradients"
    )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the name by which `named_parameters` yields each parameter, tied ones by any name."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every}


def parameter_groups(model: nn.Module, config: Config) -> dict[str, Group]:
    """Return the group of each trainable parameter by name.

    Raises UsageError if a pattern matches nothing.
    """
    first = _first_names(model)
    scales = dict.fromkeys(first.values(), 1.0)
    if config.lr_factors:
        for pattern, factor in learning_rate_factors(config.lr_factors):
            matched = select("--lr-factors", pattern, [*first])
            scales |= {first[name]: factor for name in matched}
    undecayed = {first[name] for name in _undecayed(model, config.no_decay, [*first])}
    return {
        name: Group(scales[name], 0.0 if name in undecayed else config.weight_decay)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _undecayed(model: nn.Module, given: str | None, names: Sequence[str]) -> set[str]:
    """Return the parameters that --no-decay names, by kind of layer or by pattern."""
    found: set[str] = set()
    for pattern in patterns(given, "--no-decay") if given else ():
        if pattern == "norm":
            found |= _of_normalization(model)
        elif pattern == "bias":
            found |= {name for name in names if name.endswith("bias")}
        else:
            found |= select("--no-decay", pattern, names)
    return found


def _of_normalization(model: nn.Module) -> set[str]:
    """Return the names of all parameters of normalization layers, torch's own and others."""
    kinds = _NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, kinds) or "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False)
    }
