"""Turn a batch of bytes into the network's input: random flips and shifts, scaling, normalization.

Images are augmented as they are stored, (n, H, W, C), a whole batch at once, before scaling: of
bytes a quarter of the memory traffic, and a border that is 0 whatever the scaling. Random numbers
depend on the key of the batch alone and are drawn on the CPU, so they are equal on any ranks and
devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.data.scale import FULL
from hpctrain.streams import copy_to_device

CACHED_VALUES = 1 << 17  # scaled at a time on the CPU: 512 KiB of float32 stay in a core's cache


class Augmentation(NamedTuple):
    """How training images are augmented; each field has the name of its setting."""

    flip: bool = False
    shift: int = 0  # pixels


NO_AUGMENTATION = Augmentation()


def augment(images: Tensor, augmentation: Augmentation, key: int) -> Tensor:
    """Flip and shift stored images (n, H, W, C) at random; without both, return the images.

    Each image is flipped left to right with probability 1/2, then shifted by -shift to +shift
    pixels, uniform and independent in x and y.
    """
    rows = len(images)
    flip, shift = augmentation
    if rows == 0 or not (flip or shift):
        return images
    if images.dtype == torch.uint16:  # torch does not flip it on a CPU
        return augment(images.view(torch.int16), augmentation, key).view(torch.uint16)
    # Always draw both, so that turning one off does not change the numbers of the other.
    generator = torch.Generator().manual_seed(key)
    flips = torch.randint(0, 2, (rows,), generator=generator)
    down, right = torch.randint(-shift, shift + 1, (2, rows), generator=generator)
    if flip:
        chosen = copy_to_device(flips.nonzero().squeeze(1), images.device)  # (k,)
        images = images.index_copy(0, chosen, images.index_select(0, chosen).flip(2))
    if shift:
        images = _shift(images, down, right, shift)
    return images


def _shift(images: Tensor, down: Tensor, right: Tensor, shift: int) -> Tensor:
    """Return a copy with image i shifted by down[i] and right[i], at most `shift`, over black.

    A row of a shifted image is a run of W * C bytes of the image padded with a black border, which
    is a row of one overlapping view.
    """
    n, height, width, channels = images.shape
    tall = height + 2 * shift
    wide = width + 2 * shift
    bordered = images.new_zeros((n, tall, wide, channels))
    bordered[:, shift : shift + height, shift : shift + width] = images
    run = width * channels
    runs = bordered.as_strided((n * tall * wide - width + 1, run), (channels, 1))
    lines = torch.arange(height) + (torch.arange(n) * tall + shift - down)[:, None]  # (n, H)
    starts = (lines * wide + (shift - right)[:, None]).flatten().int()
    return runs.index_select(0, copy_to_device(starts, images.device)).view(images.shape)


def to_input(
    images: Tensor,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    divisor: float | None = None,
) -> Tensor:
    """Scale stored values (n, H, W, C) to the network's input, (n, C, H, W) of `dtype`.

    They are divided by `divisor`; None = the largest value of an integer type, and 1 for floats.
    With `mean` and `std`, (C,) each and on the device of the images, (x - mean) / std is computed
    per channel. The result is a copy, in memory as NHWC (`channels_last`) or NCHW, computed in
    float32 (float64 for that `dtype`).
    """
    n, height, width, channels = images.shape
    memory = torch.channels_last if channels_last else torch.contiguous_format
    # An empty tensor with the desired strides: .contiguous() would not set them for one channel.
    values = torch.empty(
        (n, channels, height, width),
        dtype=_type_of_arithmetic(dtype),
        device=images.device,
        memory_format=memory,
    )
    if divisor is None:
        divisor = FULL.get(str(images.dtype).removeprefix("torch."), 1.0)
    scale = None
    offset = None
    if mean is not None and std is not None:
        scale, offset = _scale_and_offset(mean, std, divisor, values, channels_last)
    permuted = images.permute(0, 3, 1, 2)  # (n, C, H, W)
    step = max(1, n if images.is_cuda else CACHED_VALUES // max(1, height * width * channels))
    for first in range(0, n, step):
        part = values[first : first + step].copy_(permuted[first : first + step])
        if scale is not None and offset is not None:
            _as_rows(part, channels_last).mul_(scale).add_(offset)
        elif divisor != 1:
            # Multiply: a GPU divides by a scalar by multiplying, so CPU and GPU give the same bits.
            part.mul_(1 / divisor)
    return values.to(dtype)


def normalize(inputs: Tensor, mean: Tensor, std: Tensor, channels_last: bool = True) -> Tensor:
    """Return (inputs - mean) / std per channel, as a copy of the same dtype and strides.

    Inputs are (n, C, H, W) as `to_input` returns them; mean and std, (C,), are on their device.
    """
    values = inputs.to(_type_of_arithmetic(inputs.dtype))
    scale, offset = _scale_and_offset(mean, std, 1.0, values, channels_last)
    rows = _as_rows(values, channels_last).mul(scale).add_(offset)
    return rows.to(inputs.dtype).as_strided(inputs.shape, inputs.stride())


def _type_of_arithmetic(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.float64:
        return dtype
    return torch.float32


def _scale_and_offset(
    mean: Tensor, std: Tensor, divisor: float, values: Tensor, channels_last: bool
) -> tuple[Tensor, Tensor]:
    """Return the factors and summands that normalize `_as_rows` of the values (n, C, H, W).

    There is one for each value of an image: loops over C values would take five times as long.
    Stored values are divided by `divisor`.
    """
    spread = Tensor.repeat if channels_last else Tensor.repeat_interleave
    pixels = values.shape[2] * values.shape[3]
    scale = (1 / (divisor * std.double())).to(values.dtype)
    offset = (-mean.double() / std.double()).to(values.dtype)
    return spread(scale, pixels), spread(offset, pixels)


def _as_rows(values: Tensor, channels_last: bool) -> Tensor:
    """Return a view of images (n, C, H, W) with one row for each, in memory order."""
    if channels_last:
        values = values.permute(0, 2, 3, 1)
    return values.flatten(1)
