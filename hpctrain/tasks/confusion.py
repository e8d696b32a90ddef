"""Counts of an evaluation by true and predicted class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hpctrain.tasks.tally import Block, Tally
from hpctrain.watchdog import waiting

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.parallel.mpi import Comm

DENSE = 2048  # most classes of a confusion matrix: 32 MiB
PRINTED = 12  # most classes of a confusion matrix that fits a terminal
FREQUENT = 10  # cells of a larger one that are printed


class Confusion(Tally):
    """Counts of samples by true and by predicted class, with accuracy and balanced accuracy.

    `counts` (3 + K, K) int64 is what `by_class` returns, and below it the confusion matrix, true
    classes by row; (3, K) with more than `DENSE` classes.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes
        count = len(classes)
        rows = 3 + count if count <= DENSE else 3
        self.counts = np.zeros((rows, count), np.int64)

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"predicted": outputs.argmax(1)}

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        assert block.targets is not None
        self.count(block.targets, measured["predicted"])

    def count(self, true: np.ndarray, predicted: np.ndarray) -> None:
        """Count samples of these true and predicted classes, (n,) integers each."""
        for row, classes in enumerate((true, predicted, true[true == predicted])):
            np.add.at(self.counts[row], classes, 1)
        if self.matrix is not None:
            np.add.at(self.matrix, (true, predicted), 1)

    def merge(self, parts: Sequence[None], comm: Comm) -> None:
        from hpctrain.parallel.mpi import MPI

        with waiting():
            comm.Allreduce(MPI.IN_PLACE, self.counts)

    @property
    def matrix(self) -> np.ndarray | None:
        """The confusion matrix; None if there are too many classes."""
        return self.counts[3:] if len(self.counts) > 3 else None

    def by_class(self) -> np.ndarray:
        """Return samples by true class, samples by predicted class, correct ones: (3, K) int64."""
        return self.counts[:3]

    def figures(self) -> dict[str, float | None]:
        """Return the accuracy, the mean recall of the classes that have samples, and the mean F1.

        The mean F1 is that of all classes that are true or predicted for a sample.
        """
        true, predicted, right = self.by_class()
        recalls = right[true > 0] / true[true > 0]
        occurs = true + predicted > 0
        f1 = 2 * right[occurs] / (true + predicted)[occurs]
        return {
            "accuracy": float(right.sum()) / int(true.sum()),
            "balanced_accuracy": float(recalls.mean()),
            "f1_macro": float(f1.mean()),
        }

    def as_json(self) -> dict[str, Any]:
        """Return "confusion", the matrix; if there is none, also "by_class", its sums."""
        if self.matrix is not None:
            return {"confusion": self.matrix.tolist()}
        by_class = zip(("true", "predicted", "correct"), self.counts.tolist(), strict=True)
        return {"confusion": None, "by_class": dict(by_class)}

    def tables(self) -> Iterator[Table]:
        """Yield the table by class, and the confusion matrix or, if large, its worst cells."""
        from rich.table import Table

        table = Table("class", title="By class")
        for name in ("images", "recall", "precision", "F1"):
            table.add_column(name, justify="right")
        for name, (true, predicted, right) in zip(self._classes, self.by_class().T, strict=True):
            table.add_row(
                name,
                f"{true:,}",
                quotient(right, true),
                quotient(right, predicted),
                quotient(2 * right, true + predicted),
            )
        yield table
        if self.matrix is None:
            return
        is_small = len(self._classes) <= PRINTED
        yield self._whole(self.matrix) if is_small else self._frequent(self.matrix)

    def _whole(self, matrix: np.ndarray) -> Table:
        from rich.table import Table

        from hpctrain.report.console import styled

        table = Table("", title="Confusion matrix: true class by row, predicted class by column")
        for name in self._classes:
            table.add_column(name, justify="right")
        for k, (name, row) in enumerate(zip(self._classes, matrix.tolist(), strict=True)):
            cells = [str(count or "·") for count in row]
            table.add_row(name, *cells[:k], styled(str(row[k]), "bold"), *cells[k + 1 :])
        return table

    def _frequent(self, matrix: np.ndarray) -> Table:
        from rich.table import Table

        title = "Most frequent mistakes (the whole matrix: --output FILE.json)"
        table = Table("true class", "predicted", title=title)
        table.add_column("images", justify="right")
        classes = self._classes
        wrong = matrix * ~np.eye(len(classes), dtype=bool)
        for cell in np.argsort(-wrong, axis=None, kind="stable")[:FREQUENT].tolist():
            i, j = divmod(cell, len(classes))
            if wrong[i, j]:
                table.add_row(classes[i], classes[j], f"{wrong[i, j]:,}")
        return table


def quotient(part: int, total: int) -> str:
    """Return a quotient as the cell of a table."""
    return f"{part / total:.4f}" if total else "-"
