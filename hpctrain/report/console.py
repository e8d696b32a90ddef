"""The console: it prints text from data as it is, in the width of the terminal.

A launcher stands between rank 0 and the terminal. Open MPI gives each rank a pty of its own, so
that ``isatty`` is true even if mpirun's output goes to a file. That pty has width 0; with older
versions, also at a terminal. Hydra (MPICH, Intel MPI) gives each rank a pipe, even at a terminal.
Therefore, on Linux, standard output of the outermost launcher is examined (``/proc/PID/fd/1``), if
it is the parent. If it is uncertain whether a terminal shows the output, none does.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from hpctrain.text import printable

LAUNCHERS = ("mpirun", "mpiexec", "prterun", "orterun", "hydra")  # beginnings of their names


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


def make_console(live: bool | None = None) -> Console:
    """Make a console as wide as the output; if `live`, in colour and with displays that change.

    By default it is live if a terminal shows the output. ``isatty`` does not decide this: mpirun
    gives ranks a pty in any case. TERM may name a terminal whose cursor cannot be moved.
    """
    if live is None:
        live = terminal_columns() is not None
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        live = False
    return Console(width=output_width(), force_terminal=live, force_jupyter=False)


def output_width() -> int:
    """Return the columns of the output: those of COLUMNS, else of the terminal, else 120."""
    return shutil.get_terminal_size((terminal_columns() or 120, 1)).columns


def terminal_columns() -> int | None:
    """Return the width of the terminal that shows this process's output; None if unsure."""
    stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # while there is a bar
    if stdout is not sys.__stdout__ or stdout is None:  # in a notebook it is the server's
        return None
    try:
        output = stdout.fileno()
        if os.isatty(output):
            columns = os.get_terminal_size(output).columns
            if columns:
                return columns
        launcher = _outermost_launcher()
        if not launcher or stat.S_ISREG(os.fstat(output).st_mode):
            return None
        terminal = os.open(f"/proc/{launcher}/fd/1", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.get_terminal_size(terminal).columns or 80
        finally:
            os.close(terminal)
    except (OSError, ValueError):  # no Linux, not our process, no terminal, closed
        return None


def _outermost_launcher() -> int:
    """Return the process ID of the outermost launcher of this process; 0 if none is its parent."""
    launcher = 0
    parent = os.getppid()
    while True:
        name, grandparent = _process(parent)
        if not name.startswith(LAUNCHERS):
            return launcher
        launcher = parent
        parent = grandparent


def _process(pid: int) -> tuple[str, int]:
    """Return the name and the parent of a process (proc(5)). Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    return before.partition("(")[2], int(after.split()[1])
