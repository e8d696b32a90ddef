"""The functions of the user's own: --loss, --metric and --augment, and tests of them.

They are described in docs/networks.md. Batches are cut into shards, and splits into blocks: the
value of a sample must not depend on the others, nor a call on earlier ones. `check_values` tests
this before the first step; those of --augment are tested by `data/transform_checks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hpctrain.config.functions import Imported, import_function
from hpctrain.errors import UsageError
from hpctrain.numerics import seed_torch
from hpctrain.tasks.facts import all_figures
from hpctrain.text import listed

RESERVED = {"", "rows", *all_figures()}  # names that no figure of the user's own has
# Tolerances of a sample's value in a part of a batch, for which kernels round otherwise
RELATIVE = 1e-3
ABSOLUTE = 1e-5
AnyLoss = TypeVar("AnyLoss", bound="Loss")  # or a metric, which is called alike


def import_own(text: str, flag: str) -> Imported:
    """Import a function of the user's own, as --loss, --metric or --augment names it.

    Raises UsageError.
    """
    function = import_function(text, flag)
    arguments = ("images", "generator") if flag == "--augment" else ("outputs", "targets")
    function.check_arguments(f"function({', '.join(arguments)})", *arguments)
    return function


class Loss(Protocol):
    """What --loss names: a function of the user's own, or a loss of a library."""

    @property
    def setting(self) -> str:
        """The setting as it was given, with which errors begin."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        """Return the losses (n,) of samples."""


def compute_losses(function: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of samples."""
    return _per_sample(function(outputs, targets), len(outputs), function.setting)


def losses_by_name(function: Loss, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the losses (n,) of samples, for `check_values`."""
    return {"": compute_losses(function, outputs, targets)}


def compute_metric(function: Imported, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the metric's figures of n samples: values and weights, (2, n) float64, by name."""
    n = len(outputs)
    named = function(outputs, targets)
    if not isinstance(named, Mapping):
        named = {function.setting.rpartition(":")[2]: named}
    figures = {}
    for name, value in named.items():
        if not isinstance(name, str) or not name.isprintable() or name in RESERVED:
            raise UsageError(f"{function.setting} named a figure {name!r}: give it another name")
        values_and_weights = (value, torch.ones(n, device=outputs.device))
        if isinstance(value, tuple) and len(value) == 2:
            values_and_weights = value
        source = f"{function.setting}: {name}"
        figures[name] = torch.stack(
            [_per_sample(result, n, source).double() for result in values_and_weights]
        )
    if not figures:
        raise UsageError(f"{function.setting} gave no figure")
    return figures


def check_names(figures: Iterable[str]) -> None:
    """Raise UsageError if figures of --metric have equal names, or one that is hpctrain's."""
    times = Counter(figures)
    taken = [name for name in times if times[name] > 1 or name in RESERVED]
    if taken:
        text = f"more than one figure is named {listed(taken)}"
        raise UsageError(f"--metric: {text}: give one of them another name")


def _per_sample(result: Any, n: int, source: str) -> Tensor:
    """Return the result of a function for n samples. Raises UsageError if it is not (n,)."""
    if isinstance(result, Tensor) and result.shape == (n,):
        return result
    kind = type(result).__name__
    if isinstance(result, Tensor):
        kind = f"a tensor of shape {tuple(result.shape)}"
    samples = "sample" if n == 1 else "samples"
    raise UsageError(
        f"{source} returned {kind} for {n} {samples}: return one value a sample, a tensor"
        f" of shape ({n},), not their mean or sum (torch's losses: reduction='none')"
    )


# Tests of these functions before their first use


def check_values(
    function: AnyLoss,
    compute: Callable[[AnyLoss, Tensor, Tensor], dict[str, Tensor]],
    outputs: Tensor,
    targets: Tensor,
) -> None:
    """Test that the value of a sample depends on its output and target alone.

    `compute` returns the values of samples, (..., n) by name. It is called for all samples, again
    with torch's generator in another state, and for parts, one of which is a single sample.
    """
    n = len(outputs)
    outputs_before = outputs.clone()
    targets_before = targets.clone()
    of_all = compute(function, outputs, targets)
    pairs = ((outputs_before, outputs), (targets_before, targets))
    if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs):
        raise UsageError(f"{function.setting} changed its outputs or targets: compute with copies")
    if not all(values.isfinite().all() for values in of_all.values()):
        hint = ""
        if targets.is_floating_point() and targets.isnan().any():
            hint = ": targets are NaN where they are unknown, leave these entries out"
        raise UsageError(f"{function.setting} returned a value that is not finite{hint}")
    for seed, part in enumerate((slice(n), slice(1), slice(n // 2, n))):
        when = "for a part of the batch" if seed else "in a second call"
        within = (RELATIVE, ABSOLUTE) if seed else (0, 0)
        seed_torch(seed, outputs.device)
        of_part = compute(function, outputs[part], targets[part])
        if of_part.keys() != of_all.keys() or not all(
            torch.allclose(of_part[name].double(), values[..., part].double(), *within)
            for name, values in of_all.items()
        ):
            raise UsageError(
                f"{function.setting} gave other values {when}: the value of a sample must depend on"
                " its output and target alone, because batches are cut into shards"
            )
