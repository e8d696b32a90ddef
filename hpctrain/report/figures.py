"""Figures by matplotlib, an extra: pip install 'hpctrain[plot]'. No display is needed. What all
figures share, and the confusion matrix of ``plot --confusion``.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.files import whole_file, writing
from hpctrain.report.find import evaluation_file
from hpctrain.text import printable, told_apart
from hpctrain.typed import parse_json

BLUE, VERMILLION = "#0072b2", "#d55e00"  # of the colour-blind-safe palette of Okabe and Ito
SUFFIXES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150
LARGEST = 65_000  # pixels of a side of a PNG, by matplotlib
FONTS = {  # points
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 9,
}

NUMBERED = 16  # classes whose counts still fit their cells
CELL = 0.34  # inches of one of these
NAMED = 40  # classes whose names still fit an axis


def empty_figure(width: float, height: float) -> Any:
    """A figure of this size in inches."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot, so no window system is asked for

    settings: Any = matplotlib.rcParams
    settings.update(FONTS)
    figure: Any = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    return figure


def check_name(path: Path, flag: str) -> None:
    """Refuse a name that no figure can be written to, and any without matplotlib. UsageError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib: pip install 'hpctrain[plot]'")
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{flag} {path}: give a name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no folder {path.parent}")


def save(figure: Any, path: Path) -> None:
    """Write a figure, in the format that its name says, whole or not at all. RunError."""
    suffix = path.suffix.lower().lstrip(".")
    across = max(figure.get_size_inches())
    dots = min(DOTS_PER_INCH, LARGEST / across)
    with writing(path), warnings.catch_warnings(), whole_file(path) as file:
        warnings.filterwarnings("ignore", "Glyph .* missing")  # shown as a box
        figure.savefig(file, format=suffix, dpi=dots)


def columns_for(count: int, most: int = 4) -> int:
    """Columns of a grid of `count` panels, at most `most`, so that the last row is full or nearly.

    >>> [columns_for(n) for n in (1, 3, 4, 5, 9, 12)]
    [1, 3, 4, 3, 3, 4]
    """
    rows = -(-count // most)
    return -(-count // rows)


def wrapped(text: str, width: int, lines: int) -> list[str]:
    """`text` in at most `lines` of `width` characters, ended where it has a comma or the like.

    What does not fit gives way to an ellipsis in its middle: names that belong together often
    begin alike.

    >>> wrapped("03-digits,lr=0.1,batch-size=256", 20, 2)
    ['03-digits,lr=0.1,', 'batch-size=256']
    """
    text = " ".join(printable(text).split())
    room = width * lines
    for most in range(min(room, len(text)), 0, -1):
        half = most // 2
        shorter = text if most == len(text) else f"{text[: most - half]}…{text[-half:]}"
        found = re.findall(rf".{{1,{width}}}(?:(?<=[\s,;:/_.-])|$)|.{{{width}}}", shorter)
        if len(found) <= lines and "".join(found) == shorter:
            return [line.strip() for line in found]
    return [text[:width]]


@dataclass(frozen=True)
class ConfusionMatrix:
    """The predictions of one network over one split."""

    name: str
    split: str
    classes: tuple[str, ...]  # K
    counts: np.ndarray  # (K, K): images of true class i predicted as class j


def read_confusion(folder: Path, name: str, split: str) -> ConfusionMatrix:
    """The confusion matrix that a run, or ``evaluate --output``, left in the run's folder.

    Raises UsageError where there is none.
    """
    path = evaluation_file(folder, split)
    try:
        found = parse_json(path.read_bytes())
        counts, classes = found["confusion"], tuple(map(str, found["classes"]))
        if counts is None:
            raise UsageError(f"{name} restores images: it has no confusion matrix")
        matrix = np.array(counts, np.int64)
        if matrix.shape != (len(classes), len(classes)):
            raise ValueError(f"{matrix.shape} counts of {len(classes)} classes")
        if matrix.min(initial=0) < 0:
            raise ValueError("counts below 0")
    except FileNotFoundError as error:
        raise UsageError(
            f"{name} has no metrics of the split {split}; this makes them: hpctrain evaluate"
            f" {shlex.quote(str(folder))} --split {split} --output {shlex.quote(str(path))}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(
            f"{path} is not what hpctrain evaluate --output writes: {error}"
        ) from error
    return ConfusionMatrix(name, split, classes, matrix)


def plot_confusion(networks: Sequence[ConfusionMatrix]) -> Any:
    """A figure with the matrix of each network: shades are shares of the true class, numbers are
    images.
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

    shade = PowerNorm(0.5, 0, 100)  # rare confusions are seen too
    image = axes.imshow(shares, cmap="Blues", norm=shade)
    if many <= NUMBERED:
        size = 7 if counts.max() < 10_000 else 6
        for (i, j), count in np.ndenumerate(counts):
            if count:
                ink = "white" if shares[i, j] > 35 else "black"
                axes.text(j, i, f"{count}", ha="center", va="center", color=ink, fontsize=size)
    if many <= NAMED:
        labels = [wrapped(name, 22, 1)[0] for name in told_apart(network.classes)]
        turned = 90 if max(map(len, labels)) > 3 else 0
        axes.set_xticks(range(many), labels, rotation=turned, parse_math=False)
        axes.set_yticks(range(many), labels, parse_math=False)
    if NUMBERED < many <= NAMED:
        axes.tick_params(labelsize=6)
    number = "" if many <= NAMED else " (number)"
    axes.set_xlabel(f"predicted class{number}")
    axes.set_ylabel(f"true class{number}")
    right = 100 * np.trace(counts) / max(counts.sum(), 1)
    title = [*wrapped(network.name, 40, 3), f"{network.split}: {right:.2f} % of {counts.sum():,}"]
    axes.set_title("\n".join(title), parse_math=False)
    return image
