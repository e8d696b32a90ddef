"""TensorBoard events: what was recorded can be read back by TensorBoard itself."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.errors import RunError, UsageError
from hpctrain.report.record import read_records
from hpctrain.report.recorder import Recorder
from tests.report.records import record_evaluation, record_step

STEP = {"kind": "step", "step": 1, "loss": 0.5, "accuracy": 0.25}


@pytest.mark.filterwarnings("default")  # those of the reader are not ours
def test_events_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Recorder(tmp_path, "none", tensorboard=True) as recorder:
        recorder.run({"name": "first"})
        for number in range(1, 12):
            accuracy = None if number == 7 else number / 16
            seconds = {"total": 1.0}
            own = {"learning_rate": 0.5, "seconds": seconds}
            record_step(recorder, 1, number, 1 / number, accuracy, **own)
        record_evaluation(recorder, 1, 11, "test", 0.25, 0.75, 101, 1.0)
        recorder.end("done")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = ("loss", "accuracy", "learning_rate", "images_per_second")
    expected = {f"training/{name}" for name in names} | {"test/loss", "test/accuracy"}
    assert set(events.Tags()["scalars"]) == expected
    loss = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert loss == [(number, pytest.approx(1 / number)) for number in range(1, 12)]
    assert [event.step for event in events.Scalars("training/accuracy")] == [
        *range(1, 7),
        *range(8, 12),
    ]
    assert [(e.step, e.value) for e in events.Scalars("test/accuracy")] == [(11, 0.75)]
    assert len(list(read_records(tmp_path))) == 14


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard") as caught:
        Recorder(tmp_path, "none", tensorboard=True)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


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


def test_no_events_unless_asked_for(tmp_path: Path) -> None:
    with Recorder(tmp_path, "none") as recorder:
        recorder.run({"name": "first"})
    assert [path.name for path in tmp_path.iterdir()] == ["progress.jsonl"]


@pytest.mark.filterwarnings("default")  # those of the reader are not ours
def test_steps_that_are_told_again_count_once(tmp_path: Path) -> None:
    """A run that goes on after step 6 of 9: what came after it is purged."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, done, value in ((1, 0, 1.0), (7, 6, 2.0)):
        with Recorder(tmp_path, "none", tensorboard=True, done=done) as recorder:
            recorder.run({"name": "first"})
            for number in range(first, first + 9):
                record_step(recorder, 1, number, value, 0.5, learning_rate=0.5)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    loss = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert loss == [(number, 1.0 if number < 7 else 2.0) for number in range(1, 16)]
