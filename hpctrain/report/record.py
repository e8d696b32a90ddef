"""The record of a run, ``progress.jsonl``: its fields; write it, read it, truncate it.

It is one JSON object per line (jsonlines.org). Every line has ``kind`` and ``time`` (UTC, ISO 8601,
milliseconds); `FIELDS` lists the others by kind. Epochs and steps count from 1, steps over the
whole run. JSON has no NaN and no infinity (RFC 8259): such a number is recorded as null, and
``nonfinite`` lists the names of these fields.

Lines are appended whole, so a killed writer can leave only its last line incomplete. Readers skip
that line, and a resumed launch removes it, with the lines after its checkpoint (`truncate_record`).
Any other line that cannot be read, or has a value that `FIELDS` does not allow, is corrupt (lost
in a power failure, say): it is named by file and line.

**To add a field**, add a line to `FIELDS` and pass the value where the record is made (for steps
``Recorder.write`` in training/loop.py). `scalar` makes TensorBoard show it, `deterministic` makes
``compare`` compare it. No other change is needed. Figures of tasks (tasks/facts.py) are fields by
themselves.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hpctrain.errors import Failure, RunError, UsageError
from hpctrain.fault import fault
from hpctrain.files import write_whole, writing
from hpctrain.outcome import Status
from hpctrain.report.step_stats import Costs
from hpctrain.tasks.facts import FACTS, USUAL, Direction, TaskFacts, all_figures
from hpctrain.text import brief

FILE_NAME = "progress.jsonl"
FORMAT = 1
LONGEST_WAIT = 1.0  # seconds after a write in which steps are buffered, at most
COST_RATIO = 2000  # up to that limit, the time between writes in units of the last one's duration

Record = Mapping[str, Any]


class Field(NamedTuple):
    """The values of a field, each of which may be null, and the commands that use them."""

    type: type  # int (from 0 on), float (also an integer), str or bool; object: any value
    is_object: bool = False  # an object of such values by name: seconds by phase, shares by phase
    deterministic: bool = False  # equal runs record equal values: ``compare`` compares them
    scalar: bool = False  # shown by TensorBoard
    is_share: bool = False  # from 0 to 1

    @property
    def check(self) -> Callable[[Any], bool]:
        """A function that returns whether a value, as JSON gives it, is one of this field."""
        check = CHECKS[self.type]
        if self.is_share:
            check = is_share
        if not self.is_object:
            return check
        return lambda value: (
            value is None or (type(value) is dict and all(map(check, value.values())))
        )


def is_count(value: Any) -> bool:
    """Whether a value of JSON is null, or an integer from 0 on that NumPy can hold."""
    return value is None or (type(value) is int and 0 <= value <= LARGEST_COUNT)


def is_number(value: Any) -> bool:
    """Whether a value of JSON is null, or a number that is finite as a float."""
    return value is None or (type(value) in NUMBERS and -LARGEST <= value <= LARGEST)


def is_share(value: Any) -> bool:
    """Whether a value of JSON is null, or a number from 0 to 1."""
    return value is None or (type(value) in NUMBERS and 0 <= value <= 1)


def is_text(value: Any) -> bool:
    """Whether a value of JSON is null, or a text that can be written in UTF-8, as a file name."""
    if type(value) is str and not value.isascii():
        value.encode("utf-8", "surrogateescape")  # raises ValueError
    return value is None or type(value) is str


CHECKS: dict[type, Callable[[Any], bool]] = {
    int: is_count,
    float: is_number,
    str: is_text,
    bool: lambda value: value is None or type(value) is bool,
    object: lambda value: True,
}
NUMBERS = (float, int)
LARGEST = sys.float_info.max
LARGEST_COUNT = 2**63 - 1

COUNT = Field(int)
NUMBER = Field(float)
TEXT = Field(str)
EXACT_COUNT = Field(int, deterministic=True)
EXACT_TEXT = Field(str, deterministic=True)
METRIC = Field(float, deterministic=True, scalar=True)
ACCURACY = Field(float, deterministic=True, scalar=True, is_share=True)

FIELDS: dict[str, dict[str, Field]] = {  # by kind, then by name
    "run": {  # a launch; these, and all other facts of training/folder.py: run_facts
        **dict.fromkeys(("epochs", "steps_per_epoch", "ranks"), COUNT),
        **dict.fromkeys(("model", "device"), TEXT),
        "settings": Field(object, is_object=True),
        "figures": Field(str, is_object=True),  # of the task, "max" or "min": see `figures_of`
    },
    "step": {  # means over the mini-batch of all ranks
        **dict.fromkeys(("epoch", "step", "slowest_rank"), COUNT),
        **dict.fromkeys(("loss", "learning_rate"), METRIC),
        "accuracy": ACCURACY,
        "images_per_second": Field(float, scalar=True),
        "rows": EXACT_COUNT,  # images of the mini-batch
        "seconds": Field(float, is_object=True),  # of the slowest rank: data, compute, reduce,
        # total; idle: the mean time that a rank waits for it
    },
    "epoch": {  # means over all its images
        "epoch": COUNT,
        **dict.fromkeys(("loss", "images_per_second", "seconds"), NUMBER),
        "accuracy": Field(float, is_share=True),
    },
    "evaluation": {  # with the weights after `step`
        **dict.fromkeys(("epoch", "step"), COUNT),
        "split": EXACT_TEXT,
        **{name: ACCURACY if figure.is_share else METRIC for name, figure in all_figures().items()},
        "metrics": Field(float, is_object=True, deterministic=True, scalar=True),  # of --metric
        "rows": EXACT_COUNT,
        "seconds": NUMBER,
    },
    "note": {"text": TEXT},
    "digest": {"step": COUNT, "digest": EXACT_TEXT},
    "end": {  # of a launch; metrics of the test may follow
        "status": TEXT,  # outcome.py: Status
        "reason": TEXT,
        "repeats": Field(bool),  # whether another launch would fail in the same way
        "seconds": NUMBER,  # since the line of kind "run"
        "steps": COUNT,
        **dict.fromkeys(("step_seconds", "images_per_second"), NUMBER),  # means
        "shares": Field(float, is_object=True),  # of a step: data, compute, reduce, other
        "idle": NUMBER,  # share of a step that ranks wait for the slowest
        "slowest_rank": COUNT,  # most often
        "slowest_share": NUMBER,  # of the steps
        "digest": EXACT_TEXT,
    },
}

# Figures of tasks that have no line above
FIGURES = {"step": METRIC, "epoch": NUMBER, "evaluation": METRIC}
for kind, field in FIGURES.items():
    for facts in FACTS.values():
        for name in facts.figures:
            FIELDS[kind].setdefault(name, field)

NEEDED = {  # fields without which, or with null, a record cannot be read, by kind
    **{"step": ("step",), "epoch": ("epoch",), "evaluation": ("split", "step")},
    **{"note": ("text",), "digest": ("digest", "step"), "end": ("status",)},
}

CHECKS_OF = {
    kind: {name: field.check for name, field in fields.items()} for kind, fields in FIELDS.items()
}


def fields_marked(kind: str, mark: str) -> list[str]:
    """Return the fields of a kind for which `mark`, a flag of `Field`, is set."""
    return [name for name, field in FIELDS.get(kind, {}).items() if getattr(field, mark)]


def figures_of(facts: Record) -> dict[str, Direction]:
    """Return the figures of a run and the direction in which each is better; the first ranks runs.

    `facts` is the first line of the record. If it lists no figures, they are those of its task.
    """
    return {**(facts.get("figures") or task_of(facts).recorded), "loss": "min"}


def value_in(record: Record, name: str) -> float | None:
    """Return a figure of an evaluation, one of --metric, too; None if it is unknown.

    An area of scores that were counted in intervals is recorded as "NAME_binned".
    """
    values = {**record, **(record.get("metrics") or {})}
    value: float | None = values.get(name, values.get(f"{name}_binned"))
    return value


def best_by_of(facts: Record) -> str:
    """Return the figure that chooses the best network of a run, by the first line of its record."""
    settings = facts.get("settings") or {}
    if settings.get("best_by"):
        return next(iter(figures_of(facts)))
    return task_of(facts).chooses


def task_of(facts: Record) -> TaskFacts:
    """Return the facts of a run's task; `facts` is the first line of its record."""
    settings = facts.get("settings") or {}
    return FACTS.get(str(settings.get("task")), USUAL)


class Sink(Protocol):
    """A receiver of records as they are written, such as a display."""

    def write(self, record: dict[str, Any]) -> None:
        """Show a record, or a "phase", which is not recorded."""

    def close(self) -> None:
        """End what is shown."""


class Recorder:
    """Writes the records of a run to its folder, and passes them to `sinks`, which it closes.

    Rank 0 passes the folder of the run. All other ranks pass None, and nothing is written, so that
    a training loop can call the same methods on every rank.

    Methods raise RunError if a line cannot be written (disk full); this happens once, and later
    lines are dropped. Leaving a ``with`` block by an exception records an end with status "failed".

    Steps are buffered, so that writing takes at most one part in `COST_RATIO` of the time even if
    it is slow (NFS asks its server every time), but for at most `LONGEST_WAIT`. Records of other
    kinds are written immediately, with the steps before them.
    """

    def __init__(self, folder: Path | None, sinks: Sequence[Sink] = ()) -> None:
        self._descriptor = -1  # of the file; -1: nothing is written
        self._sinks = sinks
        self._buffered: list[dict[str, Any]] = []
        self._due = 0.0  # when steps are written next
        self._started = 0.0  # when the record of kind "run" was written; 0: no launch is running
        self._costs = Costs()
        if folder is None:
            return
        self._path = folder / FILE_NAME
        with writing(self._path):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Record the fields of one kind in ``FIELDS`` at this time, and return the record.

        A "run" is a launch and comes first; see `note` and `end` for these kinds.
        """
        if kind not in ("run", "end"):
            unknown = sorted(fields.keys() - FIELDS[kind].keys())
            if unknown:
                raise ValueError(
                    f"no field {unknown[0]} of a record of kind {kind}: figures are named in"
                    " tasks/facts.py, other fields in report/record.py"
                )
        if kind == "run":
            self._started = time.monotonic()
            self._costs = Costs(fields)
            fields = {"format": FORMAT, **fields}
        elif kind == "step":
            self._costs.add(fields)
        record = {"kind": kind, "time": time.time(), **fields}
        try:
            if self._descriptor >= 0:
                self._buffered.append(record)
                if kind != "step" or time.monotonic() >= self._due:
                    self.flush()
        finally:  # shown even if the disk is full
            for sink in self._sinks:
                sink.write(record)
        return record

    def note(self, text: str) -> None:
        """Record a message for the user."""
        self.write("note", text=text)

    def phase(self, text: str) -> None:
        """Show current work other than steps; it is not recorded."""
        for sink in self._sinks:
            sink.write({"kind": "phase", "text": text})

    def end(self, status: str, reason: str | None = None, **facts: Any) -> None:
        """Record how the run ended and how its time was spent."""
        seconds = 0.0
        if self._started:
            seconds = round(time.monotonic() - self._started, 3)
        self._started = 0.0
        fields = {
            "status": status,
            "reason": reason,
            "seconds": seconds,
            **self._costs.facts(),
            **facts,
        }
        self.write("end", **fields)

    def flush(self, last: bool = False) -> None:
        """Write the buffered records to the file; after the `last` ones, fsync and close it."""
        if self._descriptor < 0:
            return
        start = time.monotonic()
        data = b"".join([encode_record(record) for record in self._buffered])
        self._buffered.clear()
        try:
            with writing(self._path):
                while data:  # one write, unless the disk fills up: then the next write raises
                    data = data[os.write(self._descriptor, data) :]
                fault("record.written")
                if last:
                    os.fsync(self._descriptor)  # NFS reports a full disk only here
        except RunError:
            last = True
            raise
        finally:
            if last:
                with suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = -1
        end = time.monotonic()
        self._due = end + min(COST_RATIO * (end - start), LONGEST_WAIT)

    def close(self) -> None:
        """Write and close the file, and close the sinks. May be called again."""
        with ExitStack() as stack:  # closes all of them, even if one fails
            for sink in self._sinks:
                stack.callback(sink.close)
            self._sinks = ()
            self.flush(last=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        name = type(error).__name__
        if isinstance(error, Failure):
            name = ""
        with suppress(RunError):  # the exception being handled matters more than its record
            if self._started:
                self.end(Status.FAILED, ": ".join(filter(None, [name, str(error)])))
        with suppress(RunError):
            self.close()


def encode_record(record: Record) -> bytes:
    """Encode a record, its time in seconds since 1970, as a line of strict JSON in ASCII."""
    moment = datetime.fromtimestamp(record["time"], UTC).isoformat(timespec="milliseconds")
    record = {**record, "time": moment.replace("+00:00", "Z")}
    try:
        text = _ENCODER.encode(record)
    except ValueError:  # a number that JSON cannot hold
        nonfinite: list[str] = []
        fields = without_nonfinite(record, nonfinite)
        text = _ENCODER.encode({**fields, "nonfinite": nonfinite})
    return text.encode("ascii") + b"\n"


def without_nonfinite(value: Any, names: list[str] | None = None, name: str = "") -> Any:
    """Copy a value for JSON, with None for NaN and infinity.

    Their dotted names are appended to `names`; `name` is that of the value itself. Numbers of NumPy
    and torch become Python's; paths, devices and the like str.
    """
    if isinstance(value, Mapping):
        return {key: without_nonfinite(part, names, f"{name}.{key}") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(part, names, f"{name}.{i}") for i, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if names is not None:
            names.append(name.removeprefix("."))
        return None
    if isinstance(value, str | int | float | None):
        return value
    return without_nonfinite(_to_json_type(value), names, name)


def _to_json_type(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


_ENCODER = json.JSONEncoder(allow_nan=False, default=_to_json_type)


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the run in `folder`, in order.

    An incomplete last line is skipped: its writer was killed, or is still writing. While iterating,
    raises UsageError if the file is missing or a line is corrupt.
    """
    path = folder / FILE_NAME
    try:
        with open(path, "rb") as file:
            lines = Lines()
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield lines.parse_line(line, number, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def parse_record(line: bytes | str) -> dict[str, Any]:
    """Parse a line.

    Raises ValueError if it is no JSON object with a kind, a time and `NEEDED`, or if a value is not
    as in `FIELDS`.
    """
    try:
        record = json.loads(line, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("no JSON: nested too deeply") from None
    if not isinstance(record, dict) or not {"kind", "time"} <= record.keys():
        raise ValueError("no JSON object with a kind and a time")
    kind = record["kind"]
    time = record["time"]
    if not isinstance(time, str) or not isinstance(kind, str) or not is_text(kind):
        raise ValueError("its kind and its time must be texts")
    try:
        datetime.fromisoformat(time).timestamp()
    except OverflowError as error:  # of a time without a zone, year 1 or 9999
        raise ValueError(str(error)) from None
    for name in NEEDED.get(kind, ()):
        if record.get(name) is None:
            raise ValueError(f"a record of this kind lacks {name}")
    checks = CHECKS_OF.get(kind, {})
    for name, value in record.items():
        if name in checks and not checks[name](value):
            raise refused(name, value)
    return record


def refused(name: str, value: Any) -> ValueError:
    """Return the error for a value that a field cannot have."""
    return ValueError(f"{name} cannot be {brief(json.dumps(value), 40)}")


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinity, which JSON does not have."""
    raise ValueError(f"no JSON: {name}")


class Lines:
    """Parses the lines of one file in turn: steps are in order, unless two jobs wrote to it."""

    def __init__(self) -> None:
        self._step = -1  # the last one
        self._figures: Collection[str] = ()  # those of the run, which are numbers

    def parse(self, line: bytes) -> dict[str, Any]:
        """Parse the next line. Raises ValueError if it is corrupt; see `parse_record`."""
        record = parse_record(line)
        kind = record["kind"]
        if kind == "run":
            self._figures = figures_of(record).keys()
        elif kind in FIGURES:
            for name in self._figures:
                if not is_number(record.get(name)):
                    raise refused(name, record[name])
        if kind == "step":
            if record["step"] <= self._step:
                raise ValueError(f"step {record['step']} comes after step {self._step}")
            self._step = record["step"]
        return record

    def parse_line(self, line: bytes, number: int, path: Path) -> dict[str, Any]:
        """Parse the next line, `number` of `path`. Raises UsageError if it is corrupt."""
        try:
            return self.parse(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number} is no line of a record: {error}") from error


def truncate_record(folder: Path, step: int, epoch: int, validated: int) -> None:
    """Remove from a run's record the lines that a resumed launch will record again.

    These are the steps and digests after `step`, the epochs after `epoch`, the validations after
    step `validated`, all other evaluations, and an end with status "done". All other lines are kept
    byte for byte, up to the first one that is incomplete or corrupt.
    """

    def is_kept(record: dict[str, Any]) -> bool:
        match record["kind"]:
            case "step" | "digest":
                return record["step"] <= step
            case "epoch":
                return record["epoch"] <= epoch
            case "evaluation":
                return record["split"] == "validation" and record["step"] <= validated
            case "end":
                return record["status"] != Status.DONE
        return True

    kept = []
    lines = Lines()
    with suppress(FileNotFoundError), open(folder / FILE_NAME, "rb") as file:
        for line in file:
            try:
                if line.endswith(b"\n") and is_kept(lines.parse(line)):
                    kept.append(line)
            except ValueError:
                break  # the lines after it cannot be trusted
        write_whole(folder / FILE_NAME, b"".join(kept))
