"""Waiting in tests for what must happen, in place of a time that should be enough."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Return the first true result of `condition()`; fail the test if there is none in time."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"it did not happen in {seconds:.0f} s"
        time.sleep(0.01)
    return found


def when(condition: Callable[[], Any], action: Callable[[], Any]) -> None:
    """Do the action, in a thread, as soon as the condition is true."""

    def act() -> None:
        wait_for(condition)
        action()

    threading.Thread(target=act, daemon=True).start()
