"""The figure of ``plot``: for every network accuracy by epoch above loss by epoch.

Training is a line, validation are dots. All networks share their axes, so that they compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.report.figures import BLUE, VERMILLION, columns_for, empty_figure, wrapped
from hpctrain.report.plot_data import Curves, Points
from hpctrain.text import printable

LARGE = (6.0, 2.7)  # inches of a panel of one network alone
SMALL = (2.5, 1.4)
LEGEND = 0.35
HEAD = 0.75  # above and below a pair of panels
DIVERGED = 20  # a loss so many times that of the beginning needs a logarithmic axis
FEW = 100  # validations whose dots do not crowd
STEPS = [1, 2, 5, 10]  # between numbers of an axis, times a power of ten
DOTS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "color": VERMILLION,
    "markeredgecolor": "black",
    "markeredgewidth": 0.4,
}


def plot_training(networks: Sequence[Curves]) -> Any:
    """A figure with the panels of each network, each of which has something to show."""
    columns = columns_for(len(networks))
    across, high = LARGE if len(networks) == 1 else SMALL
    panels = 2 if any(network.has_accuracy for network in networks) else 1
    rows = -(-len(networks) // columns)
    figure = empty_figure(0.6 + across * columns, LEGEND + rows * (HEAD + panels * high))
    cells = figure.add_gridspec(rows * panels, columns)
    limits = {kind: Limits(networks, kind) for kind in {n.has_accuracy for n in networks}}
    for number, network in enumerate(networks):
        row, column = divmod(number, columns)
        names = [name for name, shown in _panels(network) if shown]
        first, each = row * panels, panels // len(names)
        axes = {
            name: figure.add_subplot(cells[first + i * each : first + (i + 1) * each, column])
            for i, name in enumerate(names)
        }
        kind = network.has_accuracy
        outer = column == 0 or networks[number - 1].has_accuracy != kind
        _draw(axes, network, limits[kind], outer, wide=len(networks) == 1)
    _legend(figure, networks)
    return figure


def _panels(network: Curves) -> list[tuple[str, bool]]:
    return [("accuracy", network.has_accuracy), ("loss", network.has_loss)]


class Limits:
    """What the axes of all networks share, those of loss where they learn the same task."""

    def __init__(self, networks: Sequence[Curves], classify: bool) -> None:
        every = [
            curve
            for n in networks
            for curve in (n.loss, n.validation_loss, n.accuracy, n.validation_accuracy)
        ]
        self.epochs = max((float(curve.x.max()) for curve in every if curve.x.size), default=1.0)
        alike = [n for n in networks if n.has_accuracy == classify]
        curves = [curve for n in alike for curve in (n.loss, n.validation_loss) if curve.shown]
        values = [curve.y[np.isfinite(curve.y)] for curve in curves]
        losses = np.concatenate([*values, np.empty(0)])
        top, positive = losses.max(initial=0.0), losses[losses > 0]
        self.log = bool(values and top > DIVERGED * np.median([each[0] for each in values]))
        low = positive.min() / 1.5 if self.log else min(0.0, losses.min(initial=0.0))
        self.loss = (float(low), float(top * (1.5 if self.log else 1.05)) or 1.0)
        self.name = "loss (cross-entropy)" if classify else "loss (mean squared error)"


def _draw(
    panels: Mapping[str, Any], network: Curves, limits: Limits, outer: bool, wide: bool
) -> None:
    """The panels of one network, by name; `outer` ones have the numbers of their vertical axes."""
    from matplotlib.ticker import MaxNLocator

    if accuracy := panels.get("accuracy"):
        accuracy.set_ylim(0, 100)
        accuracy.set_yticks(range(0, 101, 20 if wide else 25))
        _curves(accuracy, network.accuracy, network.validation_accuracy)
        _outer(accuracy, "accuracy (%)", outer)
    if loss := panels.get("loss"):
        if limits.log:
            loss.set_yscale("log")
        loss.set_ylim(*limits.loss)
        _curves(loss, network.loss, network.validation_loss)
        _outer(loss, limits.name, outer)
    first, *_, last = [*panels.values()] * 2
    for axes in panels.values():
        axes.set_xlim(0, limits.epochs * 1.02)
        whole = limits.epochs >= 3
        axes.xaxis.set_major_locator(MaxNLocator(10 if wide else 5, steps=STEPS, integer=whole))
        axes.tick_params(labelbottom=axes is last)
        axes.grid(color="0.88", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    last.set_xlabel("epoch", labelpad=2)
    lines = [*wrapped(network.name, 80 if wide else 30, 3), outcome(network)]
    first.set_title(printable("\n".join(lines)), parse_math=False)


def _outer(axes: Any, label: str, outer: bool) -> None:
    if outer:
        axes.set_ylabel(label)
    else:
        axes.tick_params(which="both", labelleft=False)


def _curves(axes: Any, training: Points, validation: Points) -> None:
    """A line and dots, which may reach over the edge of the panel: 100 % is at its edge."""
    if training.shown:
        alone = int(np.isfinite(training.y).sum()) == 1  # a line of one point would not be seen
        marker = {"marker": "s", "markersize": 4} if alone else {}
        axes.plot(training.x, training.y, color=BLUE, linewidth=1.3, clip_on=False, **marker)
    if validation.shown:
        size = 4.0 if validation.x.size <= FEW else 2.4
        axes.plot(validation.x, validation.y, clip_on=False, zorder=3, **DOTS, markersize=size)


def _legend(figure: Any, networks: Sequence[Curves]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=BLUE, linewidth=1.3, label="training")]
    if any(n.validation_loss.shown or n.validation_accuracy.shown for n in networks):
        lines.append(Line2D([], [], **DOTS, markersize=4, label="validation"))
    figure.legend(handles=lines, loc="outside upper center", ncols=2, frameon=False)


def outcome(network: Curves) -> str:
    """How the network's training ended, and what its test gave, in a few words."""
    found = ""
    if math.isfinite(network.test_accuracy):
        found = f"test accuracy {network.test_accuracy:.2f} %"
    elif math.isfinite(network.test_loss):
        found = f"test loss {network.test_loss:.4g}"
    status = "" if network.status == "done" and found else network.status
    return ", ".join(filter(None, [status, found]))
