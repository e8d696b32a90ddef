"""Read image files where they are: a file, or a slice of the bytes of an archive.

Only regular files are read: a device or a named pipe would block, or never end.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, TypeVar

from hpctrain.data.images import BadImage

MOST_BYTES = (2 << 30) - 4096  # of an image file: those of one read of Linux

PLAIN = -1  # kinds of slices; others are compression methods of .zip
STORED = 0
DEFLATED = 8
ENCRYPTED = -2
LINK = -3
SPECIAL = -4
UNREADABLE = {
    ENCRYPTED: "it is encrypted",
    LINK: "a link in an archive, which is not followed",
    SPECIAL: "not a regular file",
}

T = TypeVar("T")


class Slice(NamedTuple):
    """Where an image file is: a file, or `size` bytes of an archive from `offset` on.

    There, a member of a .zip (not PLAIN) has its local header, which comes in addition.
    """

    path: str
    kind: int = PLAIN
    offset: int = 0
    size: int = -1  # as it is stored; -1: all bytes
    crc32: int = 0  # stored for a member of a .zip


def open_regular(path: str) -> tuple[int, int]:
    """Open a regular file; return its descriptor and its size. Raises OSError and BadImage.

    A named pipe does not wait for a writer.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device without a driver
            raise BadImage(UNREADABLE[SPECIAL]) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise BadImage(UNREADABLE[SPECIAL])
    return descriptor, status.st_size


def read_files(slices: Iterable[Slice], use: Callable[[bytes], T]) -> Iterator[T | BadImage]:
    """Yield what `use` makes of the bytes of each image file, or why it cannot be read.

    An archive is opened once. `use` may raise BadImage.
    """
    for path, parts in groupby(slices, lambda part: part.path):
        descriptor = -1
        try:
            for part in parts:
                try:
                    if descriptor == -1:
                        descriptor, size = open_regular(path)
                    yield use(_read_slice(descriptor, size, part))
                except BadImage as error:
                    yield error
                except (OSError, ValueError, zlib.error) as error:
                    yield BadImage(getattr(error, "strerror", None) or str(error))
        finally:
            if descriptor != -1:
                os.close(descriptor)


def read_file(path: str) -> bytes:
    """Return the bytes of an image file. Raises BadImage."""
    (data,) = read_files([Slice(path)], bytes)
    if isinstance(data, BadImage):
        raise data
    return data


def _read_slice(descriptor: int, file_size: int, part: Slice) -> bytes:
    """Read an image file. Raises BadImage, OSError and zlib.error."""
    if part.kind in UNREADABLE:
        raise BadImage(UNREADABLE[part.kind])
    if part.kind not in (PLAIN, STORED, DEFLATED):
        raise BadImage(f"compressed by method {part.kind} of .zip: store or deflate it")
    start = part.offset
    if part.kind != PLAIN:  # a local header of 30 bytes, a name and an extra field
        lengths = os.pread(descriptor, 4, start + 26)
        start += 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    size = part.size
    if size == -1:
        size = file_size
    if size > MOST_BYTES:
        raise BadImage("larger than 2 GiB: no image")
    data = os.pread(descriptor, size, start)
    if part.size not in (-1, len(data)):
        raise BadImage("the archive was cut short")
    if part.kind == DEFLATED:
        data = zlib.decompress(data, -zlib.MAX_WBITS)
    if part.kind != PLAIN and zlib.crc32(data) != part.crc32:
        raise BadImage("the archive is damaged: CRC-32 differs")
    if not data:
        raise BadImage("an empty file")
    return data
