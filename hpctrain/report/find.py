"""Which runs a command is about: given by name or folder, each on its own or a whole sweep; and the
best run of a sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError, did_you_mean
from hpctrain.report.history import UNKNOWN, Metrics
from hpctrain.report.record import FILE_NAME, read_history
from hpctrain.typed import parse_toml

SETTINGS_FILE = "config.toml"  # of a run
SWEEP_FILE = "sweep.toml"  # a folder with this file is that of a sweep
NETWORK_FILE = "model.safetensors"


def find_runs(targets: Sequence[str], runs_dir: str) -> list[Path]:
    """The folders of all runs that `targets` name, in that order; those of a sweep by their names.

    Raises UsageError for what is neither a run nor a sweep.
    """
    found: list[Path] = []
    for target in targets:
        folder = find_run_or_sweep(target, runs_dir)
        found += sweep_runs(folder) if (folder / SWEEP_FILE).is_file() else [folder]
    return list(dict.fromkeys(found))


def find_run_or_sweep(target: str, runs_dir: str) -> Path:
    """The folder of one run that has begun its record, or of one sweep, by its name in `runs_dir`
    or by its path. UsageError.
    """
    return find_folder(target, runs_dir, (FILE_NAME, SWEEP_FILE))


def find_folder(target: str, runs_dir: str, files: Sequence[str] = (".",)) -> Path:
    """The folder of that name in `runs_dir`, or of that path, that holds one of these files; any
    folder, such as that of a run that has not begun its record, by default. UsageError.
    """
    for path in (Path(runs_dir) / target, Path(target)):
        if any((path / name).exists() for name in files):
            return path
    proposal = propose_run(target, runs_dir)
    raise UsageError(
        f"there is no run or sweep {target!r} in {runs_dir}, or of that path{proposal}"
    )


def propose_run(target: str, runs_dir: str) -> str:
    """', did you mean X?' for the run or sweep with the nearest name, or nothing."""
    markers = (SETTINGS_FILE, FILE_NAME, SWEEP_FILE)
    runs = Path(runs_dir)
    folders = runs.iterdir() if runs.is_dir() else ()
    known = [each.name for each in folders if any((each / name).is_file() for name in markers)]
    return did_you_mean(target, known)


def sweep_runs(folder: Path) -> list[Path]:
    """The runs of a sweep that have begun, by their names."""
    return sorted(path.parent for path in folder.glob(f"*/{FILE_NAME}"))


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """What to call these folders: by their names, where those are alike with the folder above."""
    resolved = [folder.resolve() for folder in folders]
    counts = Counter(folder.name for folder in resolved)
    return [f"{f.parent.name}/{f.name}" if counts[f.name] > 1 else f.name for f in resolved]


def evaluation_file(folder: Path, split: str) -> Path:
    """Where a run's folder keeps the metrics of its network over a split, confusion matrix too."""
    return folder / f"evaluation-{split}.json"


def compared_by_accuracy(tasks: Sequence[str]) -> bool:
    """Whether networks of these tasks are compared by accuracy, and not by loss."""
    return all(task == "classify" for task in tasks)


def best_run(sweep: Path) -> tuple[Path, str]:
    """The best network of a sweep that has been saved, and by what: by validation, or where no
    network has been validated, by the last epoch of training; never by the test. UsageError.

    Compared are the metrics of the networks that were saved: of the last validation, or with
    --output best of the one with the smallest loss.
    """
    validation: dict[Path, Metrics] = {}
    training: dict[Path, Metrics] = {}
    tasks = []
    for folder in sweep_runs(sweep):
        if (folder / NETWORK_FILE).is_file():
            history, settings = read_history(folder, "none"), _settings(folder)
            last = (history.validations or [UNKNOWN])[-1]
            smallest = settings.get("output") == "best"
            validation[folder] = history.best(by_accuracy=False) if smallest else last
            training[folder] = history.training
            tasks.append(settings.get("task", "classify"))
    if not training:
        raise UsageError(f"{sweep}: no network has ended yet")
    accurate = compared_by_accuracy(tasks)
    validated = any(metrics != UNKNOWN for metrics in validation.values())
    metrics = validation if validated else training
    best = max(metrics, key=lambda folder: metrics[folder].score(accurate))
    value = metrics[best].accuracy if accurate else metrics[best].loss
    what = f"{'validation' if validated else 'training'} {'accuracy' if accurate else 'loss'}"
    return best, f"{what} {'unknown' if value is None else format(value, '.4g')}"


def _settings(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return parse_toml((folder / SETTINGS_FILE).read_text())
    return {}
