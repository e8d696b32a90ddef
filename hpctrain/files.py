"""Atomic writes: temporary file, fsync, rename, fsync of the folder.

rename(2) replaces a file atomically on POSIX file systems. fsync(2) of a file does not cover its
directory entry, so the folder is synced as well.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from hpctrain.errors import RunError
from hpctrain.fault import fault
from hpctrain.text import bytes_text


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside `path` that contains the host and process ID of its writer."""
    parts = (socket.gethostname(), str(os.getpid()), secrets.token_hex(8))
    return path.with_name(f".{path.name}.{'-'.join(parts)}.tmp")


def remove_left_behind(path: Path) -> None:
    """Remove temporary files and folders for `path` whose writers, on this host, were killed."""
    stem = f".{path.name}.{socket.gethostname()}-"
    for temporary in path.parent.glob(f"{glob.escape(stem)}*.tmp"):
        process = temporary.name.removeprefix(stem).partition("-")[0]
        if not process.isdigit() or Path("/proc", process).exists():
            continue
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to an open file, from byte `offset` on. Raises OSError."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset += count


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise RunError if fewer than `needed` bytes, which `what` needs, are free in the folder."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(
            f"{folder} has {bytes_text(free)} free, {what} needs {bytes_text(needed)} there"
        )


@contextmanager
def whole_file(path: Path, point: str = "") -> Iterator[BinaryIO]:
    """Open a new file for writing; rename it to `path` on success, remove it on any error.

    Raises OSError, also if `path` is a device or a pipe, which must not be replaced. Fault points
    (``fault.py``) begin with `point`, or with the file's name without suffix.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    temporary = temporary_name(path)
    point = point or path.stem
    with open(temporary, "x+b") as file:
        try:
            yield file
            file.flush()
            fault(f"{point}.written")
            os.fsync(file.fileno())
            fault(f"{point}.synced")
            os.replace(temporary, path)
            fault(f"{point}.renamed")
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)
    fault(f"{point}.durable")


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Convert an OSError in the block to a RunError: "cannot write WHAT: No space left"."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {what}: {error.strerror or error}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Raises OSError."""
    with whole_file(path) as file:
        if isinstance(content, str):
            content = content.encode()
        file.write(content)


def as_text(file: BinaryIO) -> TextIO:
    """Return the same file for writing text, without newline translation; `file` stays open."""
    return open(
        file.fileno(),
        "w",
        newline="",
        encoding="utf-8",
        errors="surrogateescape",
        closefd=False,
    )
