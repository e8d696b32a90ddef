"""Decode one image file to a sample of a pack: (H, W, C) uint8, C = 1 (gray) or 3 (colour).

A file is processed in these steps:

1. Decode with Pillow: only formats that are decoded in this process (not EPS, which starts a
   program), and only the first of several frames. A JPEG much larger than requested is decoded at
   1/2, 1/4 or 1/8 scale, but never below twice the requested size: on pictures of 12 megapixels
   this is three times as fast, and differs from full decoding by 0.4 gray levels on average, by 4
   at most.
2. Convert to gray or RGB: palettes and CMYK become RGB (a palette of grays becomes gray), 16-bit
   gray is scaled by 1/257, and transparent pixels are blended over black, so transparent is 0.
3. Resize with a bilinear filter that is widened when shrinking (no aliasing): stretch the whole
   image, or crop it first to its largest centred part of the right proportions (``crop``).
4. Apply the EXIF orientation.
5. Convert to the requested channels: gray -> RGB by repetition, RGB -> gray by ITU-R 601 luma.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image

from hpctrain.errors import first_line

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000")

QUALITY = 95  # of images converted to JPEG
GRAY_MODES = ("1", "L", "LA", "La", "I", "F")  # and every mode that begins with "I;16"
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


class BadImage(Exception):
    """The file is not a readable image; the text gives the reason."""


class WrongSize(Exception):
    """The image does not have the required size; `size` is its (width, height)."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__(f"{size[0]}x{size[1]}")
        self.size = size


class Fit(NamedTuple):
    """Size and channels of every decoded image. With `exact`, other sizes raise WrongSize."""

    width: int
    height: int
    channels: int
    crop: bool = False
    exact: bool = False


class Header(NamedTuple):
    """Properties known before the pixels are decoded; the size is that after EXIF orientation."""

    width: int
    height: int
    colour: bool


@contextmanager
def bad_images() -> Iterator[None]:
    """Raise any error of the block as BadImage: for corrupt files, Pillow raises many types."""
    try:
        yield
    except (BadImage, WrongSize):
        raise
    except Image.UnidentifiedImageError as error:  # its text contains a memory address
        raise BadImage("not an image of a known format") from error
    except Exception as error:
        raise BadImage(first_line(error)) from error


def decode(data: bytes, fit: Fit) -> bytes:
    """Decode an image file to the size and channels of `fit`: height x width x channels bytes.

    Raises BadImage, or with ``fit.exact`` WrongSize.
    """
    with bad_images():
        return _decode(_open(data), fit)


def fit_pixels(pixels: bytes, shape: tuple[int, int, int], fit: Fit) -> bytes:
    """Convert raw pixels of `shape` (H, W, C) to `fit`, as `decode` does from step 3 on."""
    height, width, channels = shape
    if shape == (fit.height, fit.width, fit.channels):
        return pixels
    if fit.exact and (width, height) != (fit.width, fit.height):
        raise WrongSize((width, height))
    image = Image.frombytes("L" if channels == 1 else "RGB", (width, height), pixels)
    return resized(image, (0, 0, width, height), fit, 1).tobytes()


def fit_image(image: Image.Image, fit: Fit) -> bytes:
    """Convert an image of Pillow to `fit`, as `decode` does. The image itself is not changed.

    Raises BadImage.
    """
    with bad_images():
        return _decode(image.copy(), fit)


def as_jpeg(data: bytes) -> bytes:
    """Convert an image file to an upright JPEG file, gray or YCbCr, of the same size.

    If it already is one, its bytes are returned unchanged. Otherwise steps 2 and 4 of the module's
    docstring are applied to the decoded image, and it is encoded. Raises BadImage.
    """
    with bad_images():
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


def probe(data: bytes) -> Header:
    """Read size and colour of an image file from its header and palette. Raises BadImage."""
    with bad_images():
        image = _open(data)
        if image.format == "TIFF":
            image.load()  # Pillow applies a TIFF's orientation when it loads the image
        width, height = image.size
        if _orientation(image) in SIDEWAYS:
            width, height = height, width
        return Header(width, height, _has_colour(image))


def read_image(path: str, shape: tuple[int, int, int], crop: bool = False) -> np.ndarray:
    """Read an image file as the (H, W, C) uint8 array that a pack of this shape would hold.

    Raises BadImage, and OSError if the file cannot be read at all.
    """
    height, width, channels = shape
    with open(path, "rb") as file:
        pixels = decode(file.read(), Fit(width, height, channels, crop))
    return np.frombuffer(pixels, np.uint8).reshape(shape).copy()


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _decode(image: Image.Image, fit: Fit) -> bytes:
    box: tuple[float, float, float, float] | None = None
    if not fit.exact:
        reach = 2 * max(fit.width, fit.height)  # for both sides: EXIF may exchange them
        drafted = image.draft(None, (reach, reach))  # JPEG only, None elsewhere
        box = drafted[1] if drafted else None
    image.load()
    orientation = _orientation(image)  # after load, which rotates a TIFF
    if fit.exact:
        width, height = image.size[::-1] if orientation in SIDEWAYS else image.size
        if (width, height) != (fit.width, fit.height):
            raise WrongSize((width, height))
    return resized(_gray_or_rgb(image), box or (0, 0, *image.size), fit, orientation).tobytes()


def resized(
    image: Image.Image, box: tuple[float, float, float, float], fit: Fit, orientation: int
) -> Image.Image:
    """Resize the part `box` of a gray or RGB image to `fit`, and apply the EXIF orientation."""
    size = (fit.width, fit.height)
    if orientation in SIDEWAYS:
        size = (fit.height, fit.width)
    if fit.crop:
        box = _centre(box, size)
    image = image.resize(size, Image.Resampling.BILINEAR, box=box)
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    mode = "L" if fit.channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)  # convert() always copies


def _centre(
    box: tuple[float, float, float, float], size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the largest centred part of `box` with the proportions of `size`."""
    left, top, right, bottom = box
    scale = min((right - left) / size[0], (bottom - top) / size[1])
    width, height = min(scale * size[0], right - left), min(scale * size[1], bottom - top)
    x, y = left + (right - left - width) / 2, top + (bottom - top - height) / 2
    return x, y, min(x + width, right), min(y + height, bottom)


def _gray_or_rgb(image: Image.Image) -> Image.Image:
    """Convert to gray or RGB, step 2 of the module's docstring."""
    transparent = image.has_transparency_data
    if image.mode in ("L", "RGB") and not transparent:
        return image
    if image.mode.startswith("I"):
        return _from_16_bits(image)
    if image.mode == "F":
        raise BadImage("floating-point pixels: convert them to 8 or 16 bits")
    colour = _has_colour(image)
    if transparent:
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image.convert("RGBA"))
    return image.convert("RGB" if colour else "L")


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit gray to 8 bits: value / 257, rounded, so that 65535 becomes 255."""
    values = np.asarray(image)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise BadImage("gray values beyond 16 bits: convert them to 8 or 16 bits")
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


def _has_colour(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        red, green, blue = image.convert("RGB").split()
        return not red.tobytes() == green.tobytes() == blue.tobytes()
    return image.mode not in GRAY_MODES and not image.mode.startswith("I;16")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation 1-8; 1 (upright) if the metadata is missing or corrupt."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # of any type, for corrupt metadata; the pixels may be sound
        return 1
    return value if value in TURNS else 1
