"""A plot as lines of text: training as a line of braille dots, evaluations as larger dots, by step.

A character of Unicode's braille block (U+2800) is 2 dots wide and 4 high, each a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from hpctrain.report.curve import Curve
from hpctrain.report.story import Story
from hpctrain.watch.axes import Axis, accuracy_axis, loss_axis
from hpctrain.watch.runs import clean

Values = list[tuple[float, float]]  # (step, value), in order of steps
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a dot
LINE = "cyan"
DOTS = {"validation": "yellow", "test": "green"}
OTHER = "magenta"
SMALLEST = (24, 6)  # columns and rows in which a plot can be read
TITLES = {"loss": "loss", "accuracy": "accuracy (%)"}


def draw(story: Story, name: str, width: int, height: int) -> Text:
    """The plot of "loss" or "accuracy" in so many columns and rows; words where there is nothing
    to plot yet, nothing where there is no room.
    """
    factor = 100 if name == "accuracy" else 1
    training = _values(story.training[name], factor)
    dots = {split: _values(curves[name], factor) for split, curves in story.evaluated.items()}
    dots = {clean(split): values for split, values in dots.items() if values}
    if width < SMALLEST[0] or height < SMALLEST[1]:
        return Text("")
    drawn = [training, *dots.values()]
    values = [value for one in drawn for _, value in one]
    if not values:
        return Text(f"no {name} " + ("was recorded" if story.end else "yet"), "dim")
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
    return [(point.step, factor * point.value) for point in curve.points()]


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
