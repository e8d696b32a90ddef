"""From a batch's bytes to the network's input: random flips and shifts, scaling, noise.

Images are augmented as bytes (n, H, W, C), before scaling: a quarter of the memory traffic, and
what a shift brings in is black whatever the scaling. All images of a batch are treated at once.
What is drawn depends on the batch's key alone, so that any number of ranks sees the same images.
Flips and shifts are drawn on the CPU, and every device sees the same; noise, a number for each
value, is drawn where the images are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.config import Config
from hpctrain.errors import UsageError
from hpctrain.streams import copy_to_device

# Of the training images in [0, 1], red, green, blue: what published ResNet weights expect.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CACHED_VALUES = 1 << 17  # that a CPU core scales at a time: 512 KiB of float32 stay in its cache


class Augmentation(NamedTuple):
    """How training images are augmented: one field for each setting, of its name."""

    flip: bool = False
    shift: int = 0  # pixels

    @classmethod
    def of(cls, config: Config) -> Augmentation:
        """What the settings of a run ask for."""
        return cls(*(getattr(config, name) for name in cls._fields))


def check_shift(shift: int, image_shape: tuple[int, int, int]) -> None:
    """UsageError unless a shift of up to `shift` pixels leaves some of an image (H, W, C)."""
    height, width, _ = image_shape
    if not 0 <= shift < min(height, width):
        raise UsageError(
            f"--shift is {shift}; images of {width}x{height} allow 0 to {min(height, width) - 1}"
        )


def normalization(
    name: str, pack_mean: Sequence[float], pack_std: Sequence[float]
) -> tuple[Tensor, Tensor] | None:
    """Mean and standard deviation per channel, (C,) each, of images in [0, 1]; None for "unit".

    "pack" takes the pack's own; UsageError if a channel of it is constant, or for "imagenet" if
    there are not three channels.
    """
    channels = len(pack_mean)
    if name == "unit":
        return None
    if name == "imagenet":
        if channels != 3:
            raise UsageError(
                f"--normalize imagenet is for images of 3 channels; these have {channels}:"
                " use unit or pack"
            )
        return torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    if not all(std > 0 for std in pack_std):
        raise UsageError(
            f"--normalize pack needs channels that vary; the pack's standard deviations are"
            f" {', '.join(f'{std:g}' for std in pack_std)}: use unit"
        )
    return torch.tensor(tuple(pack_mean)), torch.tensor(tuple(pack_std))


def augment(images: Tensor, augmentation: Augmentation, key: int) -> Tensor:
    """Flip each image left to right with probability 1/2, then shift it by -shift to +shift pixels
    in x and in y, both uniform: (n, H, W, C) uint8 -> the same shape, on the same device.

    With neither, the images themselves come back and nothing is drawn.
    """
    rows, (flip, shift) = len(images), augmentation
    if rows == 0 or not (flip or shift):
        return images
    # Both are drawn in any case, so that one does not change what the other draws.
    generator = torch.Generator().manual_seed(key)
    flips = torch.randint(0, 2, (rows,), generator=generator)
    down, right = torch.randint(-shift, shift + 1, (2, rows), generator=generator)
    if flip:
        images = _flip(images, flips.nonzero().squeeze(1))
    if shift:
        images = _shift(images, down, right, shift)
    return images


def _flip(images: Tensor, chosen: Tensor) -> Tensor:
    """A copy with the images at the places `chosen` (k,) mirrored."""
    chosen = copy_to_device(chosen, images.device)
    mirrored = images.index_select(0, chosen).flip(2)  # (k, H, W, C)
    return images.index_copy(0, chosen, mirrored)


def _shift(images: Tensor, down: Tensor, right: Tensor, shift: int) -> Tensor:
    """A copy with image i moved by down[i] and right[i], at most `shift`; black comes in.

    Each image gets a black border. A row of a shifted image is then a run of W * C bytes of the
    bordered one, so all are rows of one overlapping view, picked by the pixel where they start.
    """
    n, height, width, channels = images.shape
    tall, wide = height + 2 * shift, width + 2 * shift
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
) -> Tensor:
    """Bytes (n, H, W, C) -> (n, C, H, W) in [0, 1], then (x - mean) / std per channel if given.
    Floats are taken as they are instead of being divided by 255.

    A copy, in memory as NHWC or NCHW. Computed in float32 (float64 for that `dtype`). `mean` and
    `std` (C,) lie on the device of the images.
    """
    n, height, width, channels = images.shape
    memory = torch.channels_last if channels_last else torch.contiguous_format
    # An empty tensor with the strides wanted: for one channel .contiguous() would leave them.
    values = torch.empty(
        (n, channels, height, width),
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        device=images.device,
        memory_format=memory,
    )
    scale = _scaling(images, values, mean, std, channels_last)
    lying = images.permute(0, 3, 1, 2)
    step = n if images.is_cuda else max(1, CACHED_VALUES // max(1, height * width * channels))
    for first in range(0, n, max(1, step)):
        part = values[first : first + step]
        scale(part.copy_(lying[first : first + step]))
    return values.to(dtype)


def _scaling(
    images: Tensor, values: Tensor, mean: Tensor | None, std: Tensor | None, channels_last: bool
) -> Callable[[Tensor], object]:
    """What scales some of the `values` of `images` in place."""
    height, width = values.shape[2:]
    whole = 1.0 if images.is_floating_point() else 255.0
    if mean is None or std is None:
        # Not divided: a GPU divides by a number by multiplying, so CPU and GPU give the same bits.
        return lambda part: part.mul_(1 / whole) if whole > 1 else part
    scale = (1 / (whole * std.double())).to(values.dtype)  # (C,)
    offset = (-mean.double() / std.double()).to(values.dtype)
    # Per image as one row, as it lies in memory: loops over C values would cost five times as much.
    if channels_last:
        scale, offset = scale.repeat(height * width), offset.repeat(height * width)
        return lambda part: part.permute(0, 2, 3, 1).view(len(part), -1).mul_(scale).add_(offset)
    scale = scale.repeat_interleave(height * width)
    offset = offset.repeat_interleave(height * width)
    return lambda part: part.view(len(part), -1).mul_(scale).add_(offset)


def add_noise(images: Tensor, kind: str, level: float, key: int) -> Tensor:
    """A copy of images (n, C, H, W) in [0, 1] with noise that depends on `key`, shape and device
    alone. A GPU draws other numbers than the CPU, and one of another model may draw others again:
    torch spreads the counter of its generator over the threads that a GPU has.

    "salt-pepper": every value becomes 0 or 1, each with probability level / 2. "gaussian": a
    normal deviate of standard deviation `level` is added, the sum cut to [0, 1].
    """
    generator = torch.Generator(images.device).manual_seed(key)
    draw = torch.randn if kind == "gaussian" else torch.rand
    drawn = draw(images.shape, generator=generator, device=images.device).to(images.dtype)
    noisy = images.clone()  # with the same strides
    if kind == "gaussian":
        # Not add_(drawn, alpha=level), of which some devices round only the sum.
        return noisy.add_(drawn.mul_(level)).clamp_(0, 1)
    return noisy.masked_fill_(drawn < level / 2, 0).masked_fill_(drawn >= 1 - level / 2, 1)
