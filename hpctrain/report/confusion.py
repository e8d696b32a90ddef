"""A confusion matrix that holds only what was counted.

With 21,000 classes a whole matrix takes 3.5 GB. A test of n samples counts at most n of its cells.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PENDING = 1 << 20  # answers that are kept before they are counted
WRITTEN_WHOLE = 1024  # classes of the largest matrix that JSON files hold as rows
COORDINATES = ("true", "predicted", "count")  # of a larger one


class Confusion:
    """Counts of samples by true and predicted class: a sparse matrix (K, K)."""

    def __init__(self, classes: int, cells: np.ndarray | None = None) -> None:
        """`cells` (2, m) int64 are numbers of cells, K * true class + predicted class, and counts.

        A number may occur several times: its counts are added.
        """
        self.classes = classes
        self._cells = np.empty((2, 0), np.int64) if cells is None else _merged(cells)
        self._pending: list[np.ndarray] = []
        self._waiting = 0  # answers there

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
        """The cells that are not 0, (2, m) int64: their ascending numbers, and their counts."""
        self._count()
        return self._cells

    def diagonal(self) -> np.ndarray:
        """Return the number of right answers by class, (K,) int64."""
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
        """Return true class, predicted class and count of all cells that are not 0, (m,) each."""
        numbers, counts = self.cells
        return numbers // self.classes, numbers % self.classes, counts

    def dense(self) -> np.ndarray:
        """Return the whole matrix, (K, K) int64, in memory of its own: 8 K^2 bytes."""
        true, predicted, count = self.coordinates()
        matrix = np.zeros((self.classes, self.classes), np.int64)
        matrix[true, predicted] = count
        return matrix

    def as_json(self) -> list[list[int]] | dict[str, list[int]]:
        """Return the rows of the matrix, or for many classes the lists of `coordinates`."""
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
    """Add the counts of cells (2, m) of equal number."""
    numbers, places = np.unique(cells[0], return_inverse=True)
    counts = np.zeros_like(numbers)
    np.add.at(counts, places, cells[1])
    return np.stack([numbers, counts])


def from_json(found: Any, classes: int) -> Confusion:
    """Return what `Confusion.as_json` wrote. Raises ValueError, KeyError, TypeError, OverflowError.

    Anything else than counts of `classes` classes is refused.
    """
    if isinstance(found, dict):
        true, predicted, counts = (np.array(found[name], np.int64) for name in COORDINATES)
        if not true.shape == predicted.shape == counts.shape == (len(true),):
            raise ValueError("lists of cells of different lengths")
    else:
        matrix = np.array(found, np.int64)
        if matrix.shape != (classes, classes):
            raise ValueError(f"{matrix.shape} counts of {classes} classes")
        (true, predicted), counts = np.nonzero(matrix), matrix[np.nonzero(matrix)]
    low, high = min(true.min(initial=0), predicted.min(initial=0)), classes - 1
    if low < 0 or max(true.max(initial=0), predicted.max(initial=0)) > high:
        raise ValueError(f"cells beyond the {classes} classes")
    if counts.min(initial=0) < 0:
        raise ValueError("counts below 0")
    return Confusion(classes, np.stack([true * classes + predicted, counts]))
