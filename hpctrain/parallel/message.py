"""The message: one flat buffer that holds everything a step sends, summed once over ranks.

    gradients | moments | scalars | seconds

* gradients: of the parameters that are trained, group after group (`Group`), in a group in the
  order of `model.parameters()`, each at a multiple of 64 elements (256 bytes), with the parameter's
  own strides. After a backward pass one operation adds all gradients that torch computed;
  accumulating them in place would be a kernel per parameter.
* moments: two numbers per batch-norm channel (batchnorm.py).
* scalars: one number each (`Totals`), summed over ranks, or computed from the sum afterwards, as
  `skipped` is. A task has sums of its own among them, such as the number of correct answers.
* seconds: two numbers per rank, of computation and of waiting for data. Only that rank sets them,
  so the sum leaves them unchanged.

In `buffer` the message is followed by the sum of the losses of this rank alone, which is not
reduced. Ranks gather these sums only if a step is not finite.

Float32 holds integers up to 2^24 exactly, so counts and flags survive the sum. A task whose weights
are numbers of known entries, which may be more, sends them as two counts: "weight" is the rest of a
shard's number modulo `WEIGHT_BLOCK`, and its sum `WEIGHT_BLOCKS` the quotient. Both sums are exact
for up to 4,096 shards and 2^36 entries.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.device import zeros_for_messages
from hpctrain.streams import Snapshot

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

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of `flat` that is this parameter (or its gradient, or its momentum)."""
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


class Layout:
    """The trainable parameters of a model as segments of one flat vector, tied ones once."""

    def __init__(self, model: nn.Module, groups: Mapping[str, Group] | None = None) -> None:
        """`groups` gives the group of each parameter by name; None = one group.

        Raises UsageError for mixed types.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise UsageError("the model has no parameter to train")
        dtypes = {parameter.dtype for parameter in trained.values()}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise UsageError(
                f"the model's parameters mix types ({names}): use one, float32 or float64"
            )
        members: dict[Group, list[tuple[int, str]]] = {}
        for number, name in enumerate(trained):
            group = groups[name] if groups else Group()
            members.setdefault(group, []).append((number, name))
        rates = list(dict.fromkeys(group.lr_scale for group in members))
        self.dtype = dtypes.pop()
        self.segments: list[Segment] = []
        self.groups: list[tuple[Group, slice]] = []  # with their ranges of the vector
        self.length = 0
        # Groups of one learning rate are next to each other, the smallest weight decay first: with
        # --no-decay these are the small ones, whose gradients become ready last (overlap.py).
        for group in sorted(members, key=lambda g: (rates.index(g.lr_scale), g.weight_decay)):
            start = self.length
            for number, name in members[group]:
                # Dense strides: those of a slice of a larger tensor would reach into the next.
                stride = torch.empty_like(trained[name], device="meta").stride()
                shape = trained[name].shape
                self.segments.append(Segment(name, number, self.length, shape, stride))
                self.length += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
            self.groups.append((group, slice(start, self.length)))

    def digest(self) -> str:
        """Return a hash of names, shapes, strides and type; ranks can sum only if it is equal."""
        text = repr([(s.name, tuple(s.shape), s.stride, s.offset) for s in self.segments])
        return hashlib.sha256(f"{text} {self.dtype}".encode()).hexdigest()[:16]


class Totals(NamedTuple):
    """The reduced message after the moments, by name; equal on all ranks except `own`."""

    loss: float  # sum over samples, each times its weight
    weight: float  # sum of the samples' weights; 0 if the task does not weigh them
    rows: int
    irregular: int  # batch-norm layers that did not run exactly once
    stop: int  # number of ranks that requested it, as are the next two
    preempted: int
    save: int
    skipped: int  # 1 = the sum held NaN or infinity, and no weight was updated
    named: dict[str, float]  # the task's own sums, such as "correct"
    compute: np.ndarray  # seconds by rank
    data: np.ndarray  # seconds waiting for data, by rank
    own: float  # sum of the losses of this rank

    @property
    def mean_loss(self) -> float:
        """The weighted mean of the samples' losses; 0 if no entry of their targets is known."""
        return self.loss / (self.weight or self.rows)


FLOATS = ("loss", "weight")
COUNTS = ("rows", "irregular", "stop", "preempted", "save", "skipped")
WEIGHT_BLOCKS = "weight_blocks"  # a task's sum: how many times its shards hold `WEIGHT_BLOCK`
WEIGHT_BLOCK = 4096


class Message:
    """The flat buffer of one model on one rank, `tensor`."""

    def __init__(
        self,
        model: nn.Module,
        channels: int,
        rank: int,
        size: int,
        groups: Mapping[str, Group] | None = None,
        sums: Mapping[str, type] | None = None,
    ) -> None:
        """Lay out a model with `channels` batch-norm channels for `rank` of `size`.

        `sums` are further sums over samples that are sent, by name: counts (int), or of floats.

        The model's parameters become views of `weights`, whose gradient is `gradients`: an
        optimizer updates it in one operation. With several `groups` (see `Layout`), `self.groups`
        has a view of it for each. `model.to(...)` undoes this: set device and format first.
        """
        self.layout = layout = Layout(model, groups)
        named = dict(model.named_parameters())
        self.parameters = [named[segment.name] for segment in layout.segments]
        self.device = self.parameters[0].device
        self._sums = sums or {}
        self._names = (*FLOATS, *self._sums, *COUNTS)
        parts = [layout.length, 2 * channels, len(self._names), 2 * size]
        self.buffer = zeros_for_messages(sum(parts) + 1, layout.dtype, self.device)
        self.tensor = self.buffer[:-1]
        self.gradients, moments, self.scalars, seconds = self.tensor.split(parts)
        self.moments = moments.view(2, channels)
        self._reported = self.buffer[sum(parts[:2]) :]
        self.scalar = dict(zip(self._names, self.scalars.unbind(), strict=True))
        self.skipped = self.scalar["skipped"]
        self._seconds = list(seconds.view(size, 2)[rank].unbind())
        # the loss in the scalars, and that of this rank: one operation adds to both
        self._losses = self._reported[:: len(self._reported) - 1]
        self._poison = torch.zeros((), dtype=layout.dtype, device=self.device)  # 0 or NaN

        self.weights = nn.Parameter(torch.zeros_like(self.gradients))
        self.weights.grad = self.gradients
        for parameter, segment in zip(self.parameters, layout.segments, strict=True):
            parameter.data = segment.of(self.weights.data).copy_(parameter.detach())
            parameter.grad = None
        views = [segment.of(self.gradients) for segment in layout.segments]
        self._views = list(zip(self.parameters, views, strict=True))
        self.groups: list[tuple[nn.Parameter, Group]] = []
        for group, span in layout.groups:
            weights = nn.Parameter(self.weights.data[span])
            weights.grad = self.gradients[span]
            self.groups.append((weights, group))
        self._checks_left = 2  # the second sees what the first step did

    def zero(self) -> None:
        """Zero the message at the start of a step.

        In the first two steps, raises RuntimeError if a parameter is no longer a view of `weights`,
        or if a gradient was not added to the message.
        """
        self.buffer.zero_()
        if self._checks_left == 0:
            return
        self._checks_left -= 1
        for parameter, segment in zip(self.parameters, self.layout.segments, strict=True):
            if parameter.data_ptr() != segment.of(self.weights.data).data_ptr():
                raise RuntimeError(
                    f"{segment.name} is no longer a view of the message's weights: to() was called"
                    " on the model, or its data replaced"
                )
            if parameter.grad is not None:
                raise RuntimeError(
                    f"the gradient of {segment.name} is not in the message: call add_gradients()"
                    " after each backward()"
                )

    @torch.no_grad()
    def add_gradients(self, numbers: Sequence[int] | None = None) -> None:
        """Add the gradients in the parameters' `.grad` to the message, and set `.grad` to None.

        With `numbers`, only for these segments of the layout.
        """
        views = self._views if numbers is None else [self._views[number] for number in numbers]
        present = [(p, view, p.grad) for p, view in views if p.grad is not None]
        if present:
            parameters, targets, gradients = zip(*present, strict=True)
            torch._foreach_add_(targets, gradients)
            for parameter in parameters:
                parameter.grad = None

    def add_sums(
        self,
        rows: int,
        irregular: torch.Tensor | int = 0,
        *,
        loss: torch.Tensor,
        **named: torch.Tensor | float,
    ) -> None:
        """Add a shard's samples, irregular layers, loss sum and named sums, on the device.

        A sum of weights is named "weight".
        """
        self._losses.add_(loss.detach() if loss.requires_grad else loss)
        for name, number in {**named, "rows": rows, "irregular": irregular}.items():
            self.scalar[name].add_(number)

    def request(self, *names: str) -> None:
        """Request that all ranks "stop", end "preempted", or "save", after this step."""
        for name in names:
            self.scalar[name].fill_(1)

    def set_seconds(self, compute: float, data: float) -> None:
        """Set this rank's seconds of computation and of waiting for data, once per step."""
        torch._foreach_add_(self._seconds, [compute, data])

    def weight(self) -> torch.Tensor:
        """Return the sum of all samples' weights in the reduced message, () float64."""
        weight = self.scalar["weight"].to(torch.float64)
        if WEIGHT_BLOCKS in self.scalar:
            weight += WEIGHT_BLOCK * self.scalar[WEIGHT_BLOCKS].to(torch.float64)
        return weight

    def weigh_gradients(self, divisor: int) -> None:
        """Divide the reduced gradients by the sum of the weights, and not by `divisor`, as so far.

        Where that sum is 0, they are unchanged.
        """
        weight = self.weight()
        weight = torch.where(weight > 0, weight, divisor)
        self.gradients.mul_((divisor / weight).to(self.tensor.dtype))

    def finite(self, lasting: bool = False) -> torch.Tensor:
        """Whether the reduced message is free of NaN and infinity, as a bool on the device.

        Sets `skipped` to 1 if it is not. With `lasting`, no later step counts as finite then. A sum
        over the message is finite only if all of it is: NaN and infinity survive addition, and 0 x
        is NaN for both.
        """
        total = self.tensor.sum()
        if lasting:
            self._poison.add_(total, alpha=0)
        else:
            torch.mul(total, 0, out=self._poison)
        finite = self._poison == 0
        torch.logical_not(finite, out=self.skipped)
        return finite

    def report(self) -> Snapshot:
        """Copy the reduced message after the moments to the host asynchronously; see `Totals`."""
        return Snapshot(self._reported, timing=True)

    def read(self, reported: Snapshot) -> Totals:
        """Return the totals that `report` copies to the host, after waiting for them.

        Counts that are not finite are 0.
        """
        numbers = reported.array()
        count = len(self._names)
        scalars: dict[str, Any] = dict(zip(self._names, numbers[:count].tolist(), strict=True))
        counts = (*COUNTS, *(name for name, kind in self._sums.items() if kind is int))
        for name in counts:
            scalars[name] = round(scalars[name]) if math.isfinite(scalars[name]) else 0
        named = {name: scalars.pop(name) for name in self._sums}
        scalars["weight"] += WEIGHT_BLOCK * named.get(WEIGHT_BLOCKS, 0)
        compute, data = numbers[count:-1].reshape(-1, 2).T
        return Totals(**scalars, named=named, compute=compute, data=data, own=float(numbers[-1]))

    def totals(self) -> Totals:
        """Read the reduced message after the moments (synchronizes with the device)."""
        return self.read(self.report())
