"""Records that grow while they are read: torn, cut back, replaced, huge, or not there."""

from __future__ import annotations

import os

import pytest

from hpctrain.report import curve, follow
from hpctrain.report.curve import Curve
from hpctrain.report.follow import Follower
from hpctrain.report.jsonlines import FILE_NAME, cut_back
from hpctrain.report.story import Story
from tests.records import append, end_line, evaluation_line, line, make_run, run_line, step_line


def steps(follower):
    return [point.step for point in follower.taken.training["loss"].points()]


def test_only_what_was_added_is_read_and_a_torn_line_when_it_is_whole(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1))
    follower = Follower(run, Story)
    assert follower.poll() and not follower.poll()
    decoded = follower.decoded
    whole, last = step_line(2), step_line(4)
    append(run, whole[:50])
    assert not follower.poll()
    append(run, whole[50:], step_line(3), last[:20])
    assert follower.poll() and follower.decoded == decoded + 2
    assert (steps(follower), follower.problem) == ([1, 2, 3], None)
    append(run, last[20:])
    assert follower.poll() and steps(follower) == [1, 2, 3, 4]
    assert follower.decoded == decoded + 3


def test_a_record_that_is_not_there_yet_and_one_that_goes(tmp_path):
    follower = Follower(tmp_path / "a", Story)
    assert not follower.poll() and follower.problem is None
    run = make_run(tmp_path / "a", run_line()[:8])
    assert not follower.poll() and not follower.taken.facts and follower.problem is None
    (run / FILE_NAME).write_bytes(run_line(model="x"))
    assert follower.poll() and follower.taken.facts["model"] == "x"
    (run / FILE_NAME).unlink()
    assert follower.poll() and not follower.taken.facts


def test_a_resumed_launch_cuts_the_record_back_and_tells_anew(tmp_path):
    run = make_run(tmp_path / "a", run_line(), *map(step_line, range(1, 8)), end_line("left"))
    follower = Follower(run, Story)
    follower.poll()
    assert follower.taken.end["status"] == "left"
    cut_back(run, 5, 0, 0)
    append(run, run_line(ranks=3), *(step_line(n, loss=9.0) for n in range(6, 20)))
    assert follower.poll()
    story = follower.taken
    assert (steps(follower), story.end, story.facts["ranks"]) == ([*range(1, 20)], {}, 3)
    values = [point.value for point in story.training["loss"].points()]
    assert values[4:7] == [1 / 5, 9.0, 9.0]


@pytest.mark.parametrize("shorter", [True, False])
def test_a_record_rewritten_in_the_same_file_is_read_anew(tmp_path, shorter):
    run = make_run(tmp_path / "a", run_line(), *map(step_line, range(1, 8)))
    follower = Follower(run, Story)
    follower.poll()
    inode = os.stat(run / FILE_NAME).st_ino
    text = run_line() + b"".join(step_line(n, loss=7.0) for n in range(1, 3 if shorter else 30))
    (run / FILE_NAME).write_bytes(text)
    assert os.stat(run / FILE_NAME).st_ino == inode
    follower.poll()
    values = {point.value for point in follower.taken.training["loss"].points()}
    assert values == {7.0} and len(steps(follower)) == (2 if shorter else 29)


def test_of_many_steps_some_are_decoded_and_all_else(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "MOST_DECODED", 100)
    monkeypatch.setattr(follow, "BLOCK", 1000)
    monkeypatch.setattr(follow, "NEAR_END", 2000)
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
    follower = Follower(run, Story)
    follower.poll()
    story = follower.taken
    assert 100 < follower.decoded < 250
    assert (steps(follower)[0], story.step["step"], list(story.notes)) == (1, many, ["so far"])
    assert steps(follower)[-5:] == [*range(many - 4, many + 1)]
    assert len(story.evaluated["validation"]["loss"].points()) == 30
    append(run, *(step_line(many + n) for n in range(1, 51)))
    before = follower.decoded
    follower.poll()
    assert follower.decoded == before + 50


def test_lines_lost_in_a_power_failure_are_counted(tmp_path):
    run = make_run(
        tmp_path / "a", run_line(), b"\0" * 90 + b"\n", b'{"kind": "step"}\n', step_line(1)
    )
    follower = Follower(run, Story)
    follower.poll()
    assert (steps(follower), follower.unreadable, follower.problem) == ([1], 2, None)
    append(run, b"\0" * 90)
    assert not follower.poll() and follower.problem is None


@pytest.mark.parametrize("text", [b"epoch,loss\n1,2\n", b"epoch,loss", b"\0" * 100])
def test_what_is_no_record_is_said_and_may_become_one(tmp_path, text):
    run = make_run(tmp_path / "a", text)
    follower = Follower(run, Story)
    assert follower.poll()
    assert "not the record of a run" in follower.problem
    (run / FILE_NAME).write_bytes(run_line() + step_line(1))
    assert follower.poll()
    assert (follower.problem, steps(follower)) == (None, [1])


def test_odd_values_in_records_do_no_harm(tmp_path):
    odd = {"loss": "x", "accuracy": True, "seconds": None, "slowest_rank": "?", "rows": []}
    run = make_run(
        tmp_path / "a", run_line(epochs="?"), step_line(1, **odd), step_line(2, loss=None)
    )
    follower = Follower(run, Story)
    follower.poll()
    story = follower.taken
    assert (steps(follower), follower.problem, story.steps(), story.left()) == (
        [],
        None,
        None,
        None,
    )
    assert story.costs()["step_seconds"] == pytest.approx(0.1)


def test_a_curve_keeps_means_and_ranges_in_few_points(monkeypatch):
    monkeypatch.setattr(curve, "MOST", 8)
    made = Curve()
    for step in range(1, 1001):
        made.add(step, step % 2)
    points = made.points()
    assert 4 <= len(points) <= 8 and sum(p.number for p in points) == 1000
    assert [p.step for p in points] == sorted(p.step for p in points)
    assert all(
        (p.least, p.most) == (0, 1) and p.value == pytest.approx(0.5, abs=0.01) for p in points
    )


def test_a_curve_that_goes_back_drops_what_came_later():
    made = Curve()
    for step in (1, 2, 3, 2):
        made.add(step, step)
    assert [(p.step, p.number) for p in made.points()] == [(1, 1), (2, 2)]
