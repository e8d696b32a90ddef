"""The record of a run: every kind round-trips, strict JSON, and no crash leaves a broken line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.errors import RunError, UsageError
from hpctrain.report import record as record_module
from hpctrain.report import recorder as recorder_module
from hpctrain.report.record import read_records
from hpctrain.report.recorder import Recorder
from tests.report.records import record_epoch, record_evaluation
from tests.support.launch import environment, run

SECONDS = {"data": 0.25, "compute": 1.5, "reduce": 0.125, "total": 2.0}


def step(recorder: Recorder, number: int, **changes: Any) -> None:
    """Record a step whose figures are made up, but for the changes."""
    figures: dict[str, Any] = {
        "epoch": 1,
        "step": number,
        "loss": 1.0 / number,
        "accuracy": 0.5,
        "learning_rate": 0.01,
        "images_per_second": 101.0,
        "seconds": SECONDS,
        "slowest_rank": 2,
        "rows": 101,
    }
    recorder.step(**{**figures, **changes})


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def strict(path: Path) -> list[dict[str, Any]]:
    """Every line of a file, read as strict JSON."""
    text = path.read_text("ascii")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_kind_round_trips(tmp_path: Path) -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    with Recorder(tmp_path, "none") as recorder:
        recorder.run({"name": "first", "ranks": 4, "rows": {"train": 101}, "anything": [1, "é"]})
        step(recorder, 1)
        record_epoch(recorder, 1, 0.75, 0.625, 99.5, 12.5)
        record_evaluation(recorder, 1, 1, "test", 0.5, None, 23, 0.25)
        recorder.note("two\nlines")
        recorder.end("stopped", "asked to", test_accuracy=0.875)
    records = list(read_records(tmp_path))
    assert records == strict(tmp_path / "progress.jsonl")
    for record in records:
        assert record["time"].endswith("Z") and len(record["time"]) == len(
            "2000-01-01T00:00:00.000Z"
        )
        assert before <= datetime.fromisoformat(record.pop("time")) <= datetime.now(UTC)
    assert records[-1].pop("seconds") >= 0
    assert records[-1].pop("step_seconds") > 0
    assert sum(records[-1].pop("shares").values()) == pytest.approx(1)
    assert (records[-1].pop("idle"), records[-1].pop("advice")) == (0, [])
    assert records == [
        {
            "kind": "run",
            "format": 1,
            "name": "first",
            "ranks": 4,
            "rows": {"train": 101},
            "anything": [1, "é"],
        },
        {
            "kind": "step",
            "epoch": 1,
            "step": 1,
            "loss": 1.0,
            "accuracy": 0.5,
            "learning_rate": 0.01,
            "images_per_second": 101.0,
            "slowest_rank": 2,
            "rows": 101,
            "seconds": SECONDS,
        },
        {
            "kind": "epoch",
            "epoch": 1,
            "loss": 0.75,
            "accuracy": 0.625,
            "images_per_second": 99.5,
            "seconds": 12.5,
        },
        {
            "kind": "evaluation",
            "epoch": 1,
            "step": 1,
            "split": "test",
            "loss": 0.5,
            "accuracy": None,
            "rows": 23,
            "seconds": 0.25,
        },
        {"kind": "note", "text": "two\nlines"},
        {"kind": "end", "status": "stopped", "reason": "asked to", "test_accuracy": 0.875},
    ]


def test_the_same_floats_come_back(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(101).tolist()
    with Recorder(tmp_path, "none") as recorder:
        recorder.run({"values": values})
    assert next(read_records(tmp_path))["values"] == values


def test_what_json_cannot_hold_is_null_and_listed(tmp_path: Path) -> None:
    with Recorder(tmp_path, "none") as recorder:
        step(recorder, 1, loss=float("nan"), seconds={"data": float("inf"), "total": 1.0})
        step(recorder, 2, loss=np.float32("-inf"), slowest_rank=np.int64(3))
        step(recorder, 3)
        recorder.run({"list": [1.0, float("nan")], "folder": Path("runs"), "set": np.arange(3)})
    first, second, third, run = strict(tmp_path / "progress.jsonl")
    assert (first["loss"], first["seconds"]) == (None, {"data": None, "total": 1.0})
    assert first["nonfinite"] == ["loss", "seconds.data"]
    assert (second["loss"], second["nonfinite"], second["slowest_rank"]) == (None, ["loss"], 3)
    assert "nonfinite" not in third and third["loss"] == 1 / 3
    assert (run["list"], run["nonfinite"]) == ([1.0, None], ["list.1"])
    assert (run["folder"], run["set"]) == ("runs", [0, 1, 2])


@pytest.mark.parametrize("torn", ["", '{"kind": "ste', "\0\0\0", "x" * 101])
@pytest.mark.parametrize("block", [7, 1 << 16])
def test_a_torn_last_line_is_skipped_and_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str, block: int
) -> None:
    monkeypatch.setattr(record_module, "BLOCK", block)
    path = tmp_path / "progress.jsonl"
    with Recorder(tmp_path, "none") as recorder:
        recorder.run({"name": "first"})
        step(recorder, 1)
    with open(path, "a") as file:
        file.write(torn)
    assert [record["kind"] for record in read_records(path)] == ["run", "step"]
    with Recorder(tmp_path, "none") as recorder:
        recorder.run({"name": "again"})
    assert [record["kind"] for record in strict(path)] == ["run", "step", "run"]


def test_a_file_that_is_one_torn_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    path.write_text('{"kind": "run", "ti')
    assert list(read_records(path)) == []
    with Recorder(tmp_path, "none") as recorder:
        recorder.note("hello")
    assert [record["text"] for record in strict(path)] == ["hello"]


@pytest.mark.parametrize(
    "content",
    [b"\x89HDF\r\n\x1a\n", b"hello\n", b"hello", b'{"a": 1}\n', b'{"a": 1}', b"[1]\n", b"\xff\n"],
)
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"is not the record of a run: line 1: ") as caught:
        list(read_records(path))
    assert "\n" not in str(caught.value)


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "progress.jsonl").write_text('{"kind": "run"}\n{"kind": "st\n{"kind": "end"}\n')
    with pytest.raises(UsageError, match="line 2"):
        list(read_records(tmp_path))


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match=r"cannot read .*No such file"):
            list(read_records(path))


WRITER = """
import itertools, sys
from pathlib import Path
from hpctrain.report.recorder import Recorder
from tests.report.records import record_step
recorder = Recorder(Path(sys.argv[1]), "none")
recorder.run({"name": "killed"})
print("started", flush=True)
for number in itertools.count(1):
    record_step(recorder, 1, number, 0.1, 0.5)
    if number % 997 == 0:
        recorder.note("x" * 9973)
"""


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    for seconds in (0.03, 0.1, 0.2):
        path.unlink(missing_ok=True)
        arguments = [sys.executable, "-c", WRITER, str(tmp_path)]
        output = subprocess.PIPE
        with subprocess.Popen(arguments, stdout=output, env=environment()) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"started\n"
            while path.read_bytes().count(b"\n") < 3:  # the run and two steps
                time.sleep(0.01)
            time.sleep(seconds)
            writer.kill()
        whole, _, torn = path.read_bytes().rpartition(b"\n")
        lines = [json.loads(line, parse_constant=refuse) for line in whole.splitlines()]
        assert list(read_records(path)) == lines
        assert lines[0]["name"] == "killed"
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        assert len(steps) > 1 and steps == list(range(1, len(steps) + 1))
        with Recorder(tmp_path, "none") as recorder:
            recorder.note("next")
        assert strict(path) == [*lines, strict(path)[-1]], torn


def test_other_ranks_write_and_show_nothing(tmp_path: Path) -> None:
    script = """
import sys
from hpctrain.report.recorder import Recorder
from tests.report.records import record_epoch, record_evaluation, record_step
with Recorder(None, "bar", tensorboard=True) as recorder:
    recorder.run({"name": "nothing"})
    record_step(recorder, 1, 1, 0.1, 0.5)
    record_epoch(recorder, 1, 0.1, 0.5, 101.0, 1.0)
    record_evaluation(recorder, 1, 1, "test", 0.1, 0.5, 101, 1.0)
    recorder.note("nothing")
    recorder.end("done")
assert not {"rich", "torch"} & set(sys.modules)
"""
    done = run([sys.executable, "-c", script], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_steps_gather_for_a_second_at_most_and_all_else_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, writes = [100.0], []
    real_write = os.write

    def slow_write(descriptor: int, data: bytes) -> int:
        assert data.startswith(b"{") and data.endswith(b"}\n")  # whole lines only
        writes.append((now[0], data.count(b"\n")))
        now[0] += 0.03  # a slow file system
        return real_write(descriptor, data)

    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(recorder_module, "time", clock)
    with Recorder(tmp_path, "none") as recorder:
        monkeypatch.setattr(recorder_module.os, "write", slow_write)
        recorder.run({})
        for number in range(1, 102):
            now[0] += 0.1
            step(recorder, number)
        gathered = list(writes)
        record_evaluation(recorder, 1, 101, "test", 0.5, 0.5, 23, 0.25)
        assert writes[-1][0] == now[0] - 0.03
    gaps = np.diff([moment for moment, _ in gathered])
    assert gaps.min() > 0.5 and gaps.max() < 1.0 + 0.1 + 0.03 + 1e-9
    assert 9 < len(gathered) < 12 < 101
    kinds = [record["kind"] for record in strict(tmp_path / "progress.jsonl")]
    assert kinds == ["run"] + ["step"] * 101 + ["evaluation"]
    assert sum(lines for _, lines in writes) == len(kinds)


def test_a_cheap_step_does_not_wait_for_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(recorder_module, "time", clock)
    with Recorder(tmp_path, "none") as recorder:
        recorder.run({})
        for number in (1, 2):  # writing takes no time at all
            now[0] += 0.01
            step(recorder, number)
            assert len(list(read_records(tmp_path))) == 1 + number


def test_a_full_disk_is_one_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "progress.jsonl"
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError) as caught, Recorder(tmp_path, "none") as recorder:
        recorder.run({})
    assert str(caught.value).startswith(f"cannot write {path}: No space left on device")
    assert "\n" not in str(caught.value)
    with Recorder(tmp_path, "none") as recorder:
        with pytest.raises(RunError):
            recorder.note("lost")
        recorder.note("dropped")  # told once; the end of the run must not fail again
        recorder.end("failed", "disk full")


def test_a_disk_that_fills_up_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [300]
    real_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(recorder_module.os, "write", write)
    with pytest.raises(RunError, match="No space left"), Recorder(tmp_path, "none") as recorder:
        recorder.run({})
        for number in range(1, 101):
            recorder.note(f"note {number}")
    texts = [record.get("text") for record in strict(tmp_path / "progress.jsonl")]
    assert texts[:2] == [None, "note 1"] and 2 < len(texts) < 10


def test_a_missing_folder_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot open .*No such file"):
        Recorder(tmp_path / "nothing", "none")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RunError("loss is NaN in step 7"), "loss is NaN in step 7"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_recorded_with_the_steps_before_it(
    tmp_path: Path, error: BaseException, reason: str
) -> None:
    with pytest.raises(type(error)), Recorder(tmp_path, "none") as recorder:
        recorder.run({})
        for number in range(1, 12):
            step(recorder, number)
        raise error
    records = list(read_records(tmp_path))
    assert [record["kind"] for record in records] == ["run"] + ["step"] * 11 + ["end"]
    assert (records[-1]["status"], records[-1]["reason"]) == ("failed", reason)


def test_an_exception_before_the_run_line_loses_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, "none") as recorder:
        for number in range(1, 12):
            step(recorder, number)
        raise ZeroDivisionError
    assert [record["step"] for record in read_records(tmp_path)] == list(range(1, 12))


def test_a_run_ends_once(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, "none") as recorder:
        recorder.run({})
        recorder.end("done")
        raise ZeroDivisionError
    assert [record["kind"] for record in read_records(tmp_path)] == ["run", "end"]
    recorder.close()
    recorder.note("after the end")
    assert len(list(read_records(tmp_path))) == 2


def test_what_came_after_a_checkpoint_is_taken_out_and_the_rest_stays_as_it_is(tmp_path):
    from hpctrain.report.record import truncate_record

    def line(**record):
        return (json.dumps({**record, "time": "x"}) + "\n").encode()

    kept = [
        line(kind="run", name="a"),
        line(kind="step", epoch=1, step=1),
        line(kind="digest", step=1, digest="ab"),
        line(kind="step", epoch=1, step=2),
        line(kind="digest", step=2, digest="ab"),
        line(kind="epoch", epoch=1),
        line(kind="evaluation", epoch=1, step=2, split="validation"),
        line(kind="note", text="x"),
        line(kind="end", status="preempted"),
    ]
    late = [
        line(kind="evaluation", epoch=1, step=2, split="test"),
        line(kind="end", status="done"),
        line(kind="step", epoch=2, step=3),
        line(kind="digest", step=3, digest="ab"),
        line(kind="epoch", epoch=2),
        line(kind="evaluation", epoch=2, step=3, split="validation"),
    ]
    path = tmp_path / "progress.jsonl"
    path.write_bytes(b"".join(kept + late) + b'{"kind": "step", "epoch": 2, "st')
    truncate_record(tmp_path, step=2, epoch=1, validated=2)
    assert path.read_bytes() == b"".join(kept)
    truncate_record(tmp_path, step=2, epoch=1, validated=2)
    assert path.read_bytes() == b"".join(kept)
    truncate_record(tmp_path, step=2, epoch=1, validated=1)  # the validation was interrupted
    assert b"".join(line for line in kept if b"validation" not in line) == path.read_bytes()
    truncate_record(tmp_path / "nowhere", step=2, epoch=1, validated=2)
