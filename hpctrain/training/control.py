"""Requests to stop: a STOP file in the run's folder, or one Ctrl-C where it can be caught.

A request only sets a flag on the rank that met it; the flag rides in the step's message, so all
ranks stop after the same step.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType, TracebackType

FILE = "STOP"
LOOK_EVERY = 0.5  # seconds between looks at the file system


class Control:
    """Whether this rank has been asked to stop. Only the rank given a folder looks there."""

    def __init__(self, folder: Path | None) -> None:
        self._file = folder / FILE if folder else None
        self._asked = False
        self._looked = 0.0
        self._before = signal.SIG_DFL

    def __enter__(self) -> Control:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._asked:  # a second Ctrl-C means it
            raise KeyboardInterrupt
        self._asked = True

    def asked(self) -> bool:
        """Whether to vote for stopping. Looks for the file at most twice a second."""
        now = time.monotonic()
        if self._file and not self._asked and now - self._looked > LOOK_EVERY:
            self._looked = now
            self._asked = self._file.exists()
        return self._asked
