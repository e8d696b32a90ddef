"""Records that grow while they are read: torn, cut back, replaced, long, or not there."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import truncate_record
from tests.support.records import (
    FILE,
    append,
    end_line,
    evaluation_line,
    line,
    make_other,
    make_run,
    run_line,
    step_line,
    step_lines,
)

WHOLE = [
    run_line(),
    *step_lines(1, 9),
    line("note", text="so far"),
    evaluation_line(9),
    *step_lines(10, 19),
    end_line(),
]


def losses(history):
    """The loss of each step."""
    return {int(step): mean for step, mean in history.curve("loss")}


def steps(history):
    return list(losses(history))


def test_only_what_was_added_is_read_and_a_torn_line_when_it_is_whole(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1, loss=5.0), step_line(2))
    history = hp.History(run, "sampled")
    assert history.follow() and not history.follow()
    text, third, last = (run / FILE).read_bytes(), step_line(3), step_line(5)
    (run / FILE).write_bytes(text.replace(b"5.0", b"6.0"))  # what was read is not read again
    append(run, third[:50])
    assert not history.follow() and hp.history(run).steps["step"].tolist() == [1, 2]
    append(run, third[50:], step_line(4), last[:20])
    assert history.follow() and steps(history) == [1, 2, 3, 4]
    append(run, last[20:])
    assert history.follow() and losses(history)[1] == 5.0
    assert (steps(history), history.problem) == ([1, 2, 3, 4, 5], None)


@given(cuts=st.lists(st.integers(0, len(b"".join(WHOLE))), max_size=6))
def test_wherever_a_growing_record_is_looked_at_it_is_read_once_and_whole(cuts, tmp_path_factory):
    text = b"".join(WHOLE)
    run = make_run(tmp_path_factory.mktemp("run") / "a")
    history = hp.History(run, "sampled")
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(text)]):
        append(run, text[begin:end])
        history.follow()
        whole = text[:end].rpartition(b"\n")[0].count(b'"kind": "step"')
        assert (len(history.steps.get("step", ())), history.problem) == (whole, None)
    assert losses(history) == {number: 1 / number for number in range(1, 20)}
    assert history.outcome().status == "done"
    assert (list(history.recent_notes), len(history.evaluations["loss"])) == (["so far"], 1)


def test_the_best_validation_is_by_the_first_figure_of_the_run_or_by_another_one(tmp_path):
    history = hp.history(make_other(tmp_path / "other", 4.0, 1.0, 2.0))
    assert [*history.figures.items()] == [("mae", "min"), ("loss", "min")]
    assert history.best().values == {"mae": 1.0, "loss": 1.0}
    assert history.best(by="loss").values == {"mae": 4.0, "loss": 0.25}
    assert history.test.loss == 0.5 and history.test.accuracy is None
    with pytest.raises(hp.UsageError, match="no figure 'accuracy': choose from mae, loss"):
        history.best(by="accuracy")


def test_a_validation_without_a_number_is_never_the_best(tmp_path):
    """Losses that are not finite are recorded as null."""
    lines = [evaluation_line(step, loss=loss) for step, loss in enumerate((None, 0.2, None))]
    made = make_run(tmp_path / "run", run_line(), *lines)
    assert hp.history(made).best(by="loss").loss == 0.2


def test_a_record_without_figures_has_those_of_its_task(tmp_path):
    lines = evaluation_line(1, accuracy=0.5, loss=0.1), evaluation_line(2, accuracy=0.9, loss=0.2)
    for task, loss in {"classify": 0.2, "denoise": 0.1, "unknown": 0.2}.items():
        facts = run_line(settings={"task": task})
        assert hp.history(make_run(tmp_path / task, facts, *lines)).best().loss == loss
    assert hp.history(make_run(tmp_path / "none", *lines)).best().accuracy == 0.9


def test_a_figure_that_is_no_number_is_corrupt(tmp_path):
    made = make_other(tmp_path / "other", 4.0)
    append(made, line("evaluation", step=11, split="validation", loss=1.0, mae="x"))
    with pytest.raises(hp.UsageError, match='line 7 is no line of a record: mae cannot be "x"'):
        hp.history(made)


def test_a_record_that_is_not_there_yet_and_one_that_goes(tmp_path):
    history = hp.History(tmp_path / "a", "sampled")
    assert not history.follow() and history.problem is None
    run = make_run(tmp_path / "a", run_line()[:8])
    assert not history.follow() and not history.facts and not history.problem
    (run / FILE).write_bytes(run_line(model="x"))
    assert history.follow() and history.facts["model"] == "x"
    (run / FILE).unlink()
    assert history.follow() and not history.facts
    (run / FILE).mkdir()
    assert history.follow() and not history.follow()
    assert history.problem == f"cannot read {run / FILE}: Is a directory"
    (run / FILE).rmdir()
    (run / FILE).write_bytes(run_line(model="x"))
    assert history.follow() and (history.problem, history.lost) == (None, 0)


def test_a_resumed_launch_cuts_the_record_back_and_is_told_anew(tmp_path):
    lines = [run_line(), *step_lines(1, 5), line("note", text="early"), *step_lines(6, 7)]
    run = make_run(tmp_path / "a", *lines, evaluation_line(7, "test"), end_line("preempted"))
    history = hp.History(run, "sampled")
    history.follow()
    assert history.outcome().status == "preempted"
    truncate_record(run, step=5, epoch=0, validated=0)
    append(run, run_line(ranks=3), *step_lines(6, 19, loss=9.0))
    assert history.follow()
    assert (history.outcome().status, history.facts["ranks"]) == ("", 3)
    assert list(history.recent_notes) == ["early"]
    assert losses(history) == {n: 1 / n if n < 6 else 9.0 for n in range(1, 20)}


def test_the_seconds_of_all_launches_are_added_and_the_speed_is_that_of_the_last(tmp_path):
    first, second = [run_line(time=100), step_line(1, time=103, rows=1)], [run_line(time=200)]
    run = make_run(tmp_path / "a", *first, *second, step_line(2, time=204), end_line(time=205))
    history = hp.history(run)
    assert (history.seconds, history.costs()["images_per_second"]) == pytest.approx((8, 80))


OTHER = run_line(time=1e9) + b"".join(step_lines(1, 7, time=1e9))


@pytest.mark.parametrize("last", [2, 7, 29])
@pytest.mark.parametrize("before", [OTHER, b"epoch,loss\n1,2\n", b"\0" * 100 + b"\n"])
def test_a_record_rewritten_in_the_same_file_is_read_anew(tmp_path, before, last):
    run = make_run(tmp_path / "a", before)
    history = hp.History(run, "sampled")
    assert history.follow()
    assert (str(run / FILE) in (history.problem or "")) == (before != OTHER)
    inode = os.stat(run / FILE).st_ino
    (run / FILE).write_bytes(run_line() + b"".join(step_lines(1, last, loss=7.0)))
    assert os.stat(run / FILE).st_ino == inode
    assert history.follow() and history.problem is None
    assert losses(history) == dict.fromkeys(range(1, last + 1), 7.0)


def test_of_many_steps_some_are_read_but_both_ends_and_all_else(tmp_path):
    many = 30_000
    lines = step_lines(1, many)
    evaluations = [evaluation_line(n * 10) for n in range(1, 31)]
    others = [line("note", text="so far"), line("digest", step=2000, digest="00")]
    run = make_run(tmp_path / "a", run_line(), *lines[:2000], *evaluations, *others, *lines[2000:])
    history = hp.History(run, "sampled")
    history.follow()
    read = len(history.steps["step"])
    assert many / 10 < read < many / 2
    assert (history.launch.first_step["step"], history.step["step"]) == (1, many)
    assert list(history.recent_notes) == ["so far"]
    assert len(history.evaluations["loss"]) == 30
    found = losses(history)
    assert len(found) < 1000 and min(found) < 100 and max(found) > many - 100
    values = list(found.values())
    assert values == sorted(values, reverse=True)  # those of 1 / step
    late = {step: value for step, value in found.items() if step > 2000}  # means, not extremes
    assert late == pytest.approx({step: 1 / step for step in late}, rel=1e-3)
    append(run, *step_lines(many + 1, many + 50))
    history.follow()
    assert len(history.steps["step"]) == read + 50


def test_what_follows_damage_counts_for_a_display_and_not_for_a_resumed_launch(tmp_path):
    lost = b"\0" * 90 + b"\n"
    run = make_run(tmp_path / "a", run_line(), step_line(1), lost, lost)
    strict, lenient = hp.History(run), hp.History(run, "sampled")
    assert strict.follow() and lenient.follow()
    append(run, step_line(2), b"\0" * 90)
    assert not strict.follow() and lenient.follow() and not lenient.follow()
    assert (steps(strict), steps(lenient), lenient.lost) == ([1], [1, 2], 2)
    assert strict.problem == lenient.problem
    with pytest.raises(hp.UsageError, match=f"{run / FILE}, line 3"):
        hp.history(run)
