"""What a run has come to, from its record, also while it grows; and the best run of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hpctrain.errors import UsageError
from hpctrain.report.find import sweep_runs
from hpctrain.report.follow import Follower
from hpctrain.report.story import moment, number
from hpctrain.typed import parse_toml

NETWORK_FILE = "model.safetensors"


class Point(NamedTuple):
    """Means over a split; None for what is not known, or no number."""

    loss: float | None = None
    accuracy: float | None = None

    def score(self, by_accuracy: bool) -> float:
        """The larger the better; minus infinity for what is not known."""
        if by_accuracy:
            return -math.inf if self.accuracy is None else self.accuracy
        return -math.inf if self.loss is None else -self.loss


UNKNOWN = Point()


@dataclass
class Figures:
    """A run so far; takes the records of a run in order, steps not needed."""

    status: str = ""  # of its last launch: done, stopped, left, failed; "" where it has no end
    reason: str | None = None
    ended: float = 0.0  # when, in seconds since 1970
    epochs: int = 0
    planned: int = 0
    seconds: float = 0.0  # of all launches
    train: Point = UNKNOWN  # of the last epoch
    test: Point = UNKNOWN
    validations: list[Point] = field(default_factory=list)
    latest: float = 0.0  # record, in seconds since 1970
    wants_step: ClassVar[None] = None

    def best(self, by_accuracy: bool) -> Point:
        """The best validation so far."""
        return max(self.validations, key=lambda p: p.score(by_accuracy), default=UNKNOWN)

    def best_validation(self) -> Point:
        """The smallest loss and the largest accuracy of all validations."""
        return Point(self.best(False).loss, self.best(True).accuracy)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one record."""
        point = Point(number(record.get("loss")), number(record.get("accuracy")))
        now = moment(record) or self.latest
        match record["kind"], record.get("split"):
            case "run", _:
                self.latest = now
                self.planned = int(number(record.get("epochs")) or 0)
                self.status, self.reason = "", None
            case "epoch", _:
                self.epochs, self.train = record["epoch"], point
            case "evaluation", "validation":
                self.validations.append(point)
            case "evaluation", "test":
                self.test = point
            case "end", _:
                self.status, self.reason, self.ended = record["status"], record.get("reason"), now
        self.seconds += now - (self.latest or now)
        self.latest = now


def figures_of(folder: Path) -> Figures:
    """What the run in this folder has come to; nothing where it has not begun."""
    follower = Follower(folder, Figures)
    follower.poll()
    return follower.taken


def by_accuracy(tasks: Sequence[str]) -> bool:
    """Whether networks of these tasks are compared by accuracy, and not by loss."""
    return all(task == "classify" for task in tasks)


def best_run(sweep: Path) -> tuple[Path, str]:
    """The best network of a sweep that has been saved, and by what: by validation, or where no
    network has been validated, by the last epoch of training; never by the test. UsageError.

    Compared are the figures of the networks that were saved: of the last validation, or with
    --output best of the one with the smallest loss.
    """
    validation: dict[Path, Point] = {}
    training: dict[Path, Point] = {}
    tasks = []
    for folder in sweep_runs(sweep):
        if (folder / NETWORK_FILE).is_file():
            figures, settings = figures_of(folder), _settings(folder)
            last = (figures.validations or [UNKNOWN])[-1]
            smallest = settings.get("output") == "best"
            validation[folder] = figures.best(False) if smallest else last
            training[folder] = figures.train
            tasks.append(settings.get("task", "classify"))
    if not training:
        raise UsageError(f"{sweep}: no network has ended yet")
    accurate = by_accuracy(tasks)
    validated = any(point != UNKNOWN for point in validation.values())
    points = validation if validated else training
    best = max(points, key=lambda folder: points[folder].score(accurate))
    value = points[best].accuracy if accurate else points[best].loss
    what = f"{'validation' if validated else 'training'} {'accuracy' if accurate else 'loss'}"
    return best, f"{what} {'unknown' if value is None else format(value, '.4g')}"


def _settings(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return parse_toml((folder / "config.toml").read_text())
    return {}
