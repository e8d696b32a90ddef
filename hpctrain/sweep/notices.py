"""Ctrl-C, SIGTERM and what a scheduler sends, to the driver of a sweep: flags only."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INSISTING = (signal.SIGINT, signal.SIGTERM)
APART = 1.0  # seconds: schedulers send the same notice twice in a row


class Notices:
    """Within a ``with`` block: `leave` after the first, `kill` after a second Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self.leave: str | None = None  # name of the first signal
        self.kill = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Notices:
        ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else []
        caught = [number for number in CAUGHT if number not in ignored]  # nohup wants it so
        self._before = {number: signal.signal(number, self._on_signal) for number in caught}
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.leave is None:
            self.leave, self._first = signal.Signals(number).name, time.monotonic()
        elif number in INSISTING and time.monotonic() > self._first + APART:
            self.kill = True
