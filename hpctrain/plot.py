"""``hpctrain plot RUN…|SWEEP``: plot accuracy and loss of one or more runs by epoch.

Only records are read, without MPI, torch or a display. A run may still be training. For every run
there is a panel of accuracy, below it one of loss, and one for each other recorded field of steps
that has a label (``report/fields.py``), for the balanced accuracy if it is recorded, and for each
figure of --metric. Training is drawn as a line, validation as dots. All runs share their axes, so
that they can be compared. More than `APART` runs are drawn into the same panels, each in its own
colour. Epochs are counted from 0: the third epoch lies between 2 and 3. Training is shown by epoch,
with each mean at the end of its epoch; by step if fewer than two epochs have a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpctrain.config import PlotConfig
from hpctrain.errors import UsageError
from hpctrain.report.fields import LABELS
from hpctrain.report.figures import (
    BLUE,
    VERMILLION,
    check_name,
    columns_for,
    empty_figure,
    plot_confusion,
    read_confusion,
    save,
    shortened,
)
from hpctrain.report.find import distinct_names, find_run_or_sweep, find_runs
from hpctrain.report.history import History, Metrics, Point
from hpctrain.text import say

FILE = "training.png"
CONFUSION = "-confusion"  # appended to the stem of the confusion matrix's file name
LARGE = (6.0, 2.7)  # inches of a panel of a single network
SMALL = (2.5, 1.4)
APART = 6  # runs that have panels of their own; more share theirs
NAMES = 30  # in a column of their legend
HIGHEST_LEGEND = 5.5  # inches
LEGEND = 0.35
HEAD = 0.75  # above and below the panels of a network
OWN = "metrics_", "balanced_accuracy"  # columns of validations: figures of --metric, and more
FIRST = "accuracy", "loss"  # panels, from the top
DIVERGED = 20  # a loss this many times larger than at the start needs a logarithmic axis
FEW = 100  # validations; more get smaller dots
STEPS = [1, 2, 5, 10]  # between ticks of an axis, times a power of ten
DOTS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "color": VERMILLION,
    "markeredgecolor": "black",
    "markeredgewidth": 0.4,
}
T = TypeVar("T")
Found = TypeVar("Found")


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run by field, each (n, 2) float64: epochs and values.

    Fields without values are absent. Accuracies are in percent.
    """

    name: str
    status: str  # done, stopped, preempted, failed, not finished
    reason: str | None
    training: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    test: Metrics
    loss: str  # the kind of loss, such as cross-entropy

    @property
    def panels(self) -> list[str]:
        """The fields with a curve, in drawing order."""
        names = dict.fromkeys([*FIRST, *LABELS, *self.validation])
        return [name for name in names if name in self.training or name in self.validation]

    @property
    def classifies(self) -> bool:
        """Whether there are accuracies."""
        return "accuracy" in self.panels


def main(settings: PlotConfig) -> int:
    """Write the figure; print its path and what it shows."""
    path = output_path(settings)
    check_name(path, "--output")
    folders = find_runs(settings.targets, settings.runs_dir)
    if not folders:
        raise UsageError(f"{settings.targets[0]}: none of its runs has begun yet")
    names = distinct_names([folder.resolve() for folder in folders])
    pairs = zip(folders, names, strict=True)
    found = read_each(lambda pair: (pair[0], read_curves(*pair)), pairs)
    shown = [(folder, curves) for folder, curves in found if curves.panels]
    if not shown:
        verb = "has" if len(names) == 1 else "have"
        raise UsageError(f"{', '.join(names)} {verb} recorded nothing to plot yet")
    matrices = []
    if settings.confusion:
        matrices = read_each(
            lambda each: read_confusion(each[0], each[1].name, settings.split), shown
        )
    for _, curves in found:
        if not curves.panels:
            say(f"{curves.name}: left out, it has recorded nothing to plot yet")
        elif curves.status != "done":
            say(f"{curves.name}: {curves.reason or summary(curves)}")
    save(plot_training([curves for _, curves in shown]), path)
    accurate = any(curves.classifies for _, curves in shown)
    say(f"{path}: {'accuracy and loss' if accurate else 'loss'} by epoch")
    if matrices:
        second = path.with_stem(path.stem + CONFUSION)
        save(plot_confusion(matrices), second)
        say(f"{second}: confusion matrix of the split {settings.split}")
    return 0


def read_each(read: Callable[[T], Found], items: Iterable[T]) -> list[Found]:
    """Return the result of `read` for each item; print a line for each that cannot be read.

    Raises UsageError if none can be read.
    """
    found: list[Found] = []
    unreadable: list[UsageError] = []
    for item in items:
        try:
            found.append(read(item))
        except UsageError as error:
            unreadable.append(error)
    if not found:
        raise unreadable[0]
    for line in unreadable:
        say(f"left out: {line}")
    return found


def output_path(settings: PlotConfig) -> Path:
    """Return the path of the figure, by default in the folder of the only target or of all runs."""
    if settings.output:
        return Path(settings.output)
    if len(settings.targets) == 1:
        return find_run_or_sweep(settings.targets[0], settings.runs_dir) / FILE
    return Path(settings.runs_dir) / FILE


def read_curves(folder: Path, name: str) -> RunCurves:
    """Read the curves of the run in `folder` and label them `name`. Raises UsageError."""
    history = History.read(folder)
    per_epoch = history.steps_per_epoch()
    training, validation = {}, {}
    for column in [*LABELS, *(name for name in history.evaluations if name.startswith(OWN))]:
        field = column.removeprefix("metrics_").replace("_", " ")
        epochs, steps = (history.curve(column, each) for each in ("epochs", "training"))
        by_epoch = len(epochs) > 1
        training[field] = _values(*(epochs, field, 1) if by_epoch else (steps, field, per_epoch))
        validation[field] = _values(history.curve(column, "validation"), field, per_epoch)
    outcome = history.outcome()
    return RunCurves(
        name,
        outcome.status or "not finished",
        outcome.reason,
        {field: curve for field, curve in training.items() if len(curve)},
        {field: curve for field, curve in validation.items() if len(curve)},
        history.test,
        loss_kind(history.facts.get("settings"), len(training["accuracy"]) > 0),
    )


def loss_kind(settings: Any, classifies: bool) -> str:
    """Return what the loss of a run is, from the settings in its record."""
    given = settings if isinstance(settings, dict) else {}
    if given.get("loss"):
        return str(given["loss"])
    if not classifies:
        return "mean squared error"
    return "weighted cross-entropy" if given.get("class_weights") else "cross-entropy"


def _values(curve: Sequence[Point], field: str, per_epoch: float) -> np.ndarray:
    """Return the epochs and values of a curve, (n, 2)."""
    factor = 100 if field == "accuracy" else 1
    points = [(step / per_epoch, factor * mean) for step, mean, *_ in curve]
    return np.array(points, np.float64).reshape(-1, 2)


def plot_training(networks: Sequence[RunCurves]) -> Any:
    """Return a figure of the curves of these networks; every network has at least one curve."""
    return plot_apart(networks) if len(networks) <= APART else plot_together(networks)


def plot_apart(networks: Sequence[RunCurves]) -> Any:
    """Return a figure with the panels of each network."""
    from matplotlib.lines import Line2D

    columns, is_alone = columns_for(len(networks)), len(networks) == 1
    across, high = LARGE if is_alone else SMALL
    panels = max(len(network.panels) for network in networks)
    rows = -(-len(networks) // columns)
    figure = empty_figure(0.6 + across * columns, LEGEND + rows * (HEAD + panels * high))
    cells = figure.add_gridspec(rows * panels, columns)
    epochs = last_epoch(networks)
    for number, network in enumerate(networks):
        row, column = divmod(number, columns)
        first, each = row * panels, panels // len(network.panels)
        alike = [other for other in networks if other.loss == network.loss]
        outer = column == 0 or networks[number - 1].loss != network.loss
        for i, name in enumerate(network.panels):
            place = cells[first + i * each : first + (i + 1) * each, column]
            axes = figure.add_subplot(place)
            _format(axes, name, alike, epochs, wide=is_alone, last=name == network.panels[-1])
            _draw(axes, network, name)
            if not outer:
                axes.set_ylabel("")
                axes.tick_params(which="both", labelleft=False)
            if i == 0:
                title = f"{shortened(network.name, 80 if is_alone else 30)}\n{summary(network)}"
                axes.set_title(title, parse_math=False)
    lines = [Line2D([], [], color=BLUE, linewidth=1.3, label="training")]
    if any(network.validation for network in networks):
        lines.append(Line2D([], [], **DOTS, markersize=4, label="validation"))
    figure.legend(handles=lines, loc="outside upper center", ncols=2, frameon=False)
    return figure


def plot_together(networks: Sequence[RunCurves]) -> Any:
    """Return a figure with one panel for each field, where each network has its own colour."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D

    found = [name for network in networks for name in network.panels]
    panels = [name for name in dict.fromkeys([*FIRST, *LABELS, *found]) if name in found]
    across, high = LARGE
    columns = -(-len(networks) // NAMES)
    figure = empty_figure(across + 4.4 * columns, max(HIGHEST_LEGEND, HEAD + len(panels) * high))
    colours = [to_hex(c) for c in colormaps["turbo"](np.linspace(0.05, 0.95, len(networks)))]
    for name, axes in zip(panels, figure.subplots(len(panels), squeeze=False)[:, 0], strict=True):
        _format(axes, name, networks, last_epoch(networks), wide=True, last=name == panels[-1])
        for network, colour in zip(networks, colours, strict=True):
            _draw(axes, network, name, colour)
    legend = figure.legend(
        handles=[Line2D([], [], color=colour, linewidth=1.3, label="run") for colour in colours],
        title="lines: training, dots: validation",
        loc="outside right upper",
        ncols=columns,
        fontsize=8,
        frameon=False,
    )
    for text, network in zip(legend.get_texts(), networks, strict=True):
        label = f"{shortened(network.name, 30)}: {summary(network)}"
        text.set(text=label, parse_math=False)
    return figure


def last_epoch(networks: Sequence[RunCurves]) -> float:
    """Return the end of the horizontal axis."""
    curves = [c for n in networks for c in (*n.training.values(), *n.validation.values())]
    return max((float(curve[:, 0].max()) for curve in curves), default=1.0)


class AxisLimits(NamedTuple):
    """The limits of a vertical axis that all networks of a task share."""

    low: float
    high: float
    scale: str = "linear"


def find_limits(networks: Sequence[RunCurves], name: str) -> AxisLimits:
    """Return limits for this field of all networks; a loss that diverged has a logarithmic axis."""
    if name == "accuracy":
        return AxisLimits(0, 100)
    sources = [source for network in networks for source in (network.training, network.validation)]
    curves = [source[name][:, 1] for source in sources if name in source]
    values = np.concatenate(curves)
    top = float(values.max(initial=0.0))
    if name == "loss" and top > DIVERGED * np.median([curve[0] for curve in curves]):
        return AxisLimits(float(values[values > 0].min()) / 1.5, top * 1.5, "log")
    return AxisLimits(min(0.0, float(values.min())), 1.05 * top or 1.0)


def _format(
    axes: Any, name: str, networks: Sequence[RunCurves], epochs: float, wide: bool, last: bool
) -> None:
    """Set limits, ticks and labels of the panel of a field, as all `networks` need them."""
    from matplotlib.ticker import MaxNLocator

    limits = find_limits(networks, name)
    scale = limits.scale  # without "mask", a line to 0 leaves the panel, downwards
    axes.set_yscale(scale, **({"nonpositive": "mask"} if scale == "log" else {}))
    if name == "accuracy":
        axes.set_yticks(range(0, 101, 20 if wide else 25))
    axes.set_ylim(limits.low, limits.high)
    label = LABELS.get(name, name)
    losses = {network.loss for network in networks}
    if name == "loss" and len(losses) == 1:
        label = f"loss ({losses.pop()})"
    axes.set_ylabel(shortened(label, 40), parse_math=False)
    axes.set_xlim(0, epochs * 1.02)
    locator = MaxNLocator(10 if wide else 5, steps=STEPS, integer=epochs >= 2)
    axes.xaxis.set_major_locator(locator)
    axes.tick_params(labelbottom=last)
    if last:
        axes.set_xlabel("epoch", labelpad=2)
    axes.grid(color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: Any, network: RunCurves, name: str, colour: str | None = None) -> None:
    """Draw a line and dots, not clipped at the edge of the panel, where 100 % is."""
    training, validation = network.training.get(name), network.validation.get(name)
    if training is not None:
        alone = len(training) == 1  # a line of one point would be invisible
        marker = {"marker": "s", "markersize": 4} if alone else {}
        axes.plot(*training.T, color=colour or BLUE, linewidth=1.3, clip_on=False, **marker)
    if validation is not None:
        dots = DOTS | ({"color": colour} if colour else {})
        size = 2.4 if colour or len(validation) > FEW else 4.0
        axes.plot(*validation.T, clip_on=False, zorder=3, **dots, markersize=size)


def summary(network: RunCurves) -> str:
    """Return how the network's training ended, and its test result, in a few words."""
    loss, accuracy = network.test
    found = ""
    if accuracy is not None:
        found = f"test accuracy {100 * accuracy:.2f} %"
    elif loss is not None:
        found = f"test loss {loss:.4g}"
    status = "" if network.status == "done" and found else network.status
    return ", ".join(filter(None, [status, found]))
