"""``hpctrain watch [RUN...]``: monitor runs while they train, in a terminal or in a browser.

Reads the folders of the runs only and needs neither MPI nor torch. This file selects the display.
"""

from __future__ import annotations

import sys

from hpctrain.config import WatchConfig
from hpctrain.errors import UsageError
from hpctrain.report.console import dumb_terminal, make_console
from hpctrain.report.find import all_names
from hpctrain.text import say
from hpctrain.watch.runs import WatchedRuns
from hpctrain.watch.table import status_line


def main(settings: WatchConfig) -> int:
    """Watch until the user quits; if there is no terminal, print a line per run and return.

    Without names, all runs are listed; with --web, shown.
    """
    if settings.once and settings.web:
        raise UsageError("--once and --web exclude each other")
    named = settings.targets or all_names(settings.runs_dir)
    if not named:
        raise UsageError(f"there is no run in {settings.runs_dir}")
    runs = WatchedRuns(named, settings.runs_dir)
    if settings.web:
        from hpctrain.watch.web import serve

        return serve(runs, settings.port)
    from hpctrain.watch.terminal import show, table_of

    is_terminal = sys.stdout.isatty() and not dumb_terminal()
    if is_terminal and sys.stdin.isatty() and settings.targets and not settings.once:
        return show(runs)
    runs.poll()
    columns, rows = runs.table()
    if not rows:
        say("no run has begun yet")
    elif is_terminal:
        console = make_console()
        console.print(table_of(columns, rows, console.width))
    else:
        for row in rows:
            say(status_line(row))
    return 0
