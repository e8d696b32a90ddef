"""Measure images: T values of each, learned by the squared error of standardized values.

A value x of a column is learned as (x - mean) / std, of all known training values of the column.
All that a user sees is in the units of the data: answers, figures, an exported network. Only the
loss, the user's own too, is that of standardized values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.data.split import Split
from hpctrain.data.statistics import ChannelStatistics
from hpctrain.errors import UsageError
from hpctrain.plan import Measured, listed_numbers
from hpctrain.report.results import answer_columns
from hpctrain.tasks.entries import EntriesTask
from hpctrain.tasks.residuals import SAMPLE, Residuals
from hpctrain.tasks.tally import Block, Tally, find_tally
from hpctrain.tasks.task import Caption
from hpctrain.text import brief, counted

#: Mean and standard deviation by column of values, (T,) each, of the known training values.
TargetScaling = tuple[tuple[float, ...], tuple[float, ...]]
MOST_VALUES = 2  # of a caption


class Restore(nn.Module):
    """Returns standardized values (n, T) in the units of the data."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        """`mean` and `std` (T,) are float64."""
        super().__init__()
        self.mean = nn.Buffer(mean)
        self.std = nn.Buffer(std)

    def forward(self, values: Tensor) -> Tensor:
        return (values.double() * self.std + self.mean).to(values.dtype)


@dataclass(frozen=True)
class Regress(EntriesTask):
    """Measure images: targets are standardized values (n, T), NaN where unknown, and so outputs."""

    scaling: TargetScaling = ((), ())
    restore: Restore | None = None  # None = values are not scaled

    output: ClassVar[str] = "values"
    has_mistakes: ClassVar[bool] = True
    worst: ClassVar[str] = "images of the largest errors"
    plotted: ClassVar[str] = "predicted values by true ones"

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], names: Sequence[str], like: Tensor, **fields: Any
    ) -> Self:
        scaling = settings["target_scaling"]
        restore = None
        if settings["target_scale"] == "std":
            restore = Restore(*(like.new_tensor(v, dtype=torch.float64) for v in scaling))
        return cls(names=tuple(names), scaling=scaling, restore=restore, **fields)

    @classmethod
    def measure(cls, settings: Mapping[str, Any], train: Split, begun: Measured | None) -> Measured:
        """Return mean and deviation of the columns, those of the first launch if it is resumed.

        Raises UsageError for a column without two different values: nothing is learned from it.
        """
        measured = super().measure(settings, train, begun)
        scaling = begun["target_scaling"] if begun else measure_columns(train)
        return {**measured, "target_scaling": scaling}

    @classmethod
    def init_note(cls, metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        before, now = (describe_units(values) for values in (metadata, settings))
        if before == now:
            return ""
        return f"its outputs, which are kept, were {before}; here they are {now}"

    @classmethod
    def describe_measured(cls, measured: Measured) -> dict[str, str]:
        mean, std = map(listed_numbers, measured["target_scaling"])
        return {**super().describe_measured(measured), "values": f"mean {mean}; std {std}"}

    @classmethod
    def check_metadata(cls, metadata: Mapping[str, Any]) -> None:
        super().check_metadata(metadata)
        scaling = metadata["target_scaling"]
        numbers = [number for column in scaling for number in column]
        lengths = [len(numbers_by_column) for numbers_by_column in scaling]
        is_number = [type(number) in (float, int) for number in numbers]
        if lengths != [len(metadata["columns"])] * 2 or not all(is_number):
            raise ValueError(f"target_scaling is {brief(scaling, 40)}")
        if metadata["target_scale"] not in ("std", "none"):
            raise ValueError(f"target_scale is {brief(metadata['target_scale'], 40)}")

    def metadata(self) -> dict[str, Any]:
        """Return mean and deviation of the columns, and whether values are scaled by them."""
        return {
            "target_scaling": self.scaling,
            "target_scale": "std" if self.restore else "none",
        }

    # Learning

    def stage(self, inputs: Tensor, targets: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return the inputs, and standardized targets (n, T) in their dtype, NaN where unknown."""
        if self.restore:
            targets = (targets.double() - self.restore.mean) / self.restore.std
        return inputs, targets.to(inputs.dtype)

    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets, reduction="none")

    # In the units of the data

    def exported(self) -> nn.Module | None:
        return self.restore

    def restored(self, values: Tensor) -> Tensor:
        """Return values (n, T) in the units of the data."""
        if self.restore is None:
            return values
        restored: Tensor = self.restore(values)
        return restored

    def in_units(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.restored(outputs), self.restored(targets)

    # Evaluating

    def predictions(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the values (n, T) in the units of the data."""
        return {"predictions": self.restored(outputs).double()}

    def tallies(self, mistakes: int = 0) -> list[Tally]:
        _, deviations = self.scaling
        return [*super().tallies(), Residuals(self.names, deviations, self.restored, mistakes)]

    def plot(self, tallies: Sequence[Tally], title: str) -> Any:
        """Return a figure of the values that the network answers, by the true ones."""
        from hpctrain.report.answer_plots import ValuePairs, plot_values  # not for training

        tally = find_tally(tallies, Residuals)
        assert tally is not None
        if len(tally.sample.rows) == SAMPLE:
            title += f", {SAMPLE:,} of them drawn"
        columns = []
        for number, (name, figures) in enumerate(zip(self.names, tally.by_column, strict=True)):
            true = tally.sample.true[:, number]
            is_known = ~np.isnan(true)
            columns.append(
                ValuePairs(
                    name=name,
                    true=true[is_known],
                    predicted=tally.sample.predicted[is_known, number],
                    mae=figures.mae,
                    r2=figures.r2,
                )
            )
        return plot_values(columns, title)

    def mistakes(self, tallies: Sequence[Tally]) -> tuple[list[Caption], int]:
        """Return captions of the images with the largest errors, the worst columns first."""
        tally = find_tally(tallies, Residuals)
        assert tally is not None
        captions = []
        for estimate in tally.worst:
            true = np.array(estimate.true)
            predicted = np.array(estimate.predicted)
            errors = tally.relative_errors(true, predicted)
            columns = np.argsort(-errors, kind="stable").tolist()
            lines = self.value_lines(predicted, true, columns)
            captions.append(Caption(estimate.row, lines, is_wrong=False))
        return captions, len(captions)

    # Answering

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the values (n, T) in the units of the data."""
        return self.restored(outputs).float()

    def columns(self) -> tuple[str, ...]:
        return answer_columns(self.names)

    def cells(self, answer: np.ndarray) -> list[str]:
        return [str(value) for value in answer]

    def target_columns(self) -> tuple[str, ...]:
        return tuple(f"true {name}" for name in self.names)

    def target_cells(self, target: Any) -> list[str]:
        """Return the stored values (T,), "" where they are unknown."""
        return ["" if np.isnan(value) else str(value) for value in target]

    def captions(self, block: Block, answers: np.ndarray, chosen: np.ndarray) -> list[Caption]:
        """Return the values that are answered, and the true ones, if they are known."""
        captions = []
        for number in np.flatnonzero(chosen).tolist():
            true = None if block.targets is None else block.targets[number]
            lines = self.value_lines(answers[number], true, [*range(len(self.names))])
            captions.append(Caption(int(block.rows[number]), lines, is_wrong=False))
        return captions

    def value_lines(
        self, answer: np.ndarray, true: np.ndarray | None, columns: Sequence[int]
    ) -> tuple[str, ...]:
        """Return lines for the first of these columns of values (T,), at most `MOST_VALUES`."""
        lines = []
        for number in columns[:MOST_VALUES]:
            lines.append(f"{self.names[number]}: {answer[number]:.4g}")
            if true is not None:
                is_known = not np.isnan(true[number])
                lines.append(f"true: {true[number]:.4g}" if is_known else "true: unknown")
        others = len(columns) - MOST_VALUES
        if others > 0:
            lines.append(f"and {counted(others, 'other')}")
        return tuple(lines)


def measure_columns(train: Split) -> TargetScaling:
    """Return mean and standard deviation of the known training values of each column.

    Raises UsageError for a column without two different values.
    """
    path = train.pack.path
    names = train.pack.targets.names
    statistics = ChannelStatistics(len(names), nodata=math.nan)
    for values in train.read_all_targets():
        statistics.add(values)
    images = counted(len(train), "training image")
    train.pack.targets.check_known(path, np.array(statistics.count), images)
    for name, low, high in zip(names, statistics.low, statistics.high, strict=True):
        if low == high:
            raise UsageError(
                f"{path}: {name} is {low:g} in all {images} that have it, without deviation:"
                " leave it out"
            )
    return statistics.mean_and_std()


def describe_units(settings: Mapping[str, Any]) -> str:
    """Return the units of a network's outputs in words."""
    if settings["target_scale"] == "none":
        return "in the units of the data"
    mean, std = map(listed_numbers, settings["target_scaling"])
    return f"standardized by mean {mean}; std {std}"
