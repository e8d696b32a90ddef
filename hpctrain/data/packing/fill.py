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

from hpctrain.data.packing.columns import Column
from hpctrain.data.packing.pages import cut_pages, outside, overlaps
from hpctrain.data.packing.team import Team
from hpctrain.files import open_itself, write_at

NOTHING = np.zeros(1, np.uint64)


class Sums(NamedTuple):
    """What is known of rows once they are written; the checksums alone where nothing is summed."""

    checksums: np.ndarray  # (blocks,) uint32, CRC-32 of each block
    values: np.ndarray  # (C,) uint64, sum of the pixels of each channel
    squares: np.ndarray  # (C,) uint64, sum of their squares


def fill(
    path: str,
    columns: list[Column],
    offsets: list[int],
    team: Team,
    jobs: int,
    advance: Callable[[int], None],
) -> list[Sums]:
    """Write this process's share of every column, which begins at the byte of the file that
    `offsets` says, and make the checksums of its blocks."""
    descriptor = open_itself(path, os.O_WRONLY)
    try:
        with ThreadPoolExecutor(jobs) as threads:
            sums = [
                _fill_column(descriptor, column, offset, team, threads, advance)
                for column, offset in zip(columns, offsets, strict=True)
            ]
        os.fsync(descriptor)  # the root syncs what its own host has written, no more
    finally:
        os.close(descriptor)
    return sums


def _fill_column(
    descriptor: int,
    column: Column,
    offset: int,
    team: Team,
    threads: ThreadPoolExecutor,
    advance: Callable[[int], None],
) -> Sums:
    rows, block_rows, row_bytes = column.shape[0], column.block_rows, column.row_bytes
    length, block_bytes = rows * row_bytes, block_rows * row_bytes
    blocks, spans = cut_pages(offset, length, block_bytes, team.size)[team.rank]

    def store(start: int, stop: int) -> np.ndarray:
        """Write those bytes of rows `start` to `stop` that are this process's."""
        values = column.fetch(start, stop)
        data, first = values.data.cast("B"), start * row_bytes
        for low, high in overlaps(spans, first, stop * row_bytes):
            write_at(descriptor, data[low - first : high - first], offset + low)
        return values

    def store_block(number: int) -> tuple[int, np.ndarray, np.ndarray]:
        start = number * block_rows
        stop = min(rows, start + block_rows)
        block = store(start, stop)
        if column.images:
            advance(column.images(start, stop))
        sums = _channel_sums(block) if column.summed else (NOTHING, NOTHING)
        return zlib.crc32(block.data), *sums

    done = list(threads.map(store_block, blocks))
    for low, high in outside(spans, blocks.start * block_bytes, blocks.stop * block_bytes):
        store(low // row_bytes, -(-high // row_bytes))
    checksums = np.array([checksum for checksum, _, _ in done], "<u4")
    values = _added([values for _, values, _ in done])
    return Sums(checksums, values, _added([squares for _, _, squares in done]))


def _added(sums: list[np.ndarray]) -> np.ndarray:
    """Their sum, NOTHING for none."""
    return functools.reduce(np.add, sums, NOTHING)


def total(every: list[list[Sums]]) -> list[Sums]:
    """What all processes, in their order, know of their blocks, for each column."""
    return [
        Sums(
            np.concatenate([sums.checksums for sums in column]),
            _added([sums.values for sums in column]),
            _added([sums.squares for sums in column]),
        )
        for column in zip(*every, strict=True)
    ]


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
