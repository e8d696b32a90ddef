"""Atomic writes: temporary name, fsync, rename, fsync of the folder.

rename(2) replaces atomically on POSIX file systems; fsync(2) of the file does not cover its
directory entry, so the folder is synced too.

Other users may write to these folders (/tmp, a project's). So nothing is opened through a symbolic
link, and temporary files are new (O_EXCL) and have unpredictable names.
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
REFUSED = "a symbolic link is in its place"


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that says which process of which host writes there."""
    own = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    return path.with_name(f".{path.name}.{own}.tmp")


def left_behind(path: Path) -> Iterator[Path]:
    """Temporary files for `path` whose processes, of this host, are gone."""
    stem = f".{path.name}.{socket.gethostname()}-"
    for found in path.parent.glob(f"{glob.escape(stem)}*.tmp"):
        process = found.name[len(stem) : -len(".tmp")].partition("-")[0]
        if process.isdigit() and not Path("/proc", process).exists():
            yield found


def open_regular(path: str | Path, flags: int) -> int:
    """A descriptor of the file `path`, never of a device or a pipe; an `opener` of open().
    OSError.
    """
    more = os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its other end
    descriptor = os.open(path, flags | more, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    os.set_blocking(descriptor, True)
    return descriptor


def open_itself(path: str | Path, flags: int) -> int:
    """The same, but never what a symbolic link in its place leads to."""
    try:
        return open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, REFUSED, str(path)) from None
        raise


def sync(path: Path) -> None:
    """Ask the system to put a file or a folder on disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` from byte `offset` of an open file on. OSError."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextmanager
def whole_file(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Give a new file to write; on success it becomes `path`, on any error it is removed. What is
    not `durable` may be lost in a power failure.
    """
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
    """Within the block an OSError becomes a RunError: "cannot write WHAT: No space left"."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {what}: {error.strerror or error}") from error


def write_whole(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file, whole or not at all. OSError."""
    with whole_file(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def as_text(file: BinaryIO) -> TextIO:
    """The same new file for writing text, lines as they are given; `file` itself stays open."""
    number = file.fileno()
    return open(number, "w", newline="", encoding="utf-8", errors="surrogateescape", closefd=False)
