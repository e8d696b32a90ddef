"""One JPEG file of a pack -> (H, W, C) uint8, the whole image or a random crop of it.

The whole image is decoded as ``images.decode`` does it, so a pack of JPEG files gives the very
pixels that a pack of pixels would hold. A crop is decoded at 1/2, 1/4 or 1/8 scale where it then
still has twice the size asked: no detail that the crop can show is lost.

Random crops are those of Szegedy et al. 2015 (arXiv:1409.4842), as torchvision's RandomResizedCrop
draws them: an area uniform from the smallest to the whole, a ratio of width to height log-uniform
from 3/4 to 4/3; after ten that do not fit, the largest centred crop within these ratios.

Several threads share the work because Pillow decodes and resizes without the interpreter's lock. An
image is decoded by one thread, so their number changes no bit.
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
NUMBERS = 2 * TRIES + 2  # share and ratio of each try, and the place
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
REACH = 2  # times the size asked that scaled decoding leaves at least
MAX_THREADS = 8
TASK_FILES = 8  # that a thread takes at a time

Box = tuple[int, int, int, int]  # left, top, right, bottom


class Crop(NamedTuple):
    """A random crop of an image: its smallest share of the area, and what decides the rest."""

    min_area: float
    numbers: Sequence[float]  # NUMBERS of them, in [0, 1)

    def box(self, width: int, height: int) -> Box:
        """The crop of an image of this size."""
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
    """Versions of what decodes, such as "Pillow 12.0.0, libjpeg 6.2": bits depend on them."""
    return f"Pillow {PIL.__version__}, libjpeg {features.version('jpg')}"


def draw_crops(min_area: float, count: int, key: int) -> list[Crop]:
    """The crops of `count` images, by `key`: that of an image depends on its place alone."""
    raw = np.random.Philox(key=key).random_raw(count * NUMBERS)  # fixed for all versions of NumPy
    numbers = (raw >> 11) * 2.0**-53
    return [Crop(min_area, part) for part in numbers.reshape(count, NUMBERS).tolist()]


def decode_file(data: bytes | memoryview, fit: Fit, crop: Crop | None = None) -> bytes:
    """The pixels of a JPEG file as `fit` asks, or of a crop of it stretched to that size; height x
    width x channels bytes. Raises BadImage.
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
    """So many threads; by default as many as cores may be used, at most 8."""
    return ThreadPoolExecutor(threads or min(MAX_THREADS, len(os.sched_getaffinity(0))), "decode")


def map_parts(threads: ThreadPoolExecutor, work: Callable[[slice], None], count: int) -> None:
    """Call `work` for parts of `count` images, side by side. Of several errors the first part's is
    raised, when no thread works any longer.
    """
    tasks = [
        threads.submit(work, slice(start, min(count, start + TASK_FILES)))
        for start in range(0, count, TASK_FILES)
    ]
    wait(tasks)
    for task in tasks:
        task.result()
