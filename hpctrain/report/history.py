"""The history of a run, read from its record: launches, steps, epochs, evaluations, outcome.

`History.read` reads a record once, `History.follow` while it grows. All commands that show, resume
or compare runs read the record through it. How a launch ended is decided here alone
(`History.outcome`): by its end record, else by the heartbeats of its ranks.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
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
RECENT = 50  # steps over which speeds and shares are computed
MOST_POINTS = 800  # of a curve; beyond that, neighbouring points are merged
MOST_NOTES = 5  # kept in a history
STATUSES = ("done", "stopped", "preempted", "failed")

Table = dict[str, "np.ndarray"]  # columns by name


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


class CurvePoint(NamedTuple):
    """One or more neighbouring steps: their mean step and value, and the range of the values."""

    step: float
    mean: float
    min: float
    max: float


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
    """Records of one kind as columns by name: numbers, NaN for what was not recorded, or texts.

    Fields of several parts have a column for each, such as ``seconds_compute``.
    """

    def __init__(self, kind: str) -> None:
        self.rows, self._fields = 0, FIELDS[kind]
        self._columns: dict[str, Any] = {}  # array("d"), or a list of texts

    def add(self, record: Record) -> None:
        """Append one row."""
        for name, value in record.items():
            if isinstance(value, dict):
                for part, each in value.items():
                    self._append(f"{name}_{part}", each)
            elif name == "time":
                self._append(name, time_of(record))
            elif name not in ("kind", "nonfinite"):
                self._append(name, value)
        self.rows += 1

    def _append(self, name: str, value: Any) -> None:
        if name not in self._columns:
            is_text = name in self._fields and self._fields[name].type is str
            self._columns[name] = [] if is_text else array("d")
        column = self[name]
        if isinstance(column, list):
            column.append(value)
        else:
            column.append(math.nan if (found := number(value)) is None else found)

    def __getitem__(self, name: str) -> Any:
        """Return a column; one that was not recorded is empty."""
        column = self._columns.get(name, array("d"))
        if (missing := self.rows - len(column)) > 0 and name in self._columns:
            column.extend([None if isinstance(column, list) else math.nan] * missing)
        return column

    def thin(self) -> None:
        """Remove every second row."""
        for name in self._columns:
            del self[name][::2]
        self.rows //= 2

    def table(self) -> Table:
        """Return the columns as arrays: times as datetime64[ms], counts as int64 if all known."""
        import numpy as np

        table = {}
        for name, column in self._columns.items():
            values, known = np.array(self[name]), self._fields.get(name)
            if isinstance(column, list):
                values = values.astype(object)
            elif name == "time":
                values = np.round(1000 * values).astype("datetime64[ms]")
            elif known and known.type is int and not np.isnan(values).any():
                values = values.astype(np.int64)
            table[name] = values
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
        self._unreadable: str | None = None  # why the file cannot be read at present
        self._reset()

    def _reset(self) -> None:
        self._position = 0  # offset after the last whole line that was read
        self._tail = b""  # the last bytes of that line
        self._lines = self._step_lines = 0
        self._corruption: str | None = None  # the error of the first corrupt line
        self.lost = 0  # corrupt lines
        self.launches = [Launch()]
        self.last: Record = {}  # the last record, of any kind
        self.step: Record = {}  # the last record of kind "step"
        self.gaps: list[range] = []  # steps missing before the last one, if all steps are read
        self.completed = 0  # epochs
        self.training = UNKNOWN  # means over the last epoch
        self.validations: list[Metrics] = []
        self.evaluated: dict[str, Record] = {}  # the last evaluation of each split
        self.notes: deque[str] = deque(maxlen=MOST_NOTES)
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self._steps, self._epochs = Columns("step"), Columns("epoch")
        self._evaluations = Columns("evaluation")

    @classmethod
    def read(cls, folder: Path, steps: str = "all") -> History:
        """Read the record in a folder; without one, the history is empty.

        With all steps, raises UsageError if the record is missing or corrupt.
        """
        history = cls(folder, steps)
        history.follow()
        if steps == "all" and (history.problem or not history.path.exists()):
            missing = f"cannot read {history.path}: No such file or directory"
            raise UsageError(history.problem or missing)
        return history

    @property
    def problem(self) -> str | None:
        """Why the record, or its first corrupt line, cannot be read."""
        return self._unreadable or self._corruption

    def follow(self) -> bool:
        """Read new lines of the record. Return True if anything changed."""
        before = (self.version, self.problem)
        try:
            # Opened every time, so that an NFS client asks its server for changes.
            with open(self.path, "rb") as file:
                self._unreadable = None
                self._read(file)
        except FileNotFoundError:
            self._unreadable = None
            if self._position:
                self._restart()
        except OSError as error:
            self._unreadable = f"cannot read {self.path}: {error.strerror}"
        return (self.version, self.problem) != before

    def _restart(self) -> None:
        self._reset()
        self.version += 1

    def _read(self, file: BinaryIO) -> None:
        descriptor, known = file.fileno(), len(self._tail)
        if os.pread(descriptor, known, self._position - known) != self._tail:
            self._restart()
        size, began = os.fstat(descriptor).st_size, self._position
        every = 1 + (size - began) // STEP_BYTES // SAMPLE
        file.seek(began)
        for line in file:
            if not line.endswith(b"\n") or (self._mode == "all" and self.lost):
                break
            self._lines += 1
            self._position += len(line)
            self._tail = line[-TAIL:]
            if not self._is_skipped(line, every if size - self._position > NEAR_END else 1):
                self._decode(line)
        self.version += self._position != began

    def _is_skipped(self, line: bytes, every: int) -> bool:
        """Whether the line is that of a step which is not read; every n-th is."""
        if self._mode == "all" or not line.startswith(b'{"kind": "step"'):
            return False
        self._step_lines += 1
        is_between = self._step_lines % every and self.launch.first_step
        return self._mode == "none" or bool(is_between)

    def _decode(self, line: bytes) -> None:
        self.decoded += 1
        try:
            self._add(parse_line(line, self._lines, self.path))
        except UsageError as error:  # such as lines lost in a power failure
            self.lost += 1
            self._corruption = self._corruption or str(error)

    def _add(self, record: Record) -> None:
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
                self.completed = max(self.completed, record["epoch"])
                self.training = metrics_of(record)
                self._epochs.add(record)
            case "evaluation":
                if record["split"] == "validation":
                    self.validations.append(metrics_of(record))
                self.evaluated[record["split"]] = record
                self._evaluations.add(record)
            case "note":
                self.notes.append(record["text"])
            case "end":
                self.launch.end = record
        launch = self.launch
        launch.began, launch.latest = launch.began or now, now or launch.latest

    def _add_step(self, record: Record) -> None:
        if record["step"] > self.last_step + 1:
            self.gaps.append(range(self.last_step + 1, record["step"]))
        self.step = record
        self.launch.first_step = self.launch.first_step or record
        self._recent.append(record)
        self._steps.add(record)
        if self._mode == "sampled" and self._steps.rows > 2 * SAMPLE:
            self._steps.thin()

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
        return self._evaluations.table()

    def __iter__(self) -> Iterator[Table]:
        """Yield the tables of steps, epochs and evaluations."""
        return iter((self.steps, self.epochs, self.evaluations))

    def __repr__(self) -> str:
        """Return the columns and the number of rows of each table."""
        each = zip(("steps", "epochs", "evaluations"), self, strict=True)
        rows = [(name, len(next(iter(table.values()), ())), table) for name, table in each]
        return "\n".join(f"{name}: {counted(n, 'row')} of {', '.join(t)}" for name, n, t in rows)

    def curve(self, name: str, split: str = "training") -> list[CurvePoint]:
        """Return the values of a column by step, as at most `MOST_POINTS` points.

        `split` is "training" (means over mini-batches), one of `evaluated`, or "epochs": then the
        values are those of the epochs, by epoch.
        """
        if split == "training":
            return merged(zip(self._steps["step"], self._steps[name], strict=False))
        if split == "epochs":
            return merged(zip(self._epochs["epoch"], self._epochs[name], strict=False))
        found = self._evaluations
        rows = zip(found["split"], found["step"], found[name], strict=False)
        return merged((step, value) for own, step, value in rows if own == split)

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
    def last_step(self) -> int:
        """The number of the last step; 0 for none."""
        return int(self.step.get("step", 0))

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
        """List the steps up to `done` that are not recorded, as "5, 7 to 9"; empty if none."""
        gaps = [*self.gaps, range(self.last_step + 1, done + 1)]
        found = [range(gap.start, min(gap.stop, done + 1)) for gap in gaps]
        texts = [f"{g[0]:,} to {g[-1]:,}" if len(g) > 1 else f"{g[0]:,}" for g in found if g]
        return listed(texts, 3)

    def steps_per_epoch(self) -> float:
        """Return the steps per epoch of the run's description, else an estimate from its steps."""
        described = number(self.facts.get("steps_per_epoch"))
        epochs = max(self.completed, number(self.step.get("epoch")) or 1, 1)
        return described if described and described >= 1 else max(self.last_step / epochs, 1)

    def longest_interval(self) -> float:
        """Return the seconds of the longest recent step or evaluation.

        A run may record nothing for this long.
        """
        evaluations = [number(record.get("seconds")) for record in self.evaluated.values()]
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


def merged(values: Iterable[tuple[float, float]]) -> list[CurvePoint]:
    """Merge neighbouring steps and values into at most `MOST_POINTS` points; NaN is left out."""
    known = [(step, value) for step, value in values if not math.isnan(value)]
    width, points = -(-len(known) // MOST_POINTS) or 1, []
    for first in range(0, len(known), width):
        steps, own = zip(*known[first : first + width], strict=True)
        points.append(CurvePoint(fmean(steps), fmean(own), min(own), max(own)))
    return points


def metrics_of(record: Record) -> Metrics:
    """Return the loss and the accuracy of a record."""
    return Metrics(number(record.get("loss")), number(record.get("accuracy")))


def number(value: Any) -> float | None:
    """Return `value` if it is a number, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


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
