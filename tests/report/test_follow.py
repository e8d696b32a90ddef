"""Records that grow while they are read: torn, cut back, replaced, huge, or not there."""

from __future__ import annotations

import os

import pytest

from hpctrain.report import record, step_stats
from hpctrain.report.record import (
    FILE_NAME,
    HistoryReader,
    read_history,
    truncate_record,
)
from hpctrain.report.step_stats import Curve
from tests.records import append, end_line, evaluation_line, line, make_run, run_line, step_line


def steps(reader):
    return [point.step for point in reader.history.step_curves["loss"].points]


def test_only_what_was_added_is_read_and_a_torn_line_when_it_is_whole(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1))
    reader = HistoryReader(run, "sampled")
    assert reader.poll() and not reader.poll()
    decoded = reader.decoded
    whole, last = step_line(2), step_line(4)
    append(run, whole[:50])
    assert not reader.poll()
    append(run, whole[50:], step_line(3), last[:20])
    assert reader.poll() and reader.decoded == decoded + 2
    assert (steps(reader), reader.problem) == ([1, 2, 3], None)
    append(run, last[20:])
    assert reader.poll() and steps(reader) == [1, 2, 3, 4]
    assert reader.decoded == decoded + 3


def test_a_record_that_is_not_there_yet_and_one_that_goes(tmp_path):
    reader = HistoryReader(tmp_path / "a", "sampled")
    assert not reader.poll() and reader.problem is None
    run = make_run(tmp_path / "a", run_line()[:8])
    assert not reader.poll() and not reader.history.facts and reader.problem is None
    (run / FILE_NAME).write_bytes(run_line(model="x"))
    assert reader.poll() and reader.history.facts["model"] == "x"
    (run / FILE_NAME).unlink()
    assert reader.poll() and not reader.history.facts


def test_a_resumed_launch_cuts_the_record_back_and_tells_anew(tmp_path):
    run = make_run(tmp_path / "a", run_line(), *map(step_line, range(1, 8)), end_line("preempted"))
    reader = HistoryReader(run, "sampled")
    reader.poll()
    assert reader.history.outcome.status == "preempted"
    truncate_record(run, 5, 0, 0)
    append(run, run_line(ranks=3), *(step_line(n, loss=9.0) for n in range(6, 20)))
    assert reader.poll()
    history = reader.history
    assert (steps(reader), history.launch.end, history.facts["ranks"]) == (
        [*range(1, 20)],
        {},
        3,
    )
    values = [point.mean for point in history.step_curves["loss"].points]
    assert values[4:7] == [1 / 5, 9.0, 9.0]


@pytest.mark.parametrize("shorter", [True, False])
def test_a_record_rewritten_in_the_same_file_is_read_anew(tmp_path, shorter):
    run = make_run(tmp_path / "a", run_line(), *map(step_line, range(1, 8)))
    reader = HistoryReader(run, "sampled")
    reader.poll()
    inode = os.stat(run / FILE_NAME).st_ino
    text = run_line() + b"".join(step_line(n, loss=7.0) for n in range(1, 3 if shorter else 30))
    (run / FILE_NAME).write_bytes(text)
    assert os.stat(run / FILE_NAME).st_ino == inode
    reader.poll()
    values = {point.mean for point in reader.history.step_curves["loss"].points}
    assert values == {7.0} and len(steps(reader)) == (2 if shorter else 29)


def test_of_many_steps_some_are_decoded_and_all_else(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "SAMPLE", 100)
    monkeypatch.setattr(record, "NEAR_END", 2000)
    many = 5000
    lines = [step_line(n) for n in range(1, many + 1)]
    evaluations = [evaluation_line(n * 10) for n in range(1, 31)]
    run = make_run(
        tmp_path / "a",
        run_line(),
        *lines[:2000],
        *evaluations,
        line("note", text="so far"),
        line("digest", step=2000, digest="00"),
        *lines[2000:],
    )
    reader = HistoryReader(run, "sampled")
    reader.poll()
    history = reader.history
    assert 100 < reader.decoded < 250
    assert (steps(reader)[0], history.step["step"], list(history.notes)) == (1, many, ["so far"])
    assert steps(reader)[-5:] == [*range(many - 4, many + 1)]
    assert len(history.split_curves["validation"]["loss"].points) == 30
    append(run, *(step_line(many + n) for n in range(1, 51)))
    before = reader.decoded
    reader.poll()
    assert reader.decoded == before + 50


def test_lines_lost_in_a_power_failure_are_counted(tmp_path):
    run = make_run(
        tmp_path / "a", run_line(), b"\0" * 90 + b"\n", b'{"kind": "step"}\n', step_line(1)
    )
    reader = HistoryReader(run, "sampled")
    reader.poll()
    assert (steps(reader), reader.history.corrupt_lines, reader.problem) == ([1], 2, None)
    append(run, b"\0" * 90)
    assert not reader.poll() and reader.problem is None


@pytest.mark.parametrize("text", [b"epoch,loss\n1,2\n", b"epoch,loss", b"\0" * 100])
def test_what_is_no_record_is_said_and_may_become_one(tmp_path, text):
    run = make_run(tmp_path / "a", text)
    reader = HistoryReader(run, "sampled")
    assert reader.poll()
    assert "not the record of a run" in reader.problem
    (run / FILE_NAME).write_bytes(run_line() + step_line(1))
    assert reader.poll()
    assert (reader.problem, steps(reader)) == (None, [1])


def test_odd_values_in_records_do_no_harm(tmp_path):
    odd = {"loss": "x", "accuracy": True, "seconds": None, "slowest_rank": "?", "rows": []}
    run = make_run(
        tmp_path / "a", run_line(epochs="?"), step_line(1, **odd), step_line(2, loss=None)
    )
    reader = HistoryReader(run, "sampled")
    reader.poll()
    history = reader.history
    assert (steps(reader), reader.problem, history.total_steps, history.seconds_left()) == (
        [],
        None,
        None,
        None,
    )
    assert history.costs()["step_seconds"] == pytest.approx(0.1)


def test_a_curve_keeps_means_and_ranges_in_few_points(monkeypatch):
    monkeypatch.setattr(step_stats, "MOST_POINTS", 8)
    made = Curve()
    for step in range(1, 1001):
        made.add(step, step % 2)
    points = made.points
    assert 4 <= len(points) <= 8 and sum(p.count for p in points) == 1000
    assert [p.step for p in points] == sorted(p.step for p in points)
    assert all((p.min, p.max) == (0, 1) and p.mean == pytest.approx(0.5, abs=0.01) for p in points)


def test_a_curve_that_goes_back_drops_what_came_later():
    made = Curve()
    for step in (1, 2, 3, 2):
        made.add(step, step)
    assert [(p.step, p.count) for p in made.points] == [(1, 1), (2, 2)]


def test_launches_and_how_each_ended(tmp_path):
    moment = 1_700_000_000.0
    lines = [run_line(time=moment), *(step_line(n, time=moment + n) for n in range(1, 4))]
    lines += [end_line("preempted", "the time is up", time=moment + 5)]
    lines += [run_line(time=moment + 100, ranks=3), step_line(4, time=moment + 103)]
    run = make_run(tmp_path / "a", *lines)
    history = read_history(run)
    first, second = history.launches
    assert (first.outcome.status, first.outcome.reason) == ("preempted", "the time is up")
    assert (second.outcome, history.outcome.status, history.facts["ranks"]) == (
        ("", None, 0),
        "",
        3,
    )
    assert (first.first_step["step"], second.first_step["step"]) == (1, 4)
    assert (history.seconds, history.last_step, history.gaps) == (5 + 3, 4, [])
    append(run, step_line(7), step_line(9), end_line("odd"))
    history = read_history(run)
    assert (history.outcome.status, history.missing_steps(10)) == ("failed", "5 to 6, 8, 10")


def test_what_follows_damage_counts_for_a_display_and_not_for_a_resumed_launch(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1), b"\0" * 90 + b"\n", step_line(2))
    strict, lenient = HistoryReader(run, strict=True), HistoryReader(run)
    assert strict.poll() and lenient.poll()
    append(run, step_line(3))
    assert not strict.poll() and lenient.poll()
    assert (strict.history.last_step, lenient.history.last_step) == (1, 3)
    assert (
        strict.history.corruption == lenient.history.corruption
        and "line 3" in strict.history.corruption
    )
