"""Values of a decoded image, of any type and number of channels, in the size of a `Fit`.

They are handled as pictures of 8 bits are (``images.py``), without rounding to 8 bits:

1. Pixels of a transparent value, or of an alpha channel, are blended over white or black.
2. Resize each channel by itself with a bilinear filter that is widened when shrinking, in float32
   (bytes as Pillow resizes those of pictures), and round integers to the nearest. Images of the
   requested size keep their bits.
3. Apply the orientation.
4. Convert to the requested channels: gray -> three by repetition, colour -> gray by ITU-R 601 luma.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image

from hpctrain.data.formats import Box
from hpctrain.data.images import (
    SIDEWAYS,
    BadImage,
    Change,
    Changes,
    Fit,
    OtherKind,
    centred_box,
    compare_size,
)
from hpctrain.data.pack import TYPES, WIDENED
from hpctrain.text import counted

ASSOCIATED = 1  # ExtraSamples: colours are multiplied by alpha
ALPHA = (ASSOCIATED, 2)
PICTURE_TYPES = ("uint8", "uint16")  # in which white and an opaque alpha are the largest value
LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601
FLOAT32_BITS = 24  # of its numbers


class Samples(NamedTuple):
    """The values of an image as they are stored: (H, W, C), with an alpha channel as the last."""

    values: np.ndarray
    colours: int  # how many of the channels are gray, 1, or colour, 3
    alpha: int = 0  # ExtraSamples of an alpha channel, or 0
    orientation: int = 1
    transparent: tuple[int, ...] | None = None  # the value of transparent pixels, by channel


def channel_count(samples: int, alpha: int, dtype: np.dtype) -> int:
    """Return the number of channels without the alpha channel of a picture."""
    if alpha and dtype.name in PICTURE_TYPES:
        return samples - 1
    return samples


def fit_samples(samples: Samples, fit: Fit, changes: Changes) -> np.ndarray:
    """Return values (H, W, C) of one of the types of packs. Raises BadImage.

    `fit` may have 0 for the size or the channels: then they are those of the image.
    """
    values = keep_type(samples.values)
    orientation = samples.orientation
    height, width = values.shape[:2]
    if not height or not width:
        raise BadImage("it has no pixels")
    if orientation in SIDEWAYS:
        height, width = width, height
    fit = fit.of_size(width, height)
    compare_size(width, height, fit, changes)
    values = blend(samples._replace(values=values), fit, changes)
    values = choose_channels(values, samples.colours, fit, changes)
    size = (fit.height, fit.width) if orientation in SIDEWAYS else (fit.width, fit.height)
    if size != (values.shape[1], values.shape[0]):
        values = resize(values, size, fit.crop)
    if orientation != 1:
        changes.kinds |= Change.ORIENTATION
    return np.ascontiguousarray(turn(values, orientation))


def keep_type(values: np.ndarray) -> np.ndarray:
    """Return values in native byte order, widened if that loses nothing.

    Raises BadImage, with the range of the values, for types that cannot be kept.
    """
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    name = values.dtype.name
    if name in WIDENED:
        return values.astype(WIDENED[name])
    if name in TYPES:
        return values
    if values.dtype.kind not in "iuf" or not values.size:
        raise BadImage(f"values of type {name}: only integers and floats of up to 64 bits are read")
    low = values.min()
    high = values.max()
    text = f"{name} values from {low:,} to {high:,}"
    if values.dtype.kind == "f":
        advice = f"convert it to float32, which keeps {FLOAT32_BITS} bits of each"
    else:
        advice = "divide them, or convert it to float32"
        for kind in ("uint8", "uint16", "int16"):
            limits = np.iinfo(kind)
            if limits.min <= low and high <= limits.max:
                advice = f"convert it to {kind}, which holds them"
                break
    raise BadImage(f"{text}: {advice}")


def blend(samples: Samples, fit: Fit, changes: Changes) -> np.ndarray:
    """Return the values without the alpha channel, transparent pixels blended over the background.

    An alpha channel that is 0 everywhere is ignored. Of types other than PICTURE_TYPES, in which no
    value stands for white, it is a channel like the others.
    """
    values = samples.values
    if values.dtype.name not in PICTURE_TYPES:
        return values
    opaque = int(np.iinfo(values.dtype).max)
    if samples.transparent is not None:
        is_clear = (values == np.array(samples.transparent)).all(axis=2)
        if is_clear.all():
            changes.kinds |= Change.EMPTY_ALPHA
        elif is_clear.any():
            changes.kinds |= Change.TRANSPARENCY
            ground = values.dtype.type(fit.ground(opaque))
            values = np.where(is_clear[..., None], ground, values)
    if samples.alpha not in ALPHA:
        return values
    alpha = values[..., -1:]
    values = values[..., :-1]
    if alpha.min() == opaque:
        return values
    if not alpha.any():
        changes.kinds |= Change.EMPTY_ALPHA
        return values
    changes.kinds |= Change.TRANSPARENCY
    opacity = alpha.astype(np.int64)
    light = values.astype(np.int64)
    if samples.alpha == ASSOCIATED:
        light *= opaque
    else:
        light *= opacity
    ground = fit.ground(opaque)
    blended = (light + ground * (opaque - opacity) + opaque // 2) // opaque
    return blended.clip(0, opaque).astype(values.dtype)


def choose_channels(values: np.ndarray, colours: int, fit: Fit, changes: Changes) -> np.ndarray:
    """Return the values in the channels of `fit`. Raises OtherKind if they cannot become these.

    Channels beside three colours are left out if three or one are requested.
    """
    count = values.shape[2]
    if fit.channels in (0, count):
        return values
    if count == 1 and fit.channels == 3:
        changes.kinds |= Change.GRAY_TO_COLOUR
        return values.repeat(3, axis=2)
    if colours == 3 and fit.channels in (1, 3):
        if count > 3:
            changes.kinds |= Change.FURTHER_CHANNELS
        values = values[..., :3]
        if fit.channels == 3:
            return values
        changes.kinds |= Change.COLOUR_TO_GRAY
        return round_to(values @ LUMA, values.dtype)[..., None]
    raise OtherKind(f"{counted(count, 'channel')}, not {fit.channels:,}")


def round_to(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return floats as `dtype`, those of integers rounded to the nearest, ties to even."""
    if dtype.kind == "f":
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    highest = np.nextafter(float(limits.max) + 1, 0)  # float64 has not the largest int64
    return np.rint(values).clip(limits.min, highest).astype(dtype)


def resize(values: np.ndarray, size: tuple[int, int], crop: bool) -> np.ndarray:
    """Resize values (H, W, C) to `size`, (W, H), with `crop` their largest centred part of these
    proportions. Raises BadImage for NaN and infinity, which would spread.
    """
    if values.dtype.kind == "f":
        count = int(np.count_nonzero(~np.isfinite(values)))
        if count:
            raise BadImage(f"{count:,} values are NaN or infinite, and resizing would spread them")
    height, width, channels = values.shape
    box: Box = (0, 0, width, height)
    if crop:
        box = centred_box(box, size)
    kind = np.uint8 if values.dtype == np.uint8 else np.float32
    resized = np.empty((size[1], size[0], channels), values.dtype)
    for channel in range(channels):
        plane = Image.fromarray(np.ascontiguousarray(values[..., channel], kind))
        plane = plane.resize(size, Image.Resampling.BILINEAR, box=box)
        resized[..., channel] = round_to(np.asarray(plane), values.dtype)
    return resized


def turn(values: np.ndarray, orientation: int) -> np.ndarray:
    """Return values (H, W, C) in the upright orientation, from one of EXIF and TIFF, 1-8."""
    if orientation in SIDEWAYS:  # mirrored at the diagonal, rows become columns
        values = values.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        values = values[::-1]
    if orientation in (2, 3, 6, 7):
        values = values[:, ::-1]
    return values
