"""Decode a listed source into a scratch file, in worker processes.

Row i of the scratch file is image i of the source, whatever process decoded it and when. JPEG
files, which differ in size, lie where there was room, and it is remembered where.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np

from hpctrain.data.images import Fit
from hpctrain.data.packing.jobs import Run
from hpctrain.data.packing.layout import Item, Source, shown
from hpctrain.data.packing.worker import COUNTER_BYTES, Task
from hpctrain.errors import UsageError

IMAGES_PER_TASK, ROWS_PER_TASK = 16, 256  # of files to decode, of raw pixels
Advance = Callable[[int], None]


class Wish(NamedTuple):
    """What was asked for; None where the images decide."""

    size: tuple[int, int] | None  # (width, height)
    channels: int | None
    crop: bool


class Files(NamedTuple):
    """JPEG files in the scratch file, one after the other in any order, and their pixels."""

    places: np.ndarray  # (N,) int64: where each begins
    sizes: np.ndarray  # (N,) int64
    kept: np.ndarray  # (N,) bool: the very bytes of the source
    values: np.ndarray  # (N, C) uint64: sum of the pixels of each channel, decoded
    squares: np.ndarray  # (N, C) uint64: sum of their squares


class Decoded(NamedTuple):
    """Which images are in the scratch file, and their pixels' digests."""

    good: np.ndarray  # (N,) bool
    digests: np.ndarray  # (N,) S16
    bad: list[tuple[str, str]]  # (name, why)
    files: Files  # of no meaning where pixels were stored


def choose_fit(source: Source, wish: Wish, run: Run) -> Fit:
    """The size and channels of all rows, reading as few headers as needed.

    Without a size the first readable image sets it; without channels they are 3 as soon as one
    image has colour. Raises UsageError where no image can be read.
    """
    size, colour = wish.size, False
    if source.shape:
        height, width, channels = source.shape
        size = size or (width, height)
        return Fit(*size, wish.channels or channels, wish.crop, exact=wish.size is None)
    for header in _headers(source, run) if not (size and wish.channels) else ():
        size = size or (header[0], header[1])
        colour = colour or header[2]
        if wish.channels or colour:
            break
    if size is None:
        raise UsageError(
            f"source {source.name}: none of its {len(source.items):,} files is an image"
        )
    return Fit(*size, wish.channels or (3 if colour else 1), wish.crop, exact=wish.size is None)


def decode_all(
    source: Source,
    fit: Fit,
    store: BinaryIO,
    run: Run,
    advance: Advance = lambda images: None,
    counter: tuple[int, int] | None = None,
) -> Decoded:
    """Every image into its row of `store`, or as a JPEG file into room that the `counter` gives.
    Raises UsageError where sizes differ and none was asked, OSError where the disk is full."""
    count = len(source.items)
    good, digests = np.zeros(count, bool), np.zeros(count, "S16")
    files = _no_files(count if counter else 0, fit.channels)
    bad = list(source.bad)
    for answer in run(_tasks(source, fit, store.fileno(), counter)):
        for row, outcome, *facts in answer:
            if outcome == "ok":
                good[row], digests[row] = True, bytes.fromhex(facts[0])
                for column, value in zip(files, facts[1:], strict=False):
                    column[row] = value
            elif outcome == "bad":
                bad.append((source.items[row].name, facts[0]))
            else:
                raise _sizes_differ(source, fit, row, good, (facts[0], facts[1]))
        advance(len(answer))
    return Decoded(good, digests, sorted(bad), files)


@contextmanager
def shared_counter() -> Iterator[tuple[int, int]]:
    """The ends of a pipe that holds one number, 0 at first: who reads it must put another back,
    so that one process at a time takes room in the scratch file, on whatever file system."""
    ends = os.pipe()
    try:
        os.write(ends[1], bytes(COUNTER_BYTES))
        yield ends
    finally:
        for end in ends:
            os.close(end)


def descriptors(source: Source, store: BinaryIO, counter: tuple[int, int] | None) -> list[int]:
    """The open files that worker processes need."""
    return [store.fileno(), *(counter or ()), *(file.fileno() for file in source.files)]


def row_bytes(fit: Fit) -> int:
    """Bytes of one row."""
    return math.prod((fit.height, fit.width, fit.channels))


def _headers(source: Source, run: Run) -> Iterator[tuple[int, int, bool]]:
    for answer in run(_tasks(source, None, -1)):
        for _, outcome, *facts in answer:
            if outcome == "header":
                yield facts[0], facts[1], facts[2]


def _no_files(count: int, channels: int) -> Files:
    numbers = (np.zeros(count, kind) for kind in (np.int64, np.int64, bool))
    return Files(*numbers, *(np.zeros((count, channels), np.uint64) for _ in range(2)))


def _tasks(
    source: Source, fit: Fit | None, store: int, counter: tuple[int, int] | None = None
) -> Iterator[Task]:
    slots = [file.fileno() for file in source.files] or [-1]
    step = ROWS_PER_TASK if source.shape else IMAGES_PER_TASK
    for start in range(0, len(source.items), step):
        images = [
            (start + i, item.name, slots[item.slot], item.offset, item.size)
            for i, item in enumerate(source.items[start : start + step])
        ]
        yield Task(source.kind, source.root, store, fit, source.shape, images, counter)


def _sizes_differ(
    source: Source, fit: Fit, row: int, good: np.ndarray, size: tuple[int, int]
) -> UsageError:
    other: Item = source.items[row]
    first = source.items[int(np.argmax(good))].name if good.any() else "the first image"
    return UsageError(
        f"source {source.name}: images differ in size, {shown(first)} has {fit.width}x{fit.height}"
        f" pixels and {shown(other.name)} {size[0]}x{size[1]}: give one with --size"
        f" {fit.width}x{fit.height}"
    )
