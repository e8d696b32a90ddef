"""Random crops of stored pixels; ``images.py`` draws them, and decodes those of JPEG files.

A crop is enlarged to the size of its image by bilinear interpolation, as Pillow
resizes the part of a picture: at the edges of the crop, the pixels beside it count, too.

* Pictures of 8 bits, gray or RGB, are resized by Pillow, as JPEG files are: of files of the size of
  their pack, both packs give the same bits.
* All others are resized by torch in float64, and rounded to the nearest of their type.
* Values that are no data have no weight. A pixel in which they have more than half of the weight is
  no data; no other becomes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import grid_sample

from hpctrain.data.images import Box, Crop
from hpctrain.data.samples import round_to
from hpctrain.data.scale import can_hold, is_nodata

PICTURE_CHANNELS = (1, 3)  # gray, RGB
TASK_IMAGES = 8  # that a thread crops at a time


def crop_images(
    images: np.ndarray,
    crops: Sequence[Crop],
    nodata: float | None,
    threads: ThreadPoolExecutor,
) -> None:
    """Replace each stored image (n, H, W, C) by its crop (n), resized to its size.

    Results do not depend on the number of threads.
    """

    def crop_part(first: int) -> None:
        for place in range(first, min(first + TASK_IMAGES, len(images))):
            images[place] = crop_image(images[place], crops[place], nodata)

    for _ in threads.map(crop_part, range(0, len(images), TASK_IMAGES)):
        pass


def crop_image(image: np.ndarray, crop: Crop, nodata: float | None = None) -> np.ndarray:
    """Return a crop of a stored image (H, W, C), resized to its size, of its type."""
    height, width, channels = image.shape
    box = crop.box(width, height)
    if box == (0, 0, width, height):
        return image
    if nodata is not None and can_hold(image.dtype, nodata):
        return _resize_present(image, box, nodata)
    if image.dtype == np.uint8 and channels in PICTURE_CHANNELS:
        return _resize_picture(image, box)
    return round_to(_resize(image, box), image.dtype)


def _resize_picture(image: np.ndarray, box: Box) -> np.ndarray:
    """Return the part `box` of a picture of 8 bits (H, W, C), resized to its size by Pillow."""
    height, width, channels = image.shape
    picture = Image.fromarray(image[..., 0] if channels == 1 else image)
    resized = picture.resize((width, height), Image.Resampling.BILINEAR, box=box)
    return np.asarray(resized).reshape(image.shape)


def _resize(image: np.ndarray, box: Box) -> np.ndarray:
    """Return the part `box` of values (H, W, C), resized to their size, as float64."""
    height, width, _ = image.shape
    left, top, right, bottom = box
    planes = np.ascontiguousarray(image.transpose(2, 0, 1), np.float64)[None]  # (1, C, H, W)
    grid = np.empty((1, height, width, 2))
    grid[..., 0] = _sample_places(left, right, width)
    grid[..., 1] = _sample_places(top, bottom, height)[:, None]
    resized = grid_sample(
        torch.from_numpy(planes),
        torch.from_numpy(grid),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    return resized[0].numpy().transpose(1, 2, 0)


def _sample_places(start: float, stop: float, size: int) -> np.ndarray:
    """Return the centres of `size` equal parts of the pixels from `start` to `stop`, (size,).

    In the units of `grid_sample`, all pixels, as many, are the interval from -1 to 1.
    """
    centres = start + (stop - start) * (np.arange(size) + 0.5) / size
    return 2 * centres / size - 1


def _resize_present(image: np.ndarray, box: Box, nodata: float) -> np.ndarray:
    """Return the part `box` of an image (H, W, C), resized without values that are no data."""
    missing = is_nodata(image, nodata)
    sums = _resize(np.where(missing, 0, image), box)
    weights = _resize(~missing, box)
    means = np.divide(sums, weights, out=np.zeros_like(sums), where=weights > 0)
    resized = round_to(means, image.dtype)
    hits = is_nodata(resized, nodata)
    resized[hits] = _beside(resized[hits], means[hits] < nodata)
    resized[weights < 0.5] = nodata
    return resized


def _beside(values: np.ndarray, is_below: np.ndarray) -> np.ndarray:
    """Return the numbers of their type that follow values (n,), or precede them if `is_below`."""
    if values.dtype.kind == "f":
        return np.nextafter(values, np.where(is_below, -np.inf, np.inf).astype(values.dtype))
    return values + np.where(is_below, -1, 1).astype(values.dtype)
