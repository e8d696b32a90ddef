"""Scratch files without a name, and filling them within bounds.

Such a file is gone when its process ends, however it ends: killed in mid-work, nothing is left.
"""

from __future__ import annotations

import gzip
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from hpctrain.errors import UsageError

BLOCK = 2**20
SPARE, RATIO = 2**30, 200  # a .gz may grow to SPARE bytes plus RATIO times its size
# A broken directory of files, or a compression that Python does not know.
ZIP_ERRORS = (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError)
UNZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)


def scratch_file(folder: Path) -> BinaryIO:
    """An empty file without a name in `folder`, open for writing and reading."""
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


@contextmanager
def unzipped(path: Path, folder: Path) -> Iterator[BinaryIO]:
    """The contents of the .gz file `path` as a scratch file. Raises UsageError."""
    limit = SPARE + RATIO * path.stat().st_size
    with scratch_file(folder) as target:
        try:
            with gzip.open(path) as stream:
                while block := stream.read(BLOCK):
                    target.write(block)
                    if target.tell() > limit:
                        raise UsageError(
                            f"source {path} grows to more than {limit:,} bytes, over {RATIO} times"
                            " its size: refused"
                        )
        except UNZIP_ERRORS as error:
            raise UsageError(
                f"source {path} is cut short or damaged ({error}): fetch it again"
            ) from None
        target.flush()
        yield target


def copy_exactly(stream: IO[bytes], target: BinaryIO, length: int, what: str) -> None:
    """Copy `length` bytes, which must be all that the stream has left. Raises UsageError."""
    left = length
    while left and (block := stream.read(min(BLOCK, left))):
        target.write(block)
        left -= len(block)
    if left or stream.read(1):
        there = f"{length - left:,}" if left else f"more than {length:,}"
        raise UsageError(f"{what} says it holds {length:,} bytes of pixels but has {there}")
    target.flush()
