"""TensorBoard events: what was recorded can be read back by TensorBoard itself."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpctrain.errors import RunError, UsageError
from hpctrain.report.record import read_records
from hpctrain.report.recorder import Recorder
from tests.report.records import record_evaluation, record_step


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
    events._writer = SimpleNamespace(add_image=fails, close=fails)
    with pytest.raises(RunError, match=r"^cannot write TensorBoard events to .*: No space left"):
        events.picture("a", 1, np.zeros((2, 2, 3), np.uint8))
    events.picture("b", 2, np.zeros((2, 2, 3), np.uint8))
    events.close()
    assert len(calls) == 1, "later events are dropped"


def test_an_interrupt_while_writing_leaves_a_file_that_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from hpctrain.report.tensorboard import EventWriter

    events, closed = EventWriter(tmp_path), []

    def interrupted(*values: Any) -> None:
        raise KeyboardInterrupt

    events._writer.close()
    events._writer = SimpleNamespace(add_image=interrupted, close=lambda: closed.append(True))
    with pytest.raises(KeyboardInterrupt):
        events.picture("a", 1, np.zeros((2, 2, 3), np.uint8))
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


@pytest.mark.filterwarnings("default")  # those of the reader are not ours
def test_settings_and_the_end_are_there_for_hparams(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata

    settings = {"lr": 0.5, "model": "digits", "flip": True, "seed": 3}
    ends = {"done": api_pb2.STATUS_SUCCESS, "failed": api_pb2.STATUS_FAILURE, "preempted": None}
    for status, expected in ends.items():
        (tmp_path / status).mkdir()
        with Recorder(tmp_path / status, "none", tensorboard=True) as recorder:
            recorder.run({"folder": f"runs/{status}", "settings": settings})
            recorder.end(status)
        events = EventAccumulator(str(tmp_path / status))
        events.Reload()
        content = {
            tag: events.SummaryMetadata(tag).plugin_data.content
            for tag in events.PluginTagToContent(metadata.PLUGIN_NAME)
        }
        start = metadata.parse_session_start_info_plugin_data(
            content[metadata.SESSION_START_INFO_TAG]
        )
        values = {name: getattr(v, v.WhichOneof("kind")) for name, v in start.hparams.items()}
        assert (values, start.group_name) == (settings, f"runs/{status}")
        end = content.get(metadata.SESSION_END_INFO_TAG)
        found = metadata.parse_session_end_info_plugin_data(end).status if end else None
        assert found == expected


@pytest.mark.filterwarnings("default")  # those of the reader are not ours
def test_a_picture_is_shown_by_tensorboard_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    picture = np.zeros((20, 30, 3), np.uint8)
    picture[5, 7] = 9, 8, 255
    (tmp_path / "b").mkdir()
    with Recorder(tmp_path, "none", tensorboard=True) as recorder:
        recorder.picture("test/mistakes", 4, picture)
    with Recorder(tmp_path / "b", "none") as recorder:
        recorder.picture("test/mistakes", 4, picture)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    (image,) = events.Images("test/mistakes")
    assert image.step == 4
    with Image.open(io.BytesIO(image.encoded_image_string)) as read:
        assert np.array_equal(np.asarray(read), picture)
    assert list(read_records(tmp_path)) == list(read_records(tmp_path / "b")) == []
