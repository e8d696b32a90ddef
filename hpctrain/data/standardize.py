"""Statistics of each image by itself (``--normalize image``), and values that are no data.

Everything is computed in float64, by operations of torch that act on each element or are exact, so
that an image has the same bits whatever lies beside it in a batch, on any device. Sums are those of
a binary tree: the values are halved, and the halves added, until one is left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

IMAGE = "image"  # the normalization of each image by itself


def is_nodata(images: Tensor, nodata: float | None) -> Tensor:
    """Return which stored values are no data: bools of the shape of the images."""
    value = stored_nodata(nodata, images.dtype)
    if value is None:
        return torch.zeros_like(images, dtype=torch.bool)
    if math.isnan(value):
        return images.isnan()
    return comparable(images) == value


def comparable(images: Tensor) -> Tensor:
    """Return images that torch can flip and compare on any device: uint16 as int16."""
    if images.dtype == torch.uint16:
        return images.view(torch.int16)
    return images


def stored_nodata(nodata: float | None, dtype: torch.dtype) -> float | None:
    """Return what stands for no data in `comparable` images of a type; None if nothing does."""
    if nodata is None:
        return None
    if dtype.is_floating_point:
        return torch.tensor(nodata, dtype=torch.float64).to(dtype).item()
    limits = torch.iinfo(dtype)
    if not (float(nodata).is_integer() and limits.min <= nodata <= limits.max):
        return None
    value = int(nodata)
    if dtype == torch.uint16 and value > torch.iinfo(torch.int16).max:
        value -= limits.max + 1
    return value


def image_statistics(images: Tensor, nodata: float | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of each image, (n, C) float64 each.

    `images` (n, H, W, C) are stored values; those that are no data are left out. The deviation is
    that of the population; of a constant channel it is 0.
    """
    values = images.to(torch.float64).flatten(1, 2)  # (n, H * W, C)
    missing = is_nodata(images, nodata).flatten(1, 2)
    count = (~missing).sum(1).clamp(min=1)  # (n, C)
    least = values.masked_fill(missing, math.inf).amin(1)
    least = least.masked_fill(missing.all(1), 0.0)
    # Differences from the smallest value: of a constant channel they are 0, whatever it is.
    above = (values - least[:, None]).masked_fill(missing, 0.0)
    mean = tree_sum(above) / count
    deviations = (above - mean[:, None]).masked_fill(missing, 0.0)
    variance = tree_sum(deviations * deviations) / count
    return least + mean, variance.sqrt()


def tree_sum(values: Tensor) -> Tensor:
    """Return the sums (n, C) of values (n, m, C), m > 0, in an order that depends on m alone."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        odd = values[:, 2 * half :]
        values = torch.cat([values[:, :half] + values[:, half : 2 * half], odd], 1)
    return values[:, 0]


def standardize(images: Tensor, mean: Tensor, std: Tensor, nodata: float | None = None) -> Tensor:
    """Return (images - mean) / std of stored images (n, H, W, C) as float64.

    `mean` and `std` are (n, C), in stored units. Where std is 0, and where there is no data, the
    result is 0.
    """
    factors = std.reciprocal().masked_fill(std == 0, 0.0)
    values = (images.to(torch.float64) - mean[:, None, None]) * factors[:, None, None]
    if nodata is None:
        return values
    return values.masked_fill(is_nodata(images, nodata), 0.0)
