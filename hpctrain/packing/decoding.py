"""Decode the images of a pack in worker processes, check their values, and write them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from hpctrain.data.images import (
    BadImage,
    Change,
    Changes,
    Fit,
    OtherKind,
    convert_to_jpeg,
    encode_jpeg,
)
from hpctrain.data.pack import checksum
from hpctrain.data.scale import is_nodata, is_not_finite
from hpctrain.data.slices import Slice, read_files
from hpctrain.data.statistics import BeyondMaximum, ChannelStatistics
from hpctrain.data.values import decode_reduced, decode_stored
from hpctrain.files import write_at
from hpctrain.text import counted

BYTES_TO_16_BITS = 257  # 255 becomes 65,535


class Conversion(NamedTuple):
    """How files become the samples of a pack: what all of these have in common."""

    fit: Fit  # its size is that of an image, or of a tile
    dtype: str  # of stored values
    is_reduced: bool = False  # values of more than 8 bits are reduced to 8
    is_tiled: bool = False
    is_gray: bool = False  # no image is in colour, so none is converted to gray
    nodata: float | None = None
    max_value: float | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (H, W, C) of a sample."""
        return self.fit.height, self.fit.width, self.fit.channels

    @property
    def takes_bytes(self) -> bool:
        """Whether files of 8 bits may be among others: no option is a value of 16 bits."""
        return self.dtype == "uint16" and self.max_value is None and self.nodata is None

    @property
    def of_file(self) -> Fit:
        """How files are decoded: in their own size if they are cut into tiles."""
        if self.is_tiled:
            return self.fit._replace(width=0, height=0, exact=False)
        return self.fit


class EmptyImage(BadImage):
    """An image, or a tile, whose values are all nodata."""


class Decoded:
    """Properties of n samples that were decoded."""

    def __init__(self, count: int, conversion: Conversion) -> None:
        self.crc32 = np.zeros(count, np.uint32)
        self.sizes = np.zeros(count, np.int64)  # bytes
        self.changes = np.zeros(count, np.uint32)  # of Change
        self.statistics = ChannelStatistics(conversion.fit.channels, conversion.nodata)
        self.bad: list[tuple[int, BadImage]] = []  # unreadable ones, with the reason
        self.deepest = 0  # largest value of more than 8 bits, in [0, 65535]
        self.frames = 0  # of files with several
        self.nodata = ""  # as the first file states it
        self.beyond = BeyondMaximum()

    def add(self, rows: slice, changes: Changes) -> None:
        """Add what was changed in the file of these samples."""
        self.changes[rows] = changes.kinds
        self.deepest = max(self.deepest, changes.largest)
        self.frames += changes.frames
        self.nodata = self.nodata or changes.nodata

    def measure(self, values: np.ndarray, conversion: Conversion) -> None:
        """Add the statistics of samples (n, H, W, C)."""
        self.statistics.add(values)
        self.beyond.add(values, conversion.max_value, conversion.nodata)


def decode_images(
    slices: list[Slice],
    seeds: list[int],
    conversion: Conversion,
    path: str = "",
    offset: int = 0,
) -> Decoded:
    """Decode images and write their values consecutively into the file `path`. Raises OSError.

    Without `path`, convert them to JPEG files and decode these as training will, to check them.
    """
    done = Decoded(len(slices), conversion)
    convert_file = decode_values if path else encode_file
    convert = partial(convert_file, conversion=conversion)
    values = np.zeros((len(slices), *conversion.shape), conversion.dtype)
    stored = values.data.cast("B")
    size = len(stored) // len(slices)
    for row, converted in enumerate(read_files(slices, convert)):
        if isinstance(converted, BadImage):
            done.bad.append((row, converted))
            continue
        encoded, image, changes = converted
        values[row] = image
        file = stored[row * size : (row + 1) * size] if path else encoded
        done.crc32[row] = checksum(file, seeds[row])
        done.sizes[row] = len(file)
        done.add(slice(row, row + 1), changes)
    if path:
        with open(path, "r+b", buffering=0) as output:
            write_at(output.fileno(), stored, offset)
    done.measure(values, conversion)
    return done


def decode_tiles(
    slices: list[Slice],
    seeds: list[int],
    corners: list[np.ndarray],
    places: list[np.ndarray],
    conversion: Conversion,
    path: str,
) -> Decoded:
    """Decode files, cut each into tiles and write these into the file `path`. Raises OSError.

    corners: top and left of the tiles of each file, (n, 2); places: where to write them, (n,).
    Reasons in `bad` are by tile: those of a file that cannot be read by its first one.
    """
    counts = [len(of_file) for of_file in corners]
    done = Decoded(sum(counts), conversion)
    convert = partial(decode_values, conversion=conversion)
    height, width, _ = conversion.shape
    row = 0
    with open(path, "r+b", buffering=0) as output:
        for file, converted in enumerate(read_files(slices, convert)):
            if isinstance(converted, BadImage):
                done.bad.append((row, converted))
                row += counts[file]
                continue
            _, image, changes = converted
            done.add(slice(row, row + counts[file]), changes)
            for (top, left), place in zip(
                corners[file].tolist(), places[file].tolist(), strict=True
            ):
                tile = np.ascontiguousarray(image[top : top + height, left : left + width])
                if is_empty(tile, conversion):
                    done.bad.append((row, EmptyImage("all its values are nodata")))
                else:
                    stored = tile.data.cast("B")
                    done.crc32[row] = checksum(stored, seeds[file])
                    write_at(output.fileno(), stored, place)
                    done.measure(tile[None], conversion)
                row += 1
    return done


def decode_values(data: bytes, conversion: Conversion) -> tuple[bytes, np.ndarray, Changes]:
    """Return the values (H, W, C) of an image file, of the type of the pack, and what was changed.

    Raises BadImage, OtherKind for a type that the pack does not have.
    """
    if conversion.is_reduced:
        values, changes = decode_reduced(data, conversion.of_file)
    else:
        values, changes = decode_stored(data, conversion.of_file)
    check_channels(changes, conversion)
    if is_same_nodata(changes.nodata, conversion):
        changes.kinds &= ~Change.NODATA_STATED
    if values.dtype != conversion.dtype:
        if not conversion.takes_bytes or values.dtype != np.uint8:
            raise OtherKind(f"{values.dtype} values, not {conversion.dtype}")
        changes.kinds |= Change.BYTES_TO_16_BITS
        values = values.astype(np.uint16) * BYTES_TO_16_BITS
    check_finite(values, conversion)
    if not conversion.is_tiled and is_empty(values, conversion):
        raise EmptyImage("all its values are nodata")
    return b"", values, changes


def check_channels(changes: Changes, conversion: Conversion) -> None:
    """Raise OtherKind for a picture in colour if all others are gray."""
    if conversion.is_gray and changes.kinds & Change.COLOUR_TO_GRAY:
        raise OtherKind("in colour, and others are gray")


def is_same_nodata(text: str, conversion: Conversion) -> bool:
    """Whether a nodata value, as a file states it, is that of --nodata in the type of the pack."""
    if conversion.nodata is None:
        return False
    try:
        stated = float(text)
    except ValueError:
        return False
    return bool(is_nodata(np.array(conversion.nodata, conversion.dtype), stated))


def encode_file(data: bytes, conversion: Conversion) -> tuple[bytes, np.ndarray, Changes]:
    """Return the JPEG file of an image, the values that it is decoded to, and what was changed.

    Raises BadImage, OtherKind for more than 8 bits that are not to be reduced.
    """
    file, pixels, changes = convert_to_jpeg(data, conversion.fit)
    if changes.kinds & Change.SIXTEEN_BITS and not conversion.is_reduced:
        raise OtherKind("more than 8 bits")
    check_channels(changes, conversion)
    return file, np.frombuffer(pixels, np.uint8).reshape(conversion.shape), changes


def is_empty(values: np.ndarray, conversion: Conversion) -> bool:
    """Whether all values are nodata."""
    return conversion.nodata is not None and bool(is_nodata(values, conversion.nodata).all())


def check_finite(values: np.ndarray, conversion: Conversion) -> None:
    """Raise BadImage if there is NaN, which is not nodata, or infinity."""
    if values.dtype.kind != "f":
        return
    is_bad = is_not_finite(values, conversion.nodata)
    if not is_bad.any():
        return
    row, column, channel = np.argwhere(is_bad)[0].tolist()
    count = int(np.count_nonzero(is_bad))
    text = (
        f"{counted(count, 'value')} {'is' if count == 1 else 'are'} NaN or infinite, the first in"
        f" row {row:,}, column {column:,}, channel {channel}"
    )
    if np.isnan(values[is_bad]).any():
        text += " (--nodata nan leaves NaN out)"
    raise BadImage(text)


def write_files(
    slices: list[Slice],
    seeds: list[int],
    is_encoded: list[bool],
    fit: Fit,
    path: str,
    offset: int,
) -> list[int]:
    """Write images as JPEG files consecutively; return their checksums (n,). Raises OSError.

    is_encoded: which images are encoded anew, (n,); the files of others are copied.
    """
    checksums = [0] * len(slices)
    with open(path, "r+b") as output:
        output.seek(offset)
        for row, file in enumerate(read_files(slices, bytes)):
            if isinstance(file, BadImage):
                continue
            if is_encoded[row]:
                with suppress(BadImage):  # a file that was changed since: its checksum differs
                    file, _ = encode_jpeg(file, fit)
            checksums[row] = checksum(file, seeds[row])
            output.write(file)
    return checksums
