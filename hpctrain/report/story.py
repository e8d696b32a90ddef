"""What the records of a run say of it: how far it is, its figures, its curves. Bounded in size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hpctrain.report.costs import Costs
from hpctrain.report.curve import Curve

Record = Mapping[str, Any]
FIGURES = ("loss", "accuracy")
RECENT = 50  # steps over which speeds and shares are taken
NOTES = 5  # that are kept
MOST_SPLITS = 8
LARGEST = 1e200


class Story:
    """Takes records in order. Everything may be missing: a run tells what it has."""

    def __init__(self) -> None:
        self.facts: Record = {}  # of the last launch
        self.end: Record = {}  # of the last launch, once there
        self.step: Record = {}  # the last
        self.evaluations: dict[str, Record] = {}  # the last of each split
        self.notes: deque[str] = deque(maxlen=NOTES)
        self.training = {name: Curve() for name in FIGURES}
        self.evaluated: dict[str, dict[str, Curve]] = {}  # by split
        self.last: Record = {}  # of any kind
        self.longest = 0.0  # seconds of the longest recent step or evaluation
        self._first: Record = {}  # step of this launch
        self._recent: deque[Record] = deque(maxlen=RECENT)

    @property
    def wants_step(self) -> bool:
        """Whether the next step matters more than others: it is the first of a launch."""
        return not self._first

    def add(self, record: Record) -> None:
        """Take one record."""
        self.last = record
        match record["kind"]:
            case "run":
                self.facts, self.end, self._first = record, {}, {}
                self._recent.clear()
            case "step":
                self._step(record)
            case "evaluation":
                self._evaluation(record)
            case "note":
                self.notes.append(str(record.get("text")))
            case "end":
                self.end = record

    def _step(self, record: Record) -> None:
        self.step = record
        self._first = self._first or record
        self._recent.append(record)
        self.longest = max(seconds_of(recent) for recent in self._recent)
        for name, curve in self.training.items():
            if (value := number(record.get(name))) is not None:
                curve.add(record["step"], value)

    def _evaluation(self, record: Record) -> None:
        split = record["split"]
        if split not in self.evaluated and len(self.evaluated) >= MOST_SPLITS:
            return
        self.evaluations[split] = record
        curves = self.evaluated.setdefault(split, {name: Curve() for name in FIGURES})
        for name, curve in curves.items():
            if (value := number(record.get(name))) is not None:
                curve.add(record["step"], value)

    def usual(self) -> float:
        """Seconds within which something new is to be expected."""
        seconds = [number(r.get("seconds")) or 0.0 for r in self.evaluations.values()]
        return max([self.longest, *seconds])

    def costs(self) -> dict[str, Any]:
        """Where the time of the recent steps goes, as ``costs.Costs`` tells it."""
        costs = Costs()
        for record in self._recent:
            seconds, slowest = record.get("seconds"), record.get("slowest_rank")
            if isinstance(seconds, Mapping) and seconds_of(record):
                numbers = {str(name): number(value) or 0.0 for name, value in seconds.items()}
                costs.add(numbers, slowest if isinstance(slowest, int) else None)
        return costs.facts()

    def speed(self) -> float | None:
        """Images a second in the recent steps."""
        rows = sum(number(record.get("rows")) or 0 for record in self._recent)
        seconds = sum(seconds_of(record) for record in self._recent)
        return number(rows / seconds) if seconds else None

    def steps(self) -> int | None:
        """Of the whole run."""
        epochs, steps = (number(self.facts.get(n)) for n in ("epochs", "steps_per_epoch"))
        return int(epochs * steps) if epochs and steps else None

    def left(self) -> float | None:
        """Seconds to the end of the run when its last step was recorded, at this launch's pace."""
        total, first, last = self.steps(), self._first, self.step
        began, came = moment(first), moment(last)
        if not total or self.end or began is None or came is None or first["step"] >= last["step"]:
            return None
        pace = (came - began) / (last["step"] - first["step"])
        return max(total - last["step"], 0) * pace


def number(value: Any) -> float | None:
    """A number that can be shown and added to others, or None for whatever else there may be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < LARGEST else None


def seconds_of(step: Record) -> float:
    """Of one step; 0 where it does not say."""
    seconds = step.get("seconds")
    return (number(seconds.get("total")) or 0.0) if isinstance(seconds, Mapping) else 0.0


def moment(record: Record) -> float | None:
    """When a record was made, in seconds since 1970."""
    try:
        return datetime.fromisoformat(record["time"]).astimezone(UTC).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
