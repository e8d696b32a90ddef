"""The display in a terminal: rich's live table of all runs, plotext's curves of the selected one.

Without a terminal, a line per run.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from contextlib import ExitStack, suppress
from threading import Thread

from rich.cells import cell_len
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpctrain.config import WatchConfig
from hpctrain.errors import UsageError
from hpctrain.outcome import Status
from hpctrain.report.console import Console, make_console, styled
from hpctrain.report.find import all_names
from hpctrain.text import printable, say
from hpctrain.watch.runs import Curves, State, WatchedRuns
from hpctrain.watch.web import serve

REDRAW_EVERY = 2.0  # seconds: a drawing takes 50 ms of a core that others use, too
NAME_WIDTH = 24  # columns of a name or a setting, at most
STYLES = {
    Status.RUNNING: "green",
    Status.DONE: "blue",
    Status.FAILED: "bold red",
    Status.SILENT: "bold yellow",
}
COLORS = {"training": "cyan", "validation": "orange", "test": "green"}
MOVES = {"j": 1, "\t": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1, "\x1b[Z": -1}
KEY = r"(?s)\x1b(?:\[[0-9;]*|O)?.|."  # with its whole escape sequence: F4 is ESC O S
NO_RUN = "no run has begun yet"
HELP = "j k select   o sort   S stop   q quit"


def main(settings: WatchConfig) -> int:
    """Watch until the user quits; if there is no terminal, print a line per run and return.

    Without names, all runs are listed; with --web, shown.
    """
    names = settings.targets or all_names(settings.runs_dir)
    if not names:
        raise UsageError(f"there is no run in {settings.runs_dir}")
    runs = WatchedRuns(names, settings.runs_dir)
    console = make_console()
    if settings.web:
        return serve(runs, settings.port)
    if console.is_terminal and sys.stdin.isatty() and settings.targets and not settings.once:
        return show(runs)
    runs.poll()
    columns, rows = runs.table()
    if rows and console.is_terminal:
        console.print(table_of(console, columns, rows))
        return 0
    lines = ["  ".join([row["name"], row["text"], *row["facts"]]) for row in rows]
    for line in lines or [NO_RUN]:
        say(printable(line, newlines=False))
    return 0


def show(runs: WatchedRuns) -> int:
    """Watch until q or Ctrl-C is pressed, or SIGTERM comes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is restored
    before = termios.tcgetattr(sys.stdin)
    screen = Screen(runs, Console())
    Thread(target=runs.follow, daemon=True).start()
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)
        tty.setcbreak(sys.stdin)
        live = Live(console=screen.console, screen=True, auto_refresh=False)
        stack.enter_context(live)
        keys = [""]
        pause = 0.5
        while "q" not in keys:
            live.update(screen.draw(), refresh=True)
            keys = read_keys(pause)
            for key in keys:
                screen.press(key)
            pause = REDRAW_EVERY
    return 0


def read_keys(seconds: float) -> list[str]:
    """Return the keys that were pressed, after so many seconds at most; q if there are no more."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return []
    text = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
    return re.findall(KEY, text) or ["q"]  # hung up


class Screen:
    """The table of all runs, and the details of the chosen one."""

    def __init__(self, runs: WatchedRuns, console: Console) -> None:
        self.console = console
        self._runs = runs
        self._columns: list[str] = []
        self._order: list[str] = [""]  # keys of the runs by row
        self._at = 0  # the row of the run that is chosen
        self._sort = -1  # the column by which the rows are sorted
        self._message = HELP

    def draw(self) -> Table | Text:
        """Return a page of the table, and the details of the chosen run."""
        chosen = self._order[self._at]
        columns, rows = self._runs.table(self._sort)
        self._columns = columns
        self._order = [row["key"] for row in rows] or [""]
        self._at = 0
        if chosen in self._order:
            self._at = self._order.index(chosen)
        run = self._runs.all.get(self._order[self._at])
        if run is None:
            return Text(NO_RUN)
        _, curves = run.curves()
        return render(self.console, columns, rows, self._at, curves, self._message)

    def press(self, key: str) -> None:
        """Do what a key is for."""
        self._at = (self._at + MOVES.get(key, 0)) % len(self._order)
        if key == "o":
            self._sort = (self._sort + 1) % len(self._columns)
        self._message = HELP
        run = self._runs.all.get(self._order[self._at])  # it may have been moved away
        if run and key == "S":
            self._message = run.stop()


def render(
    console: Console,
    columns: list[str],
    rows: list[State],
    at: int,
    curves: Curves,
    message: str,
) -> Table:
    """Return a page of the table, the details of the run in row `at`, and a message."""
    width, height = console.size
    most = max(height // 3 - 2, 3)
    row = rows[at]
    page = rows[at - at % most :][:most]
    lines = [f"{row['name']}: {row['text']}", "; ".join(row["facts"]), *row["notes"]]
    texts = styled("\n".join(lines)).wrap(console, width)[: max(height // 4, 4)]
    plots = draw(curves, width, max(height - len(page) - len(texts) - 2, 6))
    screen = Table.grid()
    screen.add_row(table_of(console, columns, page, row))
    for text in texts:
        screen.add_row(text)
    screen.add_row(plots)
    screen.add_row(styled(f"{message}   {at + 1} of {len(rows)}", "dim"))
    return screen


def table_of(
    console: Console,
    columns: list[str],
    rows: list[State],
    chosen: State | None = None,
) -> Table:
    """Return a table of the leading columns that fit in the width of the console."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    room = console.width + 2  # no space after the last column
    for title, *cells in zip(columns, *(row["cells"] for row in rows), strict=True):
        texts = [title, *(printable(text, newlines=False) for text, _ in cells)]
        room -= min(max(map(cell_len, texts)), NAME_WIDTH) + 2
        if room < 0 and table.columns:
            break
        table.add_column(title, no_wrap=True, max_width=NAME_WIDTH)
        table.columns[-1].justify = "left" if len(table.columns) < 3 else "right"
    for row in rows:
        style = STYLES.get(row["status"], "")
        if row is chosen:
            style = "reverse"
        table.add_row(*(text for text, _ in row["cells"][: len(table.columns)]), style=style)
    return table


def draw(curves: Curves, width: int, height: int) -> Text:
    """Draw the figures by step, side by side: training as a line, evaluations as dots."""
    try:
        import plotext
    except ImportError:
        return Text("curves need plotext: pip install plotext" + "\n" * (height - 1))
    plotext.main()  # not a subplot of the last drawing
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    plotext.subplots(1, max(len(curves), 2))
    for number, (name, splits) in enumerate(curves.items(), start=1):
        plot = plotext.subplot(1, number)
        plot.title(name)
        for split, points in splits.items():
            steps, values = zip(*points, strict=True)
            draw_points = plot.scatter
            marker = "●"
            if split == "training":
                draw_points = plot.plot
                marker = "braille"
            draw_points(
                steps,
                values,
                marker=marker,
                color=COLORS.get(split, "magenta"),
                label=split,
            )
    return Text.from_ansi(plotext.build().rstrip("\n"))
