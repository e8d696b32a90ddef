"""Decode image files to (H, W, C) uint8: any file that is packed, and JPEG files of packs.

1. Decode the first frame with Pillow, in this process (not EPS, which starts a program). A JPEG
   much larger than requested is decoded at 1/2, 1/4 or 1/8 scale, never below twice the requested
   size: on 12 megapixels three times as fast, and 0.4 gray levels off on average, 4 at most.
2. Convert to gray or RGB: palettes and CMYK become RGB (a palette of grays becomes gray), 16-bit
   gray is scaled by 1/257, and transparent pixels are blended over black.
3. Resize with a bilinear filter that is widened when shrinking (no aliasing): stretch the whole
   image, or crop it first to its largest centred part of the right proportions (``crop``).
4. Apply the EXIF orientation.
5. Convert to the requested channels: gray -> RGB by repetition, RGB -> gray by ITU-R 601 luma.

A pack of JPEG files gives exactly the pixels that a pack of pixels would hold. Random crops of them
are those of Szegedy et al. 2015 (arXiv:1409.4842), drawn as by torchvision's RandomResizedCrop: the
area is uniform, the ratio of width to height log-uniform between 3/4 and 4/3. If ten such crops do
not fit into the image, the largest centred crop within these ratios is used.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import PIL
from PIL import ExifTags, Image, features

from hpctrain.cores import core_count, make_pool
from hpctrain.errors import first_line

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000")

QUALITY = 95  # of images converted to JPEG
REACH = 2  # scaled decoding keeps at least this many times the requested size
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
TRIES = 10  # of a random crop
NUMBERS = 2 * TRIES + 2  # area and ratio of each try, and the position
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
MAX_THREADS = 8

Box = tuple[float, float, float, float]  # left, top, right, bottom


class BadImage(Exception):
    """The file is not a readable image; the text gives the reason."""


class Fit(NamedTuple):
    """Size and channels of every decoded image, with `crop` cut to its proportions first."""

    width: int
    height: int
    channels: int
    crop: bool = False


class Crop(NamedTuple):
    """A random crop of an image: its smallest share of the area, and its random numbers."""

    min_area: float
    numbers: Sequence[float]  # NUMBERS of them, in [0, 1)

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return the crop of an image of this size: left, top, right, bottom."""
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


@contextmanager
def bad_images() -> Iterator[None]:
    """Raise any error of the block as BadImage: for corrupt files, Pillow raises many types."""
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:  # its text contains a memory address
        raise BadImage("not an image of a known format") from error
    except Exception as error:
        raise BadImage(first_line(error)) from error


@bad_images()
def decode(data: bytes | Image.Image, fit: Fit) -> bytes:
    """Decode an image file, or convert an image of Pillow, which is not changed, to the size and
    channels of `fit`: height x width x channels bytes. Raises BadImage.
    """
    return _decode(data.copy() if isinstance(data, Image.Image) else _open(data), fit)


@bad_images()
def decode_values(data: bytes | Image.Image, fit: Fit) -> np.ndarray:
    """Decode likewise to (H, W, C) uint8, or of a gray image of 16 bits, uint16: all its values.

    Raises BadImage.
    """
    image = data.copy() if isinstance(data, Image.Image) else _open(data)
    shape = fit.height, fit.width, fit.channels
    if not image.mode.startswith("I"):
        return np.frombuffer(_decode(image, fit), np.uint8).reshape(shape)
    image.load()
    gray = Image.fromarray(check_16_bits(image).astype(np.float32))
    gray = _resize(gray, (0, 0, *image.size), fit, _orientation(image))
    values = np.asarray(gray).round().astype(np.uint16)
    return np.broadcast_to(values[..., None], shape)


@bad_images()
def decode_jpeg(data: bytes | memoryview, fit: Fit, crop: Crop | None = None) -> bytes:
    """Decode a JPEG file of a pack, which is upright, or a crop of it stretched to size, too."""
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    if crop is None:
        return _decode(image, fit, upright=True)
    width, height = image.size
    left, top, right, bottom = crop.box(width, height)
    room = min((right - left) / (REACH * fit.width), (bottom - top) / (REACH * fit.height))
    scale = next(s for s in (8, 4, 2, 1) if s <= max(1, room))
    if scale > 1:
        image.draft(None, (max(1, width // scale), max(1, height // scale)))
    image.load()
    box = left / scale, top / scale, right / scale, bottom / scale
    return _resize(image, box, fit._replace(crop=False)).tobytes()


@bad_images()
def as_jpeg(data: bytes) -> bytes:
    """Return an upright JPEG file, gray or YCbCr, of the same size: these bytes if they are one.

    Otherwise steps 2 and 4 of the module's docstring are applied to the decoded image, and it is
    encoded. Raises BadImage.
    """
    image = _open(data)
    sound = image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")  # MPO: several JPEGs
    if sound and _orientation(image) == 1:
        return data
    image.load()  # which rotates a TIFF
    turn = TURNS.get(_orientation(image))
    image = _gray_or_rgb(image)
    file = io.BytesIO()
    upright = image if turn is None else image.transpose(turn)
    upright.save(file, "JPEG", quality=QUALITY, subsampling="4:4:4")
    return file.getvalue()


@bad_images()
def probe(data: bytes) -> tuple[int, int, bool]:
    """Return width, height (when upright) and whether there is colour. Raises BadImage.

    No more than a palette is decoded.
    """
    image = _open(data)
    if image.format == "TIFF":
        image.load()  # Pillow applies a TIFF's orientation when it loads the image
    width, height = image.size
    if _orientation(image) in SIDEWAYS:
        width, height = height, width
    return width, height, _has_colour(image)


def draw_crops(min_area: float, count: int, key: int) -> list[Crop]:
    """Draw the crops of `count` images from `key`; each depends on the image's position alone."""
    raw = np.random.Philox(key=key).random_raw(count * NUMBERS)  # fixed for all versions of NumPy
    numbers = (raw >> 11) * 2.0**-53
    return [Crop(min_area, part) for part in numbers.reshape(count, NUMBERS).tolist()]


def decoder_versions() -> str:
    """Return the decoder's versions, on which pixels depend: "Pillow 12.0.0, libjpeg 6.2"."""
    return f"Pillow {PIL.__version__}, libjpeg {features.version('jpg')}"


def decode_threads(threads: int | None = None) -> ThreadPoolExecutor:
    """Return a pool of `threads` threads; by default one per usable core, at most 8."""
    return make_pool(threads or min(MAX_THREADS, core_count()), "decode")


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _decode(image: Image.Image, fit: Fit, upright: bool = False) -> bytes:
    """Decode an image; its EXIF orientation is not read if it is known to be `upright`."""
    reach = REACH * max(fit.width, fit.height)  # for both sides: EXIF may exchange them
    drafted: tuple[str, Box] | None = image.draft(None, (reach, reach))  # None: not a JPEG
    image.load()
    orientation = 1 if upright else _orientation(image)  # after load, which rotates a TIFF
    box = drafted[1] if drafted else (0, 0, *image.size)
    return _resize(_gray_or_rgb(image), box, fit, orientation).tobytes()


def _resize(image: Image.Image, box: Box, fit: Fit, orientation: int = 1) -> Image.Image:
    """Resize the part `box` of a gray or RGB image to `fit`, and apply the EXIF orientation."""
    size = (fit.height, fit.width) if orientation in SIDEWAYS else (fit.width, fit.height)
    if fit.crop:  # the largest centred part of these proportions
        left, top, right, bottom = box
        scale = min((right - left) / size[0], (bottom - top) / size[1])
        width, height = min(scale * size[0], right - left), min(scale * size[1], bottom - top)
        x, y = left + (right - left - width) / 2, top + (bottom - top - height) / 2
        box = x, y, min(x + width, right), min(y + height, bottom)
    image = image.resize(size, Image.Resampling.BILINEAR, box=box)
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    mode = "L" if fit.channels == 1 else "RGB"
    return image if image.mode in (mode, "F") else image.convert(mode)  # convert() always copies


def _gray_or_rgb(image: Image.Image) -> Image.Image:
    """Convert to gray or RGB, step 2 of the module's docstring."""
    transparent = image.has_transparency_data
    if image.mode in ("L", "RGB") and not transparent:
        return image
    if image.mode.startswith("I"):  # value / 257, rounded, so that 65535 becomes 255
        values = check_16_bits(image)
        return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise BadImage("floating-point pixels: convert them to 8 or 16 bits")
    colour = _has_colour(image)
    if transparent:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image.convert("RGBA"))
    return image.convert("RGB" if colour else "L")


def check_16_bits(image: Image.Image) -> np.ndarray:
    """Return the values (H, W) of a gray image of 16 or 32 bits. Raises BadImage beyond 16."""
    values = np.asarray(image)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise BadImage("gray values beyond 16 bits: convert them to 8 or 16 bits")
    return values


def _has_colour(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        red, green, blue = image.convert("RGB").split()
        return not red.tobytes() == green.tobytes() == blue.tobytes()
    return len(image.getbands()) > 2


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation 1-8; 1 (upright) if the metadata is missing or corrupt."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # of any type, for corrupt metadata; the pixels may be sound
        return 1
    return value if value in TURNS else 1
