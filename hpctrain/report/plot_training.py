"""The figure of ``plot``: for every network a panel of accuracy by epoch, below it one of loss, and
one for each other field of steps that has a label (``fields.py``) and was recorded.

Training is a line, validation are dots. All networks share their axes, so that they compare.
Epochs count on from 0, so that the third epoch lies between 2 and 3. Training is shown by epoch,
each mean at the epoch's end; where fewer than two epochs have one, by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.report.fields import LABELS
from hpctrain.report.figures import BLUE, VERMILLION, columns_for, empty_figure, wrapped
from hpctrain.report.history import Metrics, find_outcome
from hpctrain.report.record import read_history
from hpctrain.report.step_stats import Curve
from hpctrain.text import printable

LARGE = (6.0, 2.7)  # inches of a panel of one network alone
SMALL = (2.5, 1.4)
LEGEND = 0.35
HEAD = 0.75  # above and below the panels of a network
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


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run by field, each (n, 2) float64: epochs and values; only those with
    values. Accuracies are in percent.
    """

    name: str
    status: str  # done, stopped, preempted, failed, not finished
    reason: str | None
    training: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    test: Metrics

    @property
    def panels(self) -> list[str]:
        """The fields with a curve, in the order in which they are drawn."""
        names = dict.fromkeys(["accuracy", "loss", *LABELS])
        return [name for name in names if name in self.training or name in self.validation]


def read_curves(folder: Path, name: str) -> RunCurves:
    """The curves of the run in `folder`, which is to be called `name`. UsageError."""
    history = read_history(folder, strict=True)
    per_epoch = history.steps_per_epoch()
    training = {
        field: _values(epochs, field, 1)
        if len((epochs := history.epoch_curves[field]).points) > 1
        else _values(history.step_curves[field], field, per_epoch)
        for field in LABELS
    }
    splits = history.split_curves.get("validation", {})
    validation = {field: _values(curve, field, per_epoch) for field, curve in splits.items()}
    outcome = find_outcome(folder, history)
    return RunCurves(
        name,
        outcome.status or "not finished",
        outcome.reason,
        {field: curve for field, curve in training.items() if len(curve)},
        {field: curve for field, curve in validation.items() if len(curve)},
        history.test,
    )


def _values(curve: Curve, field: str, per_epoch: float) -> np.ndarray:
    """(n, 2): epochs and values."""
    factor = 100 if field == "accuracy" else 1
    points = [(point.step / per_epoch, factor * point.mean) for point in curve.points]
    return np.array(points, np.float64).reshape(-1, 2)


def plot_training(networks: Sequence[RunCurves]) -> Any:
    """A figure with the panels of each network, each of which has something to show."""
    columns = columns_for(len(networks))
    across, high = LARGE if len(networks) == 1 else SMALL
    panels = max(len(network.panels) for network in networks)
    rows = -(-len(networks) // columns)
    figure = empty_figure(0.6 + across * columns, LEGEND + rows * (HEAD + panels * high))
    cells = figure.add_gridspec(rows * panels, columns)
    limits = {kind: Limits(networks, kind) for kind in {_classifies(n) for n in networks}}
    for number, network in enumerate(networks):
        row, column = divmod(number, columns)
        first, each = row * panels, panels // len(network.panels)
        axes = {
            name: figure.add_subplot(cells[first + i * each : first + (i + 1) * each, column])
            for i, name in enumerate(network.panels)
        }
        kind = _classifies(network)
        outer = column == 0 or _classifies(networks[number - 1]) != kind
        _draw(axes, network, limits[kind], outer, wide=len(networks) == 1)
    _legend(figure, networks)
    return figure


def _classifies(network: RunCurves) -> bool:
    return "accuracy" in network.panels


class Limits:
    """The limits of axes that all networks of a task share."""

    def __init__(self, networks: Sequence[RunCurves], classify: bool) -> None:
        curves = [c for n in networks for c in (*n.training.values(), *n.validation.values())]
        self.epochs = max((float(curve[:, 0].max()) for curve in curves), default=1.0)
        self._alike = [n for n in networks if _classifies(n) == classify]
        losses = self._curves("loss")
        top = max((curve.max() for curve in losses), default=0.0)
        self.log = bool(losses) and top > DIVERGED * np.median([curve[0] for curve in losses])
        self.loss_label = f"loss ({'cross-entropy' if classify else 'mean squared error'})"

    def of(self, name: str) -> tuple[float, float]:
        """The least and the greatest value of an axis."""
        values = np.concatenate([*self._curves(name), np.empty(0)])
        top = float(values.max(initial=0.0))
        if name == "loss" and self.log:
            return float(values[values > 0].min()) / 1.5, top * 1.5
        return min(0.0, float(values.min(initial=0.0))), 1.05 * top or 1.0

    def _curves(self, name: str) -> list[np.ndarray]:
        sources = [source for n in self._alike for source in (n.training, n.validation)]
        return [source[name][:, 1] for source in sources if name in source]


def _draw(
    panels: Mapping[str, Any], network: RunCurves, limits: Limits, outer: bool, wide: bool
) -> None:
    """The panels of one network, by field; `outer` ones have the numbers of their vertical axes."""
    from matplotlib.ticker import MaxNLocator

    first, *_, last = [*panels.values()] * 2
    for name, axes in panels.items():
        if name == "accuracy":
            axes.set_ylim(0, 100)
            axes.set_yticks(range(0, 101, 20 if wide else 25))
        else:
            if name == "loss" and limits.log:
                axes.set_yscale("log")
            axes.set_ylim(*limits.of(name))
        _draw_curves(axes, network.training.get(name), network.validation.get(name))
        if outer:
            axes.set_ylabel(limits.loss_label if name == "loss" else LABELS[name])
        else:
            axes.tick_params(which="both", labelleft=False)
        axes.set_xlim(0, limits.epochs * 1.02)
        whole = limits.epochs >= 3
        axes.xaxis.set_major_locator(MaxNLocator(10 if wide else 5, steps=STEPS, integer=whole))
        axes.tick_params(labelbottom=axes is last)
        axes.grid(color="0.88", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    last.set_xlabel("epoch", labelpad=2)
    lines = [*wrapped(network.name, 80 if wide else 30, 3), summary(network)]
    first.set_title(printable("\n".join(lines)), parse_math=False)


def _draw_curves(axes: Any, training: np.ndarray | None, validation: np.ndarray | None) -> None:
    """A line and dots, which may reach over the edge of the panel: 100 % is at its edge."""
    if training is not None:
        alone = len(training) == 1  # a line of one point would not be seen
        marker = {"marker": "s", "markersize": 4} if alone else {}
        axes.plot(*training.T, color=BLUE, linewidth=1.3, clip_on=False, **marker)
    if validation is not None:
        size = 4.0 if len(validation) <= FEW else 2.4
        axes.plot(*validation.T, clip_on=False, zorder=3, **DOTS, markersize=size)


def _legend(figure: Any, networks: Sequence[RunCurves]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=BLUE, linewidth=1.3, label="training")]
    if any(network.validation for network in networks):
        lines.append(Line2D([], [], **DOTS, markersize=4, label="validation"))
    figure.legend(handles=lines, loc="outside upper center", ncols=2, frameon=False)


def summary(network: RunCurves) -> str:
    """How the network's training ended, and its test, in a few words."""
    loss, accuracy = network.test
    found = ""
    if accuracy is not None:
        found = f"test accuracy {100 * accuracy:.2f} %"
    elif loss is not None:
        found = f"test loss {loss:.4g}"
    status = "" if network.status == "done" and found else network.status
    return ", ".join(filter(None, [status, found]))
