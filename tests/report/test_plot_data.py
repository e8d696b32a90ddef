"""What a record gives as curves."""

from __future__ import annotations

import pytest

from hpctrain.errors import UsageError
from hpctrain.plot import read_curves
from hpctrain.report.recorder import Recorder
from tests.report.records import write_record


def x(curve):
    return curve[:, 0].tolist()


def y(curve):
    return curve[:, 1].tolist()


def test_training_by_epoch_validation_where_it_was(tmp_path):
    curves = read_curves(write_record(tmp_path / "a"), "a")
    assert x(curves.training["loss"]) == [1, 2, 3]
    assert y(curves.training["loss"]) == [1, 0.5, 0.25]
    assert y(curves.training["accuracy"]) == [60, 60, 60]
    assert x(curves.validation["loss"]) == [0.5, 1.5, 2.5]
    assert y(curves.validation["loss"]) == [2, 1, 0.5]
    assert (curves.test, curves.status) == ((0.25, 0.6), "done")
    assert curves.panels == ["accuracy", "loss"]


@pytest.mark.parametrize("epochs", [1, 2])
def test_by_step_where_fewer_than_two_epochs_are_done(tmp_path, epochs):
    curves = read_curves(write_record(tmp_path / "a", epochs), "a")
    assert x(curves.training["loss"]) == ([0.25, 0.5, 0.75, 1] if epochs == 1 else [1, 2])


def test_a_network_without_classes_has_no_accuracy(tmp_path):
    curves = read_curves(write_record(tmp_path / "a", classify=False, validation=False), "a")
    assert (curves.panels, curves.test.accuracy, curves.validation) == (["loss"], None, {})


def test_what_is_not_finite_is_not_drawn(tmp_path):
    curves = read_curves(write_record(tmp_path / "a", nan_from=6, status="failed"), "a")
    assert x(curves.training["loss"]) == [0.25, 0.5, 0.75, 1, 1.25]
    assert (curves.status, curves.reason) == ("failed", "a reason")
    nothing = read_curves(write_record(tmp_path / "b", classify=False, nan_from=0), "b")
    assert nothing.panels == []


def test_a_resumed_launch_is_not_finished(tmp_path):
    folder = write_record(tmp_path / "a", status="preempted")
    assert read_curves(folder, "a").status == "preempted"
    with Recorder(folder, "none") as recorder:
        recorder.run({"name": "a"})
    curves = read_curves(folder, "a")
    assert (curves.status, curves.reason) == ("not finished", None)
    assert x(curves.validation["loss"]) == [0.5, 1.5, 2.5]


def test_steps_of_an_epoch_are_counted_where_the_run_does_not_say(tmp_path):
    folder = write_record(tmp_path / "a")
    path = folder / "progress.jsonl"
    path.write_text(path.read_text().replace('"steps_per_epoch": 4', '"steps_per_epoch": null'))
    assert x(read_curves(folder, "a").validation["loss"]) == [0.5, 1.5, 2.5]


def test_what_is_no_record_is_refused(tmp_path):
    (tmp_path / "progress.jsonl").write_text("hello\n")
    with pytest.raises(UsageError, match="is not the record of a run: line 1"):
        read_curves(tmp_path, "a")
