"""``hpctrain stop RUN``: a STOP file, which the run's rank 0 sees within half a second."""

from __future__ import annotations

from pathlib import Path

from hpctrain.config import StopConfig
from hpctrain.errors import UsageError
from hpctrain.report.folders import find_run, is_finished
from hpctrain.training.control import request_stop


def main(settings: StopConfig) -> int:
    """Ask the run to stop; say so where it has ended by itself."""
    if settings.target is None:
        raise UsageError("stop what? Name a run")
    print(ask(find_run(settings.target, settings.runs_dir)))
    return 0


def ask(folder: Path) -> str:
    """Ask the run in this folder to stop, unless it is done; what to tell the user. UsageError,
    RunError.
    """
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder} is not the folder of a run: it has no config.toml")
    if is_finished(folder):
        return f"{folder} has already ended"
    request_stop(folder)
    return f"{folder} is asked to stop after its next step"
