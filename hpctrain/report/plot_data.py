"""What the record of a run has to show as curves: loss and accuracy over its epochs.

Epochs count on from 0, so that the third epoch lies between 2 and 3. Training is shown by epoch,
each mean at the epoch's end; where fewer than two epochs are done, by step. What is not a finite
number in the record is NaN here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.heartbeats import FOLDER as HEARTBEATS
from hpctrain.heartbeats import cause_if_ended
from hpctrain.report.jsonlines import read_records

MOST_POINTS = 400  # of a line by step; more are averaged
UNFINISHED = "not finished"

Record = dict[str, Any]


@dataclass(frozen=True)
class Points:
    """One curve: values `y` at epochs `x`, both (n,) float64; NaN where there is no number."""

    x: np.ndarray
    y: np.ndarray

    @property
    def shown(self) -> bool:
        """Whether any value can be drawn."""
        return bool(np.isfinite(self.y).any())


@dataclass(frozen=True)
class Curves:
    """The curves of one run. Accuracies are in percent."""

    name: str
    status: str  # done, stopped, left, failed, not finished
    reason: str | None
    loss: Points  # in training
    accuracy: Points
    validation_loss: Points
    validation_accuracy: Points
    test_loss: float
    test_accuracy: float

    @property
    def has_accuracy(self) -> bool:
        return self.accuracy.shown or self.validation_accuracy.shown

    @property
    def has_loss(self) -> bool:
        return self.loss.shown or self.validation_loss.shown

    @property
    def shown(self) -> bool:
        """Whether there is anything to draw."""
        return self.has_accuracy or self.has_loss


def read_curves(folder: Path, name: str) -> Curves:
    """The curves of the run in `folder`, which is to be called `name`. UsageError."""
    records = list(read_records(folder))
    steps, epochs, evaluations = (
        [r for r in records if r["kind"] == kind] for kind in ("step", "epoch", "evaluation")
    )
    per_epoch = steps_per_epoch(records, steps)
    training, where = epochs, [float(record["epoch"]) for record in epochs]
    if len(epochs) < 2 and steps:
        training, where = steps, [record["step"] / per_epoch for record in steps]
    validations = [r for r in evaluations if r["split"] == "validation"]
    at = [record["step"] / per_epoch for record in validations]
    tests = [record for record in evaluations if record["split"] == "test"]
    status, reason = how_it_ended(records)
    if status == UNFINISHED and (cause := cause_if_ended(folder / HEARTBEATS)):
        status, reason = "failed", cause
    return Curves(
        name,
        status,
        reason,
        thinned(points(training, where, "loss")),
        thinned(points(training, where, "accuracy", 100)),
        points(validations, at, "loss"),
        points(validations, at, "accuracy", 100),
        number(tests[-1].get("loss")) if tests else math.nan,
        100 * number(tests[-1].get("accuracy")) if tests else math.nan,
    )


def steps_per_epoch(records: Sequence[Record], steps: Sequence[Record]) -> float:
    """As the run was described; else the most steps that an epoch was seen to have."""
    described = [number(r.get("steps_per_epoch")) for r in records if r["kind"] == "run"]
    known = [value for value in described if value >= 1]
    counts: dict[Any, int] = {}
    for record in steps:
        counts[record.get("epoch")] = counts.get(record.get("epoch"), 0) + 1
    return known[-1] if known else max(counts.values(), default=1)


def how_it_ended(records: Sequence[Record]) -> tuple[str, str | None]:
    """Status and reason of the last launch."""
    for record in reversed(records):
        if record["kind"] == "end":
            return record["status"], record.get("reason")
        if record["kind"] == "run":
            break
    return UNFINISHED, None


def points(records: Sequence[Record], x: Sequence[float], field: str, scale: float = 1) -> Points:
    """A field of these records, at these epochs."""
    values = [scale * number(record.get(field)) for record in records]
    return Points(np.array(x, np.float64), np.array(values, np.float64))


def number(value: Any) -> float:
    """`value` where it is a finite number, else NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def thinned(curve: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points, each the mean of some neighbours that have a value."""
    count = -(-curve.y.size // most)
    if count <= 1:
        return curve
    x, y = (
        np.pad(v, (0, -v.size % count), constant_values=math.nan).reshape(-1, count)
        for v in (curve.x, curve.y)
    )
    return Points(_mean(x), _mean(y))


def _mean(rows: np.ndarray) -> np.ndarray:
    """Of each row (n, m) the mean of its values, NaN where it has none."""
    there = np.isfinite(rows)
    counts = there.sum(1)
    sums = np.where(there, rows, 0).sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
