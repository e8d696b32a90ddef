"""Text from data: names of files, classes, runs and tensors, and whatever a record holds.

A name may hold anything. What a terminal, a spreadsheet or a person sees of it goes through here:
`say` and `printable` for terminals (rich's tables by ``console.py``), `csv_cell` for CSV files.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TextIO

FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that spreadsheets compute


def printable(text: str, encoding: str = "utf-8", newlines: bool = True) -> str:
    """`text` with control characters as escapes, and as `encoding` can say it; also those that
    change the direction of text, and with `newlines` false the ends of lines.
    """
    shown = "".join(
        c if c.isprintable() or (newlines and c == "\n") else c.encode("unicode_escape").decode()
        for c in text
    )
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line on standard output, or on `file`, with whatever names it holds."""
    file = file or sys.stdout
    print(printable(text, getattr(file, "encoding", None) or "utf-8"), file=file, flush=True)


def discard_stdout() -> None:
    """Let what is still printed, and flushed at exit, go nowhere: standard output is gone."""
    with suppress(OSError, ValueError):  # it may be an object without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def listed(names: Iterable[object], most: int = 8, separator: str = ", ") -> str:
    """Names in one line, of many the first `most`: "a, b and 3 more", "a; b; and 3 more"."""
    texts = [str(name) for name in names]
    shown = separator.join(texts[:most])
    if len(texts) <= most:
        return shown
    return f"{shown}{separator.strip(', ')} and {len(texts) - most:,} more"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in their order, neighbours as a range: "1, 3-7"."""
    breaks = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    parts = [numbers[a:b] for a, b in pairwise([0, *breaks, len(numbers)]) if a < b]
    return listed(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def brief(value: object, most: int = 160) -> str:
    """A text, such as a library's error that quotes the file it read, in one line of at most `most`
    characters.
    """
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def csv_cell(value: object) -> object:
    """What to write into a CSV file: text that a spreadsheet would compute gets an apostrophe
    before it, which makes it text there (https://owasp.org/www-community/attacks/CSV_Injection).
    """
    is_formula = isinstance(value, str) and value.lstrip(" ").startswith(FORMULAS)
    return f"'{value}" if is_formula else value


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """Names of classes; those that several have, or that look alike in Unicode, get the number of
    their class: "x (0)", "x (3)".
    """
    looks = [unicodedata.normalize("NFKC", name) for name in names]
    shared = {look for look, count in Counter(looks).items() if count > 1}
    return tuple(
        f"{name} ({number})" if look in shared else name
        for number, (name, look) in enumerate(zip(names, looks, strict=True))
    )
