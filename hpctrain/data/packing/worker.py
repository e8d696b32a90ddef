"""What one worker process of ``pack`` does: decode images into the rows of a scratch file.

Started as ``python -m hpctrain.data.packing.worker``, it reads one task a line from standard input
and answers with one line (JSON), until its input ends; so it ends with its parent, even one that
was killed. The parent hands it the open scratch file and the open files of the source.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
import warnings
import zipfile
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

from PIL import Image

from hpctrain.data.images import BadImage, Fit, WrongSize, as_jpeg, decode, fit_pixels, probe

COUNTER_BYTES = 8
FILE_LIMIT = 2**30  # bytes of one image file
# zipfile's own are BadZipFile and, for what it cannot do, RuntimeError
READ_ERRORS = (OSError, EOFError, RuntimeError, ValueError, zlib.error, zipfile.BadZipFile)


class Task(NamedTuple):
    """Some images to decode, or only to look at (`fit` None).

    kind and root as in Source; store: descriptor of the scratch file; images: (row, name,
    descriptor, offset, size) of each; shape of raw pixels; counter: where JPEG files are stored
    instead of pixels, the ends of the pipe that says where there is room.
    """

    kind: str
    root: str
    store: int
    fit: Fit | None
    shape: tuple[int, int, int] | None
    images: list[tuple[int, str, int, int, int]]
    counter: tuple[int, int] | None = None


def run_task(task: Task) -> list[list[Any]]:
    """For each image [row, "ok", digest of the pixels], [row, "header", width, height, colour],
    [row, "bad", why] or [row, "size", width, height]; "ok" of a JPEG file goes on with its place,
    its size, whether its bytes were kept, and two sums a channel. OSError: the store is full."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
        return [[image[0], *_one(task, *image)] for image in task.images]


def _one(task: Task, row: int, name: str, descriptor: int, offset: int, size: int) -> list[Any]:
    try:
        data = _bytes(task, name, descriptor, offset, size)
        if task.fit is None:
            return ["header", *probe(data)]
        if task.shape:
            pixels = fit_pixels(data, task.shape, task.fit)
        else:
            given = data
            data = as_jpeg(given) if task.counter else given
            pixels = decode(data, task.fit)
    except BadImage as error:
        return ["bad", str(error)]
    except WrongSize as error:
        return ["size", *error.size]
    digest = hashlib.blake2b(pixels, digest_size=16).hexdigest()
    if task.counter:
        facts = _store_file(task.store, task.counter, data)
        return ["ok", digest, *facts, data is given, *_sums(pixels, task.fit.channels)]
    _store(task.store, pixels, row * len(pixels))
    return ["ok", digest]


def _store_file(store: int, counter: tuple[int, int], data: bytes) -> tuple[int, int]:
    """Append a file to the store that all processes share: its place and its size."""
    place = int.from_bytes(os.read(counter[0], COUNTER_BYTES), "little")  # one process at a time
    os.write(counter[1], (place + len(data)).to_bytes(COUNTER_BYTES, "little"))
    _store(store, data, place)
    return place, len(data)


def _sums(pixels: bytes, channels: int) -> tuple[list[int], list[int]]:
    """Of each channel the sum of the values and that of their squares."""
    mode, width = ("L", len(pixels)) if channels == 1 else ("RGB", len(pixels) // 3)
    counts = Image.frombytes(mode, (width, 1), pixels).histogram()
    by_channel = [counts[start : start + 256] for start in range(0, len(counts), 256)]
    values = [sum(v * n for v, n in enumerate(part)) for part in by_channel]
    return values, [sum(v * v * n for v, n in enumerate(part)) for part in by_channel]


def _bytes(task: Task, name: str, descriptor: int, offset: int, size: int) -> bytes:
    """The bytes of an image file, or raw pixels. Raises BadImage."""
    try:
        if task.kind == "folder":
            return _file(os.path.join(task.root, name))
        if task.kind == "zip":
            return _member(_archive(task.root), offset, size)
        data = os.pread(descriptor, size, offset)
    except READ_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadImage(reason or type(error).__name__) from None
    if len(data) != size:
        raise BadImage("the source was cut short")
    return data


def _file(path: str) -> bytes:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > FILE_LIMIT:
            raise BadImage(f"{size:,} bytes; the limit is {FILE_LIMIT:,}")
        return file.read()


def _member(archive: zipfile.ZipFile, number: int, size: int) -> bytes:
    """A member by its place in the archive; never more bytes than it said it has."""
    with archive.open(archive.infolist()[number]) as file:
        return file.read(size)


@lru_cache(maxsize=1)
def _archive(path: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def _store(descriptor: int, pixels: bytes, offset: int) -> None:
    data = memoryview(pixels)
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def main() -> None:
    """Answer tasks until standard input ends."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm sends them to every process
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    for line in sys.stdin:
        if not line.endswith("\n"):
            return  # the parent was killed while it wrote
        fields = json.loads(line)
        fit = Fit(*fields["fit"]) if fields["fit"] else None
        shape = tuple(fields["shape"]) if fields["shape"] else None
        answer: dict[str, Any]
        try:
            answer = {"images": run_task(Task(**{**fields, "fit": fit, "shape": shape}))}
        except OSError as error:
            answer = {"errno": error.errno, "text": error.strerror}
        except Exception:
            answer = {"traceback": traceback.format_exc()}
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except BrokenPipeError:
            os._exit(1)  # the parent was killed; nobody is left to tell


if __name__ == "__main__":
    main()
