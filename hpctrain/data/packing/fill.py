"""The second phase of writing a pack: every process fills its share of the rows by byte offset.

It writes whole pages of the file (``pages.py``) and makes the checksums and exact integer sums of
whole blocks; of a block that ends within a page, the process of the next one writes the last bytes.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from hpctrain.data.pack_format import rows_per_block
from hpctrain.data.packing.pages import cut_pages, outside, overlaps
from hpctrain.data.packing.team import Team, part

NOTHING = np.zeros(1, np.uint64)

Fetch = Callable[[int, int], np.ndarray]  # rows start to stop, C-contiguous


class Part(NamedTuple):
    """One split to write: labels (N,) int64, and what gives its images (n, H, W, C) uint8."""

    labels: np.ndarray
    fetch: Fetch


class Room(NamedTuple):
    """Where the rows of one dataset go: from byte `offset` of the file on."""

    split: str
    kind: str  # of KINDS
    offset: int
    rows: int
    row_bytes: int


class Sums(NamedTuple):
    """What is known of rows once they are written; of labels the checksums alone."""

    checksums: np.ndarray  # (blocks,) uint32, CRC-32 of each block
    values: np.ndarray  # (C,) uint64, sum of the pixels of each channel
    squares: np.ndarray  # (C,) uint64, sum of their squares


def row_counts(parts: dict[str, Part], row_bytes: int, team: Team) -> tuple[int, int]:
    """The rows of all parts, and how many of them are in blocks of this process."""
    total, own, block_rows = 0, 0, rows_per_block(row_bytes)
    for labels, _ in parts.values():
        blocks = part(-(-len(labels) // block_rows), team)
        rows = range(len(labels))[blocks.start * block_rows : blocks.stop * block_rows]
        own, total = own + len(rows), total + len(labels)
    return total, own


def fill(
    path: str,
    rooms: list[Room],
    parts: dict[str, Part],
    team: Team,
    jobs: int,
    advance: Callable[[int], None],
) -> list[Sums]:
    """Write this process's share of every room, and make the checksums of its blocks."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(jobs) as threads:
            sums = []
            for room in rooms:
                labels, fetch = parts[room.split]
                labels = np.ascontiguousarray(labels, "<i8")  # (N,)
                work = (fetch, advance) if room.kind == "images" else (slices(labels), None)
                sums.append(_fill_room(descriptor, room, team, threads, *work))
        os.fsync(descriptor)  # the root syncs what its own host has written, no more
    finally:
        os.close(descriptor)
    return sums


def _fill_room(
    descriptor: int,
    room: Room,
    team: Team,
    threads: ThreadPoolExecutor,
    fetch: Fetch,
    advance: Callable[[int], None] | None,
) -> Sums:
    block_rows, row_bytes = rows_per_block(room.row_bytes), room.row_bytes
    length, block_bytes = room.rows * row_bytes, block_rows * row_bytes
    blocks, spans = cut_pages(room.offset, length, block_bytes, team.size)[team.rank]

    def store(start: int, stop: int) -> np.ndarray:
        """Write those bytes of rows `start` to `stop` that are this process's."""
        rows = fetch(start, stop)
        data, first = rows.data.cast("B"), start * row_bytes
        for low, high in overlaps(spans, first, stop * row_bytes):
            _write(descriptor, data[low - first : high - first], room.offset + low)
        return rows

    def store_block(number: int) -> tuple[int, np.ndarray, np.ndarray]:
        start = number * block_rows
        block = store(start, min(room.rows, start + block_rows))
        if advance is None:
            return zlib.crc32(block.data), NOTHING, NOTHING
        advance(len(block))
        return zlib.crc32(block.data), *_channel_sums(block)

    done = list(threads.map(store_block, blocks))
    for low, high in outside(spans, blocks.start * block_bytes, blocks.stop * block_bytes):
        store(low // row_bytes, -(-high // row_bytes))
    checksums = np.array([checksum for checksum, _, _ in done], "<u4")
    values = _added([values for _, values, _ in done])
    return Sums(checksums, values, _added([squares for _, _, squares in done]))


def _added(sums: list[np.ndarray]) -> np.ndarray:
    """Their sum, NOTHING for none."""
    return functools.reduce(np.add, sums, NOTHING)


def slices(rows: np.ndarray) -> Fetch:
    """Reads rows of an array."""
    return lambda start, stop: np.ascontiguousarray(rows[start:stop])


def total(every: list[list[Sums]]) -> list[Sums]:
    """What all processes, in their order, know of their blocks, for each room."""
    return [
        Sums(
            np.concatenate([sums.checksums for sums in room]),
            _added([sums.values for sums in room]),
            _added([sums.squares for sums in room]),
        )
        for room in zip(*every, strict=True)
    ]


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _channel_sums(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and sum of squares per channel of (n, H, W, C) uint8: two (C,) uint64, exact."""
    channels = block.shape[-1]
    wide = np.uint32 if len(block) <= 2**16 else np.uint64  # 2^16 * 255^2 < 2^32
    values = block.reshape(len(block), -1).astype(wide)  # (n, H * W * C)
    total = values.sum(axis=0, dtype=wide)
    squares = np.square(values, out=values).sum(axis=0, dtype=wide)
    by_channel = (
        sums.reshape(-1, channels).sum(axis=0, dtype=np.uint64) for sums in (total, squares)
    )
    return next(by_channel), next(by_channel)
