"""The Flowers set: download flower_photos.tgz (3,670 JPEG photographs in five classes) once.

Size and SHA-256 are those that TensorFlow Datasets publishes for it (tf_flowers, checksums.tsv).
Data are downloaded to a .part file beside the archive. After a lost connection, or in a later
call, the download is resumed there. The file is renamed to the archive's name only after size and
checksum have been verified.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from hpctrain.console import Console
from hpctrain.errors import RunError, UsageError
from hpctrain.files import open_itself, sync, temporary_name
from hpctrain.watchdog import doing

TIMEOUT = 30  # seconds without a byte
DELAYS = (1, 2, 4)  # seconds before each further attempt; the last failure raises an error
BLOCK = 1 << 18  # bytes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_ERRORS = (*NO_ROOM, errno.EIO)  # raised by writing but not by a socket
PASSING = (408, 425, 429)  # temporary HTTP errors among 4xx: try again


@dataclass(frozen=True)
class Archive:
    """A file to download, with the size and checksum by which it is verified."""

    url: str
    name: str
    size: int  # bytes
    sha256: str


FLOWER_PHOTOS = Archive(
    "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz",
    "flower_photos.tgz",
    228_813_984,
    "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c",
)


def fetch_archive(data_dir: str | os.PathLike[str], archive: Archive = FLOWER_PHOTOS) -> Path:
    """Return the path of the verified archive in `data_dir`; download it if it does not exist yet.

    If another process is downloading, wait for it. Raises RunError (one line) if there is no
    network, the server fails or the file is not the published one, and UsageError if `data_dir`
    cannot be written.
    """
    path = Path(data_dir) / archive.name
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _sole_part(path) as part:
                if part is not None:
                    _complete(archive, part, path)
                    return path
        with path.open("rb") as file:
            _check(archive, file, path)
    except OSError as error:
        raise _disk_error(error, path) from None
    return path


def _complete(archive: Archive, part: BinaryIO, path: Path) -> None:
    """Download the rest of `part`, verify it and rename it to `path`."""
    if part.seek(0, os.SEEK_END) > archive.size:
        part.truncate(0)
    _download(archive, part, path)
    try:
        _check(archive, part, path)
    except RunError:
        part.truncate(0)
        raise
    os.fsync(part.fileno())
    os.replace(part.name, path)
    sync(path.parent)


@contextmanager
def _sole_part(path: Path) -> Iterator[BinaryIO | None]:
    """Open and lock the file to download into; give None if another process has made `path`.

    The lock is on the .part file itself, which is renamed when it is complete. So a process that
    has got the lock checks that the name still refers to the file that it has locked.
    """
    part = path.with_name(path.name + ".part")
    while True:
        with open(part, "a+b", opener=open_itself) as file:
            if not _lock(file, path):
                # This file system has no locks: use a private part, which is never resumed.
                private = temporary_name(part)
                with open(private, "x+b", opener=open_itself) as alone:
                    try:
                        yield alone
                    finally:
                        private.unlink(missing_ok=True)
                return
            if path.exists():
                yield None
                return
            if part.exists() and os.path.samestat(os.stat(part), os.fstat(file.fileno())):
                yield file
                return


def _lock(file: BinaryIO, path: Path) -> bool:
    """Lock `file`, waiting for other processes. Return False if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say(f"another process is downloading {path}: waiting for it")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _download(archive: Archive, part: BinaryIO, path: Path) -> None:
    """Append the missing bytes; give up after len(DELAYS) retries in a row without new bytes."""
    furthest, failures = part.seek(0, os.SEEK_END), 0
    with _progress(archive, path, furthest) as show:
        while part.seek(0, os.SEEK_END) < archive.size:
            reason = _attempt(archive, part, show)
            have = part.seek(0, os.SEEK_END)
            if have > furthest:
                furthest, failures = have, 0
            elif failures == len(DELAYS):
                raise RunError(
                    f"cannot download {archive.url}: {reason}; {have:,} of {archive.size:,} bytes"
                    " are kept. Try again, or download it by hand and run python -m hpctrain pack"
                    f" FILE --size 100x100 --output {path.parent / 'flowers.h5'}"
                )
            else:
                time.sleep(DELAYS[failures])
                failures += 1


def _attempt(archive: Archive, part: BinaryIO, show: Callable[[int], None]) -> str:
    """Request the bytes after those in `part` once; return the reason why the rest is missing."""
    try:
        _receive(archive, part, show)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in PASSING:
            raise RunError(
                f"cannot download {archive.url}: HTTP {error.code} {error.reason}"
            ) from None
        return f"HTTP {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return getattr(error.reason, "strerror", None) or str(error.reason)
    except (OSError, http.client.HTTPException) as error:
        if getattr(error, "errno", None) in DISK_ERRORS:
            raise
        return str(error) or type(error).__name__
    return "the connection was cut"


def _receive(archive: Archive, part: BinaryIO, show: Callable[[int], None]) -> None:
    have = part.seek(0, os.SEEK_END)
    headers = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(archive.url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        offered = response.headers.get("Content-Length", "")
        if response.status == 206:  # partial content, as asked
            range_ = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", "")
            )
            if range_ is None or int(range_[1]) != have:
                raise http.client.HTTPException("the server sent another part than asked for")
            offered = range_[2]
        elif have:  # the server sends the whole file again
            part.truncate(0)
            have = 0
        if offered.isdigit() and int(offered) != archive.size:
            raise RunError(
                f"{archive.url} is not the published archive: the server offers"
                f" {int(offered):,} bytes, not {archive.size:,}"
            )
        show(have)
        while have < archive.size and (block := response.read1(BLOCK)):
            part.write(block)
            have += len(block)
            show(have)
        part.flush()


def _check(archive: Archive, file: BinaryIO, path: Path) -> None:
    """Raise RunError if the file is not the published one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    hashed = hashlib.sha256()
    while block := file.read(BLOCK):
        hashed.update(block)
    digest = hashed.hexdigest()
    if (size, digest) != (archive.size, archive.sha256):
        raise RunError(
            f"{path} is not the published archive: {size:,} bytes with sha256 {digest[:16]}…, not"
            f" {archive.size:,} with {archive.sha256[:16]}…: remove it and try again"
        )


def _disk_error(error: OSError, path: Path) -> Exception:
    reason = error.strerror or str(error)
    if error.errno in NO_ROOM:
        return RunError(f"no room left in {path.parent} for {path.name}: {reason}")
    return UsageError(f"{path} cannot be written or read: {reason}; choose another --data-dir")


@contextmanager
def _progress(archive: Archive, path: Path, have: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, one line elsewhere; give a function to set the bytes received."""
    console = Console(stderr=True)
    columns = (
        TextColumn("downloading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    if not console.is_terminal:
        _say(f"downloading {archive.url} ({archive.size / 1e6:,.0f} MB) to {path}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=archive.size, completed=have)

        def show(done: int) -> None:
            doing(f"downloading byte {done:,} of {archive.url}")
            bar.update(task, completed=done)

        yield show


def _say(text: str) -> None:
    Console(stderr=True).print(text, soft_wrap=True)
