"""One row of what doctor prints, and how its parts are worded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VERDICTS = ("ok", "note", "warn", "fail")
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, the verdict, and what to do about it."""

    name: str
    found: str
    verdict: str = "ok"
    advice: str = ""


def row(name: str, found: str, verdict: str, advice: str, when: bool) -> Finding:
    """A finding with verdict and advice `when` it has any, else ok."""
    return Finding(name, found, verdict, advice) if when else Finding(name, found)


def numbered(numbers: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2"; of many the first."""
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"rank{'' if len(numbers) == 1 else 's'} {shown}{', ...' if len(numbers) > 8 else ''}"


def bytes_text(size: float) -> str:
    """ "4 B", "64 MiB"; a limit of -1 is none."""
    for unit in ("B", "KiB", "MiB"):
        if size < KIB:
            return "unlimited" if size < 0 else f"{size:,.0f} {unit}"
        size /= KIB
    return f"{size:,.0f} GiB"
