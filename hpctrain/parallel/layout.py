"""The layout of a model's parameters as one flat vector, and of their gradients as another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hpctrain.errors import UsageError

ALIGNMENT = 64  # elements


class Group(NamedTuple):
    """What parameters have in common that the optimizer updates together, in one operation."""

    lr_scale: float = 1.0  # factor of the learning rate
    weight_decay: float = 0.0


class Segment(NamedTuple):
    """The location of one parameter in a flat vector."""

    name: str
    number: int  # in the order of the model's trainable parameters
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def span(self) -> slice:
        """Its elements, without the padding that aligns the next parameter."""
        return slice(self.offset, self.offset + self.shape.numel())

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of `flat` that is this parameter (or its gradient, or its momentum)."""
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Layout:
    """The parameters of a model as segments of one flat vector."""

    segments: tuple[Segment, ...]
    length: int
    dtype: torch.dtype
    groups: tuple[tuple[Group, slice], ...]  # with their ranges in the vector, which they fill

    def digest(self) -> str:
        """Return a hash of names, shapes, strides and type; ranks can sum only if it is equal."""
        text = repr([(s.name, tuple(s.shape), s.stride, s.offset) for s in self.segments])
        return hashlib.sha256(f"{text} {self.dtype}".encode()).hexdigest()[:16]


def lay_out(model: nn.Module, groups: Mapping[str, Group] | None = None) -> Layout:
    """Lay out the trainable parameters, tied ones once. Raises UsageError for mixed types.

    `groups` gives the group of each parameter by name; None = one group.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError("the model has no parameter to train")
    dtypes = {parameter.dtype for parameter in trained.values()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(d) for d in dtypes))
        raise UsageError(f"the model's parameters mix types ({names}): use one, float32 or float64")
    members: dict[Group, list[tuple[int, str]]] = {}
    for number, name in enumerate(trained):
        group = groups[name] if groups else Group()
        members.setdefault(group, []).append((number, name))
    rates = list(dict.fromkeys(group.lr_scale for group in members))
    # Groups of one learning rate are next to each other, the smallest weight decay first: with
    # --no-decay these are the small ones, whose gradients become ready last of all (overlap.py).
    ordered = sorted(members, key=lambda g: (rates.index(g.lr_scale), g.weight_decay))
    segments, length, found = [], 0, []
    for group in ordered:
        start = length
        for number, name in members[group]:
            # Dense strides: those of a slice of a larger tensor would reach into the next segment.
            stride = torch.empty_like(trained[name], device="meta").stride()
            segments.append(Segment(name, number, length, trained[name].shape, stride))
            length += -(-trained[name].numel() // ALIGNMENT) * ALIGNMENT
        found.append((group, slice(start, length)))
    return Layout(tuple(segments), length, dtypes.pop(), tuple(found))


def flatten_parameters(model: nn.Module, layout: Layout) -> nn.Parameter:
    """Move the parameters into one flat vector, of which they become views, and return it.

    The optimizer updates the vector (one fused kernel instead of one per parameter), and the model
    sees the change. `model.to(...)` undoes this, so set device and memory format first.
    """
    parameters = dict(model.named_parameters())
    device = parameters[layout.segments[0].name].device
    flat = torch.zeros(layout.length, dtype=layout.dtype, device=device)
    with torch.no_grad():
        for segment in layout.segments:
            view = segment.of(flat)
            view.copy_(parameters[segment.name])
            parameters[segment.name].data = view
    return nn.Parameter(flat)
