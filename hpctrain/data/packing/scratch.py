"""Scratch files for what archives unpack to, and limits that are compared before room is taken."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hpctrain.errors import UsageError
from hpctrain.files import temporary_name
from hpctrain.text import brief
from hpctrain.watchdog import doing


def _lzma_error() -> type[Exception]:
    """What corrupt LZMA data raise. A Python that was built without liblzma reads none."""
    try:
        import lzma
    except ImportError:
        return RuntimeError  # of zipfile, which needs it
    return lzma.LZMAError


BLOCK = 2**20
DIRECTORY_LIMIT = 2**30  # bytes of a .zip's
ENTRY = b"PK\1\2"  # begins each entry of it
SPARE, RATIO = 2**30, 200  # what is compressed may grow to SPARE bytes plus RATIO times its size
MAX_IMAGES = 3_000_000  # of an archive or array: listing takes up to 1 kB of memory for each
# zipfile raises RuntimeError for a member that is encrypted, and NotImplementedError, which is one,
# for a compression method or a version of the format that it does not know.
ZIP_ERRORS = (zipfile.BadZipFile, RuntimeError)
UNZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, _lzma_error())

NewFile = Callable[[], IO[bytes]]  # makes an empty file, open for writing and reading


def scratch_files(output: Path, named: bool) -> NewFile:
    """Makes scratch files in the folder of `output`. Files without a name are gone when this
    process ends, however it ends; processes of other hosts can open `named` ones only.
    """
    folder = output.parent.resolve()
    prefix = temporary_name(output).stem + "-"  # found again by files.left_behind
    if named:
        return lambda: tempfile.NamedTemporaryFile(prefix=prefix, suffix=".tmp", dir=folder)
    return lambda: tempfile.TemporaryFile(dir=folder)


def path_of(file: IO[bytes]) -> str:
    """A path by which other processes open the file, also one without a name."""
    if isinstance(file.name, str) and os.path.exists(file.name):
        return os.path.abspath(file.name)
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def unzip(path: Path, target: IO[bytes]) -> None:
    """Write the contents of the .gz file `path` to `target`. Raises UsageError."""
    try:
        with gzip.open(path) as stream:
            while block := stream.read(BLOCK):
                target.write(block)
                doing(f"unzipping byte {target.tell():,} of {path}")
                check_growth(path, target.tell())
    except UNZIP_ERRORS as error:
        raise UsageError(
            f"source {path} is cut short or corrupt ({brief(error)}): fetch it again"
        ) from None
    target.flush()


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
    if count > MAX_IMAGES:
        raise UsageError(
            f"{what} holds {count:,} images or members; the limit is {MAX_IMAGES:,}: cut it"
        )


class ZipArchive(io.FileIO):
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


def copy_exactly(stream: IO[bytes], target: IO[bytes], length: int, what: str) -> None:
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
