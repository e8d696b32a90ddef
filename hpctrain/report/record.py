"""Reading the record of a run: its lines, its history, and taking out what came after a checkpoint.

Whoever reads or shortens ``progress.jsonl`` does it here, so corrupt lines are met in one place:
one cut off by a kill or a full disk, foreign bytes, values that a field cannot hold (checked by
``fields.parse_record``), a line longer than `LONGEST_LINE`. Each becomes one UsageError that names
the file and the line. Memory is bounded by the longest line.

Writers append whole lines (``recorder.RecordFile``), so a killed one can only leave its last line
without an end. Readers skip that line, and the next writer cuts it off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.errors import UsageError
from hpctrain.files import open_regular, write_whole
from hpctrain.report.fields import Record, parse_record
from hpctrain.report.history import RunHistory

FILE_NAME = "progress.jsonl"
BEGINNING = b'{"kind": '  # of every line
LONGEST_LINE = 1 << 20  # bytes; writers keep to it, readers refuse longer ones
BLOCK = 1 << 16  # bytes read at a time when looking for the last whole line
SAMPLE = 8000  # steps that are decoded in one reading of a long record, about
NEAR_END = 1 << 16  # bytes at the end of which every step is decoded
STEP_BYTES = 350  # of a step's line, about
KNOWN_BYTES = 64  # of the last line that must still be there
STEP, DIGEST = BEGINNING + b'"step"', BEGINNING + b'"digest"'


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run, in order; `path` is its folder or its ``progress.jsonl``.

    A last line without an end (its writer was killed, or is at work) is skipped. UsageError, while
    iterating, for a file that is missing or is not such a record, and for a corrupt line.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        with open(path, "rb", opener=open_regular) as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                yield decode(line, number, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def read_lines(file: BinaryIO, path: Path, number: int = 0) -> Iterator[bytes]:
    """Yield whole lines, newline included, of which `number` came before. UsageError for one that
    is longer than `LONGEST_LINE`, and for a first one that cannot become a record's.
    """
    for line in iter(partial(file.readline, LONGEST_LINE + 1), b""):
        number += 1
        if len(line) > LONGEST_LINE:
            raise corrupt_error(path, number, f"it is longer than {LONGEST_LINE:,} bytes")
        if line.endswith(b"\n"):
            yield line
        elif number == 1 and not line.startswith(BEGINNING[: len(line)]):
            raise corrupt_error(path, number, "no JSON object with a kind")


def decode(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """The record in line `number` of `path`. UsageError, which names the line and what is wrong
    with it.
    """
    try:
        return parse_record(line)
    except ValueError as error:
        raise corrupt_error(path, number, str(error)) from error


def corrupt_error(path: Path, number: int, why: str) -> UsageError:
    """What to raise for a line that cannot be read."""
    if number > 1:
        return UsageError(f"{path}, line {number} is no line of a record: {why}")
    return UsageError(
        f"{path} is not the record of a run: line {number}: {why};"
        f" name a run's folder or its {FILE_NAME}"
    )


class HistoryReader:
    """Keeps the history of the run in a folder; `poll` reads what was added to its record.

    `steps` is "all", "sampled" (of very many steps at once only every n-th is decoded, and those
    near the end) or "none". Damaged lines are counted and skipped, or with `strict` nothing is
    read after the first.

    Works on files of other machines too: nothing is asked of the file system but open, fstat and
    read. A resumed launch replaces the record by a shorter one (`truncate_record`): the bytes
    before the position are then others (times are in them), and the record is read anew.
    """

    def __init__(self, folder: Path, steps: str = "all", strict: bool = False) -> None:
        self.path, self._steps, self._strict = folder / FILE_NAME, steps, strict
        self.problem: str | None = None  # why the record cannot be read, as it stands
        self.version = 0  # grows with every change
        self.decoded = 0  # lines, in all
        self._rewind()

    def poll(self) -> bool:
        """Read what was added; whether anything changed."""
        before = (self.version, self.problem)
        try:
            with open(self.path, "rb", opener=open_regular) as file:  # anew: NFS asks its server
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
        self._size = 0  # of the file, when it was read last
        self._position = 0  # behind the last whole line that was read
        self._tail = b""  # the last bytes of that line
        self._lines = self._step_lines = 0
        self._is_record = False  # by its first line

    def _restart(self) -> None:
        self._rewind()
        self.version += 1

    def _read(self, file: BinaryIO) -> None:
        size, start = os.fstat(file.fileno()).st_size, self._position - len(self._tail)
        if os.pread(file.fileno(), len(self._tail), start) != self._tail:
            self._restart()
        elif size == self._size or (self._strict and self.history.corruption):
            return  # nothing new, or the same line without an end
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
        """Whether the line of a step, or of its digest, need not be decoded."""
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
        except UsageError as error:  # lost in a power failure
            self.history.corrupt_lines += 1
            self.history.corruption = self.history.corruption or str(error)


def read_history(folder: Path, steps: str = "all", strict: bool = False) -> RunHistory:
    """The history of the run in a folder, as far as its record can be read; nothing where it has
    not begun. With `strict` UsageError for a record that is missing or corrupt.
    """
    reader = HistoryReader(folder, steps, strict)
    reader.poll()
    problem = reader.problem or reader.history.corruption
    if strict and (problem or not reader.path.exists()):
        raise UsageError(problem or f"cannot read {reader.path}: No such file or directory")
    return reader.history


def is_done(folder: Path) -> bool:
    """Whether the last launch of a run did all its epochs."""
    return read_history(folder, "none").outcome.status == "done"


def truncate_record(folder: Path, step: int, epoch: int, validated: int) -> None:
    """Take out of a run's record what came after `step` steps and `epoch` epochs were done, the
    last validation after step `validated`: the resumed launch records it again. So it does the
    digest of that step, the test, and that the run was done. The rest stays, byte for byte, up to
    the first corrupt line.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return
    kept = []
    with open(path, "rb", opener=open_regular) as file:
        try:
            for number, line in enumerate(read_lines(file, path), start=1):
                if not _is_recorded_again(decode(line, number, path), step, epoch, validated):
                    kept.append(line)
        except UsageError:
            pass  # cut off, or lost in a power failure: what follows cannot be trusted
    write_whole(path, b"".join(kept))


def _is_recorded_again(record: Record, step: int, epoch: int, validated: int) -> bool:
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
            return bool(record["status"] == "done")
    return False


def cut_torn_line(descriptor: int) -> None:
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
