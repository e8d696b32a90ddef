"""The progress bar of packing."""

import pytest

from hpctrain.console import Console
from hpctrain.data.packing import report


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_only(capfd, monkeypatch, terminal):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(stderr=True, force_terminal=terminal, width=90)
    monkeypatch.setattr(report, "Console", lambda stderr: console)
    with report.progress("decoding", 101) as advance:
        advance(100)
        advance(1)
    said = capfd.readouterr().err
    assert "101/101" in said if terminal else said == ""
