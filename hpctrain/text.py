"""Text from data: names of files, classes, runs and tensors, and all text in records.

A name may contain any character. All names that are printed pass through this module: `say` and
`printable` (rich's tables through ``report/console.py``).
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, TextIO

MOST_NAMED = 10  # names in a line, or lines of names


def printable(text: str, encoding: str = "utf-8", newlines: bool = True) -> str:
    """Return `text` with control characters, and those that `encoding` lacks, as escapes.

    Escaped too are characters that change the direction of text and, if `newlines` is false,
    newlines.
    """

    def shown(character: str) -> str:
        if character.isprintable() or (newlines and character == "\n"):
            return character
        return character.encode("unicode_escape").decode()

    if not text.isprintable():
        text = "".join(map(shown, text))
    return text.encode(encoding, "backslashreplace").decode(encoding)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line to standard output or to `file`, with unprintable characters as escapes."""
    file = file or sys.stdout
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(printable(text, encoding), file=file, flush=True)


class Output(io.TextIOWrapper):
    """Standard output, or error, of the program. What cannot be written is discarded.

    `error` is why, for example a full disk; see `output_error`. If the reader of standard output
    has ended, BrokenPipeError is raised, as by any file.
    """

    error: OSError | None = None
    is_stderr = False

    def write(self, text: str) -> int:
        with self._discarding():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            super().flush()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, BrokenPipeError) and not self.is_stderr:
                raise
            self.error = error
            discard(self)


def open_standard_files() -> None:
    """Let standard output and error be an `Output`, unless somebody has replaced them before.

    If a descriptor was closed before the start, it is opened: else it would be that of the next
    file, such as a record, and whatever a library prints would be written into that file. Writing
    to standard output then fails, as it should, and standard error is discarded.
    """
    modes = {
        0: os.O_RDONLY,
        1: os.O_RDONLY,  # so that writing fails
        2: os.O_WRONLY,
    }
    for descriptor, mode in modes.items():
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest number that is free
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = getattr(sys, name)
        if file is None:  # closed
            raw = io.FileIO(descriptor, "w", closefd=False)
            output = Output(
                io.BufferedWriter(raw),
                encoding="utf-8",
                errors="backslashreplace",
            )
        elif type(file) is io.TextIOWrapper and file is getattr(sys, f"__{name}__"):
            options: dict[str, Any] = {
                "encoding": file.encoding,
                "errors": file.errors,
                "line_buffering": file.line_buffering,
                "write_through": file.write_through,
            }
            output = Output(file.detach(), **options)
        else:
            continue
        output.is_stderr = name == "stderr"
        setattr(sys, name, output)
        setattr(sys, f"__{name}__", output)


def output_error() -> OSError | None:
    """Return why standard output could not be written, if so and not returned before."""
    output: Any = sys.stdout
    error: OSError | None = getattr(output, "error", None)
    if error is not None:
        output.error = None
    return error


def check_output() -> None:
    """Raise an OSError if standard output could not be written."""
    error = output_error()
    if error:
        raise error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, also of others. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def discard(file: TextIO) -> None:
    """Redirect a file to the null device: what it holds is flushed there."""
    with suppress(OSError, ValueError):  # it may be an object without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)


def discard_stdout() -> None:
    """Redirect standard output, whose reader is gone, to the null device: it is flushed at exit."""
    discard(sys.stdout)


def listed(names: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """Join at most `most` names in one line: "a, b and 3 more", "a; b; and 3 more"."""
    texts = [str(name) for name in names]
    shown = separator.join(texts[:most])
    if len(texts) <= most:
        return shown
    return f"{shown}{separator.strip(', ')} and {len(texts) - most:,} more"


def listed_names(names: Iterable[str], most: int = MOST_NAMED, separator: str = ", ") -> str:
    """Join names of files or classes as `listed` does; each of them is shortened to one line."""
    names = [*names]
    shown = map(brief, names[:most])
    return listed([*shown, *names[most:]], most, separator)


def counted(number: int | None, noun: str) -> str:
    """Return a number with its noun: "1 rank", "4 ranks"; empty for None."""
    if number is None:
        return ""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def ranges(numbers: Sequence[int]) -> str:
    """Join sorted numbers in one line, consecutive ones as a range: "1, 3-7"."""
    breaks = [
        position
        for position, (before, number) in enumerate(pairwise(numbers), start=1)
        if number != before + 1
    ]
    parts = [
        numbers[begin:end] for begin, end in pairwise([0, *breaks, len(numbers)]) if begin < end
    ]
    texts = []
    for part in parts:
        if len(part) > 1:
            texts.append(f"{part[0]}-{part[-1]}")
        else:
            texts.append(f"{part[0]}")
    return listed(texts)


def min_to_max(numbers: Iterable[int]) -> str:
    """Return the range of the numbers: "2 to 4", or "2" if all are equal."""
    distinct = set(numbers)
    return " to ".join(f"{number:,}" for number in sorted({min(distinct), max(distinct)}))


def short_number(number: float | None) -> str:
    """Format a figure with four decimals, or as "1.23e-05"; empty for None."""
    if number is None:
        return ""
    if number != 0 and not 1e-3 <= abs(number) < 1e5:
        return f"{number:.2e}"
    return f"{number:.4f}"


def rate(number: float) -> str:
    """Format a measured number with at least three digits: "4,812", "48.1", "4.81"."""
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 10:
        return f"{number:,.1f}"
    return f"{number:,.2f}"


def percent(share: float) -> str:
    """Format a share as "40 %", rounded down: "100 %" only if it is complete."""
    if share < 1:
        return f"{int(100 * share + 1e-9)} %"
    return "100 %"


def bytes_text(size: float) -> str:
    """Format bytes: "4 B", "1.5 MiB", "64 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    if size >= 10 or size == int(size):
        return f"{size:,.0f} {unit}"
    return f"{size:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Format seconds as "0:34" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def rough_duration(seconds: float) -> str:
    """Format seconds in their largest unit: "45 s", "3 min", "2 h", "5 days"."""
    units = {
        "days": 86400,
        "h": 3600,
        "min": 60,
    }
    for unit, size in units.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def brief(value: object, most: int = 160) -> str:
    """Shorten a text to one line of at most `most` characters, with an ellipsis in its middle.

    Names of related runs often begin with the same words; a library's error may quote a file.

    >>> brief("03-digits,lr=0.1,batch-size=256", 20)
    '03-digits...size=256'
    """
    line = " ".join(printable(str(value)).split())
    if len(line) <= most:
        return line
    before = (most - 2) // 2
    after = (most - 3) // 2
    return f"{line[:before]}...{line[len(line) - after :]}"
