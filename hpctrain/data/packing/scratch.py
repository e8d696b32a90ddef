"""Scratch files for the content of archives, and limits that are checked before unpacking it."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO

from hpctrain.errors import UsageError
from hpctrain.text import brief

BLOCK = 2**20
DIRECTORY_LIMIT = 2**30  # bytes of the directory of a .zip
ENTRY = b"PK\1\2"  # signature of each entry in it
SPARE, RATIO = 2**30, 200  # compressed data may expand to SPARE bytes plus RATIO times their size
MAX_IMAGES = 30_000_000  # of a source; docs/data.md: memory per image


def unzip(path: Path, target: IO[bytes]) -> None:
    """Write the contents of the .gz file `path` to `target`. Raises UsageError."""
    try:
        with gzip.open(path) as stream:
            while block := stream.read(BLOCK):
                target.write(block)
                check_growth(path, target.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"source {path} is cut short or corrupt ({brief(error)}): fetch it again"
        ) from None
    target.flush()


def check_growth(path: Path, length: int) -> None:
    """Raise UsageError if the compressed file `path` may not expand to `length` bytes."""
    limit = SPARE + RATIO * path.stat().st_size
    if length > limit:
        raise UsageError(
            f"source {path} grows to more than {limit:,} bytes, over {RATIO} times its size:"
            f" {length:,} are refused"
        )


def check_count(what: str, count: int) -> None:
    """Raise UsageError if an archive or manifest has too many images or members for the memory."""
    if count > MAX_IMAGES:
        raise UsageError(
            f"{what} holds {count:,} images or members; the limit is {MAX_IMAGES:,}: cut it"
        )


class ZipArchive(io.FileIO):
    """A .zip file whose directory, which zipfile reads at once, is checked before it is parsed.

    Raises UsageError if the directory is too long.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as FileIO does; raise UsageError if the directory is too long."""
        if size is not None and size > DIRECTORY_LIMIT:
            raise UsageError(
                f"source {self.name} has a directory of {size:,} bytes; the limit is"
                f" {DIRECTORY_LIMIT:,}"
            )
        data = super().read(size) or b""
        check_count(f"source {self.name}", data.count(ENTRY))
        return data
