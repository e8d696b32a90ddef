"""TensorBoard events that cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.errors import RunError

STEP = {"kind": "step", "step": 1, "loss": 0.5, "accuracy": 0.25}


def test_events_that_cannot_be_written_are_one_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from hpctrain.report.tensorboard import EventWriter

    events, calls = EventWriter(tmp_path), []

    def fails(*values: Any) -> None:
        calls.append(values)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    events._writer.close()
    events._writer = SimpleNamespace(add_scalar=fails, close=fails)
    with pytest.raises(RunError, match=r"^cannot write TensorBoard events to .*: No space left"):
        events.write(STEP)
    events.write(STEP)
    events.close()
    assert len(calls) == 1, "later events are dropped"


def test_an_interrupt_while_writing_leaves_a_file_that_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from hpctrain.report.tensorboard import EventWriter

    events, closed = EventWriter(tmp_path), []

    def interrupted(*values: Any) -> None:
        raise KeyboardInterrupt

    events._writer.close()
    events._writer = SimpleNamespace(add_scalar=interrupted, close=lambda: closed.append(True))
    with pytest.raises(KeyboardInterrupt):
        events.write(STEP)
    events.close()
    assert closed == [True], "or events in its queue would be lost"
