"""What a record gives as curves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpctrain.errors import UsageError
from hpctrain.report.plot_data import Points, read_curves, thinned
from hpctrain.report.record import Recorder
from tests.report.records import write_record


def test_training_by_epoch_validation_where_it_was(tmp_path):
    curves = read_curves(write_record(tmp_path / "a"), "a")
    assert curves.loss.x.tolist() == [1, 2, 3]
    assert curves.loss.y.tolist() == [1, 0.5, 0.25]
    assert curves.accuracy.y.tolist() == [60, 60, 60]
    assert curves.validation_loss.x.tolist() == [0.5, 1.5, 2.5]
    assert curves.validation_loss.y.tolist() == [2, 1, 0.5]
    assert (curves.test_loss, curves.test_accuracy) == (0.25, 60)
    assert (curves.status, curves.shown, curves.has_accuracy) == ("done", True, True)


@pytest.mark.parametrize("epochs", [1, 2])
def test_by_step_where_fewer_than_two_epochs_are_done(tmp_path, epochs):
    curves = read_curves(write_record(tmp_path / "a", epochs), "a")
    assert curves.loss.x.tolist() == ([0.25, 0.5, 0.75, 1] if epochs == 1 else [1, 2])


def test_a_network_without_classes_has_no_accuracy(tmp_path):
    curves = read_curves(write_record(tmp_path / "a", classify=False, validation=False), "a")
    assert (curves.has_accuracy, curves.has_loss, curves.shown) == (False, True, True)
    assert math.isnan(curves.test_accuracy)
    assert not curves.validation_loss.x.size


def test_what_is_not_finite_is_nan(tmp_path):
    curves = read_curves(write_record(tmp_path / "a", nan_from=6, status="failed"), "a")
    assert curves.loss.y[0] == 1
    assert np.isnan(curves.loss.y[1:]).all()
    assert (curves.status, curves.reason) == ("failed", "a reason")
    nothing = read_curves(write_record(tmp_path / "b", classify=False, nan_from=0), "b")
    assert not nothing.shown


def test_a_launch_that_goes_on_is_not_finished(tmp_path):
    folder = write_record(tmp_path / "a", status="left")
    assert read_curves(folder, "a").status == "left"
    with Recorder(folder, "none") as recorder:
        recorder.run({"name": "a"})
    curves = read_curves(folder, "a")
    assert (curves.status, curves.reason) == ("not finished", None)
    assert curves.validation_loss.x.tolist() == [0.5, 1.5, 2.5]


def test_steps_of_an_epoch_are_counted_where_the_run_does_not_say(tmp_path):
    folder = write_record(tmp_path / "a")
    path = folder / "progress.jsonl"
    path.write_text(path.read_text().replace('"steps_per_epoch": 4', '"steps_per_epoch": null'))
    assert read_curves(folder, "a").validation_loss.x.tolist() == [0.5, 1.5, 2.5]


def test_many_points_become_means_of_neighbours():
    nan = math.nan
    points = Points(np.arange(5.0), np.array([1, 3, nan, 4, nan]))
    assert thinned(points, 5) is points
    few = thinned(points, 3)
    assert few.x.tolist() == [0.5, 2.5, 4]
    assert few.y[:2].tolist() == [2, 4]
    assert math.isnan(few.y[2])


def test_what_is_no_record_is_refused(tmp_path):
    (tmp_path / "progress.jsonl").write_text("hello\n")
    with pytest.raises(UsageError, match="is not the record of a run: line 1"):
        read_curves(tmp_path, "a")
