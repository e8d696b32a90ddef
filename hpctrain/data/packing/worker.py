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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from PIL import Image

from hpctrain.data.images import (
    FILE_LIMIT,
    BadImage,
    Fit,
    WrongSize,
    as_jpeg,
    decode,
    fit_pixels,
    probe,
)
from hpctrain.files import write_at
from hpctrain.watchdog import doing

COUNTER_BYTES = 8
PIECE = 2**30  # bytes of the scratch file, in which JPEG files lie whole
# zipfile's own are BadZipFile and, for what it cannot do, RuntimeError
READ_ERRORS = (OSError, EOFError, RuntimeError, ValueError, zlib.error, zipfile.BadZipFile)
ENCRYPTED, LOCAL_HEADER = 0x1, 30  # of a .zip (APPNOTE.TXT 4.4.4, 4.3.7): a flag, and bytes


class Counter(NamedTuple):
    """How workers take room for JPEG files in the scratch file: the ends of a pipe that holds how
    much is taken, and which of how many processes this is. Each process takes every `size`-th
    piece of PIECE bytes, so that none needs to know what the others take."""

    read_end: int
    write_end: int
    rank: int
    size: int


# row, name, descriptor, offset, size, packed
Listed = tuple[int, str, int, int, int, Sequence[int]]


class Task(NamedTuple):
    """Some images to decode, or only to look at (`fit` None).

    kind and root as in Source; store: descriptor of the scratch file; images: what is told of each,
    `packed` as in Item; shape of raw pixels; counter: given where JPEG files are stored instead of
    pixels.
    """

    kind: str
    root: str
    store: int
    fit: Fit | None
    shape: tuple[int, int, int] | None
    images: list[Listed]
    counter: Counter | None = None


def run_task(task: Task) -> list[list[Any]]:
    """For each image [row, "ok", digest of the pixels], [row, "header", width, height, colour],
    [row, "bad", why] or [row, "size", width, height]; "ok" of a JPEG file goes on with its place,
    its size, whether its bytes were kept, and two sums a channel. OSError: the store is full."""
    with quiet():
        return decode_task(task)


def decode_task(task: Task) -> list[list[Any]]:
    """As `run_task`, but for threads, which may not change warnings: within `quiet`."""
    return [[image[0], *_one(task, *image)] for image in task.images]


@contextmanager
def quiet() -> Iterator[None]:
    """Without Pillow's remarks on odd metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _one(
    task: Task,
    row: int,
    name: str,
    descriptor: int,
    offset: int,
    size: int,
    packed: Sequence[int],
) -> list[Any]:
    doing(f"reading {name}")
    try:
        data = _bytes(task, name, descriptor, offset, size, packed)
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
    write_at(task.store, memoryview(pixels), row * len(pixels))
    return ["ok", digest]


def _store_file(store: int, counter: Counter, data: bytes) -> tuple[int, int]:
    """Append a file to the process's pieces of the store: its place and its size."""
    taken = int.from_bytes(os.read(counter.read_end, COUNTER_BYTES), "little")  # one at a time
    if taken % PIECE + len(data) > PIECE:
        taken = -(-taken // PIECE) * PIECE  # no file lies in two pieces
    os.write(counter.write_end, (taken + len(data)).to_bytes(COUNTER_BYTES, "little"))
    piece, within = divmod(taken, PIECE)
    place = (piece * counter.size + counter.rank) * PIECE + within
    write_at(store, memoryview(data), place)
    return place, len(data)


def _sums(pixels: bytes, channels: int) -> tuple[list[int], list[int]]:
    """Of each channel the sum of the values and that of their squares."""
    mode, width = ("L", len(pixels)) if channels == 1 else ("RGB", len(pixels) // 3)
    counts = Image.frombytes(mode, (width, 1), pixels).histogram()
    by_channel = [counts[start : start + 256] for start in range(0, len(counts), 256)]
    values = [sum(v * n for v, n in enumerate(part)) for part in by_channel]
    return values, [sum(v * v * n for v, n in enumerate(part)) for part in by_channel]


def _bytes(
    task: Task, name: str, descriptor: int, offset: int, size: int, packed: Sequence[int]
) -> bytes:
    """The bytes of an image file, or raw pixels. Raises BadImage."""
    try:
        if task.kind == "folder":
            return _file(os.path.join(task.root, name))
        if task.kind == "zip":
            return _member(task.root, offset, size, packed)
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


def _member(path: str, offset: int, size: int, packed: Sequence[int]) -> bytes:
    """A member of a .zip, whose local header begins at `offset`; never more bytes than it said it
    has. The directory of the archive, which may be long, is not read again.
    """
    info = zipfile.ZipInfo()
    info.file_size = size
    info.compress_type, info.flag_bits, info.compress_size, info.CRC = packed
    if info.flag_bits & ENCRYPTED:
        raise BadImage("it is encrypted")
    with open(path, "rb") as file:
        file.seek(offset)
        header = file.read(LOCAL_HEADER)
        if header[:4] != b"PK\3\4":
            raise BadImage("it is not where the archive says")
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        file.seek(name + extra, os.SEEK_CUR)
        with zipfile.ZipExtFile(file, "r", info) as stream:
            return stream.read(size)


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
        counter = Counter(*fields["counter"]) if fields["counter"] else None
        answer: dict[str, Any]
        try:
            given = {"fit": fit, "shape": shape, "counter": counter}
            answer = {"images": run_task(Task(**{**fields, **given}))}
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
