"""A clock that a test moves, and outputs that are kept as files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("golden")


class Clock:
    """Both clocks of this process: they stand still until `skip`."""

    now = 1_700_000_000.0  # seconds since 1970; the other clock began then

    def skip(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "time", lambda: made.now)
    return made


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of the folder golden; `pytest --update` writes it anew."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("update"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text.splitlines() == path.read_text().splitlines()

    return compare


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever terminal the tests run on."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
