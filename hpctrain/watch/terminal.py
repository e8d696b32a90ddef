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
from hpctrain.watch.runs import Curves, Shown, State, WatchedRuns
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
    named = settings.targets or all_names(settings.runs_dir)
    if not named:
        raise UsageError(f"there is no run in {settings.runs_dir}")
    runs, console = WatchedRuns(named, settings.runs_dir), make_console()
    if settings.web:
        return serve(runs, settings.port)
    if console.is_terminal and sys.stdin.isatty() and settings.targets and not settings.once:
        return show(runs)
    runs.poll()
    _, rows = shown = runs.table()
    if rows and console.is_terminal:
        console.print(table_of(console, shown))
        return 0
    for line in ["  ".join([row["name"], row["text"], *row["facts"]]) for row in rows] or [NO_RUN]:
        say(printable(line, newlines=False))
    return 0


def show(runs: WatchedRuns) -> int:
    """Watch until q or Ctrl-C is pressed, or SIGTERM comes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is restored
    before, console = termios.tcgetattr(sys.stdin), Console()
    keys, chosen, sort, message, pause = [""], "", -1, HELP, 0.5
    Thread(target=runs.follow, daemon=True).start()
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)
        tty.setcbreak(sys.stdin)
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        while "q" not in keys:
            columns, rows = shown = runs.table(sort)
            order = [row["key"] for row in rows] or [""]
            at = order.index(chosen) if chosen in order else 0
            run = runs.all.get(order[at])
            screen = run and render(console, shown, at, run.curves()[1], message)
            live.update(screen or Text(NO_RUN), refresh=True)
            ready = select.select([sys.stdin], [], [], pause)[0]
            text = os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
            keys = re.findall(KEY, text) or ["q"] * len(ready)  # q: hung up
            for key in keys:
                at = (at + MOVES.get(key, 0)) % len(order)
                sort = (sort + 1) % len(columns) if key == "o" else sort
                run = runs.all.get(order[at])  # it may have been moved away
                message = run.stop() if run and key == "S" else HELP
            chosen, pause = order[at], REDRAW_EVERY
    return 0


def render(console: Console, shown: Shown, at: int, curves: Curves, message: str) -> Table:
    """Return a page of the table, what is known of the run in row `at`, and a message."""
    (columns, rows), (width, height) = shown, console.size
    most, row = max(height // 3 - 2, 3), rows[at]
    page = rows[at - at % most :][:most]
    lines = [f"{row['name']}: {row['text']}", "; ".join(row["facts"]), *row["notes"]]
    texts = styled("\n".join(lines)).wrap(console, width)[: max(height // 4, 4)]
    plots = draw(curves, width, max(height - len(page) - len(texts) - 2, 6))
    screen = Table.grid()
    screen.add_row(table_of(console, (columns, page), row))
    for text in (*texts, plots, styled(f"{message}   {at + 1} of {len(rows)}", "dim")):
        screen.add_row(text)
    return screen


def table_of(console: Console, shown: Shown, chosen: State | None = None) -> Table:
    """Return a table of the leading columns that fit in the width of the console."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    room = console.width + 2  # no space after the last column
    for title, *cells in zip(shown[0], *(row["cells"] for row in shown[1]), strict=True):
        texts = [title, *(printable(text, newlines=False) for text, _ in cells)]
        room -= min(max(map(cell_len, texts)), NAME_WIDTH) + 2
        if room < 0 and table.columns:
            break
        table.add_column(title, no_wrap=True, max_width=NAME_WIDTH)
        table.columns[-1].justify = "left" if len(table.columns) < 3 else "right"
    for row in shown[1]:
        style = "reverse" if row is chosen else STYLES.get(row["status"], "")
        table.add_row(*(text for text, _ in row["cells"][: len(table.columns)]), style=style)
    return table


def draw(curves: Curves, width: int, height: int) -> Text:
    """Draw loss and accuracy by step, side by side: training as a line, evaluations as dots."""
    try:
        import plotext
    except ImportError:
        return Text("curves need plotext: pip install plotext" + "\n" * (height - 1))
    plotext.main()  # not a subplot of the last drawing
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plot_size(width, height)
    plotext.subplots(1, 2)
    for number, (name, splits) in enumerate(curves.items(), start=1):
        plot = plotext.subplot(1, number)
        plot.title(name)
        for split, points in splits.items():
            make, marker = (plot.scatter, "●") if split != "training" else (plot.plot, "braille")
            steps, values = zip(*points, strict=True)
            make(steps, values, marker=marker, color=COLORS.get(split, "magenta"), label=split)
    return Text.from_ansi(plotext.build().rstrip("\n"))
