"""``hpctrain watch [RUN...]``: monitor runs while they train, in a terminal or in a browser.

Reads the folders of the runs only and needs neither MPI nor torch. This file selects the display.
"""

from __future__ import annotations

import sys

from hpctrain.config import WatchConfig
from hpctrain.errors import UsageError
from hpctrain.report.console import dumb_terminal
from hpctrain.report.find import all_names
from hpctrain.text import say
from hpctrain.watch.drawing import status_line
from hpctrain.watch.runs import WatchedRuns


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
    if (
        settings.once
        or not settings.targets
        or not sys.stdout.isatty()
        or not sys.stdin.isatty()
        or dumb_terminal()
    ):
        return print_once(runs)
    from hpctrain.watch.terminal import show

    return show(runs)


def print_once(runs: WatchedRuns) -> int:
    """Print one line per run."""
    runs.poll()
    for run in runs.all():
        say(status_line(run.summary()))
    if not runs.all():
        say("no run has begun yet")
    return 0
