"""``hpctrain stop RUN``: a STOP file, which the run's rank 0 sees within half a second.

In a sweep's folder its driver sees it, stops all networks and begins no other; where there is no
driver (a job array) all networks at work are stopped.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.config import StopConfig
from hpctrain.errors import UsageError
from hpctrain.report.find import SWEEP_FILE, find_folder, sweep_runs
from hpctrain.report.record import is_done
from hpctrain.text import say
from hpctrain.training.control import is_locked, request_stop


def main(settings: StopConfig) -> int:
    """Ask the run, or the sweep, to stop; say so where it has ended by itself."""
    if settings.target is None:
        raise UsageError("stop what? Name a run")
    folder = find_folder(settings.target, settings.runs_dir)
    if (folder / SWEEP_FILE).is_file():
        say(ask_sweep(folder))
    else:
        say(ask(folder))
    return 0


def ask(folder: Path) -> str:
    """Ask the run in this folder to stop, unless it has ended; the line to print. UsageError,
    RunError.
    """
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder} is not the folder of a run: it has no config.toml")
    if is_done(folder):
        return f"{folder} has already ended"
    request_stop(folder)
    return f"{folder} is asked to stop after its next step"


def ask_sweep(folder: Path) -> str:
    """Ask a sweep's driver, or without one all its runs and the tasks of its job array; the line to
    print.
    """
    driven = is_locked(folder)
    working = [] if driven else [run for run in sweep_runs(folder) if is_locked(run)]
    for run in working:
        request_stop(run)
    if driven or working or (folder / "array.sbatch").is_file():
        request_stop(folder)
        return f"{folder} is asked to stop: its networks after their next step, no other begins"
    return f"{folder} is not at work"
