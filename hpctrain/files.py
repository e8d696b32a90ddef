"""Atomic writes: temporary file, fsync, rename, fsync of the folder.

rename(2) replaces a file atomically on POSIX file systems. fsync(2) of a file does not cover its
directory entry, so the folder is synced as well.

Other users may be able to write to these folders (/tmp, a project's folder). Therefore no file is
opened through a symbolic link, and temporary files are created exclusively (O_EXCL) under
unpredictable names.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from hpctrain.errors import RunError

UMASK = os.umask(0o022)
os.umask(UMASK)
NOT_REGULAR = "it is no regular file"
REFUSED = "a symbolic link is in its place"


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside `path` that contains the host and process ID of its writer."""
    own = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    return path.with_name(f".{path.name}.{own}.tmp")


def left_behind(path: Path) -> Iterator[Path]:
    """Yield the temporary files for `path` whose writers ran on this host and no longer exist."""
    stem = f".{path.name}.{socket.gethostname()}-"
    for found in path.parent.glob(f"{glob.escape(stem)}*.tmp"):
        process = found.name[len(stem) : -len(".tmp")].partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            yield found


def open_regular(path: str | Path, flags: int) -> int:
    """Open a regular file and return its descriptor; can be the `opener` of open().

    Raises OSError, also for a device or a pipe.
    """
    more = os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would wait for its other end
    descriptor = os.open(path, flags | more, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def open_itself(path: str | Path, flags: int) -> int:
    """Open a regular file as `open_regular` does, but do not follow a symbolic link at `path`."""
    try:
        return open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, REFUSED, str(path)) from None
        raise


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
        data, offset = data[count:], offset + count


@contextmanager
def whole_file(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a new file for writing; rename it to `path` on success, remove it on any error.

    Raises OSError, also if `path` is a device or a pipe, which must not be replaced. A file that is
    not `durable` may be lost in a power failure. It is one of hpctrain's own, such as a heartbeat,
    which is written often: what is at `path` is not checked.
    """
    if durable and path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    temporary = temporary_name(path)
    with cast(BinaryIO, open(temporary, "x+b", opener=open_itself)) as file:
        try:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if not os.path.samestat(os.lstat(temporary), os.fstat(file.fileno())):
                raise OSError(errno.EEXIST, "another file was put in its place", str(temporary))
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durable:
        sync(path.parent)


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Convert an OSError in the block to a RunError: "cannot write WHAT: No space left"."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {what}: {error.strerror or error}") from error


def write_whole(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file atomically. Raises OSError."""
    with whole_file(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def as_text(file: BinaryIO) -> TextIO:
    """Return the same file for writing text, without newline translation; `file` stays open."""
    number = file.fileno()
    return open(number, "w", newline="", encoding="utf-8", errors="surrogateescape", closefd=False)
