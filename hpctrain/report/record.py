"""Read the record of a run, build its history, and truncate it to the state of a checkpoint.

``progress.jsonl`` is read and truncated only here, so that corrupt lines are handled in one place:
a line cut off by a kill or a full disk, foreign bytes, values that a field cannot hold (checked by
``fields.parse_record``). Each becomes one UsageError that names the file and the line.

Writers append whole lines (``recorder.RecordFile``), so a killed writer can leave only its last
line incomplete. Readers skip that line, and the next writer truncates it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.errors import UsageError
from hpctrain.files import write_whole
from hpctrain.report.fields import Record, parse_record
from hpctrain.report.history import RunHistory

FILE_NAME = "progress.jsonl"
BEGINNING = b'{"kind": '  # of every line
BLOCK = 1 << 16  # bytes read at a time when searching for the last whole line
SAMPLE = 8000  # steps decoded in one pass over a long record, approximately
NEAR_END = 1 << 16  # bytes at the end of the record in which every step is decoded
STEP_BYTES = 350  # approximate length of a step's line
KNOWN_BYTES = 64  # end of the last line read; if it has changed, the record was replaced
STEP, DIGEST = BEGINNING + b'"step"', BEGINNING + b'"digest"'


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, in order; `path` is its folder or its ``progress.jsonl``.

    An incomplete last line is skipped: its writer was killed, or is still writing. While iterating,
    raises UsageError if the file is missing or is not a record, or if a line is corrupt.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                yield decode(line, number, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def read_lines(file: BinaryIO, path: Path, number: int = 0) -> Iterator[bytes]:
    """Yield whole lines, newline included; `number` lines came before them.

    Raises UsageError if the first line of the file is incomplete and does not begin like a record.
    """
    for line in file:
        number += 1
        if line.endswith(b"\n"):
            yield line
        elif number == 1 and not line.startswith(BEGINNING[: len(line)]):
            raise corrupt_error(path, number, "no JSON object with a kind")


def decode(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """Decode the record in line `number` of `path`. Raises UsageError if the line is corrupt."""
    try:
        return parse_record(line)
    except ValueError as error:
        raise corrupt_error(path, number, str(error)) from error


def corrupt_error(path: Path, number: int, why: str) -> UsageError:
    """Return the error to raise for a line that cannot be read."""
    if number > 1:
        return UsageError(f"{path}, line {number} is no line of a record: {why}")
    return UsageError(
        f"{path} is not the record of a run: line {number}: {why};"
        f" name a run's folder or its {FILE_NAME}"
    )


class HistoryReader:
    """Keeps the history of the run in a folder up to date; `poll` reads new lines of its record.

    `steps` is "all", "sampled" (if there are very many new steps, only every n-th is decoded, and
    those near the end) or "none". Corrupt lines are counted and skipped; with `strict`, nothing is
    read after the first one.

    Also works on files that other machines write: it only uses open, fstat and read. A resumed
    launch replaces the record by a shorter one (`truncate_record`). The bytes before the current
    position then differ, because every line holds a time, and the record is read from its start.
    """

    def __init__(self, folder: Path, steps: str = "all", strict: bool = False) -> None:
        self.path, self._steps, self._strict = folder / FILE_NAME, steps, strict
        self.problem: str | None = None  # why the record cannot be read at present
        self.version = 0  # incremented with every change
        self.decoded = 0  # lines in total
        self._rewind()

    def poll(self) -> bool:
        """Read new lines. Return True if anything changed."""
        before = (self.version, self.problem)
        try:
            # Opened every time, so that an NFS client asks its server for changes.
            with open(self.path, "rb") as file:
                self._read(file)
        except FileNotFoundError:
            if self._size:
                self._restart()
            self.problem = None
        except OSError as error:
            self.problem = f"cannot read {self.path}: {error.strerror}"
        except UsageError as error:
            self.problem = str(error)
        return (self.version, self.problem) != before

    def _rewind(self) -> None:
        self.history = RunHistory()
        self._size = 0  # bytes of the file when it was last read
        self._position = 0  # offset after the last whole line that was read
        self._tail = b""  # the last bytes of that line
        self._lines = self._step_lines = 0
        self._is_record = False  # judged by its first line

    def _restart(self) -> None:
        self._rewind()
        self.version += 1

    def _read(self, file: BinaryIO) -> None:
        size, start = os.fstat(file.fileno()).st_size, self._position - len(self._tail)
        if os.pread(file.fileno(), len(self._tail), start) != self._tail:
            self._restart()
        elif size == self._size or (self._strict and self.history.corruption):
            return  # nothing new but the same incomplete line, or strict and corrupt
        self.problem = None
        self._size = size
        file.seek(self._position)
        every = 1 + (size - self._position) // STEP_BYTES // SAMPLE
        line, skips = b"", self._steps != "all"
        try:
            for line in read_lines(file, self.path, self._lines):
                self._lines += 1
                self._position += len(line)
                if skips and line.startswith((STEP, DIGEST)):
                    near_end = size - self._position < NEAR_END
                    if self._is_skipped(line, 1 if near_end else every):
                        continue
                self._add(line)
                if self._strict and self.history.corruption:
                    return
        finally:
            self.version += bool(line)
            self._tail = line[-KNOWN_BYTES:] or self._tail

    def _is_skipped(self, line: bytes, every: int) -> bool:
        """Whether the line of a step or of a digest is skipped."""
        self._step_lines += 1
        is_between = self._step_lines % every and self.history.launch.first_step
        return bool(is_between or self._steps == "none" or line.startswith(DIGEST))

    def _add(self, line: bytes) -> None:
        if not self._is_record and not line.startswith(BEGINNING):
            raise corrupt_error(self.path, self._lines, "no JSON object with a kind")
        self._is_record = True
        self.decoded += 1
        try:
            self.history.add(decode(line, self._lines, self.path))
        except UsageError as error:  # such as lines lost in a power failure
            self.history.corrupt_lines += 1
            self.history.corruption = self.history.corruption or str(error)


def read_history(folder: Path, steps: str = "all", strict: bool = False) -> RunHistory:
    """Read the history of the run in a folder, as far as its record can be read.

    The history is empty if the record does not exist. With `strict`, raises UsageError if the
    record is missing or corrupt.
    """
    reader = HistoryReader(folder, steps, strict)
    reader.poll()
    problem = reader.problem or reader.history.corruption
    if strict and (problem or not reader.path.exists()):
        raise UsageError(problem or f"cannot read {reader.path}: No such file or directory")
    return reader.history


def is_done(folder: Path) -> bool:
    """Whether the last launch of a run completed all epochs."""
    return read_history(folder, "none").outcome.status == "done"


def truncate_record(folder: Path, step: int, epoch: int, validated: int) -> None:
    """Remove from a run's record the lines that a resumed launch will record again.

    These are the steps after `step`, the epochs after `epoch`, the validations after step
    `validated`, the digests after `step`, all other evaluations, and an end with status "done".
    All other lines are kept byte for byte, up to the first corrupt line.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return
    kept = []
    with open(path, "rb") as file:
        try:
            for number, line in enumerate(read_lines(file, path), start=1):
                if not _is_recorded_again(decode(line, number, path), step, epoch, validated):
                    kept.append(line)
        except UsageError:
            pass  # cut off, or lost in a power failure: the lines after it cannot be trusted
    write_whole(path, b"".join(kept))


def _is_recorded_again(record: Record, step: int, epoch: int, validated: int) -> bool:
    match record["kind"]:
        case "step" | "digest":
            return bool(record["step"] > step)
        case "evaluation":
            return record["split"] != "validation" or bool(record["step"] > validated)
        case "epoch":
            return bool(record["epoch"] > epoch)
        case "end":
            return bool(record["status"] == "done")
    return False


def cut_torn_line(descriptor: int) -> None:
    """Truncate a file after its last newline."""
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
