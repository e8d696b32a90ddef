"""The history of a run, read from its record: launches, steps, epochs, evaluations, outcome.

`History.read` reads a record once, `History.follow` while it grows. All commands that show, resume
or compare runs read the record through it. How a launch ended is decided here alone
(`History.outcome`): by its end record, else by the heartbeats of its ranks.
"""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from hpctrain.errors import UsageError
from hpctrain.report.fields import FIELDS, Record
from hpctrain.report.record import FILE_NAME, parse_line
from hpctrain.report.step_stats import Costs
from hpctrain.text import counted, listed
from hpctrain.watchdog import HEARTBEATS, find_cause

if TYPE_CHECKING:
    import numpy as np

SAMPLE = 8000  # steps decoded in one pass over a long record, approximately
STEP_BYTES = 350  # approximate length of a step's line
NEAR_END = 1 << 16  # bytes at the end of the record in which every step is decoded
TAIL = 64  # bytes before the position that are compared: each line holds a time
STEP = b'{"kind": "step"'  # how the line of a step begins
RECENT = 50  # steps over which speeds and shares are computed
MOST_POINTS = 800  # of a curve; beyond that, neighbouring points are merged
MOST_NOTES = 5  # kept in a history
NO_NUMBERS = ("kind", "nonfinite", "split")  # fields without a column
STATUSES = ("done", "stopped", "preempted", "failed")
COUNTS = {name for fields in FIELDS.values() for name, each in fields.items() if each.type is int}

Table = dict[str, "np.ndarray"]  # columns by name
Point = tuple[float, float]  # of a curve: means of step and value


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
        """How the launch ended, according to its end record; see `History.outcome`."""
        if not self.end:
            return Outcome()
        status = self.end["status"] if self.end["status"] in STATUSES else "failed"
        return Outcome(status, self.end.get("reason"), time_of(self.end) or 0.0)


class Columns:
    """The numbers of records as columns by name; NaN where a record has none.

    A field of several parts has a column for each, such as ``seconds_compute``.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, record: Record) -> None:
        """Append one row."""
        for name, value in record.items():
            if isinstance(value, dict):
                for part, each in value.items():
                    self._append(f"{name}_{part}", each)
            elif name not in NO_NUMBERS:
                self._append(name, time_of(record) if name == "time" else value)
        self.rows += 1

    def _append(self, name: str, value: Any) -> None:
        column = self._columns[name] = self[name]
        column.append(value if isinstance(value, float | int) else math.nan)

    def __getitem__(self, name: str) -> array[float]:
        """Return a column of all rows; one that was never recorded is NaN."""
        column = self._columns.get(name, array("d"))
        if missing := self.rows - len(column):
            column.extend([math.nan] * missing)
        return column

    def thin(self) -> None:
        """Remove every second row."""
        for name in self._columns:
            del self[name][::2]
        self.rows //= 2

    def table(self) -> Table:
        """Return the columns as arrays: times as datetime64[ms], counts as int64 if all known."""
        import numpy as np

        table = {name: np.array(self[name]) for name in self._columns}
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

    Any record may be missing. Also works on files that other machines write: it only uses open,
    fstat and read. A resumed launch replaces the record by a shorter one (`truncate_record`); the
    bytes before the current position then differ, and the record is read from its start.
    """

    def __init__(self, folder: Path, steps: str = "all") -> None:
        self.folder, self.path, self._mode = folder, folder / FILE_NAME, steps
        self.version = 0  # incremented with every change
        self.decoded = 0  # lines in total
        self._reset()

    def _reset(self) -> None:
        self.version += 1
        self.problem: str | None = None  # why the record, or its first corrupt line, is not read
        self.lost = 0  # corrupt lines
        self._lines = 0
        self._position = 0  # offset after the last whole line that was read
        self._tail = b""  # the last bytes of that line
        self.launches = [Launch()]
        self.last: Record = {}  # the last record, of any kind
        self.step: Record = {}  # the last record of kind "step"
        self.completed = 0  # epochs
        self.training = UNKNOWN  # means over the last epoch
        self.validations: list[Metrics] = []
        self.evaluated: dict[str, Record] = {}  # the last evaluation of each split
        self.notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._recent: deque[Record] = deque(maxlen=RECENT)  # steps of this launch with a time
        self._steps, self._epochs, self._evaluations = Columns(), Columns(), Columns()
        self._splits: list[str] = []  # of the evaluations

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
            is_missing = isinstance(error, FileNotFoundError)
            problem = None if is_missing else f"cannot read {self.path}: {error.strerror}"
            if self._position or problem != self.problem:
                self._reset()
            self.problem = problem
        return self.version != before

    def _read(self, file: BinaryIO) -> None:
        descriptor, known = file.fileno(), len(self._tail)
        is_other = os.pread(descriptor, known, self._position - known) != self._tail
        if is_other or (self.problem and not self.lost):
            self._reset()
        size, began = os.fstat(descriptor).st_size, self._position
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
            self.decoded += 1
            try:
                self._add(parse_line(line, self._lines, self.path))
            except UsageError as error:  # such as lines lost in a power failure
                self.lost += 1
                self.problem = self.problem or str(error)
        self.version += self._position != began

    def _add(self, record: Record) -> None:
        self.last, now = record, time_of(record)
        match record["kind"]:
            case "run":
                self._recent.clear()
                if self.launch.began is None and not self.launch.end:
                    self.launches.pop()
                self.launches.append(Launch(record))
            case "step":
                self.step = record
                self.launch.first_step = self.launch.first_step or record
                if (record.get("seconds") or {}).get("total"):
                    self._recent.append(record)
                self._steps.add(record)
                if self._mode == "sampled" and self._steps.rows > 2 * SAMPLE:
                    self._steps.thin()
            case "epoch":
                self.completed, self.training = record["epoch"], metrics_of(record)
                self._epochs.add(record)
            case "evaluation":
                if record["split"] == "validation":
                    self.validations.append(metrics_of(record))
                self.evaluated[record["split"]] = record
                self._evaluations.add(record)
                self._splits.append(record["split"])
            case "note":
                self.notes.append(record["text"])
            case "end":
                self.launch.end = record
        launch = self.launch
        launch.began, launch.latest = launch.began or now, now or launch.latest

    @property
    def steps(self) -> Table:
        """The steps that were read, as columns; see `Columns`."""
        return self._steps.table()

    @property
    def epochs(self) -> Table:
        """The means over the images of each epoch."""
        return self._epochs.table()

    @property
    def evaluations(self) -> Table:
        """The evaluations of all splits, see the column ``split``."""
        import numpy as np

        found = self._evaluations.table()
        return {"split": np.array(self._splits, object), **found} if found else {}

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
        """Return the values of a column by step, as at most `MOST_POINTS` points; NaN is left out.

        `split` is "training" (means over mini-batches), one of `evaluated`, or "epochs": then the
        values are those of the epochs, by epoch.
        """
        known = {"training": self._steps, "epochs": self._epochs}
        found, by = known.get(split, self._evaluations), "epoch" if split == "epochs" else "step"
        splits = itertools.repeat(split) if split in known else self._splits
        three = zip(splits, found[by], found[name], strict=False)
        rows = [(x, y) for own, x, y in three if own == split and not math.isnan(y)]
        width, points = -(-len(rows) // MOST_POINTS) or 1, []
        for first in range(0, len(rows), width):
            steps, values = zip(*rows[first : first + width], strict=True)
            points.append((fmean(steps), fmean(values)))
        return points

    @property
    def launch(self) -> Launch:
        """The last launch."""
        return self.launches[-1]

    @property
    def facts(self) -> Record:
        """The description of the run, as recorded by its last launch."""
        return self.launch.facts

    def outcome(self, over: bool = False) -> Outcome:
        """Return how the last launch ended; an empty outcome if unknown.

        Its end record comes first (`Launch.outcome`). Without one, it failed if its heartbeats
        report the failure of a rank or name a process of this machine that is gone, or if there are
        heartbeats and the launch is `over`: it has certainly ended (its lock is free).
        """
        if self.launch.outcome.status:
            return self.launch.outcome
        found = find_cause(self.folder / HEARTBEATS, over)
        return Outcome("failed", *found) if found else Outcome()

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if unknown."""
        return (self.facts.get("epochs") or 0) * (self.facts.get("steps_per_epoch") or 0) or None

    @property
    def test(self) -> Metrics:
        """The metrics of the last test."""
        return metrics_of(self.evaluated.get("test", {}))

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

    def missing_steps(self, done: int) -> str:
        """List the steps up to `done` that are not recorded, as "5, 7 to 9"; empty if none.

        All steps must have been read.
        """
        known = [0, *(int(step) for step in self._steps["step"] if step <= done), done + 1]
        gaps = [(low + 1, high - 1) for low, high in itertools.pairwise(known) if low + 1 < high]
        return listed([f"{a:,} to {b:,}" if a < b else f"{a:,}" for a, b in gaps], 3)

    def longest_interval(self) -> float:
        """Return the seconds of the longest recent step or evaluation.

        A run may record nothing for this long.
        """
        evaluations = [record.get("seconds") or 0.0 for record in self.evaluated.values()]
        steps = [record["seconds"]["total"] for record in self._recent]
        return max([*evaluations, *steps], default=0.0)

    def costs(self) -> dict[str, Any]:
        """Return how the time of the recent steps is spent, and their speed, if they are known.

        See ``Costs.facts``; the speed is "images_per_second".
        """
        costs, rows, total = Costs(), 0, 0.0
        for record in self._recent:
            seconds = {phase: each or 0.0 for phase, each in record["seconds"].items()}
            costs.add(seconds, record.get("slowest_rank"))
            rows, total = rows + (record.get("rows") or 0), total + seconds["total"]
        return costs.facts() | ({"images_per_second": rows / total} if total else {})


def metrics_of(record: Record) -> Metrics:
    """Return the loss and the accuracy of a record."""
    return Metrics(record.get("loss"), record.get("accuracy"))


def time_of(record: Record) -> float | None:
    """Return when a record was made, in seconds since 1970; None if not recorded."""
    try:
        return datetime.fromisoformat(record["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
