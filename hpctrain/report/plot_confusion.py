"""The figure of ``plot --confusion``: how often images of each class were answered as which."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.report.figures import columns_for, empty_figure, wrapped
from hpctrain.report.folders import evaluation_file
from hpctrain.strictjson import parse_json
from hpctrain.text import told_apart

NUMBERED = 16  # classes whose counts still fit their cells
CELL = 0.34  # inches of one of these
NAMED = 40  # classes whose names still fit an axis


@dataclass(frozen=True)
class Confusion:
    """The answers of one network over one split."""

    name: str
    split: str
    classes: tuple[str, ...]  # K
    counts: np.ndarray  # (K, K): images of true class i answered as class j


def read_confusion(folder: Path, name: str, split: str) -> Confusion:
    """The confusion matrix that a run, or ``evaluate --output``, left in the run's folder.

    Raises UsageError where there is none.
    """
    path = evaluation_file(folder, split)
    try:
        found = parse_json(path.read_bytes())
        counts, classes = found["confusion"], tuple(map(str, found["classes"]))
        if counts is None:
            raise UsageError(f"{name} restores images: there are no classes to confuse")
        matrix = np.array(counts, np.int64)
        if matrix.shape != (len(classes), len(classes)):
            raise ValueError(f"{matrix.shape} counts of {len(classes)} classes")
        if matrix.min(initial=0) < 0:
            raise ValueError("counts below 0")
    except FileNotFoundError as error:
        raise UsageError(
            f"{name} has no figures of the split {split}; this makes them: hpctrain evaluate"
            f" {shlex.quote(str(folder))} --split {split} --output {shlex.quote(str(path))}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(
            f"{path} is not what hpctrain evaluate --output writes: {error}"
        ) from error
    return Confusion(name, split, classes, matrix)


def plot_confusion(networks: Sequence[Confusion]) -> Any:
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
        image = _draw(axes, network)
    label = "share of the true class (%)"
    figure.colorbar(image, ax=panels, label=label, location="bottom", shrink=0.6, aspect=30)
    return figure


def _draw(axes: Any, network: Confusion) -> Any:
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
    axes.set_xlabel(f"class answered{number}")
    axes.set_ylabel(f"true class{number}")
    right = 100 * np.trace(counts) / max(counts.sum(), 1)
    title = [*wrapped(network.name, 40, 3), f"{network.split}: {right:.2f} % of {counts.sum():,}"]
    axes.set_title("\n".join(title), parse_math=False)
    return image
