"""Decode a JPEG file of a pack to (H, W, C) uint8: the whole image or a random crop of it.

The whole image is decoded as in ``images.decode``, so a pack of JPEG files gives exactly the pixels
that a pack of pixels would hold. A crop is decoded at 1/2, 1/4 or 1/8 scale if it then still has
twice the requested size, so that no visible detail is lost.

Random crops are those of Szegedy et al. 2015 (arXiv:1409.4842), drawn as by torchvision's
RandomResizedCrop: the area is uniform between the smallest and the whole, the ratio of width to
height log-uniform between 3/4 and 4/3. If ten such crops do not fit into the image, the largest
centred crop within these ratios is used.

Several threads share the work, because Pillow releases the interpreter's lock when it decodes and
resizes. An image is decoded by one thread, so results do not depend on the number of threads.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import PIL
from PIL import Image, features

from hpctrain.data.images import BadImage, Fit, bad_images, resized

MODES = ("L", "RGB")  # as Pillow names gray and YCbCr
TRIES = 10
NUMBERS = 2 * TRIES + 2  # area and ratio of each try, and the position
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
REACH = 2  # scaled decoding keeps at least this many times the requested size
MAX_THREADS = 8
TASK_FILES = 8  # files per task of a thread

Box = tuple[int, int, int, int]  # left, top, right, bottom


class Crop(NamedTuple):
    """A random crop of an image: its smallest share of the area, and its random numbers."""

    min_area: float
    numbers: Sequence[float]  # NUMBERS of them, in [0, 1)

    def box(self, width: int, height: int) -> Box:
        """Return the crop of an image of this size."""
        for i in range(TRIES):
            share = self.min_area + self.numbers[2 * i] * (1 - self.min_area)
            low, high = math.log(MIN_RATIO), math.log(MAX_RATIO)
            ratio = math.exp(low + self.numbers[2 * i + 1] * (high - low))
            w = round(math.sqrt(width * height * share * ratio))
            h = round(math.sqrt(width * height * share / ratio))
            if 0 < w <= width and 0 < h <= height:
                left = int(self.numbers[-2] * (width - w + 1))
                top = int(self.numbers[-1] * (height - h + 1))
                return left, top, left + w, top + h
        w = min(width, max(1, round(height * MAX_RATIO)))
        h = min(height, max(1, round(width / MIN_RATIO)))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


def decoder_versions() -> str:
    """Return the decoder's versions, on which pixels depend: "Pillow 12.0.0, libjpeg 6.2"."""
    return f"Pillow {PIL.__version__}, libjpeg {features.version('jpg')}"


def draw_crops(min_area: float, count: int, key: int) -> list[Crop]:
    """Draw the crops of `count` images from `key`; each depends on the image's position alone."""
    raw = np.random.Philox(key=key).random_raw(count * NUMBERS)  # fixed for all versions of NumPy
    numbers = (raw >> 11) * 2.0**-53
    return [Crop(min_area, part) for part in numbers.reshape(count, NUMBERS).tolist()]


def decode_file(data: bytes | memoryview, fit: Fit, crop: Crop | None = None) -> bytes:
    """Decode a JPEG file, or a crop of it stretched to size, to height x width x channels bytes.

    Size and channels are those of `fit`. Raises BadImage.
    """
    with bad_images():
        image = Image.open(io.BytesIO(data), formats=("JPEG",))
        if image.mode not in MODES:
            raise BadImage(f"a JPEG file of mode {image.mode}")
        if crop is None:
            return _whole(image, fit)
        return _crop(image, fit, crop.box(*image.size))


def _whole(image: Image.Image, fit: Fit) -> bytes:
    reach = REACH * max(fit.width, fit.height)
    drafted = image.draft(None, (reach, reach))
    image.load()
    box = drafted[1] if drafted else (0, 0, *image.size)
    return resized(image, box, fit, 1).tobytes()


def _crop(image: Image.Image, fit: Fit, box: Box) -> bytes:
    width, height = image.size
    left, top, right, bottom = box
    room = min((right - left) / (REACH * fit.width), (bottom - top) / (REACH * fit.height))
    scale = next(s for s in (8, 4, 2, 1) if s <= max(1, room))
    if scale > 1:
        image.draft(None, (max(1, width // scale), max(1, height // scale)))
    image.load()
    scaled = (left / scale, top / scale, right / scale, bottom / scale)
    return resized(image, scaled, fit._replace(crop=False), 1).tobytes()


def decode_threads(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool of `threads` threads; by default one per usable core, at most 8."""
    return ThreadPoolExecutor(threads or min(MAX_THREADS, len(os.sched_getaffinity(0))), "decode")


def map_parts(threads: ThreadPoolExecutor, work: Callable[[slice], None], count: int) -> None:
    """Call `work` in parallel for parts of `count` images.

    Returns when all parts are done. If several parts fail, the error of the first part is raised.
    """
    tasks = [
        threads.submit(work, slice(start, min(count, start + TASK_FILES)))
        for start in range(0, count, TASK_FILES)
    ]
    wait(tasks)
    for task in tasks:
        task.result()
