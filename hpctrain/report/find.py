"""Which runs a command is about: given by name or folder, each on its own or a whole sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import UsageError, did_you_mean
from hpctrain.report.jsonlines import FILE_NAME

SETTINGS_FILE = "config.toml"  # of a run
SWEEP_FILE = "sweep.toml"  # a folder with this file is that of a sweep


def find_runs(targets: Sequence[str], runs_dir: str) -> list[Path]:
    """The folders of all runs that `targets` name, in that order; those of a sweep by their names.

    Raises UsageError for what is neither a run nor a sweep.
    """
    found: list[Path] = []
    for target in targets:
        folder = find_folder(target, runs_dir)
        found += sweep_runs(folder) if (folder / SWEEP_FILE).is_file() else [folder]
    return list(dict.fromkeys(found))


def find_folder(target: str, runs_dir: str) -> Path:
    """The folder of one run or sweep, by its name in `runs_dir` or by its path. UsageError."""
    for folder in (Path(runs_dir) / target, Path(target)):
        if any((folder / name).is_file() for name in (FILE_NAME, SWEEP_FILE)):
            return folder
    raise UsageError(
        f"there is no run or sweep {target!r} in {runs_dir}{propose_run(target, runs_dir)}"
    )


def propose_run(target: str, runs_dir: str) -> str:
    """', did you mean X?' for the run or sweep with the nearest name, or nothing."""
    signs = (SETTINGS_FILE, FILE_NAME, SWEEP_FILE)
    runs = Path(runs_dir)
    folders = runs.iterdir() if runs.is_dir() else ()
    known = [folder.name for folder in folders if any((folder / name).is_file() for name in signs)]
    return did_you_mean(target, known)


def sweep_runs(folder: Path) -> list[Path]:
    """The runs of a sweep that have begun, by their names."""
    return sorted(path.parent for path in folder.glob(f"*/{FILE_NAME}"))
