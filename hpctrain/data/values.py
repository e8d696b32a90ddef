"""Decode image files to (H, W, C) values of their own type: uint8, uint16, int16 or float32.

`decode_stored` keeps what a file holds, and refuses by name what it cannot keep. Who reads it:

* Pillow: pictures of 8 bits, as `images.decode` does it, and those kinds of deeper ones that it
  reads exactly: gray of 16 bits (TIFF also of 12 bits, signed, and float32), and colours of 16 bits
  in PNG and in TIFF. Pillow keeps the upper byte of such colours: a second decoding with the byte
  order exchanged gives the lower one.
* NumPy: ``.npy`` files, (H, W) or (H, W, C), and PPM of more than 8 bits.
* tifffile: all other kinds of TIFF (``tiff.py``).

Other types are widened where this is exact (int8, float16 and truth values), else refused with the
range of their values. Values that grow towards black (WhiteIsZero) are inverted.
"""

from __future__ import annotations

import io
import math
import re
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from PIL.ExifTags import Base as Tag
from PIL.ImageFile import ImageFile

from hpctrain.data.formats import (
    DEEP_TRANSPARENCY,
    PLANAR,
    REVERSED,
    SIGNED,
    TIFF_START,
    WHITE_IS_ZERO,
    TiffOnly,
    has_further_channels,
    has_white_at_zero,
    is_deep,
    is_deflated,
    load_whole,
    open_image,
    raw_mode,
    tiff_tags,
)
from hpctrain.data.images import (
    GRAY_ALPHA_16,
    ORIENTATIONS,
    SIDEWAYS,
    BadImage,
    Change,
    Changes,
    Fit,
    OtherKind,
    decode,
    decode_opened,
    has_colour,
    inspect,
    orientation_of,
    raises_bad_image,
)
from hpctrain.data.pack import WIDENED
from hpctrain.data.samples import Samples, channel_count, fit_samples
from hpctrain.data.tiff import are_other_axes, invert, open_tiff
from hpctrain.text import counted

MOST_NPY_CHANNELS = 64  # of an array whose first axis is the shortest: else it looks like (C, H, W)
NPY_START = b"\x93NUMPY"
ALPHA = 2  # ExtraSamples: colours are not multiplied by alpha
UPPER_BYTES = re.compile(";16([BLN])$")  # raw modes of which Pillow keeps the upper byte
NO_PREDICTOR = 1
HORIZONTAL = 2  # Predictor: each row holds differences
WIDE_TYPES = ("int16", "float32", "int32", "uint32")
OPPOSITE = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}


class Header(NamedTuple):
    """What `decode_stored` will make of a file in its own size and channels."""

    width: int  # when upright
    height: int
    channels: int
    dtype: str  # one of pack.TYPES, or a type that is refused when its values are read
    axes: str = ""  # of the pages of a TIFF that are channels, as `tiff.PageOrder` has them


class Contents(NamedTuple):
    """An opened image file: the functions that return its header, and read its values.

    The latter is None for pictures of 8 bits, which `images.decode_opened` reads.
    """

    dtype: str  # as in the header
    header: Callable[[], Header]
    read: Callable[[Changes], Samples] | None
    image: Any = None  # of Pillow


@raises_bad_image
def decode_stored(data: bytes | Image.Image, fit: Fit) -> tuple[np.ndarray, Changes]:
    """Decode an image file, or convert an image of Pillow, which is not changed.

    Returns values (H, W, C) of the file's own type, and what was changed: in the size and channels
    of `fit`, or, where these are 0, of the file. `pack` calls this function with the `Fit` of its
    options: whoever calls it with `Fit.of_pack` gets the values that `pack` writes. There are two
    exceptions: in a pack of uint16, bytes are multiplied by 257, and packs of bytes that were made
    by `--dtype uint8` are decoded by `decode_reduced`.

    NaN and infinity are returned as they are, unless the image is resized. Raises BadImage.
    """
    return decode_contents(open_contents(data, fit), data, fit)


@raises_bad_image
def decode_reduced(data: bytes | Image.Image, fit: Fit) -> tuple[np.ndarray, Changes]:
    """Decode likewise, but to bytes: more than 8 bits are reduced to 8, as `images.decode` does it.

    `fit` has a size and channels. Raises BadImage.
    """
    contents = open_contents(data, fit)
    if contents.dtype == "uint8":
        return decode_contents(contents, data, fit)
    if is_npy(data):
        raise BadImage(f"an array of {contents.dtype}, which --dtype uint8 does not reduce")
    pixels, changes = decode(data, fit)
    values = np.frombuffer(pixels, np.uint8)
    return values.reshape(fit.height, fit.width, fit.channels), changes


def decode_contents(
    contents: Contents, data: bytes | Image.Image, fit: Fit
) -> tuple[np.ndarray, Changes]:
    """Decode an opened image file. Raises BadImage, and what Pillow and tifffile raise."""
    changes = Changes()
    if contents.read is not None:
        return fit_samples(contents.read(changes), fit, changes), changes
    image = contents.image
    if not fit.width or fit.channels not in (1, 3):
        fit = complete_fit(image, fit)
        if not isinstance(data, Image.Image) and not image.tile:  # this has decoded it
            image = open_image(data)
    if isinstance(data, Image.Image):
        pixels, changes = decode(data, fit)
    else:
        pixels = decode_opened(image, data, fit, changes)
    values = np.frombuffer(pixels, np.uint8)
    return values.reshape(fit.height, fit.width, fit.channels), changes


def complete_fit(image: Any, fit: Fit) -> Fit:
    """Return `fit` with what it lacks: the size, or the channels, of an image of Pillow.

    Raises OtherKind if `fit` has neither one nor three channels.
    """
    if not fit.width:
        fit = fit.of_size(*upright_size(image))
    if fit.channels in (1, 3):
        return fit
    channels = picture_channels(image)
    if fit.channels:
        raise OtherKind(f"{counted(channels, 'channel')}, not {fit.channels:,}")
    return fit._replace(channels=channels)


@raises_bad_image
def read_header(data: bytes, fit: Fit) -> Header:
    """Return size, channels and type of an image file, decoding no more than a palette.

    `fit` says whether pages are channels, and whether one or three channels are requested. Raises
    BadImage.
    """
    return open_contents(data, fit).header()


def open_contents(data: bytes | Image.Image, fit: Fit) -> Contents:
    """Open an image file. Raises BadImage, ValueError, and what Pillow and tifffile raise."""
    if isinstance(data, Image.Image):
        return picture_contents(data, b"")
    if is_npy(data):
        return array_contents(data)
    if fit.pages and TIFF_START.match(data):
        return stack_contents(data, fit)
    try:
        image = open_image(data)
    except TiffOnly as error:
        return tiff_contents(data, reason=str(error))
    reason = needs_tifffile(image, data, fit)
    if reason:
        return tiff_contents(data, reason=reason)
    return picture_contents(image, data)


def needs_tifffile(image: ImageFile, data: bytes, fit: Fit) -> str:
    """Return what an opened TIFF holds that Pillow leaves out or reads wrongly, or ""."""
    if image.format != "TIFF":
        return ""
    if has_further_channels(image) and fit.channels not in (1, 3):
        return "a TIFF with channels beside its colours (--channels 3 leaves them out)"
    is_swapped = data.startswith(b"M") and image.info.get("compression") != "raw"
    if is_swapped and stored_type(image, data) in WIDE_TYPES:
        return "a big-endian TIFF of compressed values, whose bytes Pillow exchanges"
    if not is_deep(image, data):
        return ""
    is_planar = tiff_tags(image).get(Tag.PlanarConfiguration) == PLANAR
    if is_planar or not UPPER_BYTES.search(raw_mode(image)) or image.mode != "RGB":
        return f"a TIFF of {raw_mode(image)} values, of which Pillow keeps 8 bits"
    return ""


def stack_contents(data: bytes, fit: Fit) -> Contents:
    """Open a TIFF whose pages are channels. Raises OtherKind if their axes are not those of `fit`.

    A single gray page is not repeated in three channels: it may be a stack without its other pages.
    """
    contents = tiff_contents(data, pages=True)
    header = contents.header()
    if header.channels == 1 and fit.channels > 1:
        raise OtherKind(f"1 channel, not {fit.channels:,}")
    if fit.axes is not None and are_other_axes(header.axes, fit.axes):
        expected = f", not {fit.axes}" if fit.axes else ", and those of others are not stated"
        raise OtherKind(f"the axes of its pages are {header.axes}{expected}")
    return contents


def tiff_contents(data: bytes, pages: bool = False, reason: str = "") -> Contents:
    """Open a TIFF by tifffile."""
    tiff = open_tiff(data, pages, reason)
    channels = channel_count(tiff.channels, tiff.alpha, tiff.dtype)
    header = make_header(tiff.width, tiff.height, channels, tiff.dtype, tiff.orientation)
    header = header._replace(axes=tiff.pages.axes)

    def read(changes: Changes) -> Samples:
        changes.note_nodata(tiff.tags)
        if tiff.tags.get(Tag.PhotometricInterpretation) == WHITE_IS_ZERO:
            changes.kinds |= Change.INVERTED
        if tiff.pages.is_lost:
            changes.kinds |= Change.ORDER_LOST
        return tiff.read()

    return Contents(header.dtype, lambda: header, read)


def is_npy(data: bytes | Image.Image) -> bool:
    """Whether a file is one of NumPy's."""
    return isinstance(data, bytes) and data.startswith(NPY_START)


@raises_bad_image
def load_array(data: bytes) -> np.ndarray:
    """Return the array of a file of NumPy, which must hold no more than that. Raises BadImage."""
    file = io.BytesIO(data)
    values = np.asarray(np.load(file, allow_pickle=False))
    rest = len(data) - file.tell()
    if rest:
        raise BadImage(f"{counted(rest, 'byte')} after its array: save each array as its own file")
    return values


def array_contents(data: bytes) -> Contents:
    """Open a file of NumPy. Raises BadImage unless it holds (H, W) or (H, W, C) numbers."""
    values = load_array(data)
    shape = values.shape
    what = f"an array of {values.dtype} of shape {shape}"
    if values.dtype.kind not in "biuf":
        raise BadImage(f"{what}: only integers, floats and truth values are read")
    if values.ndim not in (2, 3) or 0 in shape:
        raise BadImage(f"{what}: expected (H, W) or (H, W, C), none of them 0")
    if values.ndim == 2:
        values = values[..., None]
    elif shape[0] < min(shape[1:]) and shape[2] > MOST_NPY_CHANNELS:
        raise BadImage(f"{what}, which looks like (C, H, W): transpose it to (H, W, C)")
    height, width, channels = values.shape
    samples = Samples(values, colours=3 if channels == 3 else 1)
    header = make_header(width, height, channels, values.dtype)
    return Contents(header.dtype, lambda: header, lambda changes: samples)


def make_header(
    width: int, height: int, channels: int, dtype: np.dtype, orientation: int = 1
) -> Header:
    """Return the header of an image that is stored in this size, type and orientation."""
    if orientation in SIDEWAYS:
        width, height = height, width
    name = dtype.newbyteorder("=").name
    return Header(width, height, channels, WIDENED.get(name, name))


def picture_contents(image: Any, data: bytes) -> Contents:
    """Return what an opened image of Pillow holds. Raises BadImage."""
    dtype = stored_type(image, data)
    contents = Contents(
        dtype=dtype,
        header=lambda: Header(*upright_size(image), picture_channels(image), dtype),
        read=None,
        image=image,
    )
    if dtype == "uint8":
        return contents
    read = read_gray
    if image.format == "AVIF":
        read = refuse_avif
    elif image.format == "PPM" and image.mode != "F":
        read = read_netpbm
    elif image.mode in ("RGB", "RGBA"):
        read = read_colours
    return contents._replace(read=partial(read, image, data))


def upright_size(image: Any) -> tuple[int, int]:
    """Return width and height of an image of Pillow. This may decode a PNG with metadata."""
    tags = tiff_tags(image)
    width, height = image.size
    if tags:  # Pillow turns a TIFF when it opens or loads it
        width = tags[Tag.ImageWidth]
        height = tags[Tag.ImageLength]
        orientation = tags.get(Tag.Orientation, 1)
    else:
        orientation = orientation_of(image, Changes())
    return (height, width) if orientation in SIDEWAYS else (width, height)


def picture_channels(image: Any) -> int:
    """Return the number of channels of an image of Pillow. This may decode a palette."""
    return 3 if has_colour(image) else 1


def stored_type(image: Image.Image, data: bytes) -> str:
    """Return the type of the values of an opened image of Pillow, as stored in its file."""
    if image.mode == "F":
        return "float32"
    if not image.mode.startswith("I"):
        return "uint16" if data and is_deep(image, data) else "uint8"
    tags = tiff_tags(image)
    is_signed = max(tags.get(Tag.SampleFormat, (1,))) == SIGNED
    if tags and max(tags.get(Tag.BitsPerSample, (1,))) > 16:
        return "int32" if is_signed else "uint32"
    if tags:
        return "int16" if is_signed else "uint16"
    if image.mode == "I" and image.format not in ("PNG", "PPM", "JPEG2000"):
        return "int32"  # of an image that a program made
    return "uint16"


def refuse_avif(image: Any, data: bytes, changes: Changes) -> Samples:
    """Raise BadImage."""
    raise BadImage("an AVIF of more than 8 bits, of which Pillow keeps 8: convert it to PNG")


def read_gray(image: Any, data: bytes, changes: Changes) -> Samples:
    """Read gray values of more than 8 bits that Pillow keeps."""
    dtype = stored_type(image, data)
    tags = tiff_tags(image)
    orientation = tags.get(Tag.Orientation, 1)
    inspect(image, data, changes)
    values = read_strips(image, data, dtype)
    if values is None:
        values, orientation = load_gray(image, data, dtype, changes)
    if has_white_at_zero(image):
        changes.kinds |= Change.INVERTED
        values = invert(values, max(tags.get(Tag.BitsPerSample, (16,))))
    transparent = image.info.get("transparency")
    return Samples(
        values=values,
        colours=1,
        orientation=orientation if orientation in ORIENTATIONS else 1,
        transparent=(transparent,) if isinstance(transparent, int) else None,
    )


def load_gray(image: Any, data: bytes, dtype: str, changes: Changes) -> tuple[np.ndarray, int]:
    """Return gray values (H, W, 1) as Pillow decodes them, and the orientation that they have."""
    shift = unused_bits(image, data)
    is_tiff = image.format == "TIFF"
    if data:
        image, _ = load_whole(image, data)
    values = np.asarray(image)
    if dtype == "uint32":
        values = values.view(np.uint32)
    values = values.astype(dtype)
    if shift:
        values >>= shift
    if is_tiff:
        return values[..., None], 1  # Pillow has turned it
    return values[..., None], orientation_of(image, changes)


def read_strips(image: Any, data: bytes, dtype: str) -> np.ndarray | None:
    """Return the values (H, W, C) of a TIFF whose strips hold them in order, plain or deflated.

    It is None for others. The result is a view of `data` if they are plain. Raises zlib.error.
    """
    tags = tiff_tags(image)
    offsets = tags.get(Tag.StripOffsets)
    if not offsets:
        return None
    sizes = tags.get(Tag.StripByteCounts, ())
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    shape = tags[Tag.ImageLength], tags[Tag.ImageWidth], tags.get(Tag.SamplesPerPixel, 1)
    stored = np.dtype(dtype).newbyteorder("<" if data.startswith(b"I") else ">")
    size = math.prod(shape) * stored.itemsize
    predictor = tags.get(Tag.Predictor, NO_PREDICTOR)
    has_differences = predictor == HORIZONTAL and stored.kind in "iu"
    if is_deflated(tags) and (has_differences or predictor == NO_PREDICTOR):
        strips = [zlib.decompress(data[at:end]) for at, end in zip(offsets, ends, strict=True)]
        content = b"".join(strips)
        if len(content) != size:
            return None
        values = np.frombuffer(content, stored).reshape(shape)
        if has_differences:  # sums wrap around
            values = np.add.accumulate(values, axis=1, dtype=dtype)
        return values
    has_all = ends[-1] - offsets[0] == size and ends[-1] <= len(data)
    is_plain = tags.get(Tag.Compression, 1) == 1 and tags.get(Tag.FillOrder) != REVERSED
    if not is_plain or not has_all or [*offsets[1:]] != ends[:-1]:
        return None
    return np.frombuffer(data, stored, math.prod(shape), offsets[0]).reshape(shape)


def unused_bits(image: Image.Image, data: bytes) -> int:
    """Return by how many bits Pillow shifts the values of a gray JPEG 2000 up.

    Raises BadImage if they are signed.
    """
    if image.format != "JPEG2000":
        return 0
    size = data.find(b"\xff\x4f\xff\x51")  # ITU-T T.800, A.5.1: SOC, SIZ
    depth = data[size + 42]
    if depth & 128:
        raise BadImage("a JPEG 2000 of signed values, which Pillow shifts: convert it to TIFF")
    return 15 - (depth & 127)


def read_colours(image: Any, data: bytes, changes: Changes) -> Samples:
    """Read colours of 16 bits in a PNG or a chunky TIFF, or gray values with alpha of a PNG."""
    raw = raw_mode(image)
    transparent = image.info.get(DEEP_TRANSPARENCY)
    inspect(image, data, changes)
    values = read_strips(image, data, "uint16")
    if values is not None:
        orientation = tiff_tags(image).get(Tag.Orientation, 1)
        return Samples(
            values=values,
            colours=3,
            orientation=orientation if orientation in ORIENTATIONS else 1,
        )
    is_tiff = image.format == "TIFF"
    other = open_image(data)
    alpha = ALPHA if image.mode == "RGBA" else 0
    if raw == GRAY_ALPHA_16:  # four bytes a pixel
        replace_raw_mode(other, "RGBA")
        loaded, _ = load_whole(other, data)
        values = np.asarray(loaded).view(">u2")
    else:
        replace_raw_mode(other, raw[:-1] + OPPOSITE[raw[-1]])
        upper, _ = load_whole(image, data)
        other.load()
        values = np.asarray(upper).astype(np.uint16) << 8 | np.asarray(other)
        loaded = upper
    return Samples(
        values=values,
        colours=1 if raw == GRAY_ALPHA_16 else 3,
        alpha=alpha,
        orientation=1 if is_tiff else orientation_of(loaded, changes),
        transparent=transparent,
    )


def replace_raw_mode(image: Any, raw: str) -> None:
    """Let Pillow's decoder of an opened image take its pixels as `raw`."""
    make_tile = type(image.tile[0])  # of Pillow 10, a tuple
    for number, (codec, extents, offset, arguments) in enumerate(image.tile):
        changed = (raw, *arguments[1:]) if isinstance(arguments, tuple) else raw
        place = (codec, extents, offset, changed)
        image.tile[number] = place if make_tile is tuple else make_tile(*place)


def read_netpbm(image: Any, data: bytes, changes: Changes) -> Samples:
    """Read a PPM or PGM of more than 8 bits, whose values Pillow scales. Raises BadImage."""
    codec, _, offset, *_ = image.tile[0]
    width, height = image.size
    channels = 3 if image.mode == "RGB" else 1
    count = width * height * channels
    if codec == "ppm_plain":
        text = re.sub(rb"#[^\n\r]*", b"", data[offset:])
        values = np.array([int(word) for word in text.split()[:count]], np.int64)
    else:
        size = min(count, (len(data) - offset) // 2)
        values = np.frombuffer(data, ">u2", size, offset)
    if len(values) < count:
        raise BadImage(f"cut short: {len(values):,} of {count:,} values")
    values = values.reshape(height, width, channels)
    return Samples(values.astype(np.uint16), colours=channels)
