"""``results.csv`` of a sweep: a line for each network, whole at any moment; and the closing table.

It is made from the records of the runs. What they cannot tell stands here alone: that a network
was killed (failed, with the reason), and that it was pruned.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hpctrain.errors import RunError
from hpctrain.files import as_text, whole_file
from hpctrain.report.find import compared_by_accuracy
from hpctrain.report.history import UNKNOWN, Metrics, RunHistory
from hpctrain.sweep.file import Network, Networks
from hpctrain.text import csv_cell

FILE = "results.csv"
DONE, FAILED, PRUNED = "done", "failed", "pruned"  # for good
STOPPED, UNFINISHED, WAITING, RUNNING = "stopped", "unfinished", "waiting", "running"
FINAL = (DONE, FAILED, PRUNED)
FIGURES = ("best_validation_accuracy", "best_validation_loss", "test_accuracy", "test_loss")


@dataclass(frozen=True)
class Row:
    """One network: how it stands, why, and its figures."""

    network: Network
    status: str
    reason: str | None
    history: RunHistory

    def numbers(self) -> tuple[float | None, ...]:
        """The values of `FIGURES`."""
        best, test = self.history.best_validation(), self.history.test
        return best.accuracy, best.loss, test.accuracy, test.loss

    def judged(self) -> Metrics:
        """What it is ordered by: validation, or training where there is none; never the test."""
        best = self.history.best_validation()
        return self.history.training if best == UNKNOWN else best


def status_of(history: RunHistory, known: tuple[str, str] | None) -> tuple[str, str | None]:
    """Status and reason of a network that does not run, by its record and by what an earlier
    results.csv says of it.
    """
    if history.outcome.status == DONE:
        return DONE, history.outcome.reason
    if known and known[0] in (FAILED, PRUNED):
        return known[0], known[1] or None
    if history.outcome.status == FAILED:
        return FAILED, history.outcome.reason
    if history.outcome.status == STOPPED:
        return STOPPED, history.outcome.reason
    return (UNFINISHED if history.planned_epochs else WAITING), None


def read_known(folder: Path) -> dict[str, tuple[str, str]]:
    """Status and reason by name from an earlier results.csv; nothing where there is none."""
    try:
        with open(folder / FILE, newline="", encoding="utf-8") as file:
            return {row["name"]: (row["status"], row["reason"]) for row in csv.DictReader(file)}
    except (OSError, KeyError, ValueError, csv.Error):
        return {}


def write_results(folder: Path, networks: Networks, rows: Iterable[Row]) -> None:
    """Write results.csv, whole or not at all. RunError."""
    header = ["name", "status", "reason", *networks.differing, *FIGURES, "epochs", "seconds"]
    path = folder / FILE
    try:
        with whole_file(path) as binary, as_text(binary) as file:
            writer = csv.writer(file)
            writer.writerow(header)
            for row in rows:
                differing = [getattr(row.network.config, name) for name in networks.differing]
                history = row.history
                line = [row.network.name, row.status, row.reason, *differing, *row.numbers()]
                line += [history.epochs, round(history.seconds, 1)]
                writer.writerow(map(csv_cell, line))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Best first: by accuracy in validation, or where there is none in training; by loss where not
    all networks classify.
    """
    rows = list(rows)
    accurate = compared_by_accuracy([row.network.config.task for row in rows])
    return sorted(rows, key=lambda row: -row.judged().score(accurate))


def results_table(rows: Iterable[Row]) -> Table:
    """The closing table, best first: accuracies, or losses where not all networks classify."""
    rows = ordered(rows)
    accurate = compared_by_accuracy([row.network.config.task for row in rows])
    what = "accuracy" if accurate else "loss"
    table = Table(pad_edge=False)
    table.add_column("network", overflow="fold")
    table.add_column("status")
    for name in (f"validation\n{what}", f"test\n{what}", "epochs", "seconds"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = row.numbers()[0::2] if accurate else row.numbers()[1::2]
        texts = ["" if value is None else f"{value:.4f}" for value in numbers]
        seconds = f"{row.history.seconds:.0f}"
        table.add_row(row.network.name, row.status, *texts, str(row.history.epochs), seconds)
    return table


def counts(statuses: Iterable[str]) -> str:
    """ "4 done, 1 failed"."""
    found = list(statuses)
    return ", ".join(f"{found.count(name)} {name}" for name in dict.fromkeys(sorted(found)))
