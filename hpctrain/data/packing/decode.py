"""The tasks of ``pack``, run by its workers: read images, decode them, and write parts of a file.

Every function processes a few images of the source, or a few rows, and opens files by their paths.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Self

import numpy as np
from PIL import Image

from hpctrain.data.checks import read_exactly
from hpctrain.data.images import (
    BadImage,
    Fit,
    WrongSize,
    as_jpeg,
    decode,
    probe,
)
from hpctrain.data.packing.layout import DECODED, DIGEST_BYTES, LISTED, ImageSource, jpeg_dtype
from hpctrain.errors import RunError
from hpctrain.files import write_at

TAIL = 4096  # bytes at the end of a file, for its fingerprint
LOCAL_HEADER = 30  # bytes, of a member of a .zip (APPNOTE.TXT 4.3.7)
BadFiles = list[tuple[str, str]]  # name, reason


class Span(NamedTuple):
    """Rows `start` to `stop` of a split's dataset, whole blocks, at byte `offset` of a file."""

    path: str
    split: str
    start: int
    stop: int
    offset: int
    block_bytes: int
    channels: int  # of the pixels; 0 = compute no sums

    def of(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Return the part of `rows`, arrays by split, that belongs to this span."""
        return rows[self.split][self.start : self.stop]


class Written(NamedTuple):
    """The result of writing a span."""

    span: Span
    checksums: list[int]  # CRC-32 of every block
    sums: np.ndarray  # (2, C) uint64: of the values of each channel and of their squares


def read_headers(source: ImageSource) -> np.ndarray:
    """Read (width, height, has colour) of every image: (N, 3) int64, zeros for unreadable ones."""
    found = np.zeros((len(source.images), 3), np.int64)
    with ImageReader(source) as reader:
        for row in range(len(found)):
            with suppress(BadImage):
                found[row] = probe(reader.read(row))
    return found


def read_fingerprints(source: ImageSource) -> np.ndarray:
    """Return a number (N,) per file: equal files have equal numbers, others hardly ever.

    It combines size and CRC-32: of the last bytes, or of all for a .zip. -1 = unreadable.
    """
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
    """Decode images and write their pixels consecutively, zeros for bad images. Raises OSError."""
    row_bytes = fit.width * fit.height * fit.channels
    pixels = memoryview(bytearray(row_bytes * len(source.images)))

    def decode_one(data: bytes, row: int, found: np.void) -> bytes:
        made = decode(data, fit)
        pixels[row * row_bytes : (row + 1) * row_bytes] = made
        return made

    decoded = np.zeros(len(source.images), DECODED)
    return *_decode_each(source, decoded, decode_one), write_span(pixels, span)


def decode_files(source: ImageSource, fit: Fit) -> tuple[np.ndarray, BadFiles]:
    """Convert images to JPEG files and decode these as training will, to check and measure them."""

    def decode_one(given: bytes, row: int, found: np.void) -> bytes:
        data = as_jpeg(given)
        pixels = decode(data, fit)
        found["size"], found["crc32"], found["kept"] = len(data), zlib.crc32(data), data is given
        found["sums"] = channel_sums(pixels, fit.channels)
        return pixels

    decoded = np.zeros(len(source.images), jpeg_dtype(fit.channels))
    return _decode_each(source, decoded, decode_one)


def _decode_each(
    source: ImageSource, decoded: np.ndarray, decode_one: Callable[[bytes, int, np.void], bytes]
) -> tuple[np.ndarray, BadFiles]:
    """Call `decode_one` for every image; return `decoded` (n,), filled, and the bad files."""
    bad: BadFiles = []
    with ImageReader(source) as reader:
        for row in range(len(decoded)):
            try:
                pixels = decode_one(reader.read(row), row, decoded[row])
                decoded["good"][row] = True
                decoded["digest"][row] = hashlib.blake2b(pixels, digest_size=DIGEST_BYTES).digest()
            except WrongSize as error:
                bad.append((source.names[row], f"{error} pixels, not as its header says"))
            except BadImage as error:
                bad.append((source.names[row], str(error)))
    return decoded, bad


def write_files(source: ImageSource, known: np.ndarray, skip: int, span: Span) -> Written:
    """Write the JPEG files of images consecutively, without the first `skip` bytes.

    Raises RunError if a file changed since it was decoded, and OSError.
    """
    data = bytearray()
    with ImageReader(source) as reader:
        for row in range(len(source.images)):
            try:
                given = reader.read(row)
                file = given if known["kept"][row] else as_jpeg(given)
            except BadImage:
                file = b""
            if (len(file), zlib.crc32(file)) != (known["size"][row], known["crc32"][row]):
                name = source.names[row]
                raise RunError(f"{name} was changed while it was packed: pack again")
            data += file
    return write_span(memoryview(data)[skip : skip + span.stop - span.start], span)


def copy_rows(path: str, offsets: np.ndarray, row_bytes: int, span: Span) -> Written:
    """Write the rows at `offsets` (n,) of another file consecutively. Raises OSError."""
    data = memoryview(bytearray(row_bytes * len(offsets)))
    with ExitStack() as stack:
        descriptor = _open(stack, path)
        for number, offset in enumerate(offsets.tolist()):
            row = data[number * row_bytes : (number + 1) * row_bytes]
            read_exactly(path, descriptor, [row], offset)
    return write_span(data, span)


def write_span(data: memoryview, span: Span) -> Written:
    """Write `data`, the content of a span; compute its checksums and sums. Raises OSError."""
    descriptor = os.open(span.path, os.O_WRONLY)
    try:
        write_at(descriptor, data, span.offset)
    finally:
        os.close(descriptor)
    step = span.block_bytes
    checksums = [zlib.crc32(data[at : at + step]) for at in range(0, len(data), step)]
    return Written(span, checksums, channel_sums(data, span.channels))


def channel_sums(pixels: bytes | memoryview, channels: int) -> np.ndarray:
    """Return the exact sums of each channel's values and of their squares, (2, C) uint64."""
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
        names = source.images.dtype.names or ()
        self._places = source.images[list(names[len(LISTED) :])].tolist()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._source.kind != "folder":
            self._archive = _open(self._stack, self._source.root)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def locate(self, row: int, stack: ExitStack) -> tuple[int, int, int]:
        """Return the descriptor of the file of an image, its offset and size. Raises OSError.

        A file opened for this image alone is closed by `stack`.
        """
        if self._source.kind != "folder":
            offset, size = self._places[row][:2]
            return self._archive, offset, size
        path = os.path.join(self._source.root, self._source.names[row])
        descriptor = _open(stack, path)
        return descriptor, 0, os.fstat(descriptor).st_size

    def read(self, row: int) -> bytes:
        """Read all bytes of an image file. Raises BadImage."""
        try:
            with ExitStack() as stack:
                descriptor, offset, size = self.locate(row, stack)
                if self._source.kind == "zip":
                    return read_member(descriptor, *self._places[row])
                data = os.pread(descriptor, size, offset)
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise BadImage(reason or type(error).__name__) from None
        if len(data) != size:
            raise BadImage("the source was cut short")
        return data


def read_member(
    descriptor: int, offset: int, size: int, method: int, compressed: int, crc32: int
) -> bytes:
    """Read a stored or deflated member of a .zip, whose local header is at `offset`.

    Raises BadImage if it is not what the directory of the archive says, and OSError.
    """
    header = os.pread(descriptor, LOCAL_HEADER, offset)
    if header[:4] != b"PK\3\4":
        raise BadImage("it is not where the archive says")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    data = os.pread(descriptor, compressed, offset + LOCAL_HEADER + name + extra)
    if method == zipfile.ZIP_DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
        except zlib.error as error:
            raise BadImage(f"the archive is damaged: {error}") from None
    if (len(data), zlib.crc32(data)) != (size, crc32):
        raise BadImage("the archive is damaged: size or CRC-32 differs")
    return data


def _open(stack: ExitStack, path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor
