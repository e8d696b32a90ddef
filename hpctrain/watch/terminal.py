"""The display in a terminal: rich's live table of all runs, plotext's curves of the selected one.

A thread reads the records. The display is redrawn at a key and every second, or less often where
drawing is slow, so that watching costs little on a shared machine.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence

from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpctrain.errors import Failure, UsageError
from hpctrain.report.console import Console
from hpctrain.text import printable
from hpctrain.watch.runs import WatchedRun, WatchedRuns
from hpctrain.watch.table import Row, facts_line, order

COST_RATIO, LONGEST_WAIT = 30, 4.0  # between drawings: in durations of the last, and in seconds
WIDE, SHORT = 100, 36  # with at least WIDE columns or fewer than SHORT rows, plots are side by side
NAME_WIDTH = 24  # columns of a name or a setting, at most
STYLES = {"running": "green", "done": "blue", "failed": "bold red", "silent": "bold yellow"}
COLORS = {"training": "cyan", "validation": "orange", "test": "green"}
MOVES = {"j": 1, "\t": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1, "\x1b[Z": -1}
KEYS = "j k select   o sort   s stop   q quit"


def show(runs: WatchedRuns) -> int:
    """Watch until q or Ctrl-C is pressed, or SIGTERM comes."""
    try:
        import plotext  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "watch needs plotext: pip install plotext; --once and --web do without"
        ) from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is restored
    before = termios.tcgetattr(sys.stdin)
    shown = Screen(runs)
    runs.follow()
    try:
        tty.setcbreak(sys.stdin)
        with Live(console=shown.console, screen=True, auto_refresh=False) as live:
            pause = 0.5  # until the thread has read something
            while shown.is_open:
                start = time.monotonic()
                live.update(shown.render(), refresh=True)
                cost = time.monotonic() - start
                if select.select([sys.stdin], [], [], pause)[0]:
                    keys = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
                    for key in re.findall(r"\x1b\[.|.|\n", keys) or ["q"]:  # no keys: hung up
                        shown.press(key)
                pause = min(max(1.0, COST_RATIO * cost), LONGEST_WAIT)
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
    return 0


class Screen:
    """What is shown: the runs, the selected one, the column by which they are sorted."""

    def __init__(self, runs: WatchedRuns) -> None:
        self.console = Console()
        self.is_open = True
        self._runs = runs
        self._chosen: int | None = None  # key of a run
        self._sorted: int | None = None  # index of a column; None: the order of the targets
        self._asked: WatchedRun | None = None  # which run to stop is to be confirmed
        self._message = ""

    def press(self, key: str) -> None:
        """Obey a key."""
        if self._asked:
            try:
                self._message = self._asked.stop() if key == "y" else ""
            except Failure as error:
                self._message = str(error)
            self._asked = None
        elif key in MOVES:
            keys = [row["key"] for row in self._table()[1]]
            if self._chosen in keys:
                self._chosen = keys[(keys.index(self._chosen) + MOVES[key]) % len(keys)]
        elif key == "o":
            self._sorted = 0 if self._sorted is None else self._sorted + 1
        elif key == "s" and (run := self._runs.get(str(self._chosen))):
            can = run.row["can_be_stopped"]
            self._asked = run if can else None
            self._message = "" if can else f"{run.name}: {run.row['text']}"
        self.is_open = key != "q"

    def _table(self) -> tuple[list[str], list[Row]]:
        columns, rows = self._runs.table()
        if self._sorted is not None:
            column = self._sorted = self._sorted % len(columns)
            rows.sort(key=lambda row: order(row["cells"][column]))
        return columns, rows

    def render(self) -> Table:
        """Return the table, the facts of the selected run, its plots and the keys."""
        width, height = self.console.size
        columns, rows = self._table()
        shown = Table.grid()
        if not rows:
            shown.add_row("no run has begun yet; q quits")
            return shown
        keys = [row["key"] for row in rows]
        self._chosen = self._chosen if self._chosen in keys else keys[0]
        at, most = keys.index(self._chosen), max(height // 3 - 2, 3)
        first = min(max(at - most // 2, 0), max(len(rows) - most, 0))
        window = rows[first : first + most]
        shown.add_row(table_of(columns, window, width, self._sorted, self._chosen))
        row = rows[at]
        filled = int(20 * (row["share"] or 0))
        bar = f"{'█' * filled}{'░' * (20 - filled)}  {row['progress']}"
        texts = [f"{row['name']}: {row['text']}", bar, facts_line(row), *row["notes"]]
        text = Text("\n".join(printable(each, newlines=False) for each in texts))
        facts = list(text.wrap(self.console, width))[: max(height // 4, 4)]
        asked = self._asked and f"Stop {self._asked.name} after its next step?  y yes  n no"
        where = f"   {at + 1} of {len(rows)}" if len(rows) > most else ""
        last = printable(asked or self._message or KEYS + where, newlines=False)
        room = height - len(window) - 1 - len(facts) - 1
        run = self._runs.get(str(self._chosen))
        plots = draw(run, width, room) if run and room >= 6 else Text("\n" * (room - 1))
        for part in (*facts, plots, Text(last, "bold yellow" if asked else "dim")):
            shown.add_row(part)
        return shown


def table_of(
    columns: Sequence[str],
    rows: Sequence[Row],
    width: int,
    sorted_by: int | None = None,
    chosen: int | None = None,
) -> Table:
    """Return a table of the leading columns that fit in `width`."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    used = 0
    for index, name in enumerate(columns):
        title = f"{name} ↓" if index == sorted_by else name
        cells = [row["cells"][index] for row in rows]
        size = min(max(map(len, [title, *(text for text, _ in cells)])), NAME_WIDTH)
        used += size + 2
        if used - 2 > width:
            break
        is_text = index < 2 or any(isinstance(value, str) for _, value in cells)
        made.add_column(title, no_wrap=True, width=size, justify="left" if is_text else "right")
    for row in rows:
        name, status, *others = (text for text, _ in row["cells"][: len(made.columns)])
        styled = Text(status, STYLES.get(status, ""))
        made.add_row(name, styled, *others, style="reverse" if row["key"] == chosen else "")
    return made


def draw(run: WatchedRun, width: int, height: int) -> Text:
    """Draw loss and accuracy by step: training as a line, evaluations as dots."""
    import plotext

    plotext.main()  # not a subplot of the last drawing
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    is_wide = width >= WIDE or height < SHORT
    plotext.subplots(*((1, 2) if is_wide else (2, 1)))
    for number, (name, curves) in enumerate(run.curves().items(), start=1):
        plot = plotext.subplot(*((1, number) if is_wide else (number, 1)))
        plot.title("loss" if name == "loss" else "accuracy (%)")
        for split, points in curves.items():
            steps, means = zip(*points, strict=True)
            values = [mean * (100 if name == "accuracy" else 1) for mean in means]
            make, marker = (plot.plot, "braille") if split == "training" else (plot.scatter, "●")
            label, color = printable(split, newlines=False), COLORS.get(split, "magenta")
            make(steps, values, marker=marker, color=color, label=label)
    return Text.from_ansi(plotext.build().rstrip("\n"))
