"""Bytes at offsets of a file, and what is checked while they are read: checksums of blocks, and
samples that cannot be used.

Bytes are read by preadv(2). It needs no HDF5, holds no lock of the library and no lock of the
interpreter, costs 1 to 2 microseconds a sample instead of 30, and turns a file that was cut short
into an error instead of a signal.

A pack too large to be verified before the first step is verified as it is read: the CRC-32 of a
block is compared before the block is first used. That costs one more read of each block.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.data.pack_format import StoredColumn
from hpctrain.errors import RunError, UsageError
from hpctrain.watchdog import doing

if TYPE_CHECKING:
    from hpctrain.data.split import Split

NOT_FINITE = "holds NaN or infinite values: write finite ones, or take it out of the file"
IOV_MAX = 1024  # buffers that one preadv(2) takes
READ_TOGETHER = 64  # samples, to look for such values
UNKNOWN, SOUND, CORRUPT = 0, 1, 2
# by split and column: the CRC-32 (blocks,) of all blocks, and the rows of a block
Sums = dict[tuple[str, str], tuple[np.ndarray, int]]
ReadInto = Callable[[list[memoryview], int], None]  # buffers, byte offset in the file


def open_file(path: str, size: int | None = None) -> int:
    """A descriptor to read the file. UsageError where it cannot be opened, or has not the `size`
    in bytes that is given.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from None
    there = os.fstat(descriptor).st_size
    if size not in (None, there):
        os.close(descriptor)
        raise UsageError(
            f"{path} has {there:,} bytes here, but {size:,} when it was checked: give every rank"
            " the same finished file"
        )
    return descriptor


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array, to be filled."""
    return array.reshape(-1).view(np.uint8).data


def read_exactly(path: str, descriptor: int, buffers: list[memoryview], offset: int) -> None:
    """Fill all buffers from consecutive bytes of the file, or raise RunError."""
    while buffers:
        try:
            count = os.preadv(descriptor, buffers[:IOV_MAX], offset)
        except OSError as error:
            raise RunError(f"{path}: reading at byte {offset:,} failed: {error.strerror}") from None
        if count == 0 and any(len(buffer) for buffer in buffers):
            missing = sum(len(buffer) for buffer in buffers)
            raise RunError(
                f"{path} ends at byte {offset:,}, {missing:,} bytes before the end of the samples"
                " asked for: it was cut short while in use"
            )
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][count:]


def gather_rows(
    path: str, descriptor: int, offset: int, indices: np.ndarray, out: memoryview
) -> None:
    """Rows `indices` (n,) of the array that begins at byte `offset`, into n equal parts of `out`.

    In the order of the file, consecutive rows by one preadv, scattered where their places in
    `out` are apart. Raises RunError.
    """
    if len(indices) == 0:
        return
    row_bytes = len(out) // len(indices)
    order = np.argsort(indices, kind="stable")
    rows = indices[order]
    places, starts = order.tolist(), (offset + rows * row_bytes).tolist()
    cuts = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for start, stop in zip([0, *cuts], [*cuts, len(places)], strict=True):
        first, count, at = places[start], stop - start, starts[start]
        if count == 1 or places[start:stop] == list(range(first, first + count)):
            part = out[first * row_bytes : (first + count) * row_bytes]
            try:
                if os.preadv(descriptor, (part,), at) == len(part):
                    continue  # nearly always
            except OSError:
                pass  # read_exactly says why
            buffers = [part]
        else:
            buffers = [out[i * row_bytes : (i + 1) * row_bytes] for i in places[start:stop]]
        read_exactly(path, descriptor, buffers, at)


class BadSamples:
    """Samples of a split that cannot be used: an error, or skipped. Thread-safe.

    A sample is bad by what the file holds, whoever reads it and when: skipping it keeps results
    independent of the number of ranks.
    """

    def __init__(self, warn: Callable[[str], None] | None = None) -> None:
        """`warn` is called for what is skipped; None: a bad sample is an error."""
        self._warn, self._lock = warn, threading.Lock()
        self._indices: set[int] = set()
        self._warned: set[str] = set()

    def add(self, indices: Iterable[int], text: str, cause: str = "") -> None:
        """Skip these samples, for the reason in `text`. RunError where none may be skipped. A
        `cause` that many samples share is warned of once.
        """
        if self._warn is None:
            raise RunError(
                f"{text}: 'hpctrain pack --check' finds what else is corrupt, train --skip-bad"
                " skips such samples"
            )
        with self._lock:
            new = set(indices) - self._indices
            self._indices |= new
            warn = bool(new) and (cause or text) not in self._warned
            self._warned.add(cause or text)
        if warn:
            self._warn(f"{cause or text}: skipped")

    def usable(self, indices: np.ndarray) -> np.ndarray | None:
        """Which of the samples `indices` (n,) can be used, (n,) bool; None = all."""
        if not self._indices:
            return None
        with self._lock:
            bad = np.isin(indices, list(self._indices))
        return ~bad if bad.any() else None


class BlockChecksums:
    """The checksums of one column, and which blocks were compared already. Thread-safe."""

    def __init__(self, name: str, column: StoredColumn, sums: np.ndarray, block_rows: int) -> None:
        """`name` is that of the column and its split, such as "train/images"."""
        self.name, self.column = name, column
        self.block_bytes = block_rows * column.row_bytes
        self._sums, self._block_rows = sums, block_rows
        self._state = np.full(len(sums), UNKNOWN, np.int8)
        self._buffers = threading.local()

    def find_corrupt(self, starts: np.ndarray, stops: np.ndarray, read: ReadInto) -> np.ndarray:
        """The corrupt block that each of the byte ranges `starts` to `stops` (n,) of the column
        touches, -1 for none: (n,). Blocks are compared, read by `read`, when first touched.
        """
        first, last = starts // self.block_bytes, (stops - 1) // self.block_bytes
        touched = np.unique(np.concatenate([first, last]))
        if (last - first).max(initial=0) > 1:
            spans = zip(first.tolist(), last.tolist(), strict=True)
            touched = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in spans]))
        for block in touched[self._state[touched] == UNKNOWN].tolist():
            self._compare(block, read)
        corrupt = np.append(np.flatnonzero(self._state == CORRUPT), len(self._state))
        found = corrupt[np.searchsorted(corrupt, first)]  # the first corrupt one from there on
        return np.where(found <= last, found, -1)

    def corrupt_blocks(self, read: ReadInto) -> Iterator[int]:
        """Compare all blocks that were not compared before: those that are corrupt."""
        for block in range(len(self._state)):
            if self._state[block] == UNKNOWN:
                doing(f"checking block {block:,}")
                self._compare(block, read)
            if self._state[block] == CORRUPT:
                yield block

    def describe(self, block: int) -> str:
        """A corrupt block, for a message."""
        rows, unit = self._rows(block), "bytes" if self.name.endswith("/bytes") else "rows"
        return f"{self.name}: {unit} {rows[0]} to {rows[-1]} (block {block}) are corrupt"

    def _rows(self, block: int) -> range:
        start = block * self._block_rows
        return range(start, min(self.column.rows, start + self._block_rows))

    def _compare(self, block: int, read: ReadInto) -> None:
        if not hasattr(self._buffers, "block"):
            self._buffers.block = memoryview(bytearray(self.block_bytes))
        rows, row_bytes = self._rows(block), self.column.row_bytes
        part = self._buffers.block[: len(rows) * row_bytes]
        read([part], self.column.offset + rows.start * row_bytes)
        sound = zlib.crc32(part) == int(self._sums[block])
        self._state[block] = SOUND if sound else CORRUPT


class Checks:
    """What all readers of a pack compare, and what becomes of bad samples."""

    def __init__(
        self,
        sums: Sums | None = None,
        warn: Callable[[str], None] | None = None,
        staged: tuple[int, int] | None = None,
    ) -> None:
        """With `sums` blocks are compared when first read. With `warn` bad samples are skipped, and
        it is called for them; without, they are errors. `staged`: which bytes of the training
        images the file has, where it is an incomplete copy.
        """
        self.sums, self.warn, self.staged = sums, warn, staged
        self._bad: dict[str, BadSamples] = {}
        self._checksums: dict[str, BlockChecksums] = {}

    def bad_samples(self, split: str) -> BadSamples:
        """The bad samples of a split that were met so far, whoever met them."""
        return self._bad.setdefault(split, BadSamples(self.warn))

    def checksums(self, split: str, kind: str, column: StoredColumn) -> BlockChecksums | None:
        """The checksums of a column; None where they are not compared."""
        name = f"{split}/{kind}"
        if self.sums is None:
            return None
        if name not in self._checksums:
            self._checksums[name] = BlockChecksums(name, column, *self.sums[split, kind])
        return self._checksums[name]


def find_nonfinite(
    split: Split, indices: np.ndarray, images: np.ndarray | None = None
) -> dict[int, str]:
    """Those of the samples `indices` (n,) that hold NaN or infinite values, as an external file
    may, each with a message. Their `images` (n, H, W, C) are read where they are not given.
    """
    found: dict[int, str] = {}
    for first in range(0, len(indices) if split.dtype.kind == "f" else 0, READ_TOGETHER):
        part = indices[first : first + READ_TOGETHER]
        if images is None:
            values = split.gather(part, np.empty((len(part), *split.image_shape), split.dtype))
        else:
            values = images[first : first + READ_TOGETHER]
        finite = np.isfinite(values).reshape(len(part), -1).all(axis=1)
        found |= {i: f"{split.describe(i)} {NOT_FINITE}" for i in part[~finite].tolist()}
    return found


def describe_first(found: Iterable[Mapping[int, str]]) -> str | None:
    """One sentence of what all ranks found with `find_nonfinite`; None where that is nothing."""
    texts = {index: text for each in found for index, text in each.items()}
    if not texts:
        return None
    return texts[min(texts)] + (f" ({len(texts)} such images)" if len(texts) > 1 else "")
