"""Plots, by matplotlib, which is an extra: pip install 'hpctrain[plot]'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import RunError, UsageError
from hpctrain.files import whole_file

MOST_BARS = 1000
BLUE = "#0072b2"  # of the colour-blind-safe palette of Okabe and Ito


def figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of this size in inches and its axes. UsageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'hpctrain[plot]'") from error
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots()


def save(made: Any, path: Path) -> None:
    """Write a figure, in the format that its name says, whole or not at all."""
    suffix = path.suffix.lstrip(".").lower() or "png"
    if suffix not in ("png", "svg", "pdf"):
        raise UsageError(f"--plot {path}: give a name that ends in .png, .svg or .pdf")
    try:
        with whole_file(path) as temporary:
            made.savefig(temporary, format=suffix, dpi=150)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def largest_of_neighbours(values: np.ndarray, count: int) -> np.ndarray:
    """Of every `count` neighbours in (n,) the one farthest from zero, with its sign."""
    padded = np.pad(values, (0, -values.size % count)).reshape(-1, count)
    return np.take_along_axis(padded, np.abs(padded).argmax(1)[:, None], 1)[:, 0]


def plot_differences(path: Path, name: str, differences: np.ndarray, title: str) -> None:
    """A bar for each value's difference, (n,), in the order in which they lie in the tensor; of
    a large tensor a bar for the largest of several neighbours.
    """
    made, axes = figure(8, 3.5)
    step = -(-differences.size // MOST_BARS)
    bars = largest_of_neighbours(differences, step)
    axes.bar((np.arange(bars.size) + 0.5) * step - 0.5, bars, width=step, color=BLUE)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(-0.5, differences.size - 0.5)
    axes.set_xlabel(f"value of {name} (0 to {differences.size - 1:,})")
    axes.set_ylabel("difference" if step == 1 else f"largest difference of {step:,}")
    axes.set_title(title, fontsize=10)
    save(made, path)
