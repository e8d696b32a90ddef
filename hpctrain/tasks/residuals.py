"""Errors of predicted values, by column: MAE, RMSE, R2, and MAE as a share of the deviation.

Sums of each block are kept and added by math.fsum, so that no figure depends on the ranks. The sum
of squares around the mean is that within blocks and that between them, which cancels nothing:
figures are those of scikit-learn to rounding, but R2 of values without a deviation is undefined.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from hpctrain.tasks.tally import Block, Tally
from hpctrain.text import short_number

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.parallel.mpi import Comm

#: A column's sum of squares around its mean, as a share of the squared mean, at most that of equal
#: values by rounding; different values of float32 have more than 1e-15.
ROUNDING = 1e-20
SAMPLE = 2000  # pairs of true and predicted values that are kept, at most
PRINTED = 40  # most columns of a table
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio


class Estimate(NamedTuple):
    """The values that the network predicted for one image."""

    row: int  # in the split
    true: tuple[float, ...]  # (T,); NaN: unknown
    predicted: tuple[float, ...]  # (T,)
    error: float  # mean of the known columns' absolute errors in deviations; NaN counts as infinite


class Pairs(NamedTuple):
    """True and predicted values of some rows."""

    rows: np.ndarray  # (n,) int64
    true: np.ndarray  # (n, T); NaN: unknown
    predicted: np.ndarray  # (n, T)

    def take(self, chosen: np.ndarray) -> Pairs:
        """Return the `chosen` ones, by their positions."""
        return Pairs(*(values[chosen] for values in self))


class ColumnFigures(NamedTuple):
    """The figures of one column, in its unit; NaN: undefined, or a prediction is NaN."""

    known: int
    mae: float = math.nan
    rmse: float = math.nan
    r2: float = math.nan
    relative_mae: float = math.nan  # MAE divided by the deviation of the training values
    is_constant: bool = True  # whether all values that are known are equal


class Residuals(Tally):
    """Errors of values (n, T) in their own units; targets of NaN are unknown.

    It also holds the worst predictions, and values to plot against each other: those of up to
    `SAMPLE` rows, which are spread evenly over the split and the same on any ranks.
    """

    def __init__(
        self,
        columns: Sequence[str],
        deviations: Sequence[float],
        predict: Callable[[Tensor], Tensor],
        most: int = 0,
    ) -> None:
        """`predict` makes values in their units of outputs.

        `deviations` are those of the training values by column; the `most` worst rows are kept.
        """
        self._columns = columns
        self._deviations = np.array(deviations, np.float64)
        self._predict = predict
        self._most = most
        self._blocks: list[np.ndarray] = []  # (5, T) each, see `sum_errors`
        self.worst: list[Estimate] = []  # the worst first; of equal ones the first rows
        self.sample = Pairs(
            rows=np.empty(0, np.int64),
            true=np.empty((0, len(columns))),
            predicted=np.empty((0, len(columns))),
        )
        self.by_column: list[ColumnFigures] = []  # once it is merged

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"predicted": self._predict(outputs).double()}

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        assert block.targets is not None
        true = block.targets.astype(np.float64)
        pairs = Pairs(block.rows, true, measured["predicted"])
        self._blocks.append(sum_errors(pairs.true, pairs.predicted))
        self._keep_worst(self._estimates(pairs))
        self._keep_sample([self.sample, pairs])

    def part(self) -> tuple[list[np.ndarray], list[Estimate], Pairs]:
        return self._blocks, self.worst, self.sample

    def merge(self, parts: Sequence[Any], comm: Comm) -> None:
        blocks, estimates, samples = zip(*parts, strict=True)
        self._blocks = [sums for of_rank in blocks for sums in of_rank]
        self.worst = []
        self._keep_worst([estimate for of_rank in estimates for estimate in of_rank])
        self._keep_sample(samples)
        by_column = np.stack(self._blocks, axis=2).swapaxes(0, 1)  # (T, 5, blocks)
        self.by_column = [
            measure_column(sums, deviation)
            for sums, deviation in zip(by_column, self._deviations.tolist(), strict=True)
        ]

    def relative_errors(self, true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Return absolute errors (n, T) in deviations: 0 where unknown, infinite for NaN."""
        errors = np.abs(predicted - true) / self._deviations
        is_known = ~np.isnan(true)
        errors[is_known & np.isnan(errors)] = math.inf
        return np.where(is_known, errors, 0)

    def _estimates(self, pairs: Pairs) -> list[Estimate]:
        """Return the worst rows of a block."""
        if not self._most:
            return []
        is_known = ~np.isnan(pairs.true)
        relative = self.relative_errors(pairs.true, pairs.predicted)
        errors = relative.sum(1) / np.maximum(is_known.sum(1), 1)
        chosen = np.argsort(-errors, kind="stable")[: self._most]
        chosen = chosen[is_known[chosen].any(1)]
        columns = [values.tolist() for values in pairs.take(chosen)]
        return [
            Estimate(row, tuple(true), tuple(predicted), error)
            for row, true, predicted, error in zip(*columns, errors[chosen].tolist(), strict=True)
        ]

    def _keep_worst(self, estimates: list[Estimate]) -> None:
        def order(estimate: Estimate) -> tuple[float, int]:
            return -estimate.error, estimate.row

        self.worst = heapq.nsmallest(self._most, [*self.worst, *estimates], key=order)

    def _keep_sample(self, parts: Sequence[Pairs]) -> None:
        """Keep the rows with the smallest multiples of the golden ratio, modulo 1, in their order.

        Of consecutive rows these are spread evenly.
        """
        pairs = Pairs(*map(np.concatenate, zip(*parts, strict=True)))
        places = np.argsort(pairs.rows.astype(np.uint64) * GOLDEN)[:SAMPLE]
        self.sample = pairs.take(places[np.argsort(pairs.rows[places])])

    # What follows from it

    def figures(self) -> dict[str, float | None]:
        """Return the mean relative MAE and the mean R2, of a single column also MAE and RMSE.

        Columns without known values have no part in the means, nor those without a deviation in R2.
        """
        measured = [column for column in self.by_column if column.known]
        figures: dict[str, float | None] = {
            "relative_mae": mean(column.relative_mae for column in measured),
            "r2": mean(column.r2 for column in measured if not column.is_constant),
        }
        if len(self.by_column) == 1:
            figures["mae"] = self.by_column[0].mae
            figures["rmse"] = self.by_column[0].rmse
        return figures

    def as_json(self) -> dict[str, Any]:
        """Return "per_column", the figures of each column."""
        rows = []
        for name, column in zip(self._columns, self.by_column, strict=True):
            rows.append(
                {
                    "column": name,
                    "known": column.known,
                    "mae": column.mae,
                    "rmse": column.rmse,
                    "r2": column.r2,
                    "relative_mae": column.relative_mae,
                }
            )
        return {"per_column": rows}

    def tables(self) -> Iterator[Table]:
        """Yield a table of the columns, of many those with the largest relative errors."""
        from rich.table import Table

        title = "By column"
        shown = [*range(len(self._columns))]
        if len(shown) > PRINTED:
            title = f"The {PRINTED} columns of the largest relative MAE (all: --output FILE.json)"
            errors = np.array([column.relative_mae for column in self.by_column])
            shown = (-errors).argsort(kind="stable")[:PRINTED].tolist()  # NaN last
        table = Table("column", title=title)
        for name in ("known", "MAE", "RMSE", "R2", "MAE / deviation"):
            table.add_column(name, justify="right")
        for number in shown:
            column = self.by_column[number]
            table.add_row(
                self._columns[number],
                f"{column.known:,}",
                short_number(column.mae),
                short_number(column.rmse),
                short_number(column.r2),
                short_number(column.relative_mae),
            )
        yield table


def sum_errors(true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return sums over the known values of a block by column, (5, T) float64.

    Their number, the values, their squares around their mean, absolute and squared errors.
    """
    is_known = ~np.isnan(true)
    number = is_known.sum(0)
    values = np.where(is_known, true, 0)
    centered = values - values.sum(0) / np.maximum(number, 1)
    errors = np.where(is_known, predicted - true, 0)
    return np.stack(
        [
            number,
            values.sum(0),
            np.where(is_known, centered**2, 0).sum(0),
            np.abs(errors).sum(0),
            (errors**2).sum(0),
        ]
    )


def measure_column(sums: np.ndarray, deviation: float) -> ColumnFigures:
    """Return the figures of a column by the sums of its blocks (5, n), see `sum_errors`."""
    numbers, values, squares, errors, squared_errors = sums
    count = int(numbers.sum())
    if not count:
        return ColumnFigures(known=0)
    mean_value = math.fsum(values) / count
    distances = values / np.maximum(numbers, 1) - mean_value
    total_squares = math.fsum([*squares, *(numbers * distances**2)])
    total_errors = math.fsum(squared_errors)
    mae = math.fsum(errors) / count
    is_constant = total_squares <= ROUNDING * mean_value**2
    r2 = math.nan
    if not is_constant:
        r2 = 1 - total_errors / total_squares
    return ColumnFigures(
        known=count,
        mae=mae,
        rmse=math.sqrt(total_errors / count),
        r2=r2,
        relative_mae=mae / deviation,
        is_constant=is_constant,
    )


def mean(values: Iterable[float]) -> float:
    """Return the mean of figures; NaN without any."""
    numbers = [*values]
    if not numbers:
        return math.nan
    return math.fsum(numbers) / len(numbers)
