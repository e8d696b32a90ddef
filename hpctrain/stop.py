"""``hpctrain stop RUN``: write a STOP file, for which the run's rank 0 looks twice a second.

In the folder of a sweep, neither its driver nor the tasks of its job array start a network once
there is a STOP file; those that are training get a STOP file of their own.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.config import StopConfig
from hpctrain.outcome import Status
from hpctrain.report.find import SWEEP_FILE, find_folder, sweep_runs
from hpctrain.report.history import History
from hpctrain.text import say
from hpctrain.training.control import is_locked, request_stop


def main(settings: StopConfig) -> int:
    """Request that the run or the sweep stop; print the request, or that it has already ended."""
    say(stop_run(find_folder(settings.target, settings.runs_dir)))
    return 0


def stop_run(folder: Path) -> str:
    """Request that a run or a sweep stop, unless it is done; return the line to print."""
    if (folder / SWEEP_FILE).is_file():
        request_stop(folder)  # first, so that no other network begins
        working = [run for run in sweep_runs(folder) if is_locked(run)]
        for run in working:
            request_stop(run)
        if working or is_locked(folder):
            return f"{folder} is asked to stop: its networks after their next step, no other begins"
        return f"{folder} is not at work; queued tasks of a job array will end at once"
    if History.read(folder, "none").launch.outcome.status == Status.DONE:
        return f"{folder} has already ended"
    request_stop(folder)
    return f"{folder} is asked to stop after its next step"
