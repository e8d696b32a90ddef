"""Text for a run: one line for pipes, cells of a table, named facts, and plots by step.

In plots, training is a line of braille dots and evaluations are larger dots. A character of
Unicode's braille block (U+2800) has 2 by 4 dots, one bit each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from hpctrain.report.history import History
from hpctrain.text import duration, percent, rate, short_number
from hpctrain.watch.runs import Summary, clean

Values = Sequence[tuple[float, float]]  # (step, value), in order of steps
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of each dot, by row and column
LINE = "cyan"
DOTS = {"validation": "yellow", "test": "green"}
OTHER = "magenta"
SMALLEST = (24, 6)  # columns and rows of the smallest legible plot
WIDEST_STATUS = 18  # characters in a table; a longer status is shown as its one word
TITLES = {"loss": "loss", "accuracy": "accuracy (%)"}


class Axis(NamedTuple):
    """The range of values on an axis, and labels at some of them."""

    low: float
    high: float
    labels: dict[float, str]

    def share(self, value: float) -> float:
        """Return the position of a value, from 0 at `low` to 1 at `high`, clipped to this range."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def accuracy_axis(low: float) -> Axis:
    """Return an axis in percent, from 90 or 50 if `low` is at least that, else from 0."""
    return axis(next((limit for limit in (90, 50) if low >= limit), 0), 100)


def loss_axis(low: float, high: float) -> Axis:
    """Return an axis from `low` to `high`, or from 0 if `low` is below half of `high`."""
    low = 0.0 if 0 <= low < high / 2 else low
    return axis(low, high) if high > low else axis(low - 0.5, high + 0.5)


def axis(low: float, high: float) -> Axis:
    """Return an axis with labels at round values, also at both ends, so that all curves fit."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [tick * step for tick in range(first, last + 1)]
    decimals = max(0, -math.floor(math.log10(step)))
    long = max(map(abs, ticks)) >= 1e6 or step < 1e-4
    return Axis(
        ticks[0], ticks[-1], {t: f"{t:.1e}" if long else f"{t:,.{decimals}f}" for t in ticks}
    )


def draw(history: History, name: str, width: int, height: int) -> Text:
    """Draw the plot of `name`, "loss" or "accuracy", in `width` columns and `height` rows.

    Returns a message if there is nothing to plot, and an empty text if there is too little room.
    """
    if width < SMALLEST[0] or height < SMALLEST[1]:
        return Text("")
    factor = 100 if name == "accuracy" else 1
    shown = {
        clean(split): [(step, factor * mean) for step, mean, *_ in curve]
        for split in ("training", *history.evaluated)
        if (curve := history.curve(name, split))
    }
    if not shown:
        return Text(f"no {name} " + ("was recorded" if history.launch.end else "yet"), "dim")
    steps, values = zip(*(point for points in shown.values() for point in points), strict=True)
    up = accuracy_axis(min(values)) if name == "accuracy" else loss_axis(min(values), max(values))
    across = Axis(min(steps), max(max(steps), min(steps) + 1), {})
    margin = max(map(len, up.labels.values())) + 2
    canvas = Canvas(width - margin - 1, height - 3, across, up)
    for split, points in shown.items():
        (canvas.line if split == "training" else canvas.dots)(points, DOTS.get(split, OTHER))
    lines = [_legend(TITLES[name], shown, width), *canvas.labelled_rows(margin)]
    first, last = f"{round(across.low):,}", f"{round(across.high):,}"
    room = max(canvas.columns - len(first) - len(last), 0)
    below = f"{first}{'step':^{room}}{last}"[: canvas.columns]
    lines.append(Text(" " * margin + "└" + "─" * canvas.columns, "dim"))
    return Text("\n").join([*lines, Text(" " * (margin + 1) + below, "dim")])


class Canvas:
    """A grid of (columns, rows) characters on which values are drawn within two axes."""

    def __init__(self, columns: int, rows: int, across: Axis, up: Axis) -> None:
        self.columns, self.rows, self._across, self._up = columns, rows, across, up
        self._bits: defaultdict[tuple[int, int], int] = defaultdict(int)  # by column and row
        self._dots: dict[tuple[int, int], str] = {}

    def line(self, values: Values, style: str) -> None:
        """Connect the values by straight lines; all lines have the style `LINE`."""
        places = [self._place(*value) for value in values]
        for (x, y), (x2, y2) in zip(places, places[1:] or places, strict=False):
            count = max(abs(x2 - x), abs(y2 - y), 1)
            for i in range(count + 1):
                column, row = round(x + (x2 - x) * i / count), round(y + (y2 - y) * i / count)
                self._bits[column // 2, row // 4] |= BITS[row % 4][column % 2]

    def dots(self, values: Values, style: str) -> None:
        """Draw a dot at each value."""
        for x, y in (self._place(*value) for value in values):
            self._dots[x // 2, y // 4] = style

    def labelled_rows(self, margin: int) -> Iterator[Text]:
        """Yield the rows of characters from the top, each after its part of the vertical axis."""
        up = self._up
        labels = {self._place(self._across.low, at)[1] // 4: text for at, text in up.labels.items()}
        for row in range(self.rows):
            label = labels.get(row, "")
            text = Text.assemble((f"{label:>{margin - 1}} {'┤' if label else '│'}", "dim"))
            for place in ((column, row) for column in range(self.columns)):
                bits = self._bits.get(place)
                braille = (chr(0x2800 + bits) if bits else " ", LINE)
                text.append(*(("●", self._dots[place]) if place in self._dots else braille))
            yield text

    def _place(self, step: float, value: float) -> tuple[int, int]:
        """Return column and row of a value's dot, from the left and from the top."""
        x, y = self._across.share(step), 1 - self._up.share(value)
        return round(x * (2 * self.columns - 1)), round(y * (4 * self.rows - 1))


def _legend(title: str, names: Sequence[str] | dict[str, Any], width: int) -> Text:
    text = Text.assemble(" ", (f"{title}  ", "bold"))
    splits = [name for name in names if name != "training"]
    if "training" in names and len(title) + 16 + sum(len(name) + 3 for name in splits) <= width:
        text.append("⠒⠒ ", LINE).append("training ")
    for split in splits:
        text.append("● ", DOTS.get(split, OTHER)).append(f"{split} ")
    text.truncate(width)  # names are cut if there is no room
    return text


def status_line(run: Summary) -> str:
    """Return the state of a run in one line, for pipes."""
    parts = run["name"], run["text"], progress(run), facts_line(run), run["corrupt"]
    return "  ".join(filter(None, parts))


def progress(run: Summary) -> str:
    """Return the progress: "epoch 3 of 100, step 12 of 400, 40 %, 0:34 left"."""
    parts = []
    if run["epoch"]:
        parts.append(f"epoch {run['epoch']}" + (f" of {run['epochs']}" if run["epochs"] else ""))
    if run["step"]:
        parts.append(f"step {run['step']:,}" + (f" of {run['steps']:,}" if run["steps"] else ""))
    if run["share"] is not None:
        parts.append(percent(run["share"]))
    if run["seconds_left"] is not None:
        parts.append(f"{duration(run['seconds_left'])} left")
    return ", ".join(parts)


def facts(run: Summary) -> list[tuple[str, str]]:
    """Return names and texts of known facts: metrics, speed, how the time is spent, device."""
    step, rank, often = run["step_seconds"], run["slowest_rank"], run["slowest_share"]
    shares = ", ".join(f"{name} {share} %" for name, share in run["percents"].items())
    share = f" in {round(100 * often)} % of steps" if often else ""
    pairs = [
        ("training", _loss_accuracy(run)),
        *((split, _loss_accuracy(each)) for split, each in run["evaluations"].items()),
        ("speed", _rate(run, " images/s")),
        ("ranks", str(run["ranks"] or "")),
        ("slowest rank", "" if rank is None else f"{rank}{share}"),
        ("step", f"{1000 * step:,.1f} ms: {shares}" if step else ""),
        ("device", run["device"]),
        ("network", run["model"]),
        ("folder", run["folder"]),
    ]
    return [(name, text) for name, text in pairs if text]


def facts_line(run: Summary) -> str:
    """Return the facts in one line, without the folder."""
    return "; ".join(" ".join(pair) for pair in facts(run) if pair[0] != "folder")


def cells(run: Summary) -> tuple[str, ...]:
    """Return a row of the table: name, status, epoch, done, left, loss, accuracy, images/s."""
    epochs = f"/{run['epochs']}" if run["epochs"] else ""
    return (
        run["name"],
        run["text"] if len(run["text"]) <= WIDEST_STATUS else run["status"],
        f"{run['epoch']}{epochs}" if run["epoch"] else "",
        percent(run["share"]) if run["share"] is not None else "",
        duration(run["seconds_left"]) if run["seconds_left"] is not None else "",
        short_number(run["loss"]),
        short_number(run["accuracy"]),
        _rate(run),
    )


def _loss_accuracy(values: dict[str, Any]) -> str:
    names = [name for name in ("loss", "accuracy") if values[name] is not None]
    return ", ".join(f"{name} {short_number(values[name])}" for name in names)


def _rate(run: Summary, unit: str = "") -> str:
    found = run["images_per_second"]
    return "" if found is None else f"{rate(found)}{unit}"
