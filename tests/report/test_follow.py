"""Curves of long runs, and the launches of a run."""

from __future__ import annotations

import pytest

from hpctrain.report import step_stats
from hpctrain.report.record import read_history
from hpctrain.report.step_stats import Curve
from tests.support.records import append, end_line, make_run, run_line, step_line


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
