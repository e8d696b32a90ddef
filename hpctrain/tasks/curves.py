"""The curves of a classifier's scores, by class: ROC, and precision and recall.

A point of a curve is a threshold: scores that reach it count as answered. The areas are those of
``scores.py``, of all thresholds; a curve is drawn by at most `POINTS` of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.report.answer_plots import ClassCurve, plot_curves
from hpctrain.tasks.scores import ClassFigures, OneVersusRest, Ranked, Scores, measure_class
from hpctrain.tasks.tally import Tally, find_tally

if TYPE_CHECKING:
    from rich.table import Table

POINTS = 500


class Curves(Scores):
    """The curves of the classes that have samples of both kinds, on rank 0 once it is merged."""

    curves: tuple[ClassCurve, ...] = ()

    def _measure_classes(self) -> list[ClassFigures]:
        curves = []
        by_class = []
        for name, (positives, negatives, is_nan) in zip(
            self._classes, self._rank_classes(), strict=True
        ):
            figures = measure_class(positives, negatives, is_nan, 0.0)
            by_class.append(figures)
            if figures.has_both and not is_nan:
                curves.append(draw_curve(name, figures, positives, negatives))
        self.curves = tuple(curves)
        return by_class

    def figures(self) -> dict[str, float | None]:
        return {}

    def as_json(self) -> dict[str, Any]:
        return {}

    def tables(self) -> Iterator[Table]:
        yield from ()


class ExclusiveCurves(Curves, OneVersusRest):
    """The curves of each class against all others, of a classifier's outputs (n, K)."""


def plot_classes(tallies: Sequence[Tally], title: str) -> Any:
    """Return a figure of the curves in merged tallies; None if no class has any."""
    tally = find_tally(tallies, Curves)
    if tally is None or not tally.curves:
        return None
    return plot_curves(tally.curves, title)


def draw_curve(
    name: str, figures: ClassFigures, positives: Ranked, negatives: Ranked
) -> ClassCurve:
    """Return the curves of a class by its samples and the others."""
    thresholds = np.union1d(positives.scores, negatives.scores)[::-1]
    right = positives.total - positives.below(thresholds)
    wrong = negatives.total - negatives.below(thresholds)
    recall = right / positives.total
    roc = np.stack([wrong / negatives.total, recall], axis=1)
    precision = np.stack([recall, right / (right + wrong)], axis=1)
    return ClassCurve(
        name=name,
        auroc=figures.auroc,
        average_precision=figures.average_precision,
        roc=thinned(np.concatenate([[[0.0, 0.0]], roc])),
        precision=thinned(np.concatenate([[[0.0, precision[0, 1]]], precision])),
    )


def thinned(points: np.ndarray) -> np.ndarray:
    """Return at most `POINTS` points of a line (m, 2), in steps of equal length."""
    if len(points) <= POINTS:
        return points
    lengths = np.abs(np.diff(points, axis=0)).sum(1).cumsum()
    steps = np.linspace(0, lengths[-1], POINTS)[1:]
    chosen = np.unique([0, *(np.searchsorted(lengths, steps) + 1).clip(max=len(lengths))])
    return points[chosen]
