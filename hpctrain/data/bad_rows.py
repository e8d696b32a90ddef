"""Rows of a split that cannot be used: an error, or left out where that was asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import numpy as np

from hpctrain.errors import RunError


class BadRows:
    """Rows that were met and cannot be used. Thread-safe.

    A row is bad by what the file holds, whoever reads it and when: leaving it out keeps results
    independent of the number of ranks.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        """Without `tell`, which is told what is left out, a bad row is an error."""
        self._tell, self._lock = tell, threading.Lock()
        self._rows: set[int] = set()
        self._told: set[str] = set()

    def meet(self, rows: Iterable[int], text: str, cause: str = "") -> None:
        """These rows cannot be used, as `text` says. RunError where they may not be left out. Of a
        `cause` that many rows share, in whatever batch they come, is told once.
        """
        if self._tell is None:
            raise RunError(
                f"{text}: 'hpctrain pack --check' finds what else is damaged, train --skip-bad"
                " leaves such rows out"
            )
        with self._lock:
            new = set(rows) - self._rows
            self._rows |= new
            untold = bool(new) and (cause or text) not in self._told
            self._told.add(cause or text)
        if untold:
            self._tell(f"{cause or text}: left out")

    def usable(self, rows: np.ndarray) -> np.ndarray | None:
        """Which of `rows` (n,) can be used, (n,) bool; None = all."""
        if not self._rows:
            return None
        with self._lock:
            bad = np.isin(rows, list(self._rows))
        return ~bad if bad.any() else None
