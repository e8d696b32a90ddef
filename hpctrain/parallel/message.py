"""The message: one flat buffer that holds everything a step sends, summed once over ranks.

    gradients | moments | scalars | seconds

* gradients: of the parameters that are trained, group after group (`Group`), in a group in the
  order of `model.parameters()`, each at a multiple of 64 elements (256 bytes), with the parameter's
  own strides. After a backward pass one operation adds all gradients that torch computed;
  accumulating them in place would be a kernel per parameter.
* moments: two numbers per batch-norm channel (batchnorm.py).
* scalars: one number each (SCALARS), summed over ranks, or computed from the sum afterwards, as
  `skipped` is.
* seconds: two numbers per rank, of computation and of waiting for data. Only that rank sets them,
  so the sum leaves them unchanged.

In `buffer` the message is followed by the sum of the losses of this rank alone, which is not
reduced. Ranks gather these sums only if a step is not finite.

Float32 holds integers up to 2^24 exactly, so counts and flags survive the sum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.device import zeros_for_messages
from hpctrain.streams import Event, Snapshot, record_event

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


# Scalars by name, with the type as which they are read; counts of requesting ranks are integers.
SCALARS: dict[str, type[int] | type[float]] = {
    "loss": float,
    "correct": int,
    "rows": int,
    "irregular": int,
    "stop": int,
    "preempted": int,
    "save": int,
    "skipped": int,
    "weight": float,
}


class Totals(NamedTuple):
    """The reduced message after the moments, by name; equal on all ranks except `own`."""

    loss: float  # sum over samples, with --class-weights weighted
    correct: int
    rows: int
    irregular: int  # batch-norm layers that did not run exactly once
    stop: int  # number of ranks that requested it, as are the next two
    preempted: int
    save: int
    skipped: int  # 1 = the sum held NaN or infinity, and no weight was updated
    weight: float  # sum over samples of the weights of their classes; 0 without --class-weights
    compute: np.ndarray  # seconds by rank
    data: np.ndarray  # seconds waiting for data, by rank
    own: float  # sum of the losses of this rank

    @property
    def finite(self) -> bool:
        """Whether the step counts: no sum was NaN or infinite."""
        return not self.skipped

    @property
    def mean_loss(self) -> float:
        """The mean of the samples' losses, weighted by class with --class-weights."""
        return self.loss / (self.weight or self.rows)


class Message:
    """The flat buffer of one model on one rank, `tensor`."""

    def __init__(
        self,
        model: nn.Module,
        channels: int,
        rank: int,
        size: int,
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        """Lay out a model with `channels` batch-norm channels for `rank` of `size`.

        The model's parameters become views of `weights`, one flat parameter for the optimizer,
        whose gradient is `gradients`. With several `groups` (by parameter, see `lay_out`), `groups`
        holds a view of it for each, for the optimizer.
        """
        self.layout = lay_out(model, groups)
        self.device = next(model.parameters()).device
        parts = [self.layout.length, 2 * channels, len(SCALARS), 2 * size]
        self.buffer = zeros_for_messages(sum(parts) + 1, self.layout.dtype, self.device)
        self.tensor = self.buffer[:-1]
        self.gradients, moments, self.scalars, seconds = self.tensor.split(parts)
        self.moments = moments.view(2, channels)
        self._reported = self.buffer[-sum(parts[2:]) - 1 :]
        self.scalar = dict(zip(SCALARS, self.scalars.unbind(), strict=True))
        self.skipped = self.scalar["skipped"]
        self._seconds = list(seconds.view(size, 2)[rank].unbind())
        # the loss in the scalars and the loss of this rank: one operation adds to both
        start = self.scalar["loss"].storage_offset()
        apart = self.buffer[-1].storage_offset() - start
        self._losses = self.buffer.as_strided((2,), (apart,), start)
        self.weights = flatten_parameters(model, self.layout)
        self.weights.grad = self.gradients
        self.groups = [(self.weights, group) for group, _ in self.layout.groups]
        if len(self.groups) > 1:
            self.groups = [
                (nn.Parameter(self.weights.data[span]), group) for group, span in self.layout.groups
            ]
            for (weights, _), (_, span) in zip(self.groups, self.layout.groups, strict=True):
                weights.grad = self.gradients[span]
        self._poison = torch.zeros((), dtype=self.layout.dtype, device=self.device)  # 0 or NaN
        self.parameters = dict(model.named_parameters())  # by name, frozen ones too
        self._views = [
            (self.parameters[segment.name], segment.of(self.gradients))
            for segment in self.layout.segments
        ]
        self._addresses = [parameter.data_ptr() for parameter, _ in self._views]
        self._checks_left = 2  # the second sees what the first step did
        for parameter, _ in self._views:
            parameter.grad = None

    def zero(self) -> None:
        """Zero the message at the start of a step.

        In the first two steps, raises RuntimeError if a parameter is no longer a view of `weights`,
        or if a gradient was not added to the message.
        """
        self.buffer.zero_()
        if self._checks_left == 0:
            return
        for number, (parameter, _) in enumerate(self._views):
            if parameter.data_ptr() != self._addresses[number]:
                raise RuntimeError(
                    f"{self.layout.segments[number].name} is no longer a view of the message's"
                    " weights: to() was called on the model, or its data replaced"
                )
            if parameter.grad is not None:
                raise RuntimeError(
                    f"the gradient of {self.layout.segments[number].name} is not in the message:"
                    " call add_gradients() after each backward()"
                )
        self._checks_left -= 1

    @torch.no_grad()
    def add_gradients(self, numbers: Sequence[int] | None = None) -> None:
        """Add the gradients in the parameters' `.grad` to the message, and set `.grad` to None.

        With `numbers`, only for these segments of the layout.
        """
        views = self._views if numbers is None else [self._views[number] for number in numbers]
        there = [(p, view, p.grad) for p, view in views if p.grad is not None]
        if there:
            parameters, targets, gradients = zip(*there, strict=True)
            torch._foreach_add_(targets, gradients)
            for parameter in parameters:
                parameter.grad = None

    def add_counts(
        self,
        loss: torch.Tensor,
        correct: torch.Tensor | int,
        rows: int,
        irregular: torch.Tensor | int = 0,
    ) -> None:
        """Add a shard's loss sum, correct answers, samples and irregular layers, on the device."""
        self._losses.add_(loss.detach() if loss.requires_grad else loss)
        for name, number in (("correct", correct), ("rows", rows), ("irregular", irregular)):
            self.scalar[name].add_(number)

    def set_flags(self, stop: bool, preempted: bool = False, save: bool = False) -> None:
        """Request that all ranks stop, end preempted, or save a checkpoint, after this step."""
        for name, asked in (("stop", stop), ("preempted", preempted), ("save", save)):
            if asked:  # otherwise it is zero already, and no kernel is launched
                self.scalar[name].fill_(1)

    def set_seconds(self, compute: float, data: float) -> None:
        """Set this rank's seconds of computation and of waiting for data, once per step."""
        torch._foreach_add_(self._seconds, [compute, data])

    def weigh_gradients(self, rows: int) -> None:
        """Divide the reduced gradients, divided by `rows` samples so far, by their class weights.

        The divisor is the sum of the weights of all samples' classes, or `rows` where that is 0.
        """
        weight = self.scalar["weight"].to(torch.float64)
        weight = torch.where(weight > 0, weight, rows)
        self.gradients.mul_((rows / weight).to(self.tensor.dtype))

    def finite(self, lasting: bool = False) -> torch.Tensor:
        """Whether the reduced message is free of NaN and infinity, as a bool on the device.

        Sets `skipped` to 1 if it is not. With `lasting`, no later step counts as finite then.

        A sum over the message is finite only if all of it is: NaN and infinity survive addition,
        and 0 x is NaN for both.
        """
        total = self.tensor.sum()
        if lasting:
            self._poison.add_(total, alpha=0)
        else:
            torch.mul(total, 0, out=self._poison)
        finite = self._poison == 0
        torch.logical_not(finite, out=self.skipped)
        return finite

    def report(self) -> Report:
        """Copy the reduced message after the moments to the host asynchronously."""
        ended = record_event(self.device, timing=True)  # complete once the copy has arrived
        return Report(ended, Snapshot(self._reported))

    def totals(self) -> Totals:
        """Read the reduced message after the moments (synchronizes with the device)."""
        return self.report().totals()


class Report(NamedTuple):
    """The reduced message after the moments, being copied to the host."""

    ended: Event
    snapshot: Snapshot

    def totals(self) -> Totals:
        """Wait for the copy and return the totals."""
        numbers = self.snapshot.array()
        first, seconds = numbers[: len(SCALARS)], numbers[len(SCALARS) : -1]
        scalars: dict[str, Any] = {
            name: _whole(number) if kind is int else number
            for (name, kind), number in zip(SCALARS.items(), first.tolist(), strict=True)
        }
        compute, data = seconds.reshape(-1, 2).T
        return Totals(**scalars, compute=compute, data=data, own=float(numbers[-1]))


def _whole(number: float) -> int:
    return round(number) if math.isfinite(number) else 0
