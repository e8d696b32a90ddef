"""The record of a run: every field round-trips, strict JSON, and no crash leaves a broken line."""

from __future__ import annotations

import errno
import itertools
import math
import os
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import FIELDS, open_recorder, read_records, truncate_record
from tests.support.launch import Job, run
from tests.support.records import (
    FILE,
    NEEDED,
    end_line,
    epoch_line,
    evaluation_line,
    line,
    read_strictly,
    recording,
    step_line,
    tell,
)
from tests.support.wait import wait_for

VALUES = {
    int: st.integers(0, 2**53),
    float: st.floats(),
    str: st.text(st.characters(exclude_categories=["Cs"])),
    bool: st.booleans(),
    object: st.text("ab") | st.integers() | st.none(),
}
OWN = {"kind", "time", "nonfinite"}
#: what the recorder adds, or needs: the time of the steps, the end of a launch
MADE = {"run": {"format"}, "end": {"steps", "step_seconds", "shares", "idle", "seconds"}}
MADE["end"] |= {"images_per_second"}


def records_of(kind):
    """Records of a kind with all its fields, each of its type, or null if it may be unknown."""

    def values(name, field):
        if field.is_object:
            return st.dictionaries(st.text("abcdefgh_", min_size=1), VALUES[field.type])
        found = st.floats(0, 1) if field.is_share else VALUES[field.type]
        is_known = kind == "step" or name in NEEDED.get(kind, ())
        return found if is_known else st.none() | found

    fields = {n: values(n, f) for n, f in FIELDS[kind].items() if n not in MADE.get(kind, ())}
    return st.fixed_dictionaries({"kind": st.just(kind)} | fields)


def finite(value):
    """What a reader of JSON gets of a value."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_every_kind_comes_back_as_it_was(kind, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    @given(record=records_of(kind))
    def check(record):
        given_ = {name: value for name, value in record.items() if name != "kind"}
        with tempfile.TemporaryDirectory() as name, open_recorder(Path(name), "none") as recorder:
            (recorder.write if kind == "run" else partial(tell, recorder))(kind, **given_)
            recorder.flush()
            (found,) = read_records(Path(name))
            assert read_strictly(Path(name)) == [found]
        assert {n: found[n] for n in record} == finite(record)
        lost = {n for n, value in given_.items() if finite(value) != value}
        assert {each.partition(".")[0] for each in found.get("nonfinite", [])} == lost
        assert found.keys() - record.keys() - OWN <= {*MADE.get(kind, ()), "advice"}

    check()


def test_times_are_those_of_the_calls_and_an_end_tells_how_time_was_spent(tmp_path):
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    with open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "run", name="first", anything=[1, "é"])
        tell(recorder, "step", step=1)
        tell(recorder, "note", text="two\nlines")
        tell(recorder, "end", status="stopped", reason="asked to", test_accuracy=0.875)
    found = read_strictly(tmp_path)
    assert [record["kind"] for record in found] == ["run", "step", "note", "end"]
    assert (found[0]["format"], found[0]["anything"]) == (1, [1, "é"])
    times = [record["time"] for record in found]
    assert all(len(each) == len("2000-01-01T00:00:00.000Z") and each[-1] == "Z" for each in times)
    moments = [before, *map(datetime.fromisoformat, times), datetime.now(UTC)]
    assert moments == sorted(moments)
    assert (found[-1]["test_accuracy"], found[-1]["seconds"] >= 0) == (0.875, True)
    assert sum(found[-1]["shares"].values()) == pytest.approx(1)


def test_numbers_that_json_cannot_hold_are_null_and_listed_by_name(tmp_path):
    with open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "step", step=1, loss=math.nan, seconds={"data": math.inf, "total": 1.0})
        tell(recorder, "step", step=2, loss=np.float32("-inf"), slowest_rank=np.int64(3))
        tell(recorder, "run", list=[1.0, math.nan], folder=Path("runs"), set=np.arange(3))
    first, second, facts = read_strictly(tmp_path)
    assert (first["loss"], first["seconds"]) == (None, {"data": None, "total": 1.0})
    assert sorted(first["nonfinite"]) == ["loss", "seconds.data"]
    assert (second["loss"], second["nonfinite"], second["slowest_rank"]) == (None, ["loss"], 3)
    assert (facts["list"], facts["nonfinite"]) == ([1.0, None], ["list.1"])
    assert (facts["folder"], facts["set"]) == ("runs", [0, 1, 2])


def test_a_field_that_is_not_listed_is_refused(tmp_path):
    with (
        open_recorder(tmp_path, "none") as recorder,
        pytest.raises(ValueError, match="gradient_norm"),
    ):
        tell(recorder, "step", step=1, gradient_norm=1.0)


NEW_TASK = """
from hpctrain.tasks.facts import ERROR, FACTS, USUAL
FACTS["regress"] = USUAL._replace(figures={"mae": ERROR, "loss": ERROR})
from hpctrain.report.record import FIELDS
print([kind for kind, fields in FIELDS.items() if "mae" in fields])
"""


def test_the_figures_of_a_new_task_are_fields():
    assert run([sys.executable, "-c", NEW_TASK]).stdout == "['step', 'epoch', 'evaluation']\n"


@pytest.mark.parametrize("torn", ["", '{"kind": "ste', "\0\0\0", "x" * 70_000])
@pytest.mark.parametrize("whole", [["run", "step"], []])
def test_a_torn_last_line_is_skipped_and_cut_off_by_the_next_launch(tmp_path, torn, whole):
    with open_recorder(tmp_path, "none") as recorder:
        for kind in whole:
            tell(recorder, kind, step=1)
    with open(tmp_path / FILE, "a") as file:
        file.write(torn)
    assert [record["kind"] for record in read_records(tmp_path)] == whole
    truncate_record(tmp_path, step=1, epoch=0, validated=0)
    with open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "run", name="again")
    assert [record["kind"] for record in read_strictly(tmp_path)] == [*whole, "run"]


@pytest.mark.parametrize(
    ("content", "number"),
    [
        *((each, 1) for each in (b"\x89HDF\r\n\x1a\n", b"hello\n", b'{"a": 1}\n', b"[1]\n")),
        (b'{"kind": "run", "time": "2026-01-01"}\n{"kind": "st\n{"kind": "end"}\n', 2),
    ],
)
def test_what_is_no_record_is_refused_by_file_and_line(tmp_path, content, number):
    with pytest.raises(hp.UsageError, match=str(tmp_path / FILE)):
        list(read_records(tmp_path))
    with pytest.raises(hp.RunError, match="nothing"):
        open_recorder(tmp_path / "nothing", "none")
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(hp.UsageError, match=f"^{tmp_path / FILE}, line {number} [^\n]*$"):
        list(read_records(tmp_path))


WRITER = """
recorder.write("run", name="killed")
for number in count(1):
    step(number)
    if number % 997 == 0:
        recorder.note("x" * 9973)
"""


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_a_killed_writer_leaves_whole_lines(tmp_path, size):
    path = tmp_path / FILE
    writer = Job(recording(WRITER, tmp_path))
    wait_for(lambda: path.exists() and path.stat().st_size > size)
    writer.kill()
    writer.communicate()
    steps = [each["step"] for each in read_records(tmp_path) if each["kind"] == "step"]
    assert len(steps) > 1 and steps == list(range(1, len(steps) + 1))


def test_a_rank_without_a_folder_writes_shows_and_imports_nothing(tmp_path):
    program = """
import sys
from hpctrain.report.sinks import open_recorder
with open_recorder(None, "bar", tensorboard=True) as recorder:
    recorder.write("run", name="nothing")
    recorder.note("nothing")
    recorder.end("done")
assert not {"rich", "torch"} & set(sys.modules)
"""
    done = run([sys.executable, "-c", program], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_steps_gather_for_a_second_at_most_where_writing_is_slow(tmp_path, monkeypatch, clock):
    writes, write = [], os.write

    def slow_write(descriptor, data):
        assert data.startswith(b"{") and data.endswith(b"}\n")  # whole lines only
        writes.append((clock.now, data.count(b"\n")))
        clock.skip(0.03)  # a slow file system
        return write(descriptor, data)

    with open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "run")
        for number in (1, 2):
            clock.skip(0.01)
            tell(recorder, "step", step=number)
            assert len(list(read_records(tmp_path))) == 1 + number, "at once where it is fast"
        monkeypatch.setattr(os, "write", slow_write)
        for number in range(3, 104):
            clock.skip(0.1)
            tell(recorder, "step", step=number)
        moments = [moment for moment, _ in writes]
        tell(recorder, "evaluation")
        assert writes[-1][0] == clock.now - 0.03  # at once, with the steps before it
        assert sum(lines for _, lines in writes) == 101 + 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert min(gaps) > 0.5 and max(gaps) < 1.0 + 0.1 + 0.03 + 1e-6


def test_a_full_disk_is_one_error_and_leaves_a_record(tmp_path, monkeypatch):
    write, left = os.write, [300]

    def fill(descriptor, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: left[0]])
        left[0] -= written
        return written

    with monkeypatch.context() as patch, open_recorder(tmp_path, "none") as recorder:
        patch.setattr(os, "write", fill)
        with pytest.raises(hp.RunError) as caught:
            for number in itertools.count(1):
                recorder.note(f"note {number}")
        assert str(tmp_path / FILE) in str(caught.value) and "No space left" in str(caught.value)
        assert "\n" not in str(caught.value)
        recorder.note("dropped")  # told once: the end of the run must not fail again
        recorder.end("failed", "disk full")
    texts = [record["text"] for record in read_records(tmp_path)]  # without a torn line
    assert texts == [f"note {n + 1}" for n in range(len(texts))] and texts


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (hp.RunError("loss is NaN in step 7"), "loss is NaN in step 7"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_exception_is_recorded_with_the_steps_before_it(tmp_path, error, reason):
    with pytest.raises(type(error)), open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "run")
        for number in range(1, 12):
            tell(recorder, "step", step=number)
        raise error
    found = list(read_records(tmp_path))
    assert [record["kind"] for record in found] == ["run"] + ["step"] * 11 + ["end"]
    assert (found[-1]["status"], found[-1]["reason"]) == ("failed", reason)


def test_a_launch_ends_once_and_one_that_never_began_has_no_end(tmp_path):
    with pytest.raises(ZeroDivisionError), open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "step", step=1)
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "run")
        recorder.end("done")
        raise ZeroDivisionError
    recorder.close()
    recorder.note("after the end")
    assert [record["kind"] for record in read_records(tmp_path)] == ["step", "run", "end"]


def test_what_came_after_a_checkpoint_is_taken_out_and_the_rest_stays_byte_for_byte(tmp_path):
    kept = [line("run", name="a"), step_line(1), line("digest", step=1, digest="ab"), step_line(2)]
    kept += [line("digest", step=2, digest="ab"), epoch_line(1), evaluation_line(2)]
    kept += [line("note", text="x"), end_line("preempted")]
    late = [evaluation_line(2, "test"), end_line(), step_line(3), epoch_line(2)]
    late += [line("digest", step=3, digest="ab"), evaluation_line(3)]
    path = tmp_path / FILE
    path.write_bytes(b"".join(kept + late) + b'{"kind": "step", "epoch": 2, "st')
    for _ in range(2):
        truncate_record(tmp_path, step=2, epoch=1, validated=2)
        assert path.read_bytes() == b"".join(kept)
    truncate_record(tmp_path, step=2, epoch=1, validated=1)  # the validation was interrupted
    assert path.read_bytes() == b"".join(each for each in kept if b"validation" not in each)
    truncate_record(tmp_path / "nowhere", step=2, epoch=1, validated=2)
