"""Decode image files to (H, W, C) uint8: any file that is packed, and JPEG files of packs.

1. Open the file, which must be whole (``formats.py``), and decode its picture with Pillow, in this
   process (not EPS, which starts a program). Of an animation, it is the first frame. A JPEG much
   larger than requested is decoded at 1/2, 1/4 or 1/8 scale, never below twice the requested size:
   on 12 megapixels three times as fast, and 0.4 gray levels off on average, 4 at most.
2. Convert to gray or RGB: palettes and CMYK become RGB (a palette of grays becomes gray), 16-bit
   gray is scaled by 1/257, and transparent pixels are blended over white or black.
3. Resize with a bilinear filter that is widened when shrinking (no aliasing): stretch the whole
   image, or crop it first to its largest centred part of the right proportions (``crop``).
4. Apply the EXIF orientation.
5. Convert to the requested channels: gray -> RGB by repetition, RGB -> gray by ITU-R 601 luma.

What these steps change in a picture is listed (`Change`), counted and printed.

A pack of JPEG files gives exactly the pixels that a pack of pixels would hold. Random crops of them
are those of Szegedy et al. 2015 (arXiv:1409.4842), drawn as by torchvision's RandomResizedCrop: the
area is uniform, the ratio of width to height log-uniform between 3/4 and 4/3. If ten such crops do
not fit into the image, the largest centred crop within these ratios is used. Packs of pixels
have the same crops (``crops.py``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import PIL
from PIL import ExifTags, Image, features
from PIL.ImageFile import ImageFile

from hpctrain.cores import core_count, make_pool
from hpctrain.data.formats import (
    Box,
    count_frames,
    draft,
    gray_bits,
    has_foreign_profile,
    has_further_channels,
    has_white_at_zero,
    is_deep,
    load_whole,
    open_image,
    raw_mode,
    tiff_tags,
)
from hpctrain.errors import first_line
from hpctrain.text import counted

QUALITY = 95  # JPEG quality of images that are converted
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
TRIES = 10  # to draw a random crop
NUMBERS = 2 * TRIES + 2  # area and ratio of each try, and the position
MIN_RATIO = 3 / 4
MAX_RATIO = 4 / 3
MAX_THREADS = 8
GDAL_NODATA = 42113  # tag of a TIFF
GRAY_ALPHA_16 = "LA;16B"  # which Pillow opens as RGBA

DEEP_ENOUGH = 2**14  # 16-bit images with smaller values only are refused
ASPECT_TOLERANCE = 0.01  # within which an image counts as not stretched
EMPTY_EXIF = 20  # bytes of EXIF metadata without a tag
ORIENTATIONS = range(1, 9)  # defined by EXIF

Background = Literal["white", "black"]
P = ParamSpec("P")
T = TypeVar("T")


class BadImage(Exception):
    """The file is not a readable image; the text gives the reason."""


class OtherKind(BadImage):
    """The file has another type, size or number of channels than the images beside it."""


class Fit(NamedTuple):
    """Size and channels of every decoded image, with `crop` cut to its proportions first.

    Transparent pixels are blended over `background`, in which white is the stored value `white`,
    None = the largest of the type. `decode_stored` (``values.py``) also takes 0
    for width and height, or for channels: those of the file. With `exact`, it refuses to resize;
    with `pages`, the pages of a TIFF are channels. Files that state other axes of them than `axes`
    are refused, unless it is None; "" is that no file states them.
    """

    width: int
    height: int
    channels: int
    crop: bool = False
    background: Background = "white"
    exact: bool = False
    pages: bool = False
    axes: str | None = None
    white: float | None = None

    @classmethod
    def of_pack(
        cls,
        image_shape: tuple[int, int, int],
        provenance: Mapping[str, Any],
        nodata: float | None = None,
    ) -> Fit:
        """Return how `pack` decodes files for a pack, by its provenance, which networks keep, too.

        The pack is of images (H, W, C), in which `nodata` stands for no value.
        """
        height, width, channels = image_shape
        way = provenance.get("fit")
        return cls(
            width=width,
            height=height,
            channels=channels,
            crop=way == "crop",
            background=provenance.get("background", "white"),
            exact=way == "tiles" or nodata is not None,
            pages=bool(provenance.get("pages")),
            axes=provenance.get("axes"),
            white=provenance.get("white"),
        )

    def of_size(self, width: int, height: int) -> Fit:
        """Return the same with the size of a file of this size, unless there is one."""
        if self.width:
            return self
        return self._replace(width=width, height=height)

    def ground(self, largest: int) -> int:
        """Return the stored value behind transparent pixels, of a type with this largest value.

        Raises BadImage if it has none for white.
        """
        if self.background == "black":
            return 0
        if self.white is None:
            return largest
        if self.white > largest:
            raise BadImage(
                f"transparent pixels, which cannot become white, as --max-value {self.white:g} is"
                f" beyond {largest:,}: --background black"
            )
        return round(self.white)


class Change(IntEnum):
    """Changes that decoding makes to a picture, one bit each; CHANGES describes those of `pack`."""

    STRETCHED = 1 << 0
    CROPPED = 1 << 1
    ENLARGED = 1 << 2
    SIXTEEN_BITS = 1 << 3
    TRANSPARENCY = 1 << 4
    EMPTY_ALPHA = 1 << 5
    FURTHER_CHANNELS = 1 << 6
    ORIENTATION = 1 << 7
    BAD_ORIENTATION = 1 << 8
    COLOUR_SPACE = 1 << 9
    COLOUR_PROFILE = 1 << 10
    FRAMES = 1 << 11
    GRAY_TO_COLOUR = 1 << 12
    COLOUR_TO_GRAY = 1 << 13
    ENCODED = 1 << 14
    BYTES_TO_16_BITS = 1 << 15
    NODATA_STATED = 1 << 16
    RESIZED = 1 << 17  # from any other size; `pack` names enlarged, stretched and cut ones only
    INVERTED = 1 << 18
    ORDER_LOST = 1 << 19


CHANGES = {
    Change.STRETCHED: "stretched to the size, by more than 1 % (--crop keeps the proportions)",
    Change.CROPPED: "cut at two sides by --crop",
    Change.ENLARGED: "smaller than the size, and enlarged",
    Change.SIXTEEN_BITS: "more than 8 bits per channel, reduced to 8 (largest value {largest:,})",
    Change.TRANSPARENCY: "transparency, laid over {background} (--background)",
    Change.EMPTY_ALPHA: "an alpha channel that is 0 everywhere, which is ignored",
    Change.FURTHER_CHANNELS: "channels beside colours and alpha, which are left out",
    Change.ORIENTATION: "turned upright by the EXIF orientation",
    Change.BAD_ORIENTATION: "EXIF metadata without a valid orientation, taken as upright",
    Change.COLOUR_SPACE: "CMYK or YCbCr colours, converted to RGB",
    Change.COLOUR_PROFILE: "a colour profile or gamma other than sRGB, which is not applied",
    Change.FRAMES: "several frames ({frames:,} in all), of which the first is kept",
    Change.GRAY_TO_COLOUR: "gray, repeated in 3 channels",
    Change.COLOUR_TO_GRAY: "in colour, converted to gray by --channels 1",
    Change.ENCODED: "encoded anew as JPEG",
    Change.BYTES_TO_16_BITS: "8-bit values, times 257, since others have 16 bits",
    Change.INVERTED: "values of more than 8 bits in which 0 is white (WhiteIsZero), inverted",
    Change.ORDER_LOST: (
        "pages in the order of the file, as the metadata that state their order are damaged or of"
        " other pages"
    ),
    Change.NODATA_STATED: (
        "a nodata value (GDAL_NODATA {nodata}), which is kept as any other: --nodata says it"
    ),
}


LOSSES = {  # those that `predict` names
    Change.SIXTEEN_BITS: "reduced to 8 bits per channel",
    Change.TRANSPARENCY: "with transparency, laid over {background}",
    Change.EMPTY_ALPHA: "with an empty alpha channel, which is ignored",
    Change.FURTHER_CHANNELS: "with channels that are left out",
    Change.BAD_ORIENTATION: "without a valid orientation",
    Change.COLOUR_SPACE: "converted to RGB",
    Change.COLOUR_PROFILE: "with a colour profile that is not applied",
    Change.FRAMES: "of which the first of several frames is used",
    Change.ORDER_LOST: "with pages in the order of the file, not of their damaged metadata",
}
OTHER_SIZE = "resized, from another size than those of the training"


@dataclass(slots=True)
class Changes:
    """The changes that were made to one picture."""

    kinds: int = 0  # bits of Change
    largest: int = 0  # value of more than 8 bits, in [0, 65535]
    frames: int = 0  # how many a file has, if several
    nodata: str = ""  # the value that marks missing data, as a file states it

    def add(self, other: Changes) -> None:
        """Add what was changed in an earlier step."""
        self.kinds |= other.kinds
        self.largest = max(self.largest, other.largest)
        self.frames += other.frames
        self.nodata = self.nodata or other.nodata

    def note_nodata(self, tags: Mapping[int, Any]) -> None:
        """Note the value that marks missing data, if the tags of a TIFF state one."""
        text = str(tags.get(GDAL_NODATA, "")).strip("\0 ")
        if text:
            self.kinds |= Change.NODATA_STATED
            self.nodata = text


class Crop(NamedTuple):
    """A random crop of an image: its smallest share of the area, and its random numbers."""

    min_area: float
    numbers: Sequence[float]  # NUMBERS of them, in [0, 1)

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return the crop of an image of this size: left, top, right, bottom."""
        for i in range(TRIES):
            share = self.min_area + self.numbers[2 * i] * (1 - self.min_area)
            low = math.log(MIN_RATIO)
            high = math.log(MAX_RATIO)
            ratio = math.exp(low + self.numbers[2 * i + 1] * (high - low))
            w = round(math.sqrt(width * height * share * ratio))
            h = round(math.sqrt(width * height * share / ratio))
            if 0 < w <= width and 0 < h <= height:
                left = int(self.numbers[-2] * (width - w + 1))
                top = int(self.numbers[-1] * (height - h + 1))
                return left, top, left + w, top + h
        w = min(width, max(1, round(height * MAX_RATIO)))
        h = min(height, max(1, round(width / MIN_RATIO)))
        left = (width - w) // 2
        top = (height - h) // 2
        return left, top, left + w, top + h


def as_bad_image(error: Exception) -> BadImage:
    """Return the error to raise in place of one of Pillow, NumPy or tifffile."""
    if isinstance(error, Image.UnidentifiedImageError):  # its text contains a memory address
        return BadImage("not an image of a known format")
    return BadImage(first_line(error))


def raises_bad_image(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that raises any error as BadImage: for corrupt files, Pillow raises many
    types.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (BadImage, MemoryError):
            raise
        except Exception as error:
            raise as_bad_image(error) from error

    return call


@raises_bad_image
def decode(data: bytes | Image.Image, fit: Fit) -> tuple[bytes, Changes]:
    """Decode an image file, or convert an image of Pillow, which is not changed, to the size and
    channels of `fit`: height x width x channels bytes, and what was changed. Raises BadImage.
    """
    changes = Changes()
    image, box = _load(data, changes, _reach(fit))
    return _fit_bytes(image, box, fit, changes), changes


def decode_opened(image: ImageFile, data: bytes, fit: Fit, changes: Changes) -> bytes:
    """Decode likewise an image of 8 bits that `open_image` has opened in `data`."""
    loaded, box = load_opened(image, data, changes, _reach(fit))
    return _fit_bytes(loaded, box, fit, changes)


@raises_bad_image
def decode_jpeg(data: bytes | memoryview, fit: Fit, crop: Crop | None = None) -> bytes:
    """Decode a JPEG file of a pack, which is upright, or a crop of it stretched to size, too."""
    image = Image.open(io.BytesIO(data), formats=("JPEG",))
    if crop is None:
        box = draft(image, _reach(fit))
        image.load()
        return _resize(image, box, fit).tobytes()
    width, height = image.size
    left, top, right, bottom = crop.box(width, height)
    room = min((right - left) / (REACH * fit.width), (bottom - top) / (REACH * fit.height))
    scale = next(s for s in (8, 4, 2, 1) if s <= max(1, room))
    if scale > 1:
        image.draft(None, (max(1, width // scale), max(1, height // scale)))
    image.load()
    box = left / scale, top / scale, right / scale, bottom / scale
    return _resize(image, box, fit._replace(crop=False)).tobytes()


@raises_bad_image
def convert_to_jpeg(data: bytes, fit: Fit) -> tuple[bytes, bytes, Changes]:
    """Return an upright JPEG file, gray or YCbCr, of the same size: these bytes if they are one.

    Returns also what `decode` makes of this file, and what was changed. Raises BadImage.
    """
    changes = Changes()
    opened = open_image(data)
    is_jpeg = opened.format in ("JPEG", "MPO") and opened.mode in ("L", "RGB")  # MPO: several JPEGs
    if is_jpeg and orientation_of(opened, Changes()) == 1:
        return data, decode_opened(opened, data, fit, changes), changes
    file, encoded = encode_jpeg(data, fit)
    pixels, changes = decode(file, fit)
    changes.add(encoded)
    return file, pixels, changes


@raises_bad_image
def encode_jpeg(data: bytes, fit: Fit) -> tuple[bytes, Changes]:
    """Encode an image file as an upright JPEG file, gray or YCbCr, of the same size.

    Steps 2 and 4 of the module's docstring are applied before; these changes are returned, too.
    Raises BadImage.
    """
    changes = Changes()
    image, _ = _load(data, changes)
    turn = TURNS.get(orientation_of(image, changes))
    image = _gray_or_rgb(image, fit, changes)
    file = io.BytesIO()
    upright = image if turn is None else image.transpose(turn)
    upright.save(file, "JPEG", quality=QUALITY, subsampling="4:4:4")
    changes.kinds |= Change.ENCODED
    return file.getvalue(), changes


def few_gray_levels(largest: int) -> str:
    """Return what 8 bits would keep of images whose largest value, of 65,535, is this.

    It is "" if that is a quarter of the gray levels or more.
    """
    if largest >= DEEP_ENOUGH:
        return ""
    levels = counted(largest // 257 + 1, "gray level")
    return f"{largest:,} of 65,535; as 8 bits, {levels} would be left"


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


def _reach(fit: Fit) -> int:
    """Return what a scaled image must at least have of both sides: EXIF may exchange them."""
    return REACH * max(fit.width, fit.height)


def _load(data: bytes | Image.Image, changes: Changes, reach: int = 0) -> tuple[Image.Image, Box]:
    """Open and decode an image; return it with its box. With `reach`, a JPEG may be scaled down."""
    if isinstance(data, Image.Image):
        data.load()
        if 0 in data.size:
            raise BadImage("it has no pixels")
        return data, (0, 0, *data.size)
    opened = open_image(data)
    if is_deep(opened, data):
        changes.kinds |= Change.SIXTEEN_BITS
    return load_opened(opened, data, changes, reach)


def load_opened(
    opened: ImageFile, data: bytes, changes: Changes, reach: int = 0
) -> tuple[Image.Image, Box]:
    """Decode an opened image likewise; `changes` says whether Pillow reduces it to 8 bits."""
    inspect(opened, data, changes)
    is_gray = raw_mode(opened) == GRAY_ALPHA_16
    canvas = 0, 0, *opened.size
    frame = opened.tile[0][1] if opened.format == "GIF" else canvas  # which the first one covers
    opened, box = load_whole(opened, data, reach)
    image = opened.convert("LA") if is_gray else opened
    if frame != canvas and not image.has_transparency_data:
        covered = Image.new("L", image.size)
        covered.paste(255, frame)
        image = image.convert("RGB")
        image.putalpha(covered)
    if changes.kinds & Change.SIXTEEN_BITS:  # Pillow keeps the upper 8
        colours = [np.asarray(image.getchannel(b)) for b in image.getbands() if b != "A"]
        changes.largest = 257 * max(int(values.max()) for values in colours)
    return image, box


def inspect(image: Image.Image, data: bytes, changes: Changes) -> None:
    """Note what decoding an opened image will leave out or change, but for its depth."""
    if has_foreign_profile(image, data):
        changes.kinds |= Change.COLOUR_PROFILE
    if image.format == "JPEG":
        return
    if image.format == "TIFF":
        if tiff_tags(image).get(ExifTags.Base.Orientation) in TURNS:
            changes.kinds |= Change.ORIENTATION
        if has_further_channels(image):
            changes.kinds |= Change.FURTHER_CHANNELS
        changes.note_nodata(tiff_tags(image))
        return
    frames = count_frames(image)
    if frames > 1:
        changes.kinds |= Change.FRAMES
        changes.frames = frames


def _fit_bytes(image: Image.Image, box: Box, fit: Fit, changes: Changes) -> bytes:
    """Return the bytes of a decoded image in the size and channels of `fit`."""
    orientation = orientation_of(image, changes)  # after loading, which rotates a TIFF
    image = _gray_or_rgb(image, fit, changes)
    _compare(image, box, fit, orientation, changes)
    return _resize(image, box, fit, orientation).tobytes()


def _compare(image: Image.Image, box: Box, fit: Fit, orientation: int, changes: Changes) -> None:
    """Note how an image differs in size and channels from `fit`."""
    left, top, right, bottom = box
    size = (right - left, bottom - top)
    width, height = reversed(size) if orientation in SIDEWAYS else size
    compare_size(width, height, fit, changes)
    if fit.channels == 1:
        if image.mode == "RGB":
            changes.kinds |= Change.COLOUR_TO_GRAY
    elif image.mode == "L":
        changes.kinds |= Change.GRAY_TO_COLOUR


def compare_size(width: float, height: float, fit: Fit, changes: Changes) -> None:
    """Note how the size of an upright image differs from that of `fit`.

    Raises OtherKind if it differs and `fit` is exact.
    """
    if fit.exact and (width, height) != (fit.width, fit.height):
        raise OtherKind(
            f"{width:g}x{height:g} pixels, not {fit.width}x{fit.height}, and resizing would change"
            " values: give it in this size"
        )
    if (width, height) != (fit.width, fit.height):
        changes.kinds |= Change.RESIZED
    wide = width * fit.height  # equal to `high` if the proportions are
    high = height * fit.width
    if abs(wide - high) > ASPECT_TOLERANCE * high:
        changes.kinds |= Change.CROPPED if fit.crop else Change.STRETCHED
    if fit.width > width or fit.height > height:
        changes.kinds |= Change.ENLARGED


def _resize(image: Image.Image, box: Box, fit: Fit, orientation: int = 1) -> Image.Image:
    """Resize the part `box` of a gray or RGB image to `fit`, and apply the EXIF orientation."""
    size = (fit.height, fit.width) if orientation in SIDEWAYS else (fit.width, fit.height)
    if fit.crop:
        box = centred_box(box, size)
    if image.size != size or box != (0, 0, *size):
        image = image.resize(size, Image.Resampling.BILINEAR, box=box)
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    mode = "L" if fit.channels == 1 else "RGB"
    return image if image.mode in (mode, "F") else image.convert(mode)  # convert() always copies


def centred_box(box: Box, size: tuple[int, int]) -> Box:
    """Return the largest centred part of a box with the proportions of `size`, (W, H)."""
    left, top, right, bottom = box
    scale = min((right - left) / size[0], (bottom - top) / size[1])
    width = min(scale * size[0], right - left)
    height = min(scale * size[1], bottom - top)
    x = left + (right - left - width) / 2
    y = top + (bottom - top - height) / 2
    return x, y, min(x + width, right), min(y + height, bottom)


def _gray_or_rgb(image: Image.Image, fit: Fit, changes: Changes) -> Image.Image:
    """Convert to gray or RGB, step 2 of the module's docstring."""
    transparent = image.has_transparency_data
    if image.mode in ("L", "RGB") and not transparent:
        return image
    if image.mode == "F":
        raise BadImage("floating-point pixels: convert them to 8 or 16 bits")
    if image.mode.startswith("I"):  # value / 257, rounded, so that 65535 becomes 255
        changes.kinds |= Change.SIXTEEN_BITS
        white = 2 ** gray_bits(image) - 1
        values = (255 * _gray_values(image, fit, changes) + white // 2) // white
        changes.largest = changes.largest * 65535 // white
        return Image.fromarray(values.astype(np.uint8))
    if image.mode in ("CMYK", "YCbCr"):
        changes.kinds |= Change.COLOUR_SPACE
    colour = has_colour(image)
    if transparent:
        image = _without_alpha(image, fit, changes)
    return image.convert("RGB" if colour else "L")


def _gray_values(image: Image.Image, fit: Fit, changes: Changes) -> np.ndarray:
    """Return the values (H, W) int64 of a gray image of more than 8 bits, in [0, 65535]."""
    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise BadImage("gray values beyond 16 bits: convert them to 8 or 16 bits")
    changes.largest = int(values.max())
    clear = values == image.info.get("transparency", -1)
    if has_white_at_zero(image):
        changes.kinds |= Change.INVERTED
        values = 65535 - values
    if clear.all():
        changes.kinds |= Change.EMPTY_ALPHA
    elif clear.any():
        changes.kinds |= Change.TRANSPARENCY
        values[clear] = 257 * fit.ground(255)
    return values


def _without_alpha(image: Image.Image, fit: Fit, changes: Changes) -> Image.Image:
    """Blend an image over the background, unless its alpha channel is 0 everywhere."""
    if image.mode == "La":  # premultiplied
        image = image.convert("LA")
    image = image.convert("RGBA")
    low, high = image.getchannel("A").getextrema()
    if low == 255:
        return image
    if high == 0:
        changes.kinds |= Change.EMPTY_ALPHA
        return image.convert("RGB")
    changes.kinds |= Change.TRANSPARENCY
    value = fit.ground(255)
    ground = Image.new("RGBA", image.size, (value, value, value, 255))
    return Image.alpha_composite(ground, image)


def has_colour(image: Image.Image) -> bool:
    """Whether an opened image has more than gray values."""
    if raw_mode(image) == GRAY_ALPHA_16:
        return False
    if image.mode in ("P", "PA"):
        red, green, blue = image.convert("RGB").split()
        return not red.tobytes() == green.tobytes() == blue.tobytes()
    return len(image.getbands()) > 2


def orientation_of(image: Image.Image, changes: Changes) -> int:
    """Return the EXIF orientation 1-8; 1 (upright) if the metadata is missing or corrupt."""
    if not image.info:
        return 1
    try:
        exif = image.getexif()
        value = exif.get(ExifTags.Base.Orientation, 1)
        if "exif" in image.info and not exif and len(image.info["exif"]) > EMPTY_EXIF:
            value = None
    except Exception:  # corrupt metadata raise any type; the pixels may be sound
        value = None
    if value in TURNS:
        changes.kinds |= Change.ORIENTATION
        return value
    if value not in ORIENTATIONS:
        changes.kinds |= Change.BAD_ORIENTATION
    return 1
