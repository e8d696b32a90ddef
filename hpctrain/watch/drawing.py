"""A run as text: in one line for pipes, in cells of a table, in named facts, and as plots, where
training is a line of braille dots and evaluations are larger dots, by step.

A character of Unicode's braille block (U+2800) is 2 dots wide and 4 high, each a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from hpctrain.report.history import RunHistory
from hpctrain.report.progress import counted, duration, rate, short_number
from hpctrain.report.step_stats import Curve
from hpctrain.watch.runs import Summary, clean

Values = list[tuple[float, float]]  # (step, value), in order of steps
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a dot
LINE = "cyan"
DOTS = {"validation": "yellow", "test": "green"}
OTHER = "magenta"
SMALLEST = (24, 6)  # columns and rows in which a plot can be read
WIDEST_STATUS = 18  # characters in a table; the word alone where there is more to say
TITLES = {"loss": "loss", "accuracy": "accuracy (%)"}


class Axis(NamedTuple):
    """From the least to the greatest value shown, with labels at some."""

    low: float
    high: float
    labels: dict[float, str]

    def share(self, value: float) -> float:
        """Where a value lies: 0 = low, 1 = high; those outside are moved to the ends."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def accuracy_axis(low: float) -> Axis:
    """Of per cent: from 0, or closer to 100 where all are high."""
    low = next((limit for limit in (90, 50) if low >= limit), 0)
    return Axis(
        low, 100, {low + (100 - low) * i / 5: f"{low + (100 - low) * i // 5}" for i in range(6)}
    )


def loss_axis(low: float, high: float) -> Axis:
    """From 0 where that is not far below the lowest value, with labels at round values, two of them
    at its ends: no curve goes beyond.
    """
    low = 0.0 if 0 <= low < high / 2 else low
    if not high > low:
        low, high = low - 0.5, high + 0.5
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [tick * step for tick in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], {tick: _label(tick, step) for tick in ticks})


def _label(value: float, step: float) -> str:
    if max(abs(value), step) >= 1e6 or step < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"


def draw(history: RunHistory, name: str, width: int, height: int) -> Text:
    """The plot of "loss" or "accuracy" in so many columns and rows; words where there is nothing
    to plot yet, nothing where there is no room.
    """
    factor = 100 if name == "accuracy" else 1
    training = _values(history.step_curves[name], factor)
    dots = {split: _values(curves[name], factor) for split, curves in history.split_curves.items()}
    dots = {clean(split): values for split, values in dots.items() if values}
    if width < SMALLEST[0] or height < SMALLEST[1]:
        return Text("")
    drawn = [training, *dots.values()]
    values = [value for one in drawn for _, value in one]
    if not values:
        return Text(f"no {name} " + ("was recorded" if history.launch.end else "yet"), "dim")
    steps = [step for one in drawn for step, _ in one]
    up = accuracy_axis(min(values)) if name == "accuracy" else loss_axis(min(values), max(values))
    margin = max(len(label) for label in up.labels.values()) + 2
    canvas = Canvas(
        width - margin - 1, height - 3, Axis(min(steps), max(max(steps), min(steps) + 1), {}), up
    )
    canvas.line(training)
    for split, found in dots.items():
        canvas.dots(found, DOTS.get(split, OTHER))
    lines = [_legend(TITLES[name], bool(training), dots, width), *_with_labels(canvas, up, margin)]
    return Text("\n").join([*lines, *_below(canvas, margin)])


class Canvas:
    """Characters, (columns, rows), for values within two axes."""

    def __init__(self, columns: int, rows: int, across: Axis, up: Axis) -> None:
        self.columns, self.rows, self.across, self.up = columns, rows, across, up
        self._bits: dict[tuple[int, int], int] = {}
        self._dots: dict[tuple[int, int], str] = {}

    def line(self, values: Values) -> None:
        """Join the values by straight lines."""
        places = [self._place(step, value) for step, value in values]
        for one, other in zip(places, places[1:] or places, strict=False):
            for x, y in _between(one, other):
                key = (x // 2, y // 4)
                self._bits[key] = self._bits.get(key, 0) | BITS[y % 4][x % 2]

    def dots(self, values: Values, style: str) -> None:
        """Put a dot at each."""
        for step, value in values:
            x, y = self._place(step, value)
            self._dots[x // 2, y // 4] = style

    def row(self, number: int) -> Text:
        """One row of characters, from the top."""
        text = Text()
        for column in range(self.columns):
            key = (column, number)
            if key in self._dots:
                text.append("●", self._dots[key])
            else:
                text.append(chr(0x2800 + self._bits[key]) if key in self._bits else " ", LINE)
        return text

    def height_of(self, value: float) -> int:
        """The row of characters in which a value lies."""
        return self._place(self.across.low, value)[1] // 4

    def _place(self, step: float, value: float) -> tuple[int, int]:
        """The dot, from the left and from the top."""
        x, y = self.across.share(step), 1 - self.up.share(value)
        return round(x * (2 * self.columns - 1)), round(y * (4 * self.rows - 1))


def _values(curve: Curve, factor: int) -> Values:
    return [(point.step, factor * point.mean) for point in curve.points]


def _between(one: tuple[int, int], other: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line."""
    (x, y), (x2, y2) = one, other
    count = max(abs(x2 - x), abs(y2 - y), 1)
    for i in range(count + 1):
        yield round(x + (x2 - x) * i / count), round(y + (y2 - y) * i / count)


def _legend(title: str, training: bool, splits: Sequence[str] | dict, width: int) -> Text:
    text = Text.assemble(" ", (f"{title}  ", "bold"))
    if training and len(title) + 16 + sum(len(split) + 3 for split in splits) <= width:
        text.append("⠒⠒ ", LINE).append("training ")
    for split in splits:
        text.append("● ", DOTS.get(split, OTHER)).append(f"{split} ")
    text.truncate(width)  # a line needs no name where there is no room
    return text


def _with_labels(canvas: Canvas, up: Axis, margin: int) -> Iterator[Text]:
    labels = {canvas.height_of(value): label for value, label in up.labels.items()}
    for number in range(canvas.rows):
        label = labels.get(number, "")
        edge = "┤" if label else "│"
        yield Text.assemble((f"{label:>{margin - 1}} {edge}", "dim"), canvas.row(number))


def _below(canvas: Canvas, margin: int) -> list[Text]:
    first, last = (f"{round(step):,}" for step in (canvas.across.low, canvas.across.high))
    line = f"{first}{'step':^{canvas.columns - len(first) - len(last)}}{last}"
    corner = " " * margin + "└" + "─" * canvas.columns
    return [Text(corner, "dim"), Text(" " * (margin + 1) + line, "dim")]


def status_line(run: Summary) -> str:
    """The whole run in one line, for pipes."""
    parts = run["name"], run["text"], progress(run), metrics(run), speed(run), run["damage"]
    return "  ".join(filter(None, parts))


def progress(run: Summary) -> str:
    """ "epoch 3 of 100, step 12 of 400, 40 %, 0:34 left"."""
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


def metrics(run: Summary) -> str:
    """Loss and accuracy of the last step, and of the last evaluation of each split."""
    named = {"training": run, **run["evaluations"]}
    return "; ".join(
        f"{split} {text}" for split, one in named.items() if (text := _loss_accuracy(one))
    )


def speed(run: Summary) -> str:
    """Images a second, ranks, where the time goes."""
    parts = [
        f"{_rate(run)} images/s" if _rate(run) else "",
        counted(run["ranks"], "rank"),
    ]
    if run["slowest_rank"] is not None:
        often = f" in {round(100 * run['slowest_share'])} %" if run["slowest_share"] else ""
        parts.append(f"slowest rank {run['slowest_rank']}{often}")
    if run["step_seconds"]:
        shares = " ".join(f"{name} {share} %" for name, share in run["percents"].items())
        parts.append(f"step {1000 * run['step_seconds']:,.1f} ms ({shares})")
    return ", ".join(filter(None, parts))


def facts(run: Summary) -> list[tuple[str, str]]:
    """Names and texts for the page; only what is known."""
    often = f" in {round(100 * run['slowest_share'])} % of steps" if run["slowest_share"] else ""
    step, rank, device = run["step_seconds"], run["slowest_rank"], run["device"]
    pairs = [
        ("training", _loss_accuracy(run)),
        *((split, _loss_accuracy(each)) for split, each in run["evaluations"].items()),
        ("speed", f"{_rate(run)} images/s" if _rate(run) else ""),
        ("ranks", f"{run['ranks']}" + (f" ({device})" if device else "") if run["ranks"] else ""),
        ("slowest rank", "" if rank is None else f"{rank}{often}"),
        ("time of a step", f"{1000 * step:,.1f} ms" if step else ""),
        (
            "where it goes",
            ", ".join(f"{name} {share} %" for name, share in run["percents"].items()),
        ),
        ("network", run["model"]),
        ("folder", run["folder"]),
    ]
    return [(name, text) for name, text in pairs if text]


def cells(run: Summary) -> Sequence[str]:
    """Of the table of all runs: name, status, epoch, done, left, loss, accuracy, images/s."""
    epochs = f"/{run['epochs']}" if run["epochs"] else ""
    return (
        run["name"],
        run["text"] if len(run["text"]) <= WIDEST_STATUS else run["status"],
        f"{run['epoch']}{epochs}" if run["epoch"] else "",
        percent(run["share"]) if run["share"] is not None else "",
        duration(run["seconds_left"]) if run["seconds_left"] is not None else "",
        short_number(run["loss"], ""),
        short_number(run["accuracy"], ""),
        _rate(run),
    )


def percent(share: float) -> str:
    """ "40 %"; 100 % only for all of it."""
    return f"{int(100 * share + 1e-9)} %" if share < 1 else "100 %"


def _loss_accuracy(values: dict[str, Any]) -> str:
    names = [name for name in ("loss", "accuracy") if values[name] is not None]
    return ", ".join(f"{name} {short_number(values[name])}" for name in names)


def _rate(run: Summary) -> str:
    return rate(run["images_per_second"]) if run["images_per_second"] is not None else ""
