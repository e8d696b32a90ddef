"""Figures of the answers to a split: values against true ones, and curves of classes.

They need matplotlib, which is imported when one is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpctrain.report.figures import BLUE, VERMILLION, empty_figure, label_text

COLOURED = 10  # most classes whose curves have a colour and a name
COLUMNS = 12  # most columns of values
IN_A_ROW = 4  # panels of columns
GRAY = "0.75"


class ClassCurve(NamedTuple):
    """How the answers for one class divide its samples from others, at each threshold of scores."""

    name: str
    auroc: float
    average_precision: float
    roc: np.ndarray  # (m, 2) shares of others, and of its samples, that are answered; ascending
    precision: np.ndarray  # (m, 2) recall, and precision of the samples that are answered


class ValuePairs(NamedTuple):
    """True and predicted values of one column."""

    name: str
    true: np.ndarray  # (n,)
    predicted: np.ndarray  # (n,)
    mae: float
    r2: float


def plot_curves(curves: Sequence[ClassCurve], title: str) -> Any:
    """Return a figure of the ROC and the precision-recall curve of each class.

    Of many classes, those of the smallest average precision have a colour and a name.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    by_precision = sorted(curves, key=lambda curve: curve.average_precision)
    named = by_precision[:COLOURED]
    colours = colormaps["tab10"](np.arange(COLOURED))
    figure = empty_figure(12.4, 4.9)
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="dashed")
    for curve in by_precision[COLOURED:]:
        draw_curve((left, right), curve, GRAY, width=0.7)
    for curve, colour in zip(named, colours, strict=False):
        draw_curve((left, right), curve, colour)
    left.set(xlabel="false positive rate", ylabel="true positive rate (recall)", title="ROC")
    right.set(xlabel="recall", ylabel="precision", title="precision and recall")
    for axes in (left, right):
        axes.set(xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
        axes.grid(color="0.88", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [
        Line2D([], [], color=colour, label=curve_text(curve))
        for curve, colour in zip(named, colours, strict=False)
    ]
    others = len(curves) - len(named)
    if others:
        handles.append(Line2D([], [], color=GRAY, label=f"{others:,} others, of larger AP"))
    figure.legend(handles=handles, loc="outside right center", fontsize=8)
    figure.suptitle(label_text(title, 100), fontsize=9)
    return figure


def curve_text(curve: ClassCurve) -> str:
    """Return the name of a class and its areas, for the legend."""
    areas = f"AUROC {curve.auroc:.3f}, AP {curve.average_precision:.3f}"
    return f"{label_text(curve.name, 24)}: {areas}"


def draw_curve(panels: Sequence[Any], curve: ClassCurve, colour: Any, width: float = 1.4) -> None:
    """Draw both curves of a class, the first in the left panel."""
    left, right = panels
    left.plot(*curve.roc.T, color=colour, linewidth=width, clip_on=False)
    right.plot(
        *curve.precision.T,
        color=colour,
        linewidth=width,
        drawstyle="steps-pre",
        clip_on=False,
    )


def plot_values(columns: Sequence[ValuePairs], title: str) -> Any:
    """Return a figure of predicted values by true ones, with a panel for each column.

    The line is where both are equal.
    """
    shown = columns[:COLUMNS]
    across = min(IN_A_ROW, len(shown))
    down = -(-len(shown) // across)
    figure = empty_figure(0.4 + 3.4 * across, 0.5 + 3.5 * down)
    panels = figure.subplots(down, across, squeeze=False).reshape(-1)
    for axes, column in zip(panels, shown, strict=False):
        draw_values(axes, column)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    if len(columns) > len(shown):
        title = f"{title}; {len(shown)} of {len(columns):,} columns"
    figure.suptitle(label_text(title, 100), fontsize=9)
    return figure


def draw_values(axes: Any, column: ValuePairs) -> None:
    """Draw predicted values by true ones; those that are NaN or infinite are left out."""
    both = np.concatenate([column.true, column.predicted])
    finite = both[np.isfinite(both)]
    low = finite.min(initial=np.inf)
    high = finite.max(initial=-np.inf)
    if low > high:
        low, high = 0.0, 1.0
    room = 0.04 * (high - low) or 1.0
    ends = (low - room, high + room)
    many = len(column.true) > 500
    axes.plot(ends, ends, color=VERMILLION, linewidth=1.0, zorder=1)
    axes.plot(
        column.true,
        column.predicted,
        linestyle="none",
        marker="o",
        markersize=2.5 if many else 4,
        alpha=0.35 if many else 0.6,
        color=BLUE,
        markeredgewidth=0,
        zorder=2,
    )
    axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel="true", ylabel="predicted")
    axes.locator_params(nbins=5)
    axes.set_title(f"{label_text(column.name, 40)}\nMAE {column.mae:.4g}, R² {column.r2:.3f}")
    axes.grid(color="0.88", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
