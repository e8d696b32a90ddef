"""Scratch files, and filling them within bounds.

One process has them without a name: such a file is gone when its process ends, however it ends.
Where several processes share them (``shared.py``), they have names, on a shelf.
"""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, cast

from hpctrain.errors import UsageError, brief
from hpctrain.watchdog import doing

BLOCK = 2**20
DIRECTORY_LIMIT = 2**30  # bytes of a .zip's
ENTRY = b"PK\1\2"  # begins each entry of it
SPARE, RATIO = 2**30, 200  # what is compressed may grow to SPARE bytes plus RATIO times its size
MOST_IMAGES = 3_000_000  # of an archive or array: each takes about 1 kB of memory
# A broken directory of files, or a compression that Python does not know.
ZIP_ERRORS = (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError)
UNZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)


class Shelf:
    """Scratch files with names beside the file `output`, for others to open."""

    def __init__(self, output: Path) -> None:
        self._output, self._names = output, list[str]()

    def new_file(self) -> BinaryIO:
        """An empty file, open for writing and reading; its `name` is its path."""
        stem = f".{self._output.name}."
        descriptor, name = tempfile.mkstemp(".tmp", stem, self._output.parent.resolve())
        self._names.append(name)
        return open(name, "w+b", opener=lambda path, flags: descriptor)

    def remove_names(self) -> None:
        """What is open stays usable (on this host); what is not is gone."""
        while self._names:
            with suppress(FileNotFoundError):
                os.unlink(self._names.pop())


Place = Path | Shelf  # a folder for files without a name, or a shelf


def scratch_file(place: Place) -> BinaryIO:
    """An empty file, open for writing and reading."""
    if isinstance(place, Shelf):
        return place.new_file()
    return cast(BinaryIO, tempfile.TemporaryFile(dir=place))


@contextmanager
def unzipped(path: Path, place: Place) -> Iterator[BinaryIO]:
    """The contents of the .gz file `path` as a scratch file. Raises UsageError."""
    with scratch_file(place) as target:
        try:
            with gzip.open(path) as stream:
                while block := stream.read(BLOCK):
                    target.write(block)
                    doing(f"unzipping byte {target.tell():,} of {path}")
                    check_growth(path, target.tell())
        except UNZIP_ERRORS as error:
            raise UsageError(
                f"source {path} is cut short or damaged ({brief(error)}): fetch it again"
            ) from None
        target.flush()
        yield target


def check_growth(path: Path, length: int) -> None:
    """UsageError where `length` bytes are more than the compressed file `path` may grow to."""
    limit = SPARE + RATIO * path.stat().st_size
    if length > limit:
        raise UsageError(
            f"source {path} grows to more than {limit:,} bytes, over {RATIO} times its size:"
            f" {length:,} are refused"
        )


def check_count(what: str, count: int) -> None:
    """UsageError where these are more images, or members of an archive, than memory is for."""
    if count > MOST_IMAGES:
        raise UsageError(
            f"{what} holds {count:,} images or members; the limit is {MOST_IMAGES:,}: cut it"
        )


class Archive(io.FileIO):
    """A .zip whose directory, which zipfile reads in one go, is measured before it is parsed.
    UsageError where it is too long.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """As FileIO does."""
        if size is not None and size > DIRECTORY_LIMIT:
            raise UsageError(
                f"source {self.name} has a directory of {size:,} bytes; the limit is"
                f" {DIRECTORY_LIMIT:,}"
            )
        data = super().read(size) or b""
        check_count(f"source {self.name}", data.count(ENTRY))
        return data


def copy_exactly(stream: IO[bytes], target: BinaryIO, length: int, what: str) -> None:
    """Copy `length` bytes, which must be all that the stream has left. Raises UsageError."""
    left = length
    while left and (block := stream.read(min(BLOCK, left))):
        target.write(block)
        left -= len(block)
        doing(f"copying {what}, {left:,} bytes left")
    if left or stream.read(1):
        there = f"{length - left:,}" if left else f"more than {length:,}"
        raise UsageError(f"{what} says it holds {length:,} bytes of pixels but has {there}")
    target.flush()
