"""Turn a batch of bytes into the network's input: flips, turns and shifts, scaling, normalization.

Images are augmented as they are stored, (n, H, W, C), a whole batch at once, before scaling: of
bytes a quarter of the memory traffic, and a border that is 0 whatever the scaling. Random numbers
depend on the key of the batch alone and are drawn on the CPU, so they are equal on any ranks and
devices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.data.partition import random_key
from hpctrain.data.scale import FULL, WIDE
from hpctrain.data.standardize import (
    comparable,
    image_statistics,
    is_nodata,
    standardize,
    stored_nodata,
)
from hpctrain.streams import copy_to_device

GPU_VALUES = 1 << 24  # normalized at a time, each image by itself: 128 MiB of float64
CACHED_VALUES = 1 << 17  # scaled at a time on the CPU: 512 KiB of float32 stay in a core's cache


class Augmentation(NamedTuple):
    """How training images are augmented; each field has the name of its setting."""

    flip: bool = False
    shift: int = 0  # pixels
    flip_vertical: bool = False
    rotate90: bool = False


NO_AUGMENTATION = Augmentation()


def augment(
    images: Tensor, augmentation: Augmentation, key: int, nodata: float | None = None
) -> Tensor:
    """Flip, turn and shift stored images (n, H, W, C) at random; without these, return the images.

    Each image is flipped left to right and upside down with probability 1/2 each, turned
    counterclockwise by 0, 1, 2 or 3 right angles (square images only), and shifted by -shift to
    +shift pixels, uniform and independent in x and y, in this order. What a shift uncovers is
    `nodata`, if images can hold that, else 0.
    """
    if len(images) == 0 or not any(augmentation):
        return images
    border = stored_nodata(nodata, images.dtype) or 0
    return _move(comparable(images), augmentation, key, border).view(images.dtype)


def _move(images: Tensor, augmentation: Augmentation, key: int, border: float) -> Tensor:
    """Implement `augment` for `comparable` images."""
    n, height, width, channels = images.shape
    shift = augmentation.shift
    # Always draw both, so that turning one off does not change the numbers of the other.
    generator = torch.Generator().manual_seed(key)
    flips = torch.randint(0, 2, (n,), generator=generator)
    down, right = torch.randint(-shift, shift + 1, (2, n), generator=generator)
    symmetries = _draw_symmetries(flips, augmentation, key)
    bordered = images.new_empty((n, height + 2 * shift, width + 2 * shift, channels))
    if shift:
        bordered.fill_(border)
    inner = bordered[:, shift : shift + height, shift : shift + width]
    inner.copy_(images)
    for symmetry in {*symmetries.tolist()} - {0}:
        chosen = copy_to_device((symmetries == symmetry).nonzero().squeeze(1), images.device)
        moved = _apply_symmetry(images.index_select(0, chosen), symmetry)
        inner.index_copy_(0, chosen, moved)
    if not shift:
        return bordered
    return _shift(bordered, down, right, shift)


def _draw_symmetries(flips: Tensor, augmentation: Augmentation, key: int) -> Tensor:
    """Return the symmetry of the square that each image undergoes, (n,) int64 in [0, 8).

    t + 4 m stands for a flip left to right, if m is 1, and then t turns by a right angle. `flips`
    (n,) are those left to right; an upside-down flip is one of them and two turns.
    """
    mirrored = torch.zeros_like(flips)
    turns = torch.zeros_like(flips)
    if augmentation.flip:
        mirrored = flips
    if augmentation.flip_vertical:
        upside_down = _draw(2, len(flips), random_key(key, "flip vertical"))
        mirrored = mirrored ^ upside_down
        turns = 2 * upside_down
    if augmentation.rotate90:
        turns = (turns + _draw(4, len(flips), random_key(key, "rotate90"))) % 4
    return turns + 4 * mirrored


def _draw(count: int, n: int, key: int) -> Tensor:
    """Draw n integers, uniform in [0, count)."""
    return torch.randint(0, count, (n,), generator=torch.Generator().manual_seed(key))


def _apply_symmetry(images: Tensor, symmetry: int) -> Tensor:
    """Return images (n, H, W, C) after a symmetry of `_draw_symmetries`, possibly as a view."""
    turns = symmetry % 4
    is_mirrored = symmetry >= 4
    axes = []
    if turns in (2, 3):
        axes.append(1)
    if (turns in (1, 2)) != is_mirrored:
        axes.append(2)
    if axes:
        images = images.flip(axes)
    if turns % 2:
        images = images.transpose(1, 2)
    return images


def _shift(bordered: Tensor, down: Tensor, right: Tensor, shift: int) -> Tensor:
    """Return images (n, H, W, C), image i shifted by down[i] and right[i], at most `shift`.

    Around each image, `bordered` has a border as wide as `shift`. A row of a shifted image is a run
    of W * C values, which is a row of one overlapping view.
    """
    n, tall, wide, channels = bordered.shape
    height = tall - 2 * shift
    width = wide - 2 * shift
    run = width * channels
    runs = bordered.as_strided((n * tall * wide - width + 1, run), (channels, 1))
    lines = torch.arange(height) + (torch.arange(n) * tall + shift - down)[:, None]  # (n, H)
    starts = (lines * wide + (shift - right)[:, None]).flatten().int()
    rows = runs.index_select(0, copy_to_device(starts, bordered.device))
    return rows.view(n, height, width, channels)


def to_input(
    images: Tensor,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    divisor: float | None = None,
    nodata: float | None = None,
    in_float64: bool = False,
) -> Tensor:
    """Scale stored values (n, H, W, C) to the network's input, (n, C, H, W) of `dtype`.

    They are divided by `divisor`; None = the largest value of an integer type, and 1 for floats.
    With `mean` and `std`, (C,) each and on the device of the images, (x - mean) / std is computed
    per channel. The result is a copy, in memory as NHWC (`channels_last`) or NCHW, computed in
    float32, or float64 for that `dtype`, where values of `WIDE` types are normalized, and with
    `in_float64`. Values that are `nodata` become 0.
    """
    values = _new_input(images, dtype, channels_last)
    divisor = divisor_of(images, divisor)
    scale = None
    offset = None
    if mean is not None and std is not None:
        arithmetic = torch.float64 if in_float64 or is_wide(images) else values.dtype
        scale, offset = _scale_and_offset(mean, std, divisor, values, channels_last, arithmetic)
    permuted = images.permute(0, 3, 1, 2)  # (n, C, H, W)
    n = len(images)
    step = n if images.is_cuda else _images_in(CACHED_VALUES, images)
    for first in range(0, n, max(1, step)):
        stored = permuted[first : first + step]
        part = values[first : first + step]
        if scale is None or offset is None:
            part.copy_(stored)
            if divisor != 1:
                # Multiply: a GPU divides by a scalar by multiplying, so it gives the CPU's bits.
                part.mul_(1 / divisor)
        elif scale.dtype == part.dtype:
            _as_rows(part.copy_(stored), channels_last).mul_(scale).add_(offset)
        else:
            exact = torch.empty_like(part, dtype=scale.dtype).copy_(stored)
            _as_rows(exact, channels_last).mul_(scale).add_(offset)
            part.copy_(exact)
        if nodata is not None:
            part.masked_fill_(is_nodata(stored, nodata), 0)
    return values.to(dtype)


def divisor_of(images: Tensor, divisor: float | None) -> float:
    """Return what stored images are divided by: None = the largest value of their integer type."""
    if divisor is not None:
        return divisor
    return FULL.get(_name_of_type(images), 1.0)


def is_wide(images: Tensor) -> bool:
    """Whether stored images are of a type whose values float32 rounds."""
    return _name_of_type(images) in WIDE


def _name_of_type(images: Tensor) -> str:
    return str(images.dtype).removeprefix("torch.")


def standardize_images(
    stored: Tensor,
    images: Tensor,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    nodata: float | None = None,
) -> Tensor:
    """Return images (n, H, W, C), each normalized by itself, as input (n, C, H, W) of `dtype`.

    Mean and standard deviation are those of the `stored` images, from which `images` were made. The
    result lies in memory as that of `to_input`.
    """
    values = _new_input(images, dtype, channels_last)
    n = len(images)
    step = _images_in(GPU_VALUES if images.is_cuda else CACHED_VALUES, images)
    for first in range(0, n, step):
        part = slice(first, first + step)
        mean, std = image_statistics(stored[part], nodata)
        normalized = standardize(images[part], mean, std, nodata)
        values[part].copy_(normalized.permute(0, 3, 1, 2))
    return values.to(dtype)


def _new_input(images: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """Return an empty tensor (n, C, H, W) for images (n, H, W, C), of the type of arithmetic.

    It has the desired strides: .contiguous() would not set them for one channel.
    """
    n, height, width, channels = images.shape
    return torch.empty(
        (n, channels, height, width),
        dtype=type_of_arithmetic(dtype),
        device=images.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )


def _images_in(values: int, images: Tensor) -> int:
    """Return how many images (n, H, W, C) have so many values, at least 1."""
    _, height, width, channels = images.shape
    return max(1, values // max(1, height * width * channels))


def normalize_filled(inputs: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (inputs - mean) / std as a copy of the same dtype and strides: exactly 0 at the mean.

    Inputs are (n, C, H, W); mean, (n or 1, C, 1, 1) of their dtype, and std, (n or 1, C), are on
    their device. Where std is 0, the result is 0.
    """
    values = inputs.to(type_of_arithmetic(inputs.dtype), copy=True)
    factors = std.double().reciprocal().masked_fill(std == 0, 0.0).to(values.dtype)
    return values.sub_(mean).mul_(factors[:, :, None, None]).to(inputs.dtype)


def normalize(inputs: Tensor, mean: Tensor, std: Tensor, channels_last: bool = True) -> Tensor:
    """Return (inputs - mean) / std per channel, as a copy of the same dtype and strides.

    Inputs are (n, C, H, W) as `to_input` returns them; mean and std, (C,), are on their device.
    """
    values = inputs.to(type_of_arithmetic(inputs.dtype))
    scale, offset = _scale_and_offset(mean, std, 1.0, values, channels_last, values.dtype)
    rows = _as_rows(values, channels_last).mul(scale).add_(offset)
    return rows.to(inputs.dtype).as_strided(inputs.shape, inputs.stride())


def type_of_arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which inputs of a dtype are computed: float64 for it, else float32."""
    if dtype == torch.float64:
        return dtype
    return torch.float32


def _scale_and_offset(
    mean: Tensor,
    std: Tensor,
    divisor: float,
    values: Tensor,
    channels_last: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the factors and summands, of `dtype`, that normalize `_as_rows` of the values.

    There is one for each value of an image (C, H, W): loops over C values would take five times as
    long. Stored values are divided by `divisor`.
    """
    spread = Tensor.repeat if channels_last else Tensor.repeat_interleave
    pixels = values.shape[2] * values.shape[3]
    scale = (1 / (divisor * std.double())).to(dtype)
    offset = (-mean.double() / std.double()).to(dtype)
    return spread(scale, pixels), spread(offset, pixels)


def _as_rows(values: Tensor, channels_last: bool) -> Tensor:
    """Return a view of images (n, C, H, W) with one row for each, in memory order."""
    if channels_last:
        values = values.permute(0, 2, 3, 1)
    return values.flatten(1)
