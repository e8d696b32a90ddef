"""Read the record of a run, ``progress.jsonl``, and truncate it to the state of a checkpoint.

Writers append whole lines (``recorder.RecordFile``), so a killed writer can leave only its last
line incomplete. Readers skip that line, and the next writer truncates it. Any other line that
cannot be read is corrupt (lost in a power failure, say): it is named by file and line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.files import write_whole
from hpctrain.report.fields import Record, parse_record

FILE_NAME = "progress.jsonl"
BLOCK = 1 << 16  # bytes read at a time when searching for the last whole line


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the run in `folder`, in order.

    An incomplete last line is skipped: its writer was killed, or is still writing. While iterating,
    raises UsageError if the file is missing or a line is corrupt.
    """
    path = folder / FILE_NAME
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield parse_line(line, number, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def parse_line(line: bytes, number: int, path: Path) -> dict[str, Any]:
    """Parse the record in line `number` of `path`. Raises UsageError if the line is corrupt."""
    try:
        return parse_record(line)
    except ValueError as error:
        raise UsageError(f"{path}, line {number} is no line of a record: {error}") from error


def truncate_record(folder: Path, step: int, epoch: int, validated: int) -> None:
    """Remove from a run's record the lines that a resumed launch will record again.

    These are the steps after `step`, the epochs after `epoch`, the validations after step
    `validated`, the digests after `step`, all other evaluations, and an end with status "done".
    All other lines are kept byte for byte, up to the first one that is incomplete or corrupt.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return
    kept = []
    with open(path, "rb") as file:
        for line in file:
            try:
                record = parse_record(line)
            except ValueError:
                break  # the lines after it cannot be trusted
            if line.endswith(b"\n") and not _is_recorded_again(record, step, epoch, validated):
                kept.append(line)
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
