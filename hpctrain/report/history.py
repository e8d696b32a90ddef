"""The history of a run, built from its record: launches and outcomes, epochs, steps, metrics.

Curves and notes are bounded in size, however long the record is.
``record.read_history`` builds the history from a whole record, ``record.HistoryReader`` while the
record grows. How a run ended is decided here alone (`RunHistory.outcome`, `find_outcome`), for the
next launch of train, and for watch, sweep, compare, plot and stop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.report.fields import LABELS, Record
from hpctrain.report.step_stats import Costs, Curve
from hpctrain.text import listed
from hpctrain.watchdog import HEARTBEATS, find_cause

RECENT = 50  # steps over which speeds and shares are computed
MOST_NOTES = 5  # kept in a history
LARGEST = 1e200
STATUSES = ("done", "stopped", "preempted", "failed")


class Outcome(NamedTuple):
    """How a launch ended."""

    status: str = ""  # done, stopped, preempted, failed; empty if unknown
    reason: str | None = None
    time: float = 0.0  # in seconds since 1970


class Metrics(NamedTuple):
    """Means over a split; None if unknown or not finite."""

    loss: float | None = None
    accuracy: float | None = None

    def score(self, by_accuracy: bool) -> float:
        """Return a score, larger is better; minus infinity if the metric is unknown."""
        if by_accuracy:
            return -math.inf if self.accuracy is None else self.accuracy
        return -math.inf if self.loss is None else -self.loss


UNKNOWN = Metrics()


@dataclass
class Launch:
    """One launch of a run; a run that was resumed has several."""

    facts: Record = field(default_factory=dict)  # its line of kind "run"
    began: float | None = None  # in seconds since 1970
    latest: float | None = None  # time of its last record
    first_step: Record = field(default_factory=dict)
    end: Record = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """How the launch ended, according to its end record."""
        if not self.end:
            return Outcome()
        status = self.end["status"] if self.end["status"] in STATUSES else "failed"
        return Outcome(status, self.end.get("reason"), time_of(self.end) or 0.0)


class RunHistory:
    """The state of a run, accumulated from its records in order. Any record may be missing."""

    def __init__(self) -> None:
        self.launches = [Launch()]
        self.last: Record = {}  # the last record, of any kind
        self.step: Record = {}  # the last record of kind "step"
        self.last_step = 0  # the largest number of a step; 0 for none
        self.gaps: list[range] = []  # steps missing before the last one, if all steps are read
        self.epochs = 0  # completed
        self.training = UNKNOWN  # means over the last epoch
        self.validated = 0  # step of the last validation
        self.validations: list[Metrics] = []
        self.evaluations: dict[str, Record] = {}  # the last one of each split
        self.notes: deque[str] = deque(maxlen=MOST_NOTES)
        self.step_curves = {name: Curve() for name in LABELS}
        self.epoch_curves = {name: Curve() for name in LABELS}  # by epoch, not by step
        self.split_curves: dict[str, dict[str, Curve]] = {}  # of evaluations, by split
        self.metric_curves: dict[str, Curve] = {}  # of validations: figures of --metric, and more
        self.corruption: str | None = None  # the error of the first line that cannot be read
        self.corrupt_lines = 0
        self._recent: deque[Record] = deque(maxlen=RECENT)

    @property
    def launch(self) -> Launch:
        """The last launch."""
        return self.launches[-1]

    @property
    def facts(self) -> Record:
        """The description of the run, as recorded by its last launch."""
        return self.launch.facts

    @property
    def outcome(self) -> Outcome:
        """How the last launch ended, according to its end record; see `find_outcome`."""
        return self.launch.outcome

    @property
    def planned_epochs(self) -> int:
        """Epochs of the whole run; 0 if unknown."""
        return int(number(self.facts.get("epochs")) or 0)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if unknown."""
        steps = number(self.facts.get("steps_per_epoch"))
        return int(self.planned_epochs * steps) or None if steps else None

    @property
    def test(self) -> Metrics:
        """The metrics of the last test."""
        return metrics_of(self.evaluations.get("test", {}))

    @property
    def seconds(self) -> float:
        """Seconds of all launches together."""
        times = [(launch.began, launch.latest) for launch in self.launches]
        return sum(latest - began for began, latest in times if began and latest)

    def best(self, by_accuracy: bool) -> Metrics:
        """Return the best validation so far."""
        return max(self.validations, key=lambda each: each.score(by_accuracy), default=UNKNOWN)

    def best_validation(self) -> Metrics:
        """Return the smallest loss and the largest accuracy of all validations."""
        return Metrics(self.best(False).loss, self.best(True).accuracy)

    def add(self, record: Record) -> None:
        """Add one record."""
        self.last, now = record, time_of(record)
        match record["kind"]:
            case "run":
                self._recent.clear()
                self.launch.facts = {}  # to bound memory: earlier launches keep no description
                if self.launch.began is None and not self.launch.end:
                    self.launches.pop()
                self.launches.append(Launch(record))
            case "step":
                self._add_step(record)
            case "epoch":
                self.epochs = max(self.epochs, record["epoch"])
                self.training = metrics_of(record)
                add_point(self.epoch_curves, record["epoch"], record)
            case "evaluation":
                self._add_evaluation(record)
            case "note":
                self.notes.append(record["text"])
            case "end":
                self.launch.end = record
        launch = self.launch
        launch.began, launch.latest = launch.began or now, now or launch.latest

    def _add_step(self, record: Record) -> None:
        if record["step"] > self.last_step + 1:
            self.gaps.append(range(self.last_step + 1, record["step"]))
        self.step, self.last_step = record, max(self.last_step, record["step"])
        self.launch.first_step = self.launch.first_step or record
        self._recent.append(record)
        add_point(self.step_curves, record["step"], record)

    def _add_evaluation(self, record: Record) -> None:
        split = record["split"]
        if split == "validation":
            self.validated = max(self.validated, record["step"])
            self.validations.append(metrics_of(record))
            own = {"balanced accuracy": record.get("balanced_accuracy")}
            own |= record.get("metrics") or {}
            for name in own:
                add_point({name: self.metric_curves.setdefault(name, Curve())}, record["step"], own)
        self.evaluations[split] = record
        curves = self.split_curves.setdefault(split, {name: Curve() for name in LABELS})
        add_point(curves, record["step"], record)

    def missing_steps(self, done: int) -> str:
        """List the steps up to `done` that are not recorded, as "5, 7 to 9"; empty if none."""
        gaps = [*self.gaps, range(self.last_step + 1, done + 1)]
        found = [range(gap.start, min(gap.stop, done + 1)) for gap in gaps]
        texts = [f"{g[0]:,} to {g[-1]:,}" if len(g) > 1 else f"{g[0]:,}" for g in found if g]
        return listed(texts, 3)

    def steps_per_epoch(self) -> float:
        """Return the steps per epoch of the run's description, else an estimate from its steps."""
        described = number(self.facts.get("steps_per_epoch"))
        epochs = max(self.epochs, number(self.step.get("epoch")) or 1, 1)
        return described if described and described >= 1 else max(self.last_step / epochs, 1)

    def longest_interval(self) -> float:
        """Return the seconds of the longest recent step or evaluation.

        A run may record nothing for this long.
        """
        evaluations = [number(record.get("seconds")) for record in self.evaluations.values()]
        steps = [step_seconds(record) for record in self._recent]
        return max(filter(None, [*evaluations, *steps]), default=0.0)

    def costs(self) -> dict[str, Any]:
        """Return how the time of the recent steps is spent; see ``Costs.facts``."""
        costs = Costs()
        for record in self._recent:
            if step_seconds(record):
                parts = {str(n): number(v) or 0.0 for n, v in record["seconds"].items()}
                costs.add(parts, record.get("slowest_rank"))
        return costs.facts()

    def images_per_second(self) -> float | None:
        """Return the speed of the recent steps; None if unknown."""
        rows = sum(number(record.get("rows")) or 0 for record in self._recent)
        seconds = sum(step_seconds(record) for record in self._recent)
        return number(rows / seconds) if seconds else None

    def seconds_left(self) -> float | None:
        """Estimate the seconds from the last recorded step to the end, at this launch's pace."""
        first, last = self.launch.first_step, self.step
        began, came = time_of(first), time_of(last)
        if not self.total_steps or self.launch.end or began is None or came is None:
            return None
        if (done := last["step"] - first["step"]) <= 0:
            return None
        return max(self.total_steps - last["step"], 0) * (came - began) / done


def find_outcome(folder: Path, history: RunHistory, is_over: bool = False) -> Outcome:
    """Return how the last launch of the run in `folder` ended; an empty `Outcome` if unknown.

    Its end record comes first. Without one, it failed if its heartbeats report the failure of a
    rank or name a process of this machine that is gone, or if there are heartbeats and `is_over`:
    the launch has certainly ended (its lock is free).
    """
    if history.outcome.status:
        return history.outcome
    found = find_cause(folder / HEARTBEATS, is_over)
    return Outcome("failed", *found) if found else Outcome()


def metrics_of(record: Record) -> Metrics:
    """Return the loss and the accuracy of a record."""
    return Metrics(number(record.get("loss")), number(record.get("accuracy")))


def add_point(curves: Mapping[str, Curve], step: int, record: Record) -> None:
    """Add the values of a record to the curves of the same names."""
    for name, curve in curves.items():
        if (value := number(record.get(name))) is not None:
            curve.add(step, value)


def number(value: Any) -> float | None:
    """Return `value` if it is a number that can be drawn and summed, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < LARGEST else None


def step_seconds(step: Record) -> float:
    """Return the seconds of one step; 0 if not recorded."""
    seconds = step.get("seconds")
    return (number(seconds.get("total")) or 0.0) if isinstance(seconds, Mapping) else 0.0


def time_of(record: Record) -> float | None:
    """Return when a record was made, in seconds since 1970; None if not recorded."""
    try:
        return datetime.fromisoformat(record["time"]).astimezone(UTC).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
