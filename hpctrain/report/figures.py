"""Common functions of all figures, and the confusion matrix of ``plot --confusion``.

Figures need matplotlib, an extra: pip install 'hpctrain[plot]'. No display is needed.
"""

from __future__ import annotations

import importlib.util
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.files import whole_file, writing
from hpctrain.report.confusion import from_json
from hpctrain.report.find import evaluation_file
from hpctrain.text import printable, told_apart
from hpctrain.typed import parse_json

BLUE, VERMILLION = "#0072b2", "#d55e00"  # of the colour-blind-safe palette of Okabe and Ito
SUFFIXES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150
LARGEST = 65_000  # pixels per side of a PNG, limited by matplotlib
FONTS = {  # points
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 9,
}

NUMBERED = 16  # with at most this many classes, cells show their counts
CELL = 0.34  # inches of such a cell
DRAWN = 4096  # most classes of a matrix that is drawn: its shares take 128 MiB
NAMED = 40  # with at most this many classes, axes show their names


def empty_figure(width: float, height: float) -> Any:
    """Return an empty figure of `width` by `height` inches."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which may need a window system

    settings: Any = matplotlib.rcParams
    settings.update(FONTS)
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    return figure


def check_name(path: Path, flag: str) -> None:
    """Raise UsageError if no figure can be written to `path`, or if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib: pip install 'hpctrain[plot]'")
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{flag} {path}: give a name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format of the path's suffix. Raises RunError."""
    suffix = path.suffix.lower().lstrip(".")
    across = max(figure.get_size_inches())
    dots = min(DOTS_PER_INCH, LARGEST / across)
    with writing(path), warnings.catch_warnings(), whole_file(path) as file:
        warnings.filterwarnings("ignore", "Glyph .* missing")  # drawn as a box
        figure.savefig(file, format=suffix, dpi=dots)


def columns_for(count: int, most: int = 4) -> int:
    """Return the columns, at most `most`, of a grid of `count` panels with a nearly full last row.

    >>> [columns_for(n) for n in (1, 3, 4, 5, 9, 12)]
    [1, 3, 4, 3, 3, 4]
    """
    rows = -(-count // most)
    return -(-count // rows)


def shortened(text: str, width: int) -> str:
    """Return `text` in one line of at most `width` characters, with an ellipsis in its middle.

    Names of related runs often begin with the same words.

    >>> shortened("03-digits,lr=0.1,batch-size=256", 20)
    '03-digits,…-size=256'
    """
    line = " ".join(printable(text).split())
    half = (width - 1) // 2
    return line if len(line) <= width else f"{line[: width - 1 - half]}…{line[-half:]}"


@dataclass(frozen=True)
class ConfusionMatrix:
    """The predictions of one network over one split."""

    name: str
    split: str
    classes: tuple[str, ...]  # K
    counts: np.ndarray  # (K, K): images of true class i predicted as class j


def read_confusion(folder: Path, name: str, split: str) -> ConfusionMatrix:
    """Read the confusion matrix that a run or ``evaluate --output`` wrote into the run's folder.

    Raises UsageError if there is none, or if the file is corrupt.
    """
    path = evaluation_file(folder, split)
    try:
        found = parse_json(path.read_bytes())
        counts, classes = found["confusion"], tuple(map(str, found["classes"]))
        if counts is None:
            raise UsageError(f"{name} restores images: it has no confusion matrix")
        confusion = from_json(counts, len(classes))
    except FileNotFoundError as error:
        raise UsageError(
            f"{name} has no metrics of the split {split}; this makes them: hpctrain evaluate"
            f" {shlex.quote(str(folder))} --split {split} --output {shlex.quote(str(path))}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(
            f"{path} is not what hpctrain evaluate --output writes: {error}"
        ) from error
    if len(classes) > DRAWN:
        raise UsageError(f"{name} has {len(classes):,} classes: at most {DRAWN:,} can be drawn")
    return ConfusionMatrix(name, split, classes, confusion.dense())


def plot_confusion(networks: Sequence[ConfusionMatrix]) -> Any:
    """Draw the confusion matrix of each network in one figure.

    Shades are shares of the true class, numbers are images.
    """
    columns = columns_for(len(networks), 3)
    rows = -(-len(networks) // columns)
    most = max(len(network.classes) for network in networks)
    side = max(3.2, CELL * most + 1.0) if most <= NUMBERED else 6.0
    figure = empty_figure(side * columns, (side + 0.5) * rows + 0.6)
    cells = figure.add_gridspec(rows, columns)
    panels = [figure.add_subplot(cells[divmod(i, columns)]) for i in range(len(networks))]
    for axes, network in zip(panels, networks, strict=True):
        image = _draw_matrix(axes, network)
    label = "share of the true class (%)"
    figure.colorbar(image, ax=panels, label=label, location="bottom", shrink=0.6, aspect=30)
    return figure


def _draw_matrix(axes: Any, network: ConfusionMatrix) -> Any:
    counts, many = network.counts, len(network.classes)
    shares = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    from matplotlib.colors import PowerNorm

    shade = PowerNorm(0.5, 0, 100)  # makes rare confusions visible
    image = axes.imshow(shares, cmap="Blues", norm=shade)
    if many <= NUMBERED:
        size = 7 if counts.max() < 10_000 else 6
        for (i, j), count in np.ndenumerate(counts):
            if count:
                ink = "white" if shares[i, j] > 35 else "black"
                axes.text(j, i, f"{count}", ha="center", va="center", color=ink, fontsize=size)
    if many <= NAMED:
        labels = [shortened(name, 22) for name in told_apart(network.classes)]
        turned = 90 if max(map(len, labels)) > 3 else 0
        axes.set_xticks(range(many), labels, rotation=turned, parse_math=False)
        axes.set_yticks(range(many), labels, parse_math=False)
    if NUMBERED < many <= NAMED:
        axes.tick_params(labelsize=6)
    number = "" if many <= NAMED else " (number)"
    axes.set_xlabel(f"predicted class{number}")
    axes.set_ylabel(f"true class{number}")
    right = 100 * np.trace(counts) / max(counts.sum(), 1)
    result = f"{network.split}: {right:.2f} % of {counts.sum():,}"
    axes.set_title(f"{shortened(network.name, 40)}\n{result}", parse_math=False)
    return image
