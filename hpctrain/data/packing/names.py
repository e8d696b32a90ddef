"""The names of a source, in one buffer instead of a string object each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

CODEC = "utf-8", "surrogateescape"
SLASH = ord("/")
WORD = 7  # bytes of a name that are compared at a time


class Names:
    """A growing list of names, paths with "/"; memory is their UTF-8 bytes and 8 bytes each."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.encoded = bytearray()
        self._bounds = array("q", [0])
        self.extend(names)

    def append(self, name: str) -> None:
        """Add one name."""
        self.encoded += name.encode(*CODEC)
        self._bounds.append(len(self.encoded))

    def extend(self, names: Iterable[str]) -> None:
        """Add names."""
        for name in names:
            self.append(name)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, row: int) -> str:
        return self.encoded[self._bounds[row] : self._bounds[row + 1]].decode(*CODEC)

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def bounds(self) -> np.ndarray:
        """Return a view (N + 1,) int64: name i is the bytes bounds[i] to bounds[i + 1].

        No name can be added while it exists.
        """
        return np.frombuffer(self._bounds, np.int64)

    def sort(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the order (N,) int64 of the names, folder by folder; equal names keep theirs.

        The second array (N,) bool tells which names, in this order, differ from the one before.
        Names that are equal so far are sorted by their next WORD bytes, until none is left.
        """
        order, new = np.arange(len(self)), np.zeros(len(self), bool)
        new[:1] = True
        tied, start = order.copy(), 0  # places in `order`
        while len(tied):
            rows, groups = order[tied], np.cumsum(new[tied])
            words = self._words(rows, start)
            by_word = np.lexsort((words, groups))
            order[tied], words = rows[by_word], words[by_word]
            new[tied[1:]] |= words[1:] != words[:-1]
            alone = new & np.roll(new, -1)
            tied = tied[(words % 8 == WORD) & ~alone[tied]]
            start += WORD
        return order, new

    def _words(self, rows: np.ndarray, start: int) -> np.ndarray:
        """Return WORD bytes of these names from `start` on as numbers that sort as they do.

        The lowest 3 bits are the number of bytes, less than WORD at the end of a name. "/" counts
        as 0, so that a folder's files stand before those of others whose names begin with its own.
        """
        bounds, encoded = self.bounds(), np.frombuffer(self.encoded, np.uint8)
        at = bounds[rows] + start
        left = np.clip(bounds[rows + 1] - at, 0, WORD).astype(np.uint8)
        words = np.zeros(len(rows), np.uint64)
        for number in range(WORD):
            found = encoded[np.minimum(at + number, len(encoded) - 1)]
            found[(left <= number) | (found == SLASH)] = 0
            words <<= np.uint64(8)
            words |= found
        return words << np.uint64(3) | left
