"""Decode a listed source into a scratch file of rows, by workers and among several processes.

Every process decodes consecutive images of the source into consecutive rows of the scratch file,
one image a row, from a first row of its own on (`first_rows`). JPEG files, which differ in size,
lie where there was room, and it is remembered where.
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
from hpctrain.data.packing.layout import Item, Source
from hpctrain.data.packing.pages import PAGE
from hpctrain.data.packing.worker import COUNTER_BYTES, Counter, Listed, Task
from hpctrain.errors import UsageError

IMAGES_PER_TASK, ROWS_PER_TASK = 16, 256  # of files to decode, of raw pixels
Advance = Callable[[int], None]


class Wish(NamedTuple):
    """What was asked for; None where the images decide."""

    size: tuple[int, int] | None  # (width, height)
    channels: int | None
    crop: bool


class Seen(NamedTuple):
    """What headers say: the size of the first readable image, and whether any has colour."""

    size: tuple[int, int] | None  # (width, height)
    colour: bool


class Files(NamedTuple):
    """JPEG files in the scratch file, in any order, and their pixels."""

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
    files: Files | None = None  # where files were stored, not pixels
    odd: tuple[int, int, int] | None = None  # an image of another size: number, width, height


def look(source: Source, wish: Wish, run: Run) -> Seen:
    """Read as few headers as `choose_fit` needs."""
    size, colour = wish.size, False
    if source.shape or (size and wish.channels):
        return Seen(size, colour)
    for header in _headers(source, run):
        size = size or (header[0], header[1])
        colour = colour or header[2]
        if wish.channels or colour:
            break
    return Seen(size, colour)


def choose_fit(source: Source, wish: Wish, seen: list[Seen]) -> Fit:
    """The size and channels of all rows, from what was `seen` in the parts of the source.

    Without a size the first readable image sets it; without channels they are 3 as soon as one
    image has colour. Raises UsageError where no image can be read.
    """
    size = next((part.size for part in seen if part.size), None)
    colour = any(part.colour for part in seen)
    if source.shape:
        height, width, channels = source.shape
        size = size or (width, height)
        return Fit(*size, wish.channels or channels, wish.crop, exact=wish.size is None)
    if size is None:
        raise UsageError(
            f"source {source.name}: none of its {len(source.items):,} files is an image"
        )
    return Fit(*size, wish.channels or (3 if colour else 1), wish.crop, exact=wish.size is None)


def decode_all(
    source: Source,
    fit: Fit,
    store: BinaryIO,
    first_row: int,
    run: Run,
    advance: Advance = lambda images: None,
    counter: Counter | None = None,
) -> Decoded:
    """Every image into its row of `store`, or as a JPEG file into room that the `counter` gives;
    ends early at one of a size that was not asked for. OSError where the disk is full."""
    count = len(source.items)
    good, digests = np.zeros(count, bool), np.zeros(count, "S16")
    files = _no_files(count, fit.channels) if counter else None
    decoded = Decoded(good, digests, [], files)
    for answer in run(_tasks(source, fit, store.fileno(), first_row, counter)):
        for row, outcome, *facts in answer:
            number = row - first_row
            if outcome == "ok":
                good[number], digests[number] = True, bytes.fromhex(facts[0])
                for column, value in zip(files or (), facts[1:], strict=True):
                    column[number] = value
            elif outcome == "bad":
                decoded.bad.append((source.items[number].name, facts[0]))
            else:
                return decoded._replace(odd=(number, facts[0], facts[1]))
        advance(len(answer))
    return decoded


def joined(source: Source, fit: Fit, decoded: list[Decoded]) -> Decoded:
    """What was decoded of all parts of the source. Raises UsageError where sizes differ."""
    good = np.concatenate([part.good for part in decoded])
    first = 0
    for part in decoded:
        if part.odd:
            number, width, height = part.odd
            raise _sizes_differ(source, fit, first + number, good, (width, height))
        first += len(part.good)
    digests = np.concatenate([part.digests for part in decoded])
    bad = [*source.bad, *(entry for part in decoded for entry in part.bad)]
    by_part = [part.files for part in decoded if part.files]
    columns = [np.concatenate(column) for column in zip(*by_part, strict=True)]
    return Decoded(good, digests, sorted(bad), Files(*columns) if columns else None)


@contextmanager
def shared_counter(rank: int, size: int) -> Iterator[Counter]:
    """A pipe that holds one number, 0 at first: who reads it must put another back, so that one
    worker of the process `rank` of `size` at a time takes room, on whatever file system."""
    ends = os.pipe()
    try:
        os.write(ends[1], bytes(COUNTER_BYTES))
        yield Counter(*ends, rank, size)
    finally:
        for end in ends:
            os.close(end)


def first_rows(counts: list[int], row_bytes: int) -> list[int]:
    """Where in the scratch file rows of each process begin, so that no two write one page of it.
    What is left free between them is a hole in the file, which takes no room."""
    step = PAGE // math.gcd(PAGE, row_bytes)  # rows whose bytes are whole pages
    first, firsts = 0, []
    for count in counts:
        firsts.append(first)
        first += -(-count // step) * step
    return firsts


def descriptors(source: Source, store: BinaryIO, counter: Counter | None) -> list[int]:
    """The open files that worker processes need."""
    ends = (counter.read_end, counter.write_end) if counter else ()
    return [store.fileno(), *ends, *(file.fileno() for file in source.files)]


def row_bytes(fit: Fit) -> int:
    """Bytes of one row."""
    return math.prod((fit.height, fit.width, fit.channels))


def scratch_rows(counts: list[int], row_bytes: int) -> np.ndarray:
    """The scratch row (N,) of every image, where the processes decode `counts` images each."""
    firsts = first_rows(counts, row_bytes)
    pairs = zip(firsts, counts, strict=True)
    return np.concatenate([np.arange(first, first + count) for first, count in pairs])


def _headers(source: Source, run: Run) -> Iterator[tuple[int, int, bool]]:
    for answer in run(_tasks(source, None, -1, 0)):
        for _, outcome, *facts in answer:
            if outcome == "header":
                yield facts[0], facts[1], facts[2]


def _no_files(count: int, channels: int) -> Files:
    numbers = (np.zeros(count, kind) for kind in (np.int64, np.int64, bool))
    return Files(*numbers, *(np.zeros((count, channels), np.uint64) for _ in range(2)))


def _tasks(
    source: Source, fit: Fit | None, store: int, first_row: int, counter: Counter | None = None
) -> Iterator[Task]:
    slots = [file.fileno() for file in source.files] or [-1]
    step = ROWS_PER_TASK if source.shape else IMAGES_PER_TASK
    for start in range(0, len(source.items), step):
        images: list[Listed] = [
            (row, item.name, slots[item.slot], item.offset, item.size, item.packed)
            for row, item in enumerate(source.items[start : start + step], first_row + start)
        ]
        yield Task(source.kind, source.root, store, fit, source.shape, images, counter)


def _sizes_differ(
    source: Source, fit: Fit, row: int, good: np.ndarray, size: tuple[int, int]
) -> UsageError:
    other: Item = source.items[row]
    good = good[:row]  # what other processes decoded meanwhile does not count
    first = source.items[int(np.argmax(good))].name if good.any() else "the first image"
    return UsageError(
        f"source {source.name}: images differ in size, {first} has {fit.width}x{fit.height}"
        f" pixels and {other.name} {size[0]}x{size[1]}: give one with --size"
        f" {fit.width}x{fit.height}"
    )
