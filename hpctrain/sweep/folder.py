"""The folder of a sweep: how it is chosen, its files, and the status of its networks.

sweep.toml              a copy of the sweep's file; marks the folder as that of a sweep
01-lr=0.1.toml          the settings of a network, for train --config
01-lr=0.1.log           the output of its ranks
01-lr=0.1/              its run
results.csv             a line for each network; replaced atomically

results.csv is made from the records of the runs. Only what is not in the records is read back from
it: that a network was killed (failed, with the reason).
"""

from __future__ import annotations

import csv
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config import SweepConfig, to_toml
from hpctrain.errors import UsageError
from hpctrain.files import as_text, whole_file, write_whole, writing
from hpctrain.report.find import SWEEP_FILE, find_run_or_sweep
from hpctrain.report.history import History
from hpctrain.sweep.file import Sweep, SweepNetwork

RESULTS_FILE = "results.csv"
DONE, FAILED = "done", "failed"
STOPPED, PREEMPTED = "stopped", "preempted"
UNFINISHED, WAITING, RUNNING = "unfinished", "waiting", "running"
FINAL = (DONE, FAILED)  # not resumed by the same command
METRICS = ("best_validation_accuracy", "best_validation_loss", "test_accuracy", "test_loss")


@dataclass(frozen=True)
class NetworkResult:
    """One network: its status, the reason for it, and the history of its run."""

    network: SweepNetwork
    status: str
    reason: str | None
    history: History

    @property
    def is_final(self) -> bool:
        """Whether the same command skips this network."""
        return self.status in FINAL

    def metrics(self) -> tuple[float | None, ...]:
        """Return the values of `METRICS`."""
        best, test = self.history.best_validation(), self.history.test
        return best.accuracy, best.loss, test.accuracy, test.loss


Results = dict[str, NetworkResult]  # by the network's name


def read_results(folder: Path, sweep: Sweep, retry: bool = False) -> Results:
    """Return the results of all networks of a sweep, assuming that none of them is running.

    With `retry`, failed networks are unfinished.
    """
    known, results = read_csv(folder), {}
    for network in sweep.networks:
        history = History.read(folder / network.name, "none")
        status, reason = status_of(history, known.get(network.name))
        if retry and status == FAILED:
            status, reason = UNFINISHED, None
        results[network.name] = NetworkResult(network, status, reason, history)
    return results


def status_of(history: History, known: tuple[str, str] | None) -> tuple[str, str | None]:
    """Return status and reason of a network that is not running.

    They follow from its record and from `known`, its line of an earlier results.csv.
    """
    outcome = history.launch.outcome
    if outcome.status != DONE and known and known[0] == FAILED:
        return FAILED, known[1] or None
    if outcome.status in (DONE, FAILED, STOPPED):
        return outcome.status, outcome.reason
    return (UNFINISHED, history.outcome().reason) if history.facts else (WAITING, None)


def read_csv(folder: Path) -> dict[str, tuple[str, str]]:
    """Read status and reason by name from an earlier results.csv; empty if there is none."""
    try:
        with open(folder / RESULTS_FILE, newline="", encoding="utf-8") as file:
            return {row["name"]: (row["status"], row["reason"]) for row in csv.DictReader(file)}
    except (OSError, KeyError, ValueError, csv.Error):
        return {}


def write_csv(folder: Path, sweep: Sweep, results: Iterable[NetworkResult]) -> None:
    """Write results.csv atomically. Raises RunError."""
    header = ["name", "status", "reason", *sweep.differing, *METRICS, "epochs", "seconds"]
    lines: list[list[object]] = [[*header]]
    for result in results:
        history, network = result.history, result.network
        differing = [network.config.table()[name] for name in sweep.differing]
        line = [network.name, result.status, result.reason, *differing, *result.metrics()]
        lines.append([*line, history.completed, round(history.seconds, 1)])
    path = folder / RESULTS_FILE
    with writing(path), whole_file(path) as binary, as_text(binary) as file:
        csv.writer(file).writerows(lines)


def find_sweep_file(settings: SweepConfig) -> tuple[Path, Path | None]:
    """Return the sweep's file, and its folder if that was named. Raises UsageError."""
    path = Path(settings.file)
    if path.is_file():
        return path, None
    if path.suffix == ".toml":
        raise UsageError(f"there is no file {path}")
    folder = find_run_or_sweep(settings.file, settings.runs_dir)
    if not (folder / SWEEP_FILE).is_file():
        raise UsageError(f"{folder} is a run, not a sweep")
    if settings.run is not None:
        raise UsageError(f"--run goes with a file of networks; {folder} has its name")
    return folder / SWEEP_FILE, folder


def choose_folder(settings: SweepConfig, file: Path, sweep: Sweep) -> Path:
    """Return the folder of the sweep, which may not exist yet.

    It is chosen by --run; else it is the newest folder of the same file whose sweep has not ended;
    else a new one, named by the time. Raises UsageError if --run is that of another sweep.
    """
    runs, text = Path(settings.runs_dir), file.read_bytes()
    if settings.run is None:
        for folder in sorted(runs.glob("*-sweep*"), reverse=True):
            same = (folder / SWEEP_FILE).is_file() and (folder / SWEEP_FILE).read_bytes() == text
            results = read_results(folder, sweep, settings.retry).values() if same else ()
            if any(not result.is_final for result in results):
                return folder
        base = f"{time.strftime('%Y%m%d-%H%M%S')}-sweep"
        names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
        return next(runs / name for name in names if not (runs / name).exists())
    folder = runs / settings.run
    if not folder.exists():
        return folder
    if not (folder / SWEEP_FILE).is_file():
        raise UsageError(f"{folder} exists and is no sweep: choose another --run")
    if (folder / SWEEP_FILE).read_bytes() != text:
        raise UsageError(
            f"the sweep {folder} was begun with another file than {file}: choose another --run"
        )
    return folder


def make_folder(folder: Path, file: Path, sweep: Sweep, runs_dir: str) -> None:
    """Write the files that the runs need; sweep.toml last, and only once. Raises RunError."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for network in sweep.networks:
            path = settings_file(folder, network)
            text = network_toml(network, folder, runs_dir)
            if not path.exists() or path.read_text() != text:
                write_whole(path, text)
        if not (folder / SWEEP_FILE).exists():
            write_whole(folder / SWEEP_FILE, file.read_bytes())


def settings_file(folder: Path, network: SweepNetwork) -> Path:
    """Return the file with the settings of a network, for train --config."""
    return folder / f"{network.name}.toml"


def network_toml(network: SweepNetwork, folder: Path, runs_dir: str) -> str:
    """Return the settings of a network as TOML. --init may name a run in `runs_dir`."""
    own: dict[str, object] = {"run": network.name, "runs_dir": str(folder), "progress": "plain"}
    init = network.config.init
    if init is not None and (Path(runs_dir) / init).exists():
        own["init"] = str(Path(runs_dir) / init)
    return to_toml(own | {n: v for n, v in network.config.changed().items() if n not in own})
