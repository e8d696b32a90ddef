"""hpctrain compare: equal or not, how far apart, since which step."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.cli import main
from hpctrain.models import save_model
from hpctrain.report.differences import compare_tensors, first_difference
from hpctrain.report.plot_differences import largest_of_neighbours

F32 = np.float32


def after(value, steps=1):
    for _ in range(steps):
        value = np.nextafter(F32(value), F32(np.inf))
    return value


@pytest.mark.parametrize(
    ("a", "b", "ulps"),
    [
        (1.0, after(1.0), 1),
        (1.0, after(1.0, 5), 5),
        (-1.0, np.nextafter(F32(-1), F32(-2)), 1),
        (np.nextafter(F32(0), F32(-1)), np.nextafter(F32(0), F32(1)), 2),
        (0.0, after(0.0, 3), 3),
        (1.0, 2.0, 2**23),
        (-0.0, 0.0, 0),
    ],
)
def test_units_in_the_last_place(a, b, ulps):
    found = compare_tensors("w", np.array([a, 7], F32), np.array([b, 7], F32))
    assert (found.values, found.differing, found.ulps) == (2, 1, ulps)


def test_float64_and_whole_numbers():
    a = np.array([1.0, -1.0])
    found = compare_tensors("w", a, np.array([np.nextafter(1.0, 2), np.nextafter(1.0, 2)]))
    assert found.ulps > 2**62
    whole = compare_tensors("n", np.array([3, 4]), np.array([3, 14]))
    assert (whole.differing, whole.largest, whole.ulps) == (1, 10.0, None)


def test_largest_and_relative_difference():
    found = compare_tensors("w", np.array([1, 100, 0.5], F32), np.array([1, 101, 0.25], F32))
    assert (found.differing, found.largest, found.relative) == (2, 1.0, 0.5)
    nan = np.array([np.nan, 1], F32)
    assert compare_tensors("w", nan, nan.copy()).differing == 0


def step(number, loss=1.0, **more):
    return {"kind": "step", "step": number, "loss": loss, "accuracy": 0.5, "seconds": 3, **more}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([step(1), step(2)], [step(1), step(2, seconds=9)], None),
        ([step(1), step(2)], [step(1), step(2, 1.5)], (2, "step: loss 1.0 and 1.5")),
        ([step(1), step(2)], [step(1)], (2, "one has step 2, the other ended")),
        (
            [step(1), {"kind": "digest", "step": 1, "digest": "ab"}],
            [step(1), {"kind": "digest", "step": 1, "digest": "ac"}],
            (1, "digest: digest ab and ac"),
        ),
        ([step(1)], [{"kind": "evaluation", "step": 0, "loss": 1}], (0, "one has step 1, the ")),
    ],
)
def test_the_first_step_at_which_records_differ(a, b, expected):
    found = first_difference(a, b)
    assert found == expected or (found[0] == expected[0] and found[1].startswith(expected[1]))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that writes a run's folder."""
    monkeypatch.chdir(tmp_path)

    def write(name, seed=0, shift=0.0, losses=(1.0, 2.0), shape=(4, 3, 3, 3)):
        torch.manual_seed(3)
        model = torch.nn.Conv2d(shape[1], shape[0], shape[2])
        model.weight.data[0, 0, 0, 0] += shift
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        save_model(folder / "model.safetensors", model, {})
        (folder / "config.toml").write_text(f'seed = {seed}\nrun = "{name}"\n')
        lines = [json.dumps({**step(n + 1, loss), "time": "x"}) for n, loss in enumerate(losses)]
        (folder / "progress.jsonl").write_text("\n".join(lines) + "\n")
        return name

    return write


def test_equal_runs(runs, capsys):
    assert main(["compare", runs("a"), runs("b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tensors: 2 equal, 0 different",
        "records: equal",
        "equal",
    ]


def test_runs_that_differ(runs, capsys, tmp_path):
    a, b = runs("a"), runs("b", seed=5, shift=0.5, losses=(1.0, 2.5))
    assert main(["compare", a, b, "--plot", "apart.png"]) == 1
    printed = capsys.readouterr().out
    assert "weight" in printed
    assert "tensors: 1 equal, 1 different" in printed
    assert "records: differ at step 2, step: loss 2.0 and 2.5" in printed
    assert "settings that differ: seed 0 and 5" in printed
    assert printed.endswith("different\n")
    with Image.open(tmp_path / "apart.png") as image:
        picture = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert (picture == (0, 114, 178)).all(1).sum() > 20, "no bar is drawn"


def test_no_figure_of_what_is_equal_nor_without_matplotlib(runs, capsys, monkeypatch):
    a, b = runs("a"), runs("b")
    assert main(["compare", a, b, "--plot", "apart.png"]) == 0
    assert "weight is equal in both runs: there is nothing to draw" in capsys.readouterr().out
    assert not Path("apart.png").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["compare", a, b, "--plot", "apart.png"]) == 2
    printed = capsys.readouterr()
    assert "plots need matplotlib" in printed.err and not printed.out


def test_of_many_values_the_largest_of_neighbours_are_shown():
    values = np.array([1.0, -3.0, 2.0, 0.5, 0.0, -0.25, 7.0])
    assert largest_of_neighbours(values, 1).tolist() == values.tolist()
    assert largest_of_neighbours(values, 3).tolist() == [-3.0, 0.5, 7.0]


def test_runs_with_equal_weights_and_other_records_are_different(runs):
    assert main(["compare", runs("a"), runs("b", losses=(1.0, 2.5))]) == 1


def test_runs_of_different_networks(runs, capsys):
    assert main(["compare", runs("a"), runs("b", shape=(5, 3, 3, 3))]) == 1
    assert "tensors: bias is (4,) float32 and (5,) float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "compare what? Name two runs"),
        (["a", "none"], "there is no run 'none' in runs"),
        (["a", "b", "--plot", "x.bmp"], "a name that ends in .png, .svg or .pdf"),
        (["a", "b", "--plot", "x.png", "--tensor", "w"], "--tensor w: no tensor of that name"),
    ],
)
def test_mistakes(runs, capsys, arguments, message):
    runs("a")
    runs("b")
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err
