"""Transforms of training images: parts of other libraries and the user's own functions, in a row.

Each draws random numbers of a key of its own, which follows from that of the batch and its place in
the row. A batch is what a shard has in a step, so what is drawn does not depend on ranks.

* A part of a library draws by `Drawing`. Those of Kornia draw for each sample of a batch, and get
  the whole batch. Those of torchvision draw once a call, as do Kornia's of `auto`, and get one
  sample a call, each with a key of its own.
* A function of the user's own gets the whole batch and a generator.

Parts expect values in [0, 1]. Where stored values have another range, they are mapped to it
(`UnitRange`), and back for the user's own functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.config.functions import Imported, call_guarded
from hpctrain.config.parts import Part, build_part, load_class, parameters_of, taken_by
from hpctrain.data.augment import type_of_arithmetic
from hpctrain.data.drawing import Drawing
from hpctrain.data.partition import random_key
from hpctrain.data.pipeline import UnitRange
from hpctrain.errors import UsageError

ROUNDING = 1e-5  # beyond [0, 1], of values that were mapped to it, or resampled
#: What hpctrain fills in where a class takes it: a batch is a shard's share of a step.
FILLED = {"same_on_batch": False}


@dataclass(frozen=True, eq=False)
class LibraryTransform:
    """A part of a library that was built."""

    flag: str  # "--augment kornia:RandomAffine(degrees=15)": errors begin with it
    function: Callable[[Tensor], Any]
    is_called_by_sample: bool  # as it draws once a call

    @torch.no_grad()
    def __call__(self, images: Tensor, key: int) -> Tensor:
        """Return images (n, C, H, W) in [0, 1], transformed with numbers of `key`.

        They have the same shape, dtype and strides, and share no memory with those given. Raises
        UsageError for values outside [0, 1] and for a result that is not of that shape, and
        OwnCodeError if the part fails.
        """
        given = images.to(type_of_arithmetic(images.dtype), copy=True)
        require_unit(self.flag, given)
        result = torch.empty_like(images)
        drawing = Drawing(key)
        if not self.is_called_by_sample:
            return result.copy_(self._call(given, drawing))
        for row in range(len(images)):
            drawing.restart(random_key(key, row))
            result[row : row + 1].copy_(self._call(given[row : row + 1], drawing))
        return result

    def _call(self, images: Tensor, drawing: Drawing) -> Tensor:
        """Return what the part makes of images (n, C, H, W)."""
        expected = (images.shape, images.dtype)
        with drawing:
            result = call_guarded(self.flag, self.function, images)
        if not isinstance(result, Tensor):
            raise UsageError(f"{self.flag} returned {type(result).__name__}, not images")
        if (result.shape, result.dtype) != expected:
            raise UsageError(
                f"{self.flag} returned {result.dtype} of shape {tuple(result.shape)} for"
                f" {images.dtype} of shape {tuple(images.shape)}: a transform must keep both"
            )
        if not result.isfinite().all():
            raise UsageError(f"{self.flag} returned an image with NaN or infinity")
        return result


def require_unit(flag: str, images: Tensor) -> None:
    """Raise UsageError for images beyond [0, 1] by more than rounding; cut off what is less."""
    if not images.numel():
        return
    low, high = torch.stack(images.aminmax()).tolist()
    if not -ROUNDING <= low <= high <= 1 + ROUNDING:
        raise UsageError(
            f"{flag} takes values in [0, 1], and was given values from {low:g} to {high:g}: a"
            " transform before it returned them, or they are beyond --max-value"
        )
    if low < 0 or high > 1:
        images.clamp_(0, 1)


@dataclass(frozen=True, eq=False)
class Transforms:
    """The transforms of a run, in their order, as the stage of a `Pipeline`."""

    steps: Sequence[LibraryTransform | Imported]
    range: UnitRange | None = None  # of the images that are given; None = they are in [0, 1]

    def __call__(self, images: Tensor, key: int) -> Tensor:
        """Return images (n, C, H, W) transformed with numbers of the batch's `key`.

        With a `range` they are given and returned in [0, 1]. Values that are not finite, which are
        those of samples that the loader names, become 0.
        """
        if self.has_parts and len(images):
            images = images.nan_to_num(0.0, 0.0, 0.0)
        for place in range(len(self.steps)):
            images = self.apply(place, images, key)
        return images

    def apply(self, place: int, images: Tensor, key: int) -> Tensor:
        """Return images transformed by the step at a place in the row."""
        step = self.steps[place]
        key = key_of_step(key, place)
        if isinstance(step, LibraryTransform):
            return step(images, key)
        if self.range is None:
            return augment_by(step, images, key)
        return self.range.to_unit(augment_by(step, self.range.from_unit(images), key))

    @property
    def has_parts(self) -> bool:
        """Whether a step is a part of a library."""
        return any(isinstance(step, LibraryTransform) for step in self.steps)


def key_of_step(key: int, place: int) -> int:
    """Return the key of the step at a place in the row, from that of the batch."""
    if place == 0:
        return random_key(key, "own augmentation")
    return random_key(key, "own augmentation", place)


@torch.no_grad()
def augment_by(function: Imported, images: Tensor, key: int) -> Tensor:
    """Return images (n, C, H, W) as a function augments them with numbers of `key`."""
    generator = torch.Generator(images.device).manual_seed(key)
    expected = (images.shape, images.dtype, images.device)
    strides = images.stride()
    result = function(images, generator)
    if not isinstance(result, Tensor) or (result.shape, result.dtype, result.device) != expected:
        shape, dtype, device = expected
        raise UsageError(
            f"{function.setting} must return images like those that it is given: {dtype} on"
            f" {device}, shape {tuple(shape)}"
        )
    if result.stride() == strides:
        return result
    return torch.empty_like(images).copy_(result)  # in the memory format of the network


def build_transform(part: Part) -> LibraryTransform:
    """Build a part of --augment. Raises UsageError as `build_part` does."""
    filled = taken_by(part, FILLED)
    with Drawing(random_key("transform", part.text)):
        function = build_part(part, **filled)
    return LibraryTransform(part.flag, function, draws_once_a_call(part))


def draws_once_a_call(part: Part) -> bool:
    """Whether a class draws the same numbers for all samples of a call."""
    module = load_class(part).__module__
    return part.library != "kornia" or module.startswith("kornia.augmentation.auto.")


def always_applied(part: Part) -> Part | None:
    """Return a part with p = 1 where it takes a p that is less; None where there is no other."""
    kind = load_class(part)
    signature = inspect.signature(kind)
    given = signature.bind_partial(*part.args, **part.kwargs)
    given.apply_defaults()
    if "p" not in signature.parameters or given.arguments["p"] == 1:
        return None
    names = [*signature.parameters][: len(part.args)]
    named = {**dict(zip(names, part.args, strict=True)), **part.kwargs}
    return part._replace(args=(), kwargs={**named, "p": 1.0})


def describe_part(part: Part) -> str:
    """Return a part as it was given, with the probability by which its class is applied."""
    parameter = parameters_of(part).get("p")
    if parameter is None or parameter.default is parameter.empty or "p" in part.kwargs:
        return part.text
    return f"{part.text} with p={parameter.default:g}"
