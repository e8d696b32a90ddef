"""The pipeline from stored images to a network's inputs and targets: its stages, in their order.

    stage                   what it changes                               key of its random numbers
    flips and shifts        stored values (n, H, W, C) of their type      "augment"
    scaling                 makes floats (n, C, H, W) in [0, 1] of them
    the user's transform    these floats                                  "own augmentation"
    normalization           (x - mean) / std per channel
    the task's stage        inputs and targets                            its own: "noise"

A batch has one key, from which each stage derives its own: what one draws does not change what
another draws. Random crops, which are drawn where JPEG files are decoded, have the key "crop".

Where no stage stands between them, scaling and normalization are one multiplication and one
addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hpctrain.data.augment import NO_AUGMENTATION, Augmentation, augment, normalize, to_input
from hpctrain.data.partition import random_key

# images (n, C, H, W) in [0, 1] and the key of the batch -> others of the same shape and dtype
Transform = Callable[[Tensor, int], Tensor]
# inputs (n, C, H, W), targets (n, ...) and the key of the batch -> inputs and targets
Stage = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Pipeline:
    """Makes a network's inputs and targets of stored images and their targets."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32  # dtype of inputs
    channels_last: bool = True  # whether inputs lie in memory as NHWC
    normalization: Sequence[Tensor | Sequence[float]] | None = None  # mean and std, (C,) each
    augmentation: Augmentation = NO_AUGMENTATION
    transform: Transform | None = None
    stage: Stage | None = None
    _mean: Tensor | None = field(init=False, default=None)  # (C,) on the device
    _std: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.normalization:
            self._mean, self._std = (torch.as_tensor(v).to(self.device) for v in self.normalization)

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
        images = augment(images.to(self.device), self.augmentation, random_key(key, "augment"))
        if self.transform is None:
            return to_input(images, self._mean, self._std, self.dtype, self.channels_last, divisor)
        scaled = to_input(images, None, None, self.dtype, self.channels_last, divisor)
        inputs = self.transform(scaled, key)
        if self._mean is None or self._std is None:
            return inputs
        return normalize(inputs, self._mean, self._std, self.channels_last)

    def plain(self) -> Pipeline:
        """Return the pipeline of an evaluation: without augmentation, the user's own among it."""
        return replace(self, augmentation=NO_AUGMENTATION, transform=None)
