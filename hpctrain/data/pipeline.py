"""The pipeline from stored images to a network's inputs and targets: its stages, in their order.

    stage                   what it changes                               key of its random numbers
    flips, turns, shifts    stored values (n, H, W, C) of their type      "augment"
    scaling                 makes floats (n, C, H, W) in [0, 1] of them
    the transforms          these floats                                  "own augmentation"
    normalization           (x - mean) / std per channel: one mean and std, or those of each image
    the task's stage        inputs and targets                            its own: "noise"

A batch has one key, from which each stage derives its own: what one draws does not change what
another draws. Flips left to right and shifts have the key "augment"; from it, upside-down flips
derive the key "flip vertical", and turns by right angles "rotate90". They are applied in the order
flip, upside-down flip, turn, shift. Random crops, which are made where images are read or JPEG
files decoded, have the key "crop".

Where no stage stands between them, scaling and normalization are one multiplication and one
addition. Mean and std of an image are those of its stored values, or of its crop, before flips,
turns and shifts.

A transform of a library takes values in [0, 1]. Where those of the training images are in another
range, `UnitRange` maps them to [0, 1]; normalization undoes that in the same multiplication.

Values that are no data are 0 after normalization. A transform is given the channel's mean in their
place (0 without normalization), so that it may move them, and shifts uncover such values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.data.augment import (
    NO_AUGMENTATION,
    Augmentation,
    augment,
    divisor_of,
    is_wide,
    normalize,
    normalize_filled,
    standardize_images,
    to_input,
)
from hpctrain.data.partition import random_key
from hpctrain.data.standardize import image_statistics, is_nodata

# images (n, C, H, W), in [0, 1] where `Pipeline.unit_range` says what that is, and the key of the
# batch -> others of the same shape and dtype
Transform = Callable[[Tensor, int], Tensor]
# inputs (n, C, H, W), targets (n, ...) and the key of the batch -> inputs and targets
Stage = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class UnitRange(NamedTuple):
    """The range of divided values that becomes [0, 1], by channel: x = low + width * unit."""

    low: Tensor  # (C,) float64, on the device of the images
    width: Tensor

    def to_unit(self, images: Tensor) -> Tensor:
        """Return divided values (n, C, H, W) as those in [0, 1], of the same dtype."""
        low, width = self._by_channel()
        return ((images.double() - low) / width).to(images.dtype)

    def from_unit(self, images: Tensor) -> Tensor:
        """Return values in [0, 1] as divided ones, of the same dtype."""
        low, width = self._by_channel()
        return (images.double() * width + low).to(images.dtype)

    def _by_channel(self) -> tuple[Tensor, Tensor]:
        return self.low[:, None, None], self.width[:, None, None]


@dataclass(eq=False)
class Pipeline:
    """Makes a network's inputs and targets of stored images and their targets."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32  # dtype of inputs
    channels_last: bool = True  # whether inputs lie in memory as NHWC
    #: mean and std, (C,) each; "image" = those of each image by itself; None or () = no change
    normalization: Sequence[Tensor | Sequence[float]] | str | None = None
    augmentation: Augmentation = NO_AUGMENTATION
    transform: Transform | None = None
    stage: Stage | None = None
    nodata: float | None = None  # stored value, possibly NaN, that is no data
    #: the divided values that a transform is given as 0 to 1; None = they are given as they are
    unit_range: UnitRange | None = None
    _mean: Tensor | None = field(init=False, default=None)  # (C,) on the device
    _std: Tensor | None = field(init=False, default=None)
    #: both as float64, for stored types whose values float32 rounds
    _exact: Sequence[Tensor] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.normalization and not self.is_by_image:
            self._mean, self._std = (torch.as_tensor(v).to(self.device) for v in self.normalization)
            self._exact = [
                torch.as_tensor(v, dtype=torch.float64).to(self.device) for v in self.normalization
            ]

    def make(
        self, images: Tensor, targets: Tensor, key: int, divisor: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs (n, C, H, W) and the targets of stored images (n, H, W, C) and targets.

        `key` is that of the batch. `divisor` is what stored values are divided by; None = 255 for
        uint8, 65,535 for uint16, 1 for floats. Inputs are copies: the memory of the images is used
        again.
        """
        inputs = self.inputs(images, key, divisor)
        targets = targets.to(self.device)
        if self.stage is None:
            return inputs, targets
        return self.stage(inputs, targets, key)

    def inputs(self, images: Tensor, key: int = 0, divisor: float | None = None) -> Tensor:
        """Return the inputs (n, C, H, W) of stored images (n, H, W, C) before the task's stage."""
        stored = images.to(self.device)
        nodata = self.nodata
        images = augment(stored, self.augmentation, random_key(key, "augment"), nodata)
        layout = self.dtype, self.channels_last
        if self.transform is None:
            if self.is_by_image:
                return standardize_images(stored, images, *layout, nodata)
            mean, std = self._mean, self._std
            if self._exact and is_wide(images):
                mean, std = self._exact
            return to_input(images, mean, std, *layout, divisor, nodata)
        scaled = self._scale(images, divisor)
        statistics = self._statistics(stored, divisor)
        if statistics is None:
            return self.transform(scaled, key)
        mean, std = statistics
        if nodata is None and not self.is_by_image:
            inputs = self.transform(scaled, key)
            return normalize(inputs, mean[0], std[0], self.channels_last)
        filling = mean[:, :, None, None].to(self.dtype)
        missing = is_nodata(images, nodata).permute(0, 3, 1, 2)
        filled = scaled.copy_(torch.where(missing, filling, scaled))
        return normalize_filled(self.transform(filled, key), filling, std)

    def _scale(self, images: Tensor, divisor: float | None) -> Tensor:
        """Return stored images (n, H, W, C) as floats (n, C, H, W), as a transform gets them."""
        layout = self.dtype, self.channels_last
        if self.unit_range is None:
            return to_input(images, None, None, *layout, divisor, self.nodata)
        low, width = self.unit_range
        return to_input(images, low, width, *layout, divisor, self.nodata, in_float64=True)

    def _statistics(self, stored: Tensor, divisor: float | None) -> tuple[Tensor, Tensor] | None:
        """Return what is subtracted after a transform, and by what it is divided, if anything.

        They are (1, C), or (n, C) for stored images (n, H, W, C) that are normalized each by
        itself.
        """
        if self.is_by_image:
            mean, std = image_statistics(stored, self.nodata)  # (n, C)
            divisor = divisor_of(stored, divisor)
            mean = mean / divisor
            std = std / divisor
        elif self._mean is not None and self._std is not None:
            mean = self._mean[None]
            std = self._std[None]
        elif self.unit_range is None:
            return None
        else:
            mean = torch.zeros_like(self.unit_range.low)[None]
            std = torch.ones_like(mean)
        if self.unit_range is None:
            return mean, std
        low, width = self.unit_range
        return (mean - low) / width, std / width

    @property
    def is_by_image(self) -> bool:
        """Whether each channel of each image is normalized by itself."""
        return isinstance(self.normalization, str)

    def plain(self) -> Pipeline:
        """Return the pipeline of an evaluation: without augmentation, the user's own among it."""
        return replace(self, augmentation=NO_AUGMENTATION, transform=None)
