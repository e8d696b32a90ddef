"""``hpctrain plot RUN…|SWEEP``: plot accuracy and loss of runs by epoch, and confusion matrices.

Only records are read, without MPI, torch or a display; a run may still be training. There is a
panel of accuracy, below it one of loss and one of each other figure of validations. Training is a
line: the mean of each epoch at its end, or steps if fewer than two epochs have one. Validation is
dots. Each run has a column, and all share their axes; with --overlay, or if there are more than
`APART`, all are drawn in the same panels, each in its own colour, and the axes fit the last half of
each curve.

Figures need matplotlib, an optional package.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpctrain.config import PlotConfig
from hpctrain.errors import UsageError
from hpctrain.files import whole_file, writing
from hpctrain.report.find import distinct_names, evaluation_file, find_folder, sweep_runs
from hpctrain.report.history import History
from hpctrain.text import say, short_number, shortened

BLUE, VERMILLION = "#0072b2", "#d55e00"  # of the colour-blind-safe palette of Okabe and Ito
SUFFIXES = (".png", ".svg", ".pdf")
FONTS = {"font.size": 9, "axes.titlesize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8}
FILE = "training.png"
CONFUSION = "-confusion"  # appended to the stem of the confusion matrix's file name
APART = 6  # runs that have columns of their own
NAMES = 30  # in a column of a legend
FIRST = "accuracy", "loss"  # panels, from the top
OWN = "metrics_", "balanced_accuracy"  # columns of validations: figures of --metric, and more
DIVERGED = 20  # a loss this many times larger than at the start needs a logarithmic axis
DOTS: dict[str, Any] = {"linestyle": "none", "marker": "o", "zorder": 3}
DOTS |= {"markeredgecolor": "black", "markeredgewidth": 0.4, "markersize": 4}
NUMBERED, NAMED = 16, 40  # most classes of a matrix whose cells show counts, whose axes show names
Found = TypeVar("Found")


class RunCurves(NamedTuple):
    """The curves of one run by field: (n, 2) float64, epochs and values, accuracies in percent.

    There is one of training and one of validation, either of which may be empty.
    """

    name: str
    problem: str  # why it is not done, or that it is not finished; empty if it is done
    summary: str  # how the training ended, and the result of the test
    curves: dict[str, tuple[np.ndarray, np.ndarray]]


def main(settings: PlotConfig) -> int:
    """Write the figures; print their paths and what they show."""
    found = [find_folder(target, settings.runs_dir) for target in settings.targets]
    folder = found[0] if len(found) == 1 else Path(settings.runs_dir)
    path = Path(settings.output or folder / FILE)
    check_name(path, "--output")
    folders = list(dict.fromkeys(run for each in found for run in sweep_runs(each)))
    if not folders:
        raise UsageError(f"{settings.targets[0]}: none of its runs has begun yet")
    runs = dict(zip(distinct_names([each.resolve() for each in folders]), folders, strict=True))
    networks = read_each(read_curves, runs.items())
    shown = [(each.name, runs[each.name], settings.split) for each in networks]
    matrices = read_each(read_confusion, shown) if settings.confusion else []
    for network in networks:
        if network.problem:
            say(f"{network.name}: {network.problem}")
    save(plot_training(networks, settings.overlay), path)
    accurate = any("accuracy" in network.curves for network in networks)
    say(f"{path}: {'accuracy and loss' if accurate else 'loss'} by epoch")
    if matrices:
        second = path.with_stem(path.stem + CONFUSION)
        save(plot_confusion(matrices, settings.split), second)
        say(f"{second}: confusion matrix of the split {settings.split}")
    return 0


def read_each(read: Callable[..., Found], items: Iterable[tuple[Any, ...]]) -> list[Found]:
    """Return the result of `read` for the arguments in each item; print why one has none.

    Raises UsageError if all have none.
    """
    found: list[Found] = []
    errors: list[UsageError] = []
    for item in items:
        try:
            found.append(read(*item))
        except UsageError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    for each in errors:
        say(f"left out: {each}")
    return found


def read_curves(name: str, folder: Path) -> RunCurves:
    """Read the curves of the run in `folder`. Raises UsageError if there are none."""
    history = History.read(folder)
    per_epoch = history.facts.get("steps_per_epoch") or 1  # unknown: nothing is recorded yet
    curves = {}
    own = [name for name in history.evaluations if name.startswith(OWN)]
    for column in (*FIRST, *own):
        scale = 100 if column == "accuracy" else 1
        splits = ("epochs", 1.0), ("training", per_epoch), ("validation", per_epoch)
        epochs, steps, validation = (
            np.array([(x / unit, scale * y) for x, y in history.curve(column, split)])
            for split, unit in splits
        )
        training = epochs if len(epochs) > 1 else steps
        if len(training) or len(validation):
            curves[column.removeprefix(OWN[0]).replace("_", " ")] = training, validation
    if not curves:
        raise UsageError(f"{name} has recorded nothing to plot yet")
    result = f"test loss {short_number(history.test.loss)}" if history.test.loss else ""
    if history.test.accuracy is not None:
        result = f"test accuracy {100 * history.test.accuracy:.2f} %"
    outcome = history.outcome()
    status = "" if outcome.status == "done" else outcome.status or "not finished"
    summary = ", ".join(filter(None, [status, result])) or "done"
    problem = status and (outcome.reason or summary)
    return RunCurves(name, problem, summary, curves)


def plot_training(networks: Sequence[RunCurves], overlay: bool = False) -> Any:
    """Return a figure of these networks, each of which has at least one curve."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    overlay = overlay or len(networks) > APART
    panels = list(dict.fromkeys(name for network in networks for name in network.curves))
    columns = 1 if overlay else len(networks)
    across, high = (6.0, 2.7) if columns == 1 else (2.5, 2.2)
    beside = -(-len(networks) // NAMES) if overlay else 0  # columns of the legend
    figure = empty_figure(0.6 + across * columns + 4.4 * beside, 1.1 + high * len(panels))
    grid = figure.subplots(len(panels), columns, sharex=True, sharey="row", squeeze=False)
    colours = [BLUE] * len(networks)
    if overlay:
        colours = list(colormaps["turbo"](np.linspace(0.05, 0.95, len(networks))))
    for row, name in zip(grid, panels, strict=True):
        for number, network in enumerate(networks):
            if name in network.curves:
                axes = row[0 if overlay else number]
                _draw(axes, *network.curves[name], colours[number], overlay)
        _format(row, name, [each for each in networks if name in each.curves], overlay)
    curves = [curve for each in networks for both in each.curves.values() for curve in both]
    last = max(curve[-1, 0] for curve in curves if len(curve))
    grid[0, 0].set_xlim(0, 1.02 * last)
    ticks = MaxNLocator(10 if columns == 1 else 5, steps=[1, 2, 5, 10], integer=last >= 2)
    grid[0, 0].xaxis.set_major_locator(ticks)
    for axes in grid[-1]:
        axes.set_xlabel("epoch")
    handles = [Line2D([], [], color=each, linewidth=1.3, label="training") for each in colours]
    if overlay:
        place = {"loc": "outside right upper", "title": "lines: training, dots: validation"}
        legend = figure.legend(handles=handles, ncols=beside, fontsize=8, frameon=False, **place)
        for text, network in zip(legend.get_texts(), networks, strict=True):
            text.set(text=f"{shortened(network.name, 30)}: {network.summary}", parse_math=False)
        return figure
    for axes, network in zip(grid[0], networks, strict=True):
        title = f"{shortened(network.name, 80 if columns == 1 else 30)}\n{network.summary}"
        axes.set_title(title, parse_math=False)
    del handles[1:]
    if any(len(dots) for each in networks for _, dots in each.curves.values()):
        handles.append(Line2D([], [], **DOTS, color=VERMILLION, label="validation"))
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _draw(axes: Any, line: np.ndarray, dots: np.ndarray, colour: Any, overlay: bool) -> None:
    """Draw training and validation; in a column not clipped at the edge, where 100 % is."""
    if len(line):
        alone = {"marker": "s", "markersize": 4} if len(line) == 1 else {}  # or it is invisible
        axes.plot(*line.T, color=colour, linewidth=1.3, clip_on=overlay, **alone)
    if len(dots):
        small = {"markersize": 2.4} if overlay or len(dots) > 100 else {}
        axes.plot(*dots.T, **DOTS | small, color=colour if overlay else VERMILLION, clip_on=overlay)


def _format(row: Sequence[Any], name: str, networks: Sequence[RunCurves], overlay: bool) -> None:
    """Set limits, ticks and labels of the panels of a field, which share their axes."""
    curves = [curve for network in networks for curve in network.curves[name] if len(curve)]
    halves = [c[c[:, 0] >= c[-1, 0] / 2] for c in curves] if overlay else curves
    values = np.concatenate([curve[:, 1] for curve in halves])
    low, high = float(values.min()), float(values.max())
    if name == "loss" and high > DIVERGED * np.median([curve[0, 1] for curve in curves]):
        row[0].set_yscale("log", nonpositive="mask")  # or a line to 0 leaves the panel
    elif overlay:
        room = 0.05 * (high - low) or 1.0
        row[0].set_ylim(low - room, high + room)
    elif name == "accuracy":
        row[0].set(ylim=(0, 100), yticks=range(0, 101, 20))
    else:
        row[0].set_ylim(min(0.0, low), 1.05 * high or 1.0)
    label = "accuracy (%)" if name == "accuracy" else name
    row[0].set_ylabel(shortened(label, 40), parse_math=False)
    for axes in row:
        axes.grid(color="0.88", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


ConfusionMatrix = tuple[str, list[str], np.ndarray]  # name of the run, K classes, counts (K, K)


def read_confusion(name: str, folder: Path, split: str) -> ConfusionMatrix:
    """Read the confusion matrix that a run or ``evaluate --output`` wrote into the run's folder.

    Raises UsageError if there is none.
    """
    path = evaluation_file(folder, split)
    try:
        found = json.loads(path.read_bytes())
        classes, counts = found["classes"], found["confusion"]
        if counts is None:
            why = f"it has {len(classes):,} classes" if len(classes) > 1 else "it restores images"
            raise UsageError(f"{name} has no confusion matrix: {why}")
        matrix = np.array(counts, np.int64).reshape(len(classes), len(classes))
    except FileNotFoundError as error:
        raise UsageError(
            f"{name} has no metrics of the split {split}; this makes them: hpctrain evaluate"
            f" {shlex.quote(str(folder))} --split {split} --output {shlex.quote(str(path))}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "is not what hpctrain evaluate --output writes"
        raise UsageError(f"{path} {what}: {error}") from error
    return name, classes, matrix


def plot_confusion(networks: Sequence[ConfusionMatrix], split: str) -> Any:
    """Draw the confusion matrix of each network. Shades are shares of the true class."""
    from matplotlib.colors import PowerNorm

    columns = min(len(networks), 3)
    rows = -(-len(networks) // columns)
    most = max(len(classes) for _, classes, _ in networks)
    side = max(3.2, 0.34 * most + 1.0) if most <= NUMBERED else 6.0
    figure = empty_figure(side * columns, (side + 0.5) * rows + 0.6, "compressed")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(networks) :]:
        axes.remove()
    for axes, (name, classes, counts) in zip(panels, networks, strict=False):
        shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
        shade = PowerNorm(0.5, 0, 100)  # makes rare confusions visible
        image = axes.imshow(shares, cmap="Blues", norm=shade)
        for i, j in np.argwhere(counts) if len(classes) <= NUMBERED else ():
            ink, size = "white" if shares[i, j] > 35 else "black", 6 if counts.max() > 9999 else 7
            axes.text(j, i, counts[i, j], ha="center", va="center", color=ink, fontsize=size)
        if len(classes) <= NAMED:
            labels = [shortened(each, 22) for each in classes]
            turned = 90 if max(map(len, labels)) > 3 else 0
            axes.set_xticks(range(len(labels)), labels, rotation=turned, parse_math=False)
            axes.set_yticks(range(len(labels)), labels, parse_math=False)
            axes.tick_params(labelsize=8 if len(classes) <= NUMBERED else 6)
        axes.set(xlabel="predicted class", ylabel="true class")
        right, total = 100 * np.trace(counts) / max(counts.sum(), 1), counts.sum()
        title = f"{shortened(name, 40)}\n{split}: {right:.2f} % of {total:,}"
        axes.set_title(title, parse_math=False)
    label = "share of the true class (%)"
    panels = panels[: len(networks)]
    figure.colorbar(image, ax=panels, label=label, location="bottom", shrink=0.6, aspect=30)
    return figure


def empty_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """Return an empty figure of `width` by `height` inches; `layout` is that of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which may need a window system

    settings: Any = matplotlib.rcParams
    settings.update(FONTS)
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
