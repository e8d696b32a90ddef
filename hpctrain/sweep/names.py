"""The folder of each network: its number and what makes it different."""

from __future__ import annotations

import re
from typing import Any

LONGEST = 80  # characters


def folder_name(number: int, count: int, given: dict[str, Any], name: str | None) -> str:
    """ "03-optimizer=adam,lr=0.01", or "03-wide" where it has a name of its own."""
    digits = max(2, len(str(count)))
    text = name or ",".join(f"{key}={_short(value)}" for key, value in given.items()) or "base"
    return f"{number:0{digits}}-{_safe(text)[:LONGEST].rstrip('.,=')}"


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.rstrip("/").rpartition("/")[2]


def _safe(text: str) -> str:
    """Only what needs no quotes in a shell."""
    return re.sub(r"[^A-Za-z0-9._=,+:@-]+", "_", text)
