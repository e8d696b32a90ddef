"""Losses of torch.nn: one value a sample, as those of the user's own.

A loss is made with ``reduction="none"``. Its values for the entries of a sample, such as columns or
pixels, are averaged; unknown entries have no part in value and gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.config.parts import Part, accepted_names, build_part, load_class, taken_by
from hpctrain.errors import UsageError, brief_error
from hpctrain.tasks.facts import KINDS
from hpctrain.text import listed

#: The kinds of targets that a loss is for, "" for images (data/targets.py).
TARGETS: dict[str, tuple[str, ...]] = {
    "CrossEntropyLoss": ("class",),
    "MultiMarginLoss": ("class",),
    "BCEWithLogitsLoss": ("classes",),
    "HuberLoss": ("values", ""),
    "L1Loss": ("values", ""),
    "MSELoss": ("values", ""),
    "SmoothL1Loss": ("values", ""),
}
WEIGHTS = ("weight", "pos_weight")  # arguments that have a number for each class
#: What hpctrain fills in where a class takes it.
FILLED = {"reduction": "none", "size_average": None, "reduce": None, "ignore_index": -100}


class LibraryLoss(NamedTuple):
    """A loss of a library, called like a function of the user's own."""

    setting: str  # "--loss torch:HuberLoss(delta=0.5)"
    module: nn.Module

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (n,) of samples; entries of targets that are NaN are unknown.

        Raises UsageError if the library fails, or gives other than one value a sample or entry.
        """
        is_of_entries = outputs.shape == targets.shape
        expected = outputs.shape if is_of_entries else targets.shape[:1]
        is_known = torch.ones_like(targets, dtype=torch.bool)
        if is_of_entries:
            is_known = ~targets.isnan()
            targets = torch.where(is_known, targets, 0)
            outputs = torch.where(is_known, outputs, 0)
        try:
            losses: Tensor = self.module(outputs, targets)
        except (ValueError, IndexError, RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UsageError(f"{self.setting}: {brief_error(error)}") from error
        if losses.shape != expected:
            text = f"gives values of shape {tuple(losses.shape)}, not {tuple(expected)}"
            raise UsageError(f"{self.setting} {text}")
        if not is_of_entries:
            return losses
        total = torch.where(is_known, losses, 0).flatten(1).sum(1)
        return total / is_known.flatten(1).sum(1).clamp(min=1)


def make_loss(part: Part, kind: str, names: Sequence[str], like: Tensor) -> LibraryLoss:
    """Make the loss that a setting names, for targets of a kind; "" for images.

    `names` are those of the classes or columns; weights are on the device and in the dtype of
    `like`. Raises UsageError.
    """
    if kind not in TARGETS[part.name]:
        others = [name for name in accepted_names("loss", part.library) if kind in TARGETS[name]]
        text = f"is not for {KINDS.get(kind, 'images')}: there are {', '.join(others)}"
        raise UsageError(f"{part.flag} {text}")
    part = with_names(part)
    weights = {
        name: like.new_tensor(numbers_of(part, name, names))
        for name in WEIGHTS
        if name in part.kwargs
    }
    filled = taken_by(part, FILLED)
    module = build_part(part._replace(kwargs={**part.kwargs, **weights}), **filled)
    return LibraryLoss(part.flag, module.to(like.device))


def with_names(part: Part) -> Part:
    """Return a part whose arguments all have names; unchanged if the class does not take them."""
    try:
        bound = inspect.signature(load_class(part)).bind_partial(*part.args, **part.kwargs)
    except TypeError:  # which `build_part` explains
        return part
    return part._replace(args=(), kwargs=bound.arguments)


def numbers_of(part: Part, name: str, names: Sequence[str]) -> list[float]:
    """Return the numbers of an argument, one for each class. Raises UsageError."""
    given = part.kwargs[name]
    is_list = isinstance(given, list | tuple)
    if not is_list or not all(type(value) in (int, float) for value in given):
        raise UsageError(f"{part.flag}: {name} is a list of numbers, one for each class")
    if len(given) != len(names):
        text = f"{name} has {len(given)} numbers for {len(names)} classes, {listed(names)}"
        raise UsageError(f"{part.flag}: {text}")
    return [*map(float, given)]
