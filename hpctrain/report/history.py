"""The history of a run, read from its record: launches, steps, epochs, evaluations, outcome.

`History.read` reads a record once, `History.follow` while it grows. All commands that show or
resume runs read the record through it. How a launch ended is decided here alone
(`History.outcome`): by its end record, else by the heartbeats of its ranks.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, BinaryIO

from hpctrain.errors import UsageError
from hpctrain.heartbeat import HEARTBEATS, find_cause
from hpctrain.outcome import Outcome, Status
from hpctrain.report.metrics import UNKNOWN, Figure, Metrics, metrics_of
from hpctrain.report.record import (
    FIELDS,
    FILE_NAME,
    Lines,
    Record,
    figures_of,
    is_number,
    value_in,
)
from hpctrain.report.step_stats import Costs, seconds_left
from hpctrain.tasks.facts import Direction
from hpctrain.text import counted

if TYPE_CHECKING:
    import numpy as np

SAMPLE = 8000  # steps decoded in one pass over a long record, approximately
STEP_BYTES = 350  # approximate length of a step's line
NEAR_END = 1 << 16  # bytes at the end of the record in which every step is decoded
TAIL = 64  # bytes before the position that are compared: each line holds a time
STEP = b'{"kind": "step"'  # how the line of a step begins
RECENT = 50  # steps over which speeds and shares are computed
MOST_POINTS = 800  # of a curve; beyond that, neighbouring points are merged
LARGEST_DRAWN = 1e300
MOST_NOTES = 5  # kept in a history
COUNTS = {
    name
    for fields in FIELDS.values()
    for name, field_of_kind in fields.items()
    if field_of_kind.type is int
}

Table = dict[str, "np.ndarray"]  # columns by name
Point = tuple[float, float]  # of a curve: means of step and value


@dataclass
class Launch:
    """One launch of a run; a run that was resumed has several."""

    began: float | None = None  # in seconds since 1970
    latest: float | None = None  # time of its last record
    first_step: Record = field(default_factory=dict)
    end: Record = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """How the launch ended, according to its end record; see `History.outcome`."""
        if not self.end:
            return Outcome()
        return Outcome(
            status=self.end["status"],
            reason=self.end.get("reason"),
            time=time_of(self.end),
        )


class Columns:
    """The numbers of records as columns by name; NaN where a record has none.

    A field of several parts has a column for each, such as ``seconds_compute``.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.rows = 0
        self.by_name: dict[str, array[float]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Append one row."""
        numbers = {"time": time_of(record)}
        for name, value in record.items():
            if isinstance(value, dict):
                numbers |= {f"{name}_{part}": v for part, v in value.items() if is_number(v)}
            elif is_number(value):
                numbers[name] = value
        for name in numbers:
            if name not in self.by_name:
                self.by_name[name] = array("d", [math.nan]) * self.rows
        for name, column in self.by_name.items():
            value = numbers.get(name)
            column.append(math.nan if value is None else value)
        self.rows += 1

    def thin(self) -> None:
        """Remove every second row."""
        for column in self.by_name.values():
            del column[::2]
        self.rows //= 2

    def table(self) -> Table:
        """Return the columns as arrays: times as datetime64[ms], counts as int64 if all known."""
        import numpy as np

        table = {name: np.array(column) for name, column in self.by_name.items()}
        for name, values in table.items():
            if name == "time":
                table[name] = np.round(1000 * values).astype("datetime64[ms]")
            elif name in COUNTS and not np.isnan(values).any():
                table[name] = values.astype(np.int64)
        return table


class History:
    """The history of the run in `folder`, up to date with its record after each `follow`.

    `steps` is "all"; "sampled" (of very many new steps only every n-th is read, and those near the
    end); or "none". Corrupt lines are counted and skipped; but with all steps, nothing is read
    after the first one: what follows it cannot be trusted.

    Also works on files that other machines write: it only uses open, fstat and read. A resumed
    launch replaces the record by a shorter one (`truncate_record`); the bytes before the current
    position then differ, and the record is read from its start.
    """

    def __init__(self, folder: Path, steps: str = "all") -> None:
        self.folder = folder
        self.path = folder / FILE_NAME
        self._mode = steps
        self.version = 0  # incremented with every change
        self._reset()

    def _reset(self) -> None:
        self.version += 1
        self.problem: str | None = None  # why the record, or its first corrupt line, is not read
        self.lost = 0  # corrupt lines
        self._lines = 0
        self._parser = Lines()
        self._position = 0  # offset after the last whole line that was read
        self._tail = b""  # the last bytes of that line
        self.launch = Launch()  # the last one
        self.facts: Record = {}  # the description of the run, as recorded by that launch
        self.seconds = 0.0  # of all launches together
        self.step: Record = {}  # the last record of kind "step"
        self.completed = 0  # epochs
        self.training = UNKNOWN  # means over the last epoch
        self.evaluated: dict[str, Record] = {}  # the last evaluation of each split
        self.recent_notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._recent: deque[Record] = deque(maxlen=RECENT)  # steps of this launch
        self._steps = Columns()
        self._epochs: list[Record] = []
        self._evaluations: list[Record] = []

    @classmethod
    def read(cls, folder: Path, steps: str = "all") -> History:
        """Read the record in a folder; without one, the history is empty.

        With all steps, raises UsageError if the record is missing or corrupt.
        """
        history = cls(folder, steps)
        history.follow()
        if steps == "all" and (history.problem or not history.path.exists()):
            raise UsageError(history.problem or f"there is no {history.path}")
        return history

    def follow(self) -> bool:
        """Read new lines of the record. Return True if anything changed."""
        before = self.version
        try:
            # Opened every time, so that an NFS client asks its server for changes.
            with open(self.path, "rb") as file:
                self._read(file)
        except OSError as error:
            problem = None
            if not isinstance(error, FileNotFoundError):
                problem = f"cannot read {self.path}: {error.strerror}"
            if self._position or problem != self.problem:
                self._reset()
            self.problem = problem
        return self.version != before

    def _read(self, file: BinaryIO) -> None:
        descriptor = file.fileno()
        length = len(self._tail)
        is_other = os.pread(descriptor, length, self._position - length) != self._tail
        if is_other or (self.problem and not self.lost):
            self._reset()
        size = os.fstat(descriptor).st_size
        began = self._position
        every = 1 + (size - began) // STEP_BYTES // SAMPLE
        file.seek(began)
        for line in file:
            if not line.endswith(b"\n") or (self._mode == "all" and self.lost):
                break
            self._lines += 1
            self._position += len(line)
            self._tail = line[-TAIL:]
            if self._mode != "all" and line.startswith(STEP):
                near_end = size - self._position < NEAR_END or not self.launch.first_step
                if self._mode == "none" or (self._lines % every and not near_end):
                    continue
            try:
                self._add(self._parser.parse_line(line, self._lines, self.path))
            except UsageError as error:  # such as lines lost in a power failure
                self.lost += 1
                self.problem = self.problem or str(error)
        if self._position != began:
            self.version += 1

    def _add(self, record: Record) -> None:
        if record["kind"] == "run":
            self.launch = Launch()
            self.facts = record
            self._recent.clear()
        launch = self.launch
        now = time_of(record)
        launch.began = launch.began or now
        self.seconds += now - (launch.latest or now)
        launch.latest = now
        match record["kind"]:
            case "step":
                self.step = record
                launch.first_step = launch.first_step or record
                self._recent.append(record)
                self._steps.add(record)
                if self._mode == "sampled" and self._steps.rows > 2 * SAMPLE:
                    self._steps.thin()
            case "epoch":
                self.completed = record["epoch"]
                self.training = metrics_of(record, self.figures)
                self._epochs.append(record)
            case "evaluation":
                self.evaluated[record["split"]] = record
                self._evaluations.append(record)
            case "note":
                self.recent_notes.append(record["text"])
            case "end":
                launch.end = record

    @property
    def steps(self) -> Table:
        """The steps that were read, as columns; see `Columns`."""
        return self._steps.table()

    @property
    def epochs(self) -> Table:
        """The means over the images of each epoch."""
        return Columns(self._epochs).table()

    @property
    def evaluations(self) -> Table:
        """The evaluations of all splits, see the column ``split``."""
        import numpy as np

        table = Columns(self._evaluations).table()
        if not table:
            return {}
        splits = [record["split"] for record in self._evaluations]
        return {"split": np.array(splits, object), **table}

    def __iter__(self) -> Iterator[Table]:
        """Yield the tables of steps, epochs and evaluations."""
        return iter((self.steps, self.epochs, self.evaluations))

    def __repr__(self) -> str:
        """Return the columns and the number of rows of each table."""
        lines = []
        for name, table in zip(("steps", "epochs", "evaluations"), self, strict=True):
            rows = len(next(iter(table.values()), ()))
            lines.append(f"{name}: {counted(rows, 'row')} of {', '.join(table)}")
        return "\n".join(lines)

    def curve(self, name: str, split: str = "training") -> list[Point]:
        """Return the values of a column by step, as at most `MOST_POINTS` points.

        NaN and values beyond `LARGEST_DRAWN`, whose sums may not be finite, are left out.
        `split` is "training" (means over mini-batches), one of `evaluated`, or "epochs": then the
        values are those of the epochs, by epoch.
        """
        by = "step"
        columns = self._steps
        if split == "epochs":
            by = "epoch"
            columns = Columns(self._epochs)
        elif split != "training":
            columns = Columns(record for record in self._evaluations if record["split"] == split)
        others = (f"metrics_{name}", f"{name}_binned")  # as `value_in` finds it
        name = next((other for other in (name, *others) if other in columns.by_name), "")
        if not name:
            return []
        pairs = zip(columns.by_name[by], columns.by_name[name], strict=True)
        rows = [(x, y) for x, y in pairs if abs(y) <= LARGEST_DRAWN]
        width = -(-len(rows) // MOST_POINTS) or 1
        points = []
        for begin in range(0, len(rows), width):
            steps, values = zip(*rows[begin : begin + width], strict=True)
            points.append((fmean(steps), fmean(values)))
        return points

    def outcome(self, over: bool = False) -> Outcome:
        """Return how the last launch ended; an empty outcome if unknown.

        Its end record comes first (`Launch.outcome`). Without one, it failed if its heartbeats
        report the failure of a rank or name a process of this machine that is gone, or if there are
        heartbeats and the launch is `over`: it has certainly ended (its lock is free).
        """
        if self.launch.outcome.status:
            return self.launch.outcome
        cause = find_cause(self.folder / HEARTBEATS, over)
        if cause is None:
            return Outcome()
        reason, time = cause
        return Outcome(Status.FAILED, reason, time)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if unknown."""
        epochs = self.facts.get("epochs") or 0
        steps_per_epoch = self.facts.get("steps_per_epoch") or 0
        return epochs * steps_per_epoch or None

    @property
    def figures(self) -> dict[str, Direction]:
        """The figures of the run, "max" or "min" is better; the first one ranks runs."""
        return figures_of(self.facts)

    @property
    def test(self) -> Metrics:
        """The metrics of the last test."""
        return metrics_of(self.evaluated.get("test", {}), self.figures)

    def best(self, by: str = "") -> Metrics:
        """Return the best validation so far by one of `figures`, by default the first one.

        Raises UsageError if the run has no such figure.
        """
        figures = self.figures
        by = by or next(iter(figures))
        if by not in figures:
            raise UsageError(f"{self.path} has no figure {by!r}: choose from {', '.join(figures)}")
        validations = (record for record in self._evaluations if record["split"] == "validation")
        best: Record = max(
            validations,
            key=lambda record: Figure(by, value_in(record, by), figures[by]).score,
            default={},
        )
        return metrics_of(best, figures)

    def best_validation(self) -> Metrics:
        """Return the best value of each figure in all validations."""
        return Metrics({name: self.best(name)[name] for name in self.figures})

    def longest_interval(self) -> float:
        """Return the seconds of the longest recent step or evaluation: nothing is recorded then."""
        steps = [(record.get("seconds") or {}).get("total") for record in self._recent]
        evaluations = [record.get("seconds") for record in self.evaluated.values()]
        return max(filter(None, [*steps, *evaluations]), default=0.0)

    def seconds_left(self) -> float | None:
        """Estimate the seconds to the last step, at the pace of this launch; None if unknown."""
        first = self.launch.first_step
        last = self.step
        steps = self.total_steps
        if not steps or not first or last["step"] <= first["step"]:
            return None
        seconds = time_of(last) - time_of(first)
        done = last["step"] - first["step"]
        return seconds_left(seconds, done, steps - last["step"]) or None

    def costs(self) -> dict[str, Any]:
        """Return how the time of the recent steps is spent; see ``Costs.facts``."""
        costs = Costs()
        for record in self._recent:
            costs.add(record)
        return costs.facts()


def time_of(record: Record) -> float:
    """Return when a record was made, in seconds since 1970."""
    return datetime.fromisoformat(record["time"]).timestamp()
