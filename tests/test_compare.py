"""hpctrain compare: equal or not, how far apart, since which step."""

from __future__ import annotations

import importlib.util
import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain import compare
from hpctrain.cli import main
from hpctrain.compare import (
    compare_tensors,
    first_difference,
    largest_of_neighbours,
)
from hpctrain.config import Config, Interval
from hpctrain.models import read_model, save_model
from hpctrain.plan import Facts, resolve
from hpctrain.training.checkpoint import Writer, make_ready
from tests.support.launch import run_cli

FACTS = Facts(1, "cpu", 1, 101, (8, 8, 3), 1, 4, pack_uuid="u", min_samples=1)

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_values_whose_bits_differ_are_counted(dtype):
    a, b = torch.tensor([0, 1, 1, 0]).to(dtype), torch.tensor([0, 1, 0, 0]).to(dtype)
    found = compare_tensors("w", a.reshape(2, 2), b.reshape(2, 2))
    assert (found.values, found.differing, found.largest) == (4, 1, 1.0)
    assert compare_tensors("w", a, a.clone()).differing == 0
    zeros = torch.tensor([0.0, -0.0])
    assert compare_tensors("w", zeros, zeros.abs()).differing == 1


def test_largest_and_relative_difference():
    a, b = torch.tensor([1, 100, 0.5]), torch.tensor([1, 101, 0.25])
    found = compare_tensors("w", a, b)
    assert (found.differing, found.largest, found.relative) == (2, 1.0, 0.5)
    nan = torch.tensor([np.nan, 1])
    assert compare_tensors("w", nan, nan.clone()).differing == 0


def step(number, loss=1.0, **more):
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "accuracy": 0.5,
        "seconds": {"total": 3},
        **more,
    }


def digested(step, digest):
    return {"kind": "digest", "step": step, "digest": digest}


def end(digest):
    status = "done" if digest else "preempted"
    return {"kind": "end", "status": status, "steps": 1, "digest": digest}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([step(1), step(2)], [step(1), step(2, seconds={"total": 9})], None),
        ([step(1), step(2)], [step(1), step(2, 1.5)], (2, "step: loss 1.0 and 1.5")),
        ([step(1), step(2)], [step(1)], (2, "one has step 2, the other ended")),
        (
            [step(1), {"kind": "digest", "step": 1, "digest": "ab"}],
            [step(1), {"kind": "digest", "step": 1, "digest": "ac"}],
            (1, "digest: digest ab and ac"),
        ),
        ([step(1)], [{"kind": "evaluation", "step": 0, "loss": 1}], (0, "one has step 1, the ")),
        ([step(1), end("ab")], [step(1), end("ac")], (1, "end: digest ab and ac")),
        (  # checkpoints at other steps: what both have is compared
            [step(1), digested(1, "x"), step(2), digested(2, "y"), step(3)],
            [step(1), step(2), digested(2, "y"), step(3)],
            None,
        ),
        (
            [step(1), digested(1, "x"), step(2), digested(2, "y"), step(3)],
            [step(1), step(2), digested(2, "z"), step(3)],
            (2, "digest: digest y and z"),
        ),
        ([step(1), digested(1, "x"), step(2)], [step(1), step(2)], None),
        ([step(1), end("x"), end("ab")], [step(1), end(None), end("ab")], None),
        ([step(1), end("ab")], [step(1), end(None)], None),
    ],
)
def test_the_first_step_at_which_records_differ(a, b, expected):
    found = first_difference(a, b)
    assert found == expected or (found[0] == expected[0] and found[1].startswith(expected[1]))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that writes a run's folder."""
    monkeypatch.chdir(tmp_path)

    def write(
        name,
        seed=0,
        shift=0.0,
        losses=(1.0, 2.0),
        shape=(4, 3, 3, 3),
        memory=None,
        rate=1,
        status="done",
    ):
        torch.manual_seed(3)
        model = torch.nn.Conv2d(shape[1], shape[0], shape[2])
        model.weight.data[0, 0, 0, 0] += shift
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        save_model(folder / "model.safetensors", model, {})
        (folder / "config.toml").write_text(f'seed = {seed}\nrun = "{name}"\n')
        lines = [json.dumps({**step(n + 1, loss), "time": "x"}) for n, loss in enumerate(losses)]
        lines += [json.dumps({"kind": "end", "status": status, "reason": "the time is up"})]
        (folder / "progress.jsonl").write_text("\n".join(lines) + "\n")
        plan = resolve(Config(seed=seed, lr=rate), FACTS)
        (folder / "plan.json").write_text(plan.to_json())
        if memory is not None:
            make_ready(folder, 0)
            with Writer(folder, Interval(), 2) as writer:
                writer.save(*memory, {})
        return name

    return write


def test_equal_runs(runs, capsys):
    assert main(["compare", runs("a"), runs("b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tensors: 2 equal, 0 different",
        "records: equal",
        "checkpoints: not compared, both runs have none",
        "equal",
    ]
    assert main(["compare", "a", runs("c", status="preempted")]) == 0
    assert "second run: preempted (the time is up)\n" in capsys.readouterr().out


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


def test_equal_runs_are_drawn_as_zeros_but_not_without_matplotlib(runs, capsys, monkeypatch):
    a, b = runs("a"), runs("b")
    drawn = []
    monkeypatch.setattr(compare, "plot_differences", lambda *given: drawn.append(given[1:]))
    assert main(["compare", a, b, "--plot", "apart.png"]) == 0
    ((name, differences, title),) = drawn
    assert (name, differences.tolist()) == ("weight", [0.0] * 108)
    assert title == "a - b: 0 of 108 differ"
    capsys.readouterr()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["compare", a, b, "--plot", "apart.png"]) == 2
    printed = capsys.readouterr()
    assert "plots need matplotlib" in printed.err and not printed.out


def test_runs_whose_optimizers_alone_differ_are_different(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    same, other = torch.arange(5.0), torch.arange(5.0)
    other[3] += 1
    runs("a", memory=(2, {"weights": same, "optimizer.exp_avg": same}))
    runs("b", memory=(2, {"weights": same, "optimizer.exp_avg": other}))
    runs("c", memory=(2, {"weights": same, "optimizer.exp_avg": same.clone()}))
    runs("d", memory=(3, {"weights": same, "optimizer.exp_avg": same}))
    runs("e")
    assert main(["compare", "a", "b"]) == 1
    printed = capsys.readouterr().out
    assert "tensors: 3 equal, 1 different\nrecords: equal\ncheckpoints: of step 2" in printed
    assert "checkpoint optimizer.exp_avg" in printed
    assert main(["compare", "a", "c"]) == 0
    assert main(["compare", "a", "d"]) == 1
    assert "the newest checkpoints are of steps 2 and 3" in capsys.readouterr().out
    assert main(["compare", "a", "e"]) == 0
    assert "checkpoints: not compared, the second run has none" in capsys.readouterr().out


def test_settings_that_were_not_set_are_shown_as_resolved(runs, capsys):
    runs("a", rate=0.1)
    runs("b", rate=0.2)
    config = Path("runs/b/config.toml")
    config.write_text(config.read_text() + "lr = 0.2\nkeep_checkpoints = 3\n")
    assert main(["compare", "a", "b"]) == 0
    printed = capsys.readouterr().out
    assert "settings that differ: lr 0.1 and 0.2; keep_checkpoints not set and 3\n" in printed
    assert "None" not in printed and "plans differ" not in printed
    config.write_text('run = "b"\nseed = 0\n')
    assert main(["compare", "a", "b"]) == 0
    assert "plans differ: learning_rate 0.1 and 0.2\n" in capsys.readouterr().out


def test_a_damaged_plan_is_named(runs, capsys):
    path = Path("runs", runs("a"), "plan.json")
    runs("b")
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1', 1))
    assert main(["compare", "a", "b"]) == 0
    assert f"settings: {path} is corrupt: " in capsys.readouterr().out


def test_the_first_convolution_is_that_of_the_model_in_every_process(tmp_path):
    """Its name is the last in the alphabet, and the library's order changes with the process."""
    layers = {f"z{n}": torch.nn.Conv2d(3, 3, 3) for n in range(7, 0, -1)}
    model = torch.nn.Sequential(OrderedDict({"norm": torch.nn.BatchNorm2d(3), **layers}))
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        save_model(tmp_path / "runs" / name / "model.safetensors", model, {"model": "x"})
        (tmp_path / "runs" / name / "config.toml").touch()
        (tmp_path / "runs" / name / "progress.jsonl").touch()
    tensors, metadata = read_model(tmp_path / "runs/a/model.safetensors")
    assert list(tensors) == list(model.state_dict()) and metadata == {"model": "x"}
    printed = [run_cli(["compare", "a", "b", "--plot", "x.svg"], cwd=tmp_path) for _ in range(2)]
    first = [done.stdout.splitlines()[0] for done in printed]
    assert first == ["x.svg: differences of z7.weight"] * 2


def test_of_many_values_the_largest_of_neighbours_are_shown():
    values = np.array([1.0, -3.0, 2.0, 0.5, 0.0, -0.25, 7.0])
    assert largest_of_neighbours(values, 1).tolist() == values.tolist()
    assert largest_of_neighbours(values, 3).tolist() == [-3.0, 0.5, 7.0]


def test_runs_with_equal_weights_and_other_records_are_different(runs):
    assert main(["compare", runs("a"), runs("b", losses=(1.0, 2.5))]) == 1


def test_runs_of_different_networks(runs, capsys):
    assert main(["compare", runs("a"), runs("b", shape=(5, 3, 3, 3))]) == 1
    assert "; bias is (4,) float32 and (5,) float32\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "compare what? Name two runs"),
        (["a", "none"], "there is no run or sweep 'none' in runs"),
        (["a", "b", "--plot", "x.bmp"], "a name that ends in .png, .svg or .pdf"),
        (["a", "b", "--plot", "x.png", "--tensor", "w"], "--tensor w: no tensor of that name"),
    ],
)
def test_mistakes(runs, capsys, arguments, message):
    runs("a")
    runs("b")
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err
