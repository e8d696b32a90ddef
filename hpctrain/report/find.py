"""Find runs and sweeps by name or path, the checkpoints of a run, the best runs of a sweep."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import UsageError, did_you_mean
from hpctrain.report.history import History
from hpctrain.report.metrics import Metrics, metrics_of
from hpctrain.report.record import FILE_NAME, best_by_of

SETTINGS_FILE = "config.toml"  # the settings of a run
SWEEP_FILE = "sweep.toml"  # marks a folder as that of a sweep
MARKERS = (SETTINGS_FILE, FILE_NAME, SWEEP_FILE)  # one of them is in every folder of a run or sweep
NETWORK_FILE = "model.safetensors"
CHECKPOINTS = "checkpoints"  # the folder in that of a run


def find_folder(target: str, runs_dir: str) -> Path:
    """Return the folder of a run or sweep, named `target` in `runs_dir`, or else at this path.

    The run may not have begun a record yet. Raises UsageError if there is no such folder.
    """
    for path in (Path(runs_dir) / target, Path(target)):
        if any(os.path.isfile(path / name) for name in MARKERS):  # False for too long a name
            return path
    near = propose_run(target, runs_dir)
    raise UsageError(f"there is no run or sweep {target!r} in {runs_dir}, or of that path{near}")


def propose_run(target: str, runs_dir: str) -> str:
    """Return ', did you mean X?' for the run or sweep with the most similar name, or ''."""
    return did_you_mean(target, all_names(runs_dir))


def all_names(runs_dir: str) -> list[str]:
    """Return the names of all runs and sweeps in `runs_dir`, sorted; none if there is no folder."""
    return sorted(
        {path.parent.name for name in MARKERS for path in Path(runs_dir).glob(f"*/{name}")}
    )


def sweep_runs(folder: Path) -> list[Path]:
    """Return the runs of a sweep that have a record, sorted by name; or the run in `folder`."""
    if not os.path.isfile(folder / SWEEP_FILE):  # False if the file system does not answer
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{FILE_NAME}"))


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return a distinct name per folder: its own, with its parent's if several have the same."""
    counts = Counter(folder.name for folder in folders)
    names = []
    for folder in folders:
        name = folder.name
        if counts[name] > 1:
            name = f"{folder.parent.name}/{name}"
        names.append(name)
    return names


def evaluation_file(folder: Path, split: str) -> Path:
    """Return the file in a run's folder for the metrics and confusion matrix over a split."""
    return folder / f"evaluation-{split}.json"


def ranked_runs(sweep: Path) -> list[tuple[Path, str]]:
    """Return the runs of a sweep that saved a network, the best one first, each with its metric.

    Networks are compared by validation, or by the last epoch of training if none has been
    validated; never by the test. The metrics are those of the saved weights: of the last
    validation, or with --final best of the best one.
    """
    folders = [folder for folder in sweep_runs(sweep) if (folder / NETWORK_FILE).is_file()]
    histories = [History.read(folder, "none") for folder in folders]
    name = _ranking_figure(histories)
    split = "training"
    metrics = [history.training for history in histories]
    if any("validation" in history.evaluated for history in histories):
        split = "validation"
        metrics = [_validation_of_saved(history) for history in histories]
    ranked = sorted(zip(folders, metrics, strict=True), key=lambda pair: -pair[1][name].score)
    return [(run, f"{split} {name} {_short(of_run[name].value)}") for run, of_run in ranked]


def _ranking_figure(histories: Sequence[History]) -> str:
    """Return the figure that ranks all of these runs; if there are several, the loss."""
    first = {next(iter(history.figures)) for history in histories}
    if len(first) == 1:
        return first.pop()
    return "loss"


def _validation_of_saved(history: History) -> Metrics:
    """Return the validation of the saved weights."""
    settings = history.facts.get("settings") or {}
    if settings.get("final") == "best":
        return history.best(best_by_of(history.facts))
    return metrics_of(history.evaluated.get("validation", {}), history.figures)


def _short(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}"


def best_file(folder: Path, step: int) -> Path:
    """Return the name of the network of a run that was the best after `step`."""
    return folder / f"best-{step:08}.safetensors"


def best_steps(folder: Path) -> list[int]:
    """Return the steps of the best networks in the folder of a run, in ascending order."""
    return checkpoint_steps(folder, "best-")


def checkpoint_steps(folder: Path, prefix: str = "") -> list[int]:
    """Return the steps of the checkpoints in a folder, intact or not, in ascending order."""
    names = [path.stem.removeprefix(prefix) for path in folder.glob(f"{prefix}*.safetensors")]
    return sorted(int(name) for name in names if name.isdecimal())
