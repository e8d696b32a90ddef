"""Figures by matplotlib, which is an extra: pip install 'hpctrain[plot]'. No display is needed."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import RunError, UsageError
from hpctrain.files import whole_file
from hpctrain.text import printable

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
    try:
        with warnings.catch_warnings(), whole_file(path) as file:
            warnings.filterwarnings("ignore", "Glyph .* missing")  # shown as a box
            figure.savefig(file, format=suffix, dpi=dots)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


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


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """What to call these folders: by their names, where those are alike with the folder above."""
    names = [folder.resolve().name for folder in folders]
    return [
        name if names.count(name) == 1 else f"{folder.resolve().parent.name}/{name}"
        for name, folder in zip(names, folders, strict=True)
    ]
