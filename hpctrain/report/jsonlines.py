"""The record of a run: ``progress.jsonl`` in its folder, one JSON object a line (jsonlines.org).

Every line has ``kind`` and ``time`` (UTC, ISO 8601, milliseconds); by kind it holds

    run          format, name, model, ranks, batch_size, epochs … whatever the run is described by
    step         epoch, step, loss, accuracy, learning_rate, images_per_second, slowest_rank, rows,
                 seconds {data, compute, reduce, total; idle: of a rank, waiting for the slowest}
    epoch        epoch, loss, accuracy, images_per_second, seconds
    evaluation   epoch, step, split, loss, accuracy, rows, seconds
    note         text
    digest       step, digest
    end          status (done, stopped, left, failed), reason, seconds since the run line,
                 step_seconds, shares {data, compute, reduce, other} of them, idle, advice

Epochs and steps count from 1, steps over the whole run. A run that is taken up again goes on in
the same file with another run line; what came after its checkpoint is taken out first. JSON
knows no NaN and no infinity (RFC 8259): such a number is null, and ``nonfinite`` lists the fields
concerned.

Lines are appended whole, so that a killed writer can only leave its last line torn. Readers
skip a torn last line, and the next writer cuts it off.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.errors import RunError, UsageError
from hpctrain.files import open_itself, open_regular, write_whole
from hpctrain.report.fields import parse_record

FILE_NAME = "progress.jsonl"
BEGINNING = b'{"kind": '  # of every line
LONGEST_LINE = 1 << 24  # bytes; a longer one is no line of a record

LONGEST_WAIT = 1.0  # seconds a step may wait to be written
COST_RATIO = 2000  # time between two writes, at least, in units of what the last one took
BLOCK = 1 << 16  # bytes read at a time when looking for the last whole line


class RecordFile:
    """Appends records to a JSON Lines file, whole lines in one write each.

    Steps gather for a moment, so that encoding and writing take at most one part in `COST_RATIO`
    of the time even where an append is slow (NFS asks its server each time), but for
    `LONGEST_WAIT` at most. All other kinds are written at once, with the steps before them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[dict[str, Any]] = []
        self._due = 0.0
        try:
            self._descriptor = open_itself(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            _cut_torn_line(self._descriptor)
        except OSError as error:
            raise RunError(f"cannot open {path}: {error.strerror}") from error

    def put(self, record: dict[str, Any]) -> None:
        """Add one line."""
        if self._descriptor < 0:
            return
        self._waiting.append(record)
        if record["kind"] != "step" or time.monotonic() >= self._due:
            self._write()

    def flush(self) -> None:
        """Write what waits."""
        if self._descriptor >= 0:
            self._write()

    def close(self) -> None:
        """Write, force to disk and close; harmless when repeated."""
        if self._descriptor < 0:
            return
        self._write()
        try:  # NFS tells of a full disk only here
            os.fsync(self._descriptor)
            os.close(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error
        self._descriptor = -1

    def _write(self) -> None:
        start = time.monotonic()
        data = b"".join([encode(record) for record in self._waiting])
        self._waiting.clear()
        try:
            while data:  # one write, unless the disk fills up: then the next one says so
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise self._failed(error) from error
        end = time.monotonic()
        self._due = end + min(COST_RATIO * (end - start), LONGEST_WAIT)

    def _failed(self, error: OSError) -> RunError:
        """Leave whole lines only, stop writing, and say why."""
        try:
            _cut_torn_line(self._descriptor)
            os.close(self._descriptor)
        except OSError:
            pass
        self._descriptor = -1
        return RunError(f"cannot write {self._path}: {error.strerror}; the record ends here")


def cut_back(folder: Path, step: int, epoch: int, validated: int) -> None:
    """Take out of a run's record what came after `step` steps and `epoch` epochs were done, the
    last validation after step `validated`: the launch that goes on from there tells it again. So
    it does the digest of that step, the test, and how the run ended. The rest stays, byte for byte.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return
    kept = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = decode(line, number, path)
            except UsageError:
                break  # torn, or lost in a power failure: what follows it cannot be trusted
            if not _is_told_again(record, step, epoch, validated):
                kept.append(line)
    write_whole(path, b"".join(kept))


def _is_told_again(record: Mapping[str, Any], step: int, epoch: int, validated: int) -> bool:
    match record["kind"]:
        case "step":
            return bool(record["step"] > step)
        case "digest":
            return bool(record["step"] >= step)
        case "evaluation":
            return record["split"] != "validation" or bool(record["step"] > validated)
        case "epoch":
            return bool(record["epoch"] > epoch)
        case "end":
            return record["status"] == "done"
    return False


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Give the records of a run, in order; `path` is its folder or its ``progress.jsonl``.

    A torn last line (its writer was killed, or is at work) is left out. UsageError, while
    iterating, for a file that is missing or is not such a record.
    """
    if path.is_dir():
        path = path / FILE_NAME
    try:
        with open(path, "rb", opener=open_regular) as file:
            lines = iter(partial(file.readline, LONGEST_LINE), b"")
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n"):
                    yield decode(line, number, path)
                elif len(line) == LONGEST_LINE:
                    raise _foreign(path, number, f"it is longer than {LONGEST_LINE:,} bytes")
                elif number == 1 and not line.startswith(BEGINNING[: len(line)]):
                    raise _foreign(path, number, "no JSON object with a kind")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def encode(record: Mapping[str, Any]) -> bytes:
    """One record, its time in seconds, as a line of strict JSON in ASCII, newline included."""
    moment = datetime.fromtimestamp(record["time"], UTC).isoformat(timespec="milliseconds")
    record = {**record, "time": moment.replace("+00:00", "Z")}
    try:
        text = _ENCODER.encode(record)
    except ValueError:  # a number that JSON cannot hold
        found: list[str] = []
        text = _ENCODER.encode({**_finite(record, "", found), "nonfinite": found})
    return text.encode("ascii") + b"\n"


def decode(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """The record in one line, its fields checked. UsageError, which names the line and what is
    wrong with it.
    """
    try:
        return parse_record(line)
    except ValueError as error:
        raise _foreign(path, number, str(error)) from error


def _foreign(path: Path, number: int, why: str) -> UsageError:
    if number > 1:
        return UsageError(f"{path}, line {number} is no line of a record: {why}")
    return UsageError(
        f"{path} is not the record of a run: line {number}: {why};"
        f" name a run's folder or its {FILE_NAME}"
    )


def _finite(value: Any, name: str, found: list[str]) -> Any:
    """Copy `value` with None for NaN and infinity, whose dotted names are added to `found`."""
    if isinstance(value, Mapping):
        return {key: _finite(item, f"{name}.{key}", found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{name}.{index}", found) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(name.removeprefix("."))
        return None
    if not isinstance(value, str | int | float | None):
        return _finite(_plain(value), name, found)
    return value


def _plain(value: Any) -> Any:
    """What to write for a type JSON does not know: numbers of NumPy and torch, paths, devices."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(", ", ": "), default=_plain)


def _cut_torn_line(descriptor: int) -> None:
    """Shorten a file to its last newline."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
