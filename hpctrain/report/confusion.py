"""A sparse confusion matrix, which holds nonzero cells only.

With 21,000 classes a dense matrix takes 3.5 GB. After n samples at most n cells are nonzero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PENDING = 1 << 20  # predictions that are collected before they are counted
WRITTEN_WHOLE = 1024  # up to this many classes, JSON files hold the rows of the dense matrix
COORDINATES = ("true", "predicted", "count")  # lists in JSON files with more classes


class Confusion:
    """Counts of samples by true and predicted class: a sparse matrix (K, K)."""

    def __init__(self, classes: int, cells: np.ndarray | None = None) -> None:
        """`cells` (2, m) int64 are indices, K * true class + predicted class, and counts.

        Counts of equal indices are added.
        """
        self.classes = classes
        self._cells = np.empty((2, 0), np.int64) if cells is None else _merged(cells)
        self._pending: list[np.ndarray] = []
        self._waiting = 0  # predictions in `_pending`

    def add(self, true: np.ndarray, predicted: np.ndarray) -> None:
        """Count samples of these true and predicted classes, (n,) integers each.

        Raises ValueError for a class that is not 0 ... K-1.
        """
        self._pending.append(np.ravel_multi_index((true, predicted), (self.classes,) * 2))
        self._waiting += len(true)
        if self._waiting >= PENDING:
            self._count()

    @property
    def cells(self) -> np.ndarray:
        """The nonzero cells, (2, m) int64: ascending indices, and counts."""
        self._count()
        return self._cells

    def diagonal(self) -> np.ndarray:
        """Return the number of correct predictions by class, (K,) int64."""
        true, predicted, count = self.coordinates()
        return self._sums(true[true == predicted], count[true == predicted])

    def by_true(self) -> np.ndarray:
        """Return the number of samples by true class, (K,) int64."""
        true, _, count = self.coordinates()
        return self._sums(true, count)

    def by_predicted(self) -> np.ndarray:
        """Return the number of samples by predicted class, (K,) int64."""
        _, predicted, count = self.coordinates()
        return self._sums(predicted, count)

    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return true class, predicted class and count of the nonzero cells, (m,) int64 each."""
        numbers, counts = self.cells
        return numbers // self.classes, numbers % self.classes, counts

    def dense(self) -> np.ndarray:
        """Return a dense copy of the matrix, (K, K) int64: 8 K^2 bytes."""
        true, predicted, count = self.coordinates()
        matrix = np.zeros((self.classes, self.classes), np.int64)
        matrix[true, predicted] = count
        return matrix

    def as_json(self) -> list[list[int]] | dict[str, list[int]]:
        """Return the rows of the dense matrix, or for many classes the lists of `coordinates`."""
        if self.classes <= WRITTEN_WHOLE:
            rows: list[list[int]] = self.dense().tolist()
            return rows
        lists = [each.tolist() for each in self.coordinates()]
        return dict(zip(COORDINATES, lists, strict=True))

    def _count(self) -> None:
        if self._pending:
            numbers = np.concatenate(self._pending)
            found = np.stack([numbers, np.ones_like(numbers)])
            self._cells, self._pending = _merged(np.hstack([self._cells, found])), []
            self._waiting = 0

    def _sums(self, classes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        sums = np.zeros(self.classes, np.int64)
        np.add.at(sums, classes, counts)
        return sums


def _merged(cells: np.ndarray) -> np.ndarray:
    """Return the cells (2, m) with the counts of equal indices added."""
    numbers, places = np.unique(cells[0], return_inverse=True)
    counts = np.zeros_like(numbers)
    np.add.at(counts, places, cells[1])
    return np.stack([numbers, counts])


def from_json(found: Any, classes: int) -> Confusion:
    """Return the matrix of `classes` classes that `Confusion.as_json` returned as `found`.

    Raises ValueError, KeyError or TypeError if it is no such matrix.
    """
    if isinstance(found, dict):
        true, predicted, counts = (np.array(found[name], np.int64) for name in COORDINATES)
    else:
        matrix = np.array(found, np.int64)
        (true, predicted), counts = np.nonzero(matrix), matrix[np.nonzero(matrix)]
    numbers = np.ravel_multi_index((true, predicted), (classes,) * 2)
    return Confusion(classes, np.stack([numbers, counts]))
