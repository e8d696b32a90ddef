"""``hpctrain plot RUN…|SWEEP``: plot figures and loss of runs by epoch, and confusion matrices.

Only records are read, without MPI, torch or a display; a run may still be training. There is a
panel of each figure of the task, of accuracy and below it of loss, say, and then one of each other
figure of validations. Training is a line: the mean of each epoch at its end, or steps if fewer than
two epochs have one. Validation is dots. Each run has a column, and all share their axes; with
--overlay, or if there are more than `APART`, all are drawn in the same panels, each in its own
colour, and the axes fit the last half of each curve.

Figures need matplotlib, an optional package.
"""

from __future__ import annotations

import importlib.util
import itertools
import shlex
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpctrain.config import PlotConfig
from hpctrain.errors import UsageError
from hpctrain.files import whole_file, writing
from hpctrain.outcome import Status
from hpctrain.report.find import distinct_names, evaluation_file, find_folder, sweep_runs
from hpctrain.report.history import History
from hpctrain.report.metrics import PERCENT
from hpctrain.report.outputs import output_name
from hpctrain.report.record import is_count, task_of
from hpctrain.tasks.facts import shown_figures
from hpctrain.text import brief, listed, parse_json, say

BLUE = "#0072b2"  # of the colour-blind-safe palette of Okabe and Ito, as the next one
VERMILLION = "#d55e00"
SUFFIXES = (".png", ".svg", ".pdf")
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
}
FILE = "training.png"
CONFUSION = "-confusion"  # appended to the stem of the confusion matrix's file name
APART = 6  # runs that have columns of their own
NAMES = 30  # in a column of a legend
METRICS = "metrics_"  # before the names of --metric, in the columns of validations
MORE = (METRICS, *shown_figures())  # how other columns with a panel begin
DIVERGED = 20  # a loss this many times larger than at the start needs a logarithmic axis
DOTS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "zorder": 3,
    "markeredgecolor": "black",
    "markeredgewidth": 0.4,
}
NUMBERED = 16  # most classes of a matrix whose cells show counts
NAMED = 40  # most classes of a matrix whose axes show names
T = TypeVar("T")


class RunCurves(NamedTuple):
    """The curves of one run by field: of training and of validation, either may be empty.

    They are (n, 2) float64, epochs and values, shares in percent.
    """

    name: str
    summary: str  # how the training ended, and the result of the test
    curves: dict[str, tuple[np.ndarray, np.ndarray]]


def main(settings: PlotConfig) -> int:
    """Write the figures; print their paths and what they show."""
    targets = [find_folder(target, settings.runs_dir) for target in settings.targets]
    folder = targets[0] if len(targets) == 1 else Path(settings.runs_dir)
    path = Path(settings.output or folder / FILE)
    check_name(path, "--output")
    folders = list(dict.fromkeys(run for target in targets for run in sweep_runs(target)))
    if not folders:
        raise UsageError(f"{settings.targets[0]}: none of its runs has begun yet")
    names = distinct_names([folder.resolve() for folder in folders])
    runs = dict(zip(names, folders, strict=True))
    networks = read_each(read_curves, runs)
    matrices: list[ConfusionMatrix] = []
    if settings.confusion:
        matrices = read_each(partial(read_confusion, split=settings.split), runs)
    panels = list(dict.fromkeys(name for network in networks for name in network.curves))
    figure = plot_training(networks, panels, overlay=settings.overlay or len(networks) > APART)
    written = output_name(path)
    save(figure, path)
    say(f"{written}: {listed(panels)} by epoch")
    if matrices:
        second = path.with_stem(path.stem + CONFUSION)
        written = output_name(second)
        save(plot_confusion(matrices, settings.split), second)
        say(f"{written}: confusion matrix of the split {settings.split}")
    return 0


def read_each(read: Callable[[str, Path], T], runs: dict[str, Path]) -> list[T]:
    """Read something of each run; print why a run has none of it, unless no run has any.

    Then raises UsageError.
    """
    contents: list[T] = []
    errors: list[UsageError] = []
    for name, folder in runs.items():
        try:
            contents.append(read(name, folder))
        except UsageError as error:
            errors.append(error)
    if not contents:
        raise errors[0]
    for left_out in errors:
        say(f"left out: {left_out}")
    return contents


def read_curves(name: str, folder: Path) -> RunCurves:
    """Read the curves of the run in `folder`; print why it is not done, or that it is not finished.

    Raises UsageError if there are none.
    """
    history = History.read(folder)
    per_epoch = history.facts.get("steps_per_epoch") or 1  # unknown: nothing is recorded yet
    more = [name for name in history.evaluations if name.startswith(MORE)]
    curves = {}
    for column in dict.fromkeys([*history.figures, *more]):
        training = _points(history, column, "epochs", 1.0)
        if len(training) < 2:
            training = _points(history, column, "training", per_epoch)
        validation = _points(history, column, "validation", per_epoch)
        if len(training) or len(validation):
            name_of_panel = column.removeprefix(METRICS).replace("_", " ")
            curves[name_of_panel] = (training, validation)
    if not curves:
        raise UsageError(f"{name} has recorded nothing to plot yet")
    test = history.test.first_known
    result = ""
    if test.value is not None:
        result = f"test {test.name} {test.text}"
    outcome = history.outcome()
    status = ""
    if outcome.status != Status.DONE:
        status = outcome.status or "not finished"
    summary = ", ".join(filter(None, [status, result])) or Status.DONE
    if status:
        say(f"{name}: {outcome.reason or summary}")
    return RunCurves(name, summary, curves)


def _points(history: History, column: str, split: str, unit: float) -> np.ndarray:
    """Return a curve (n, 2), by so many steps or epochs as a `unit`, shares in percent."""
    scale = 100 if column in PERCENT else 1
    points = [(x / unit, scale * y) for x, y in history.curve(column, split)]
    return np.reshape(points, (-1, 2))


def plot_training(networks: Sequence[RunCurves], panels: Sequence[str], overlay: bool) -> Any:
    """Return a figure of these networks with these panels, from the top."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    columns = len(networks)
    beside = 0  # columns of the legend
    turbo = colormaps["turbo"](np.linspace(0.05, 0.95, len(networks)))
    colours = [(BLUE, VERMILLION)] * len(networks)  # of training and validation
    if overlay:
        columns = 1
        beside = -(-len(networks) // NAMES)
        colours = [(colour, colour) for colour in turbo]
    across = 6.0 if columns == 1 else 2.5  # inches of a panel
    high = 2.7 if columns == 1 else 2.2
    figure = empty_figure(0.6 + across * columns + 4.4 * beside, 1.1 + high * len(panels))
    grid = figure.subplots(
        len(panels),
        columns,
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for row, name in zip(grid, panels, strict=True):
        curves: list[np.ndarray] = []
        for number, network in enumerate(networks):
            looks = zip(network.curves.get(name, ()), colours[number], ({}, DOTS), strict=False)
            for curve, colour, look in looks:
                if len(curve):
                    curves.append(curve)
                    row[number % columns].plot(
                        *curve.T,
                        **look,
                        color=colour,
                        markersize=2.4 if overlay or len(curve) > 100 else 4,
                        clip_on=overlay,  # else a marker at the edge, as of 100 %, is whole
                    )
        _set_axes(row, name, curves, overlay)
    grid[0, 0].set_xlim(left=0)
    grid[0, 0].locator_params(axis="x", integer=True)
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    if overlay:
        figure.legend(
            handles=[
                Line2D(
                    [],
                    [],
                    color=colour,
                    label=f"{label_text(network.name, 30)}: {network.summary}",
                )
                for network, colour in zip(networks, turbo, strict=True)
            ],
            ncols=beside,
            fontsize=8,
            loc="outside right upper",
            title="lines: training, dots: validation",
        )
        return figure
    longest = 80 if columns == 1 else 30
    for axes, network in zip(grid[0], networks, strict=True):
        axes.set_title(f"{label_text(network.name, longest)}\n{network.summary}")
    handles = [Line2D([], [], color=BLUE, label="training")]
    if any(len(dots) for network in networks for _, dots in network.curves.values()):
        handles.append(Line2D([], [], **DOTS, color=VERMILLION, label="validation"))
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure


def _set_axes(row: Sequence[Any], name: str, curves: list[np.ndarray], overlay: bool) -> None:
    """Set limits, ticks and labels of the panels of a field, which share their axes."""
    begin = 0.5 if overlay else 0.0  # share of each curve that need not be visible
    visible = [curve[curve[:, 0] >= begin * curve[-1, 0], 1] for curve in curves]
    low = min(float(values.min()) for values in visible)
    high = max(float(values.max()) for values in visible)
    if name == "loss" and high > DIVERGED * np.median([curve[0, 1] for curve in curves]):
        row[0].set_yscale("log", nonpositive="mask")  # or a line to 0 leaves the panel
    elif overlay:
        room = 0.05 * (high - low) or 1.0
        row[0].set_ylim(low - room, high + room)
    elif name in PERCENT:
        row[0].set(ylim=(0, 100), yticks=range(0, 101, 20))
    else:
        row[0].set_ylim(bottom=min(0.0, low))
    row[0].set_ylabel(f"{name} (%)" if name in PERCENT else label_text(name, 40))
    for axes in row:
        axes.grid(color="0.88", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)


def label_text(name: str, most: int) -> str:
    """Shorten a name to one line in which matplotlib finds no formula."""
    return brief(name, most).replace("$", r"\$")


class ConfusionMatrix(NamedTuple):
    """The confusion matrix of one run."""

    name: str
    classes: list[str]  # (K,)
    counts: np.ndarray  # (K, K) int64, true classes by row


def read_confusion(name: str, folder: Path, split: str) -> ConfusionMatrix:
    """Read the confusion matrix that a run or ``evaluate --output`` wrote into the run's folder.

    Raises UsageError if there is none.
    """
    path = evaluation_file(folder, split)
    try:
        evaluation = parse_json(path.read_bytes())
        classes = evaluation["classes"]
        counts = evaluation["confusion"]
        if not isinstance(classes, list) or not all(isinstance(text, str) for text in classes):
            raise ValueError("its classes are no texts")
        if counts is not None:
            return ConfusionMatrix(name, classes, _table_of_counts(counts, len(classes)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        command = f"hpctrain evaluate {shlex.quote(str(folder))} --split {split}"
        raise UsageError(
            f"{name} has no confusion matrix of the split {split} ({error}); this makes it:"
            f" {command} --output {shlex.quote(str(path))}"
        ) from error
    why = f"its network {task_of(History.read(folder, 'none').facts).use}"
    if "by_class" in evaluation:
        why = f"it has {len(classes):,} classes"
    raise UsageError(f"{name} has no confusion matrix: {why}")


def _table_of_counts(rows: Any, classes: int) -> np.ndarray:
    """Return a confusion matrix, as JSON gives it, as (K, K) int64. Raises ValueError."""
    is_square = classes > 0 and [len(row) for row in rows] == [classes] * classes
    if not is_square or not all(map(is_count, itertools.chain(*rows))):
        raise ValueError(f"its confusion matrix is no table of {classes} x {classes} counts")
    return np.array(rows, np.int64)


def plot_confusion(networks: Sequence[ConfusionMatrix], split: str) -> Any:
    """Draw the confusion matrix of each network. Shades are shares of the true class."""
    from matplotlib.colors import PowerNorm

    columns = min(len(networks), 3)
    rows = -(-len(networks) // columns)
    most = max(len(network.classes) for network in networks)
    side = 6.0  # inches
    if most <= NUMBERED:
        side = max(3.2, 0.34 * most + 1.0)
    figure = empty_figure(side * columns, (side + 0.5) * rows + 0.6, "compressed")
    for number, network in enumerate(networks, start=1):
        axes = figure.add_subplot(rows, columns, number)
        counts = network.counts
        shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
        shade = PowerNorm(0.5, 0, 100)  # makes rare confusions visible
        image = axes.imshow(shares, cmap="Blues", norm=shade)
        if len(network.classes) <= NUMBERED:
            _write_counts(axes, counts, shares)
        if len(network.classes) <= NAMED:
            labels = [label_text(name, 22) for name in network.classes]
            turned = 90 if max(map(len, labels)) > 3 else 0
            axes.set_xticks(range(len(labels)), labels, rotation=turned)
            axes.set_yticks(range(len(labels)), labels)
            axes.tick_params(labelsize=8 if len(labels) <= NUMBERED else 6)
        axes.set(xlabel="predicted class", ylabel="true class")
        total = counts.sum()
        right = 100.0 * np.trace(counts) / max(total, 1)
        axes.set_title(f"{label_text(network.name, 40)}\n{split}: {right:.2f} % of {total:,}")
    figure.colorbar(
        image,
        label="share of the true class (%)",
        ax=figure.axes,
        location="bottom",
        shrink=0.6,
        aspect=30,
    )
    return figure


def _write_counts(axes: Any, counts: np.ndarray, shares: np.ndarray) -> None:
    """Write the counts that are not 0 into their cells."""
    size = 6 if counts.max() > 9999 else 7
    for i, j in np.argwhere(counts):
        axes.text(
            j,
            i,
            counts[i, j],
            ha="center",
            va="center",
            color="white" if shares[i, j] > 35 else "black",
            fontsize=size,
        )


def empty_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """Return an empty figure of `width` by `height` inches; `layout` is that of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which may need a window system

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout=layout)


def check_name(path: Path, flag: str) -> None:
    """Raise UsageError if no figure can be written to `path`, or if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib: pip install matplotlib")
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{flag} {path}: give a name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format of the path's suffix. Raises RunError."""
    with writing(path), warnings.catch_warnings(), whole_file(path) as file:
        warnings.filterwarnings("ignore", "Glyph .* missing")  # drawn as a box
        figure.savefig(file, format=path.suffix.lower().lstrip("."), dpi=150)
