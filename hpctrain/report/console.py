"""The console: it prints text from data as it is, in the width of the terminal, and a live bar.

A launcher stands between rank 0 and the terminal. Open MPI gives each rank a pty of its own, so
that ``isatty`` is true even if mpirun's output goes to a file. That pty has width 0; with older
versions, also at a terminal. Hydra (MPICH, Intel MPI) gives each rank a pipe, even at a terminal.
Therefore, on Linux, the launcher's own standard output is examined (``/proc/PID/fd/1``, proc(5)).
"""

from __future__ import annotations

import os
import stat
import sys
import time
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from hpctrain.text import printable

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun", "hydra")  # beginnings of their names
UNKNOWN_WIDTH = 100  # columns of a bar if the width of the output is unknown
SHORTEST_WAIT, LONGEST_WAIT = 0.2, 2.0  # seconds from one drawing to the next
COST_RATIO = 1000  # between these bounds, that wait in units of the last drawing's duration


class Console(RichConsole):
    """Prints strings, also in tables, without interpreting markup or emoji codes in them.

    Control characters, including newlines, are printed as escapes. Text with a style or with
    several lines must be a ``rich.text.Text`` made by `styled`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to rich's Text; rich calls this for every string to print."""
        return super().render_str(printable(text, self.encoding, newlines=False), **options)

    def on_broken_pipe(self) -> None:
        """Raise the error; rich would exit the process, and thereby end the training."""
        raise


def styled(text: str, style: str = "", encoding: str = "utf-8") -> Text:
    """Return text with a style, control characters as escapes."""
    return Text(printable(text, encoding), style)


def dumb_terminal() -> bool:
    """Whether TERM names a terminal on which the cursor cannot be moved."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def terminal_columns() -> int | None:
    """Return the width of the terminal that shows this process's output; None if none does."""
    stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # while there is a bar
    replaced = stdout is not sys.__stdout__  # in a notebook: the terminal is the server's
    if replaced:
        return None
    try:
        output = stdout.fileno()
        mode = os.fstat(output).st_mode
    except (OSError, ValueError):  # closed
        return None
    if os.isatty(output):
        columns = os.get_terminal_size(output).columns
        launcher = None if columns else _launcher(os.getppid())
        return columns or (_columns_of(launcher) if launcher else 80)
    piped = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    if piped and _process(os.getppid())[0].startswith(LAUNCHERS):
        return _columns_of(_launcher(os.getppid()))
    return None


def _columns_of(pid: int | None) -> int | None:
    """Return the width of the terminal that is a process's standard output; None if it is none."""
    path = f"/proc/{pid}/fd/1"
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):  # opening a pipe would keep it open
            return None
        terminal = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(terminal).columns or 80
        finally:
            os.close(terminal)
    except OSError:
        return None


def _launcher(pid: int) -> int | None:
    """Return the launcher's outermost process from `pid` upwards (mpiexec, not its proxy)."""
    found = None
    while pid > 1:
        name, parent = _process(pid)
        if name.startswith(LAUNCHERS):
            found = pid
        elif found:
            break
        pid = parent
    return found


def _process(pid: int) -> tuple[str, int]:
    """Return the name and the parent of a process; ("", 0) if unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            before, _, after = file.read().rpartition(")")
    except OSError:
        return "", 0
    return before.partition("(")[2], int(after.split()[1])


def output_width(default: int = 120) -> int:
    """Return the columns of the output: those of COLUMNS, else of the terminal, else `default`."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return terminal_columns() or default


def make_console(default: int = 120) -> Console:
    """Make a console as wide as the output, in colour only if a terminal shows the output.

    ``isatty`` does not decide this: mpirun gives ranks a pty in any case.
    """
    plain = terminal_columns() is None or dumb_terminal()
    return Console(width=output_width(default), no_color=plain, force_terminal=not plain)


class Bar:
    """Two lines kept below all printed lines, until closed.

    No thread redraws them. Drawing takes time from the training loop, and `COST_RATIO` limits its
    share: a slow terminal is redrawn less often.
    """

    def __init__(self) -> None:
        self._console = Console(force_terminal=True, width=output_width(UNKNOWN_WIDTH))
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._console.show_cursor(True)  # a killed run must not leave the cursor hidden
        self._due = 0.0

    def line(self, text: str, style: str = "") -> None:
        """Print a line above the bar."""
        self._console.print(styled(text, style, self._console.encoding))

    def due(self) -> bool:
        """Whether it is time to redraw."""
        return time.monotonic() >= self._due

    def draw(self, before: str, share: float, after: str, below: str) -> None:
        """Draw a bar filled to `share` in [0, 1] between `before` and `after`, above `below`."""
        start = time.monotonic()
        width = self._console.width = output_width(UNKNOWN_WIDTH)  # it may have changed
        size = min(max(width - len(before) - len(after) - 4, 4), 40)
        filled = int(size * share)
        done, to_do = "━─" if self._console.encoding.startswith("utf") else "#-"
        bar = (done * filled, "bar.complete"), to_do * (size - filled)
        lines = Text.assemble(f"{before}  ", *bar, styled(f"  {after}\n  {below}"))
        lines.no_wrap, lines.overflow = True, "ellipsis"
        self._live.update(lines, refresh=True)
        end = time.monotonic()
        self._due = end + min(max(SHORTEST_WAIT, COST_RATIO * (end - start)), LONGEST_WAIT)

    def close(self) -> None:
        """Remove the bar."""
        self._live.stop()
