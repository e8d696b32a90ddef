"""What is compared while a pack is read: the CRC-32 of every block, before it is first used.

For packs too large to be verified before the first step: a block costs one more read, once.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from hpctrain.data.bad_rows import BadRows
from hpctrain.data.pack_format import Column
from hpctrain.errors import RunError
from hpctrain.watchdog import doing

UNSEEN, SOUND, DAMAGED = 0, 1, 2
# by split and column: the CRC-32 (blocks,) of all blocks, and the rows of a block
Sums = dict[tuple[str, str], tuple[np.ndarray, int]]
ReadInto = Callable[[list[memoryview], int], None]  # buffers, byte offset in the file


class Seals:
    """The checksums of one column, and which blocks were compared already. Thread-safe."""

    def __init__(self, name: str, column: Column, checksums: np.ndarray, block_rows: int) -> None:
        """`name` is that of the column and its split, such as "train/images"."""
        self.name, self.column = name, column
        self.block_bytes = block_rows * column.row_bytes
        self._checksums, self._block_rows = checksums, block_rows
        self._state = np.zeros(len(checksums), np.int8)
        self._buffers = threading.local()

    def broken(self, starts: np.ndarray, stops: np.ndarray, read: ReadInto) -> np.ndarray:
        """Of the pieces of the column, bytes `starts` to `stops` (n,), the damaged block that each
        lies in, -1 for none: (n,). Compares blocks that no piece touched before, read by `read`.
        """
        first, last = starts // self.block_bytes, (stops - 1) // self.block_bytes
        touched = np.unique(np.concatenate([first, last]))
        if (last - first).max(initial=0) > 1:
            spans = zip(first.tolist(), last.tolist(), strict=True)
            touched = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in spans]))
        for block in touched[self._state[touched] == UNSEEN].tolist():
            self._state[block] = SOUND if self._compare(block, read) else DAMAGED
        damaged = np.append(np.flatnonzero(self._state == DAMAGED), len(self._state))
        met = damaged[np.searchsorted(damaged, first)]  # the first damaged one from there on
        return np.where(met <= last, met, -1)

    def rows(self, block: int) -> range:
        """The rows of a block."""
        start = block * self._block_rows
        return range(start, min(self.column.rows, start + self._block_rows))

    def describe(self, block: int) -> str:
        """What to say of a damaged block."""
        rows, unit = self.rows(block), "bytes" if self.name.endswith("/bytes") else "rows"
        return f"{self.name}: {unit} {rows[0]} to {rows[-1]} (block {block}) are damaged"

    def damaged(self, read: ReadInto) -> Iterator[int]:
        """Compare all blocks that were not compared before: those that are damaged."""
        for block in range(len(self._state)):
            if self._state[block] == UNSEEN:
                doing(f"checking block {block:,}")
                self._state[block] = SOUND if self._compare(block, read) else DAMAGED
            if self._state[block] == DAMAGED:
                yield block

    def _compare(self, block: int, read: ReadInto) -> bool:
        rows, row_bytes = self.rows(block), self.column.row_bytes
        part = self._buffer()[: len(rows) * row_bytes]
        read([part], self.column.offset + rows.start * row_bytes)
        return zlib.crc32(part) == int(self._checksums[block])

    def _buffer(self) -> memoryview:
        """Memory of this thread for one block."""
        if not hasattr(self._buffers, "block"):
            self._buffers.block = memoryview(bytearray(self.block_bytes))
        return self._buffers.block


class Checks:
    """What all readers of a pack compare, and what becomes of rows that cannot be used."""

    def __init__(
        self,
        sums: Sums | None = None,
        tell: Callable[[str], None] | None = None,
        held: tuple[int, int] | None = None,
    ) -> None:
        """With `sums` blocks are compared when first read. With `tell` bad rows are left out, and
        it is told of them; without, they are errors. `held`: which bytes of the training images
        the file has, where it has not all.
        """
        self.held = held
        self.sums, self.tell = sums, tell
        self._bad: dict[str, BadRows] = {}
        self._seals: dict[str, Seals] = {}

    def bad(self, split: str) -> BadRows:
        """The bad rows of a split that were met so far, whoever met them."""
        return self._bad.setdefault(split, BadRows(self.tell))

    def seals(self, split: str, kind: str, column: Column) -> Seals | None:
        """The checksums of a column; None where they are not compared."""
        name = f"{split}/{kind}"
        if self.sums is None:
            return None
        if name not in self._seals:
            self._seals[name] = Seals(name, column, *self.sums[split, kind])
        return self._seals[name]


def compare_whole(path: str, seals: Seals, read: ReadInto) -> None:
    """RunError where a block is damaged of a column that no row can be used without."""
    for block in seals.damaged(read):
        raise RunError(f"{path}: {seals.describe(block)}; copy or pack it again")
