"""Files that are whole or not there: temporary name, fsync, rename, fsync of the folder.

rename(2) replaces atomically on POSIX file systems; fsync(2) of the file does not cover its
directory entry, so the folder is synced too.
"""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UMASK = os.umask(0o022)
os.umask(UMASK)


def temporary_name(path: Path) -> Path:
    """The hidden name beside `path` under which this process of this host writes it."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def left_behind(path: Path) -> Iterator[Path]:
    """Temporary files for `path` whose processes, of this host, are gone."""
    stem = f".{path.name}.{socket.gethostname()}-"
    for found in path.parent.glob(f"{glob.escape(stem)}*.tmp"):
        process = found.name[len(stem) : -len(".tmp")]
        if process.isdigit() and not Path("/proc", process).exists():
            yield found


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
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; on success it becomes `path`, on any error it is removed."""
    temporary = temporary_name(path)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~UMASK)  # some writers keep others from reading
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
