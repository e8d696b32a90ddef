"""The figure of ``compare``: how the values of one tensor differ between two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpctrain.report.figures import BLUE, empty_figure, save
from hpctrain.text import printable

MOST_BARS = 1000


def largest_of_neighbours(values: np.ndarray, count: int) -> np.ndarray:
    """Of every `count` neighbours in (n,) the one farthest from zero, with its sign."""
    padded = np.pad(values, (0, -values.size % count)).reshape(-1, count)
    return np.take_along_axis(padded, np.abs(padded).argmax(1)[:, None], 1)[:, 0]


def plot_differences(path: Path, name: str, differences: np.ndarray, title: str) -> None:
    """A bar for each value's difference, (n,), in the order in which they lie in the tensor; of
    a large tensor a bar for the largest of several neighbours.
    """
    figure = empty_figure(8, 3.5)
    axes = figure.subplots()
    step = -(-differences.size // MOST_BARS)
    bars = largest_of_neighbours(differences, step)
    axes.bar((np.arange(bars.size) + 0.5) * step - 0.5, bars, width=step, color=BLUE)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(-0.5, differences.size - 0.5)
    label = f"value of {printable(name, newlines=False)} (0 to {differences.size - 1:,})"
    axes.set_xlabel(label, parse_math=False)
    axes.set_ylabel("difference" if step == 1 else f"largest difference among {step:,} values")
    axes.set_title(printable(title, newlines=False), fontsize=10, parse_math=False)
    save(figure, path)
