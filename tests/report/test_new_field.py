"""A field of steps that somebody adds: one line in fields.py, and the value where it is made."""

from __future__ import annotations

import pytest

from hpctrain.compare import first_difference
from hpctrain.plot import plot_training, read_curves
from hpctrain.report.fields import FIELDS, LABELS, Field, fields_marked
from hpctrain.report.record import read_records
from hpctrain.report.recorder import Recorder
from tests.support.records import tell


def record(folder, norms):
    """A run of these gradient norms."""
    folder.mkdir()
    with Recorder(folder, "none") as recorder:
        recorder.run({"name": folder.name, "epochs": 2, "steps_per_epoch": 2})
        for step, norm in enumerate(norms, start=1):
            tell(recorder, "step", step=step, loss=1.0, gradient_norm=norm)
    return folder


def test_a_field_that_nobody_has_listed_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a step has no field gradient_norm.*fields\.py"):
        record(tmp_path / "a", [1.0])


def test_a_field_is_checked_compared_drawn_and_shown_by_its_line(tmp_path, monkeypatch):
    label = "gradient norm"
    field = Field(float, deterministic=True, scalar=True, label=label)
    monkeypatch.setitem(FIELDS["step"], "gradient_norm", field)
    monkeypatch.setitem(LABELS, "gradient_norm", label)
    one, other = record(tmp_path / "a", [1.0, 2.0]), record(tmp_path / "b", [1.0, 3.0])
    found = first_difference(read_records(one), read_records(other))
    assert found == (2, "step: gradient_norm 2.0 and 3.0")
    assert "gradient_norm" in fields_marked("step", "scalar")
    curves = read_curves(one, "a")
    assert curves.panels == ["accuracy", "loss", "gradient_norm"]
    assert curves.training["gradient_norm"].tolist() == [[0.5, 1.0], [1.0, 2.0]]
    pytest.importorskip("matplotlib")
    axes = plot_training([curves, read_curves(other, "b")]).axes
    assert [each.get_ylabel() for each in axes][:3] == [
        "accuracy (%)",
        "loss (cross-entropy)",
        label,
    ]
    assert axes[2].get_ylim() == axes[5].get_ylim() == (0.0, pytest.approx(3.15))
