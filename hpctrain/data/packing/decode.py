"""What worker processes of ``pack`` do: read images, decode them, and write parts of a file.

Every function is given a few images of the source, or a few rows, and opens files by their paths.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from hpctrain.data.checks import read_exactly
from hpctrain.data.images import (
    FILE_LIMIT,
    BadImage,
    Fit,
    WrongSize,
    as_jpeg,
    decode,
    fit_pixels,
    probe,
)
from hpctrain.data.packing.layout import DIGEST_BYTES, ImageSource, decoded_dtype
from hpctrain.data.packing.scratch import UNZIP_ERRORS, ZIP_ERRORS
from hpctrain.errors import RunError
from hpctrain.files import open_itself, open_regular, write_at
from hpctrain.watchdog import doing

PAGE = 4096  # bytes
TAIL = 4096  # bytes at the end of a file that tell it from others
READ_ERRORS = (OSError, ValueError, *ZIP_ERRORS, *UNZIP_ERRORS)
ENCRYPTED, LOCAL_HEADER = 0x1, 30  # of a .zip (APPNOTE.TXT 4.4.4, 4.3.7): a flag, and bytes
BadFiles = list[tuple[str, str]]  # name, and why

current_image: list[memoryview] = []  # where this worker process shows what it decodes, if anywhere


class Span(NamedTuple):
    """Rows `start` to `stop` of a split's dataset, whole blocks, from byte `offset` of a file on.

    Only whole pages of the file are written, others are given back: two writers on two hosts must
    never write the same page, because file systems of networks keep whole pages on each host, and
    the one that is written back last would undo the other.
    """

    path: str
    split: str
    start: int
    stop: int
    offset: int
    block_bytes: int
    channels: int  # of pixels; 0 = no sums are wanted

    def of(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """What `rows` have for the rows of this span."""
        return rows[self.split][self.start : self.stop]


class Written(NamedTuple):
    """What became of the bytes of a span."""

    span: Span
    checksums: list[int]  # CRC-32 of every block
    sums: np.ndarray  # (2, C) uint64: of the values of each channel, and of their squares
    rest: list[tuple[int, bytes]]  # bytes not written, with their offsets in the file


def read_headers(source: ImageSource) -> np.ndarray:
    """Width, height, and whether it has colour, of every image: (N, 3) int64, 0 of those that are
    no images."""
    found = np.zeros((len(source.images), 3), np.int64)
    with ImageReader(source) as reader:
        for row in range(len(found)):
            with suppress(BadImage):
                found[row] = probe(reader.read(row))
    return found


def read_fingerprints(source: ImageSource) -> np.ndarray:
    """Numbers (N,), equal for equal files and for hardly any others: size and end of each."""
    if source.kind == "zip":
        return source.images["size"] << 32 | source.images["crc32"]
    found = np.full(len(source.images), -1, np.int64)
    with ImageReader(source) as reader:
        for row in range(len(found)):
            with suppress(OSError, ValueError), ExitStack() as stack:
                descriptor, offset, size = reader.locate(row, stack)
                tail = os.pread(descriptor, min(size, TAIL), offset + max(0, size - TAIL))
                found[row] = size << 32 | zlib.crc32(tail)
    return found


def decode_rows(source: ImageSource, fit: Fit, span: Span) -> tuple[np.ndarray, BadFiles, Written]:
    """Decode images and write their pixels one after the other, zeros for bad ones. OSError."""
    row_bytes = fit.width * fit.height * fit.channels
    pixels = memoryview(bytearray(row_bytes * len(source.images)))

    def decode_one(data: bytes, row: int, found: np.void) -> bytes:
        made = fit_pixels(data, source.shape, fit) if source.shape else decode(data, fit)
        pixels[row * row_bytes : (row + 1) * row_bytes] = made
        return made

    return *_decode_each(source, fit, decode_one), write_span(pixels, span)


def decode_files(source: ImageSource, fit: Fit) -> tuple[np.ndarray, BadFiles]:
    """Decode the JPEG files that images become, as they will be decoded in training."""

    def decode_one(given: bytes, row: int, found: np.void) -> bytes:
        data = as_jpeg(given)
        pixels = decode(data, fit)
        found["size"], found["crc32"], found["kept"] = len(data), zlib.crc32(data), data is given
        found["sums"] = channel_sums(pixels, fit.channels)
        return pixels

    return _decode_each(source, fit, decode_one)


def _decode_each(
    source: ImageSource, fit: Fit, decode_one: Callable[[bytes, int, np.void], bytes]
) -> tuple[np.ndarray, BadFiles]:
    """What became of the images (n,), whose pixels `decode_one` makes of their bytes."""
    decoded = np.zeros(len(source.images), decoded_dtype(fit.channels))
    bad: BadFiles = []
    with ImageReader(source) as reader:
        for row in range(len(decoded)):
            try:
                pixels = decode_one(reader.read(row), row, decoded[row])
                decoded["good"][row] = True
                decoded["digest"][row] = hashlib.blake2b(pixels, digest_size=DIGEST_BYTES).digest()
            except WrongSize as error:
                bad.append((source.name_of(row), f"{error} pixels, not as its header says"))
            except BadImage as error:
                bad.append((source.name_of(row), str(error)))
    return decoded, bad


def write_files(source: ImageSource, known: np.ndarray, skip: int, span: Span) -> Written:
    """Write the JPEG files of images one after the other, after `skip` bytes of the first one.
    RunError where a file is not the one that was decoded. OSError."""
    data = bytearray()
    with ImageReader(source) as reader:
        for row in range(len(source.images)):
            try:
                given = reader.read(row)
                file = given if known["kept"][row] else as_jpeg(given)
            except BadImage:
                file = b""
            if (len(file), zlib.crc32(file)) != (known["size"][row], known["crc32"][row]):
                name = source.name_of(row)
                raise RunError(f"{name} was changed while it was packed: pack again")
            data += file
    return write_span(memoryview(data)[skip : skip + span.stop - span.start], span)


def copy_rows(path: str, offsets: np.ndarray, row_bytes: int, span: Span) -> Written:
    """Write rows of another file, which begin at `offsets` (n,), one after the other. OSError."""
    data = memoryview(bytearray(row_bytes * len(offsets)))
    with ExitStack() as stack:
        descriptor = _open(stack, path)
        for number, offset in enumerate(offsets.tolist()):
            row = data[number * row_bytes : (number + 1) * row_bytes]
            read_exactly(path, descriptor, [row], offset)
    return write_span(data, span)


def write_span(data: memoryview, span: Span) -> Written:
    """Write the whole pages of a span that is to hold `data`. OSError."""
    start, stop = span.offset, span.offset + len(data)
    low = min(-(-start // PAGE) * PAGE, stop)
    high = max(stop // PAGE * PAGE, low)
    descriptor = open_itself(span.path, os.O_WRONLY)
    try:
        write_at(descriptor, data[low - start : high - start], low)
    finally:
        os.close(descriptor)
    ends = ((start, low), (high, stop))
    return sum_up(data, span, [(at, bytes(data[at - start : end - start])) for at, end in ends])


def sum_up(data: memoryview, span: Span, rest: list[tuple[int, bytes]]) -> Written:
    """Checksums and sums of the bytes of a span, of which `rest` are not written yet."""
    step = span.block_bytes
    checksums = [zlib.crc32(data[at : at + step]) for at in range(0, len(data), step)]
    return Written(span, checksums, channel_sums(data, span.channels), rest)


def channel_sums(pixels: bytes | memoryview, channels: int) -> np.ndarray:
    """(2, C) uint64: the sum of the values of each channel, and of their squares; exact."""
    counts: Any
    if mode := {1: "L", 3: "RGB"}.get(channels):  # the fastest
        counts = Image.frombytes(mode, (len(pixels) // channels, 1), pixels).histogram()
    else:
        planes = np.frombuffer(pixels, np.uint8).reshape(-1, max(1, channels)).T
        counts = [np.bincount(plane, minlength=256) for plane in planes[:channels]]
    by_channel = np.array(counts, np.uint64).reshape(channels, 256)
    values = np.arange(256, dtype=np.uint64)
    return np.stack([by_channel @ values, by_channel @ values**2])


class ImageReader:
    """Reads the bytes of the images of a source."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        columns = ("file", "offset", "size", "method", "flags", "compressed", "crc32")
        self._places = source.images[list(columns)].tolist()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        paths = [self._source.root] if self._source.kind == "zip" else self._source.files
        self._files = [_open(self._stack, path) for path in paths]
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def locate(self, row: int, stack: ExitStack) -> tuple[int, int, int]:
        """The open file in which an image is, to be closed with `stack`, and where. OSError."""
        file, offset, size = self._places[row][:3]
        if self._source.kind != "folder":
            return self._files[file], offset, size
        path = os.path.join(self._source.root, self._source.name_of(row))
        descriptor = _open(stack, path)
        return descriptor, 0, os.fstat(descriptor).st_size

    def read(self, row: int) -> bytes:
        """All bytes of an image file, or raw pixels. Raises BadImage."""
        show_image(self._source.name_of(row))
        try:
            with ExitStack() as stack:
                descriptor, offset, size = self.locate(row, stack)
                if size > FILE_LIMIT:
                    raise BadImage(f"{size:,} bytes; the limit is {FILE_LIMIT:,}")
                if self._source.kind == "zip":
                    return read_member(descriptor, offset, size, self._places[row][3:])
                data = os.pread(descriptor, size, offset)
        except READ_ERRORS as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise BadImage(reason or type(error).__name__) from None
        if len(data) != size:
            raise BadImage("the source was cut short")
        return data


def read_member(descriptor: int, offset: int, size: int, facts: Sequence[int]) -> bytes:
    """A member of a .zip, whose local header begins at `offset`; never more bytes than it is
    listed with. The directory of the archive, which may be long, is not read again. BadImage.
    """
    info = zipfile.ZipInfo()
    info.file_size = size
    info.compress_type, info.flag_bits, info.compress_size, info.CRC = facts
    if info.flag_bits & ENCRYPTED:
        raise BadImage("it is encrypted")
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(offset)
        header = file.read(LOCAL_HEADER)
        if header[:4] != b"PK\3\4":
            raise BadImage("it is not where the archive says")
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        file.seek(name + extra, os.SEEK_CUR)
        with zipfile.ZipExtFile(file, "r", info) as stream:
            return stream.read(size)


def show_image(name: str) -> None:
    """Leave word of the image that comes now, for whoever finds this process hung or dead."""
    doing(f"reading {name}")
    for place in current_image:
        text = name.encode("utf-8", "surrogateescape")[: len(place) - 1]
        place[: len(text) + 1] = text + b"\0"


def _open(stack: ExitStack, path: str) -> int:
    descriptor = open_regular(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor
