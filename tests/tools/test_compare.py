"""hpctrain compare: equal or not, how far apart, since which step."""

from __future__ import annotations

import json
import re
import shutil
from collections import OrderedDict

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.api import command_line, save_model
from tests.support.packs import make_pack
from tests.support.ranks import command
from tests.support.runs import train_once


def compare(first, second, *words):
    return command(1, "compare", first, second, *words)


@pytest.fixture
def pair(trained, trained_copy):
    """A run and its equal, which a test may change."""
    return trained.run("plain"), trained_copy.run("plain")


def change_weights(run, change):
    """Save the network again after `change` of a dictionary of its tensors."""
    tensors = load_file(run / "model.safetensors")
    change(tensors)
    save_file(tensors, run / "model.safetensors", {})


def change_record(run, change):
    """Write the record again as `change` of its records gives it."""
    path = run / "progress.jsonl"
    records = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_equal_runs(pair):
    ended = compare(*pair)
    assert ended.code == 0
    assert ended.out.splitlines() == [
        "tensors: 25 equal, 0 different",
        "records: equal",
        "checkpoints: of steps 14 and 14",
        "equal",
    ]


DTYPES = ["float64", "float32", "bfloat16", "float8_e5m2", "int64", "bool"]
VALUES = {  # a, b -> how many differ, largest |a - b|, largest relative difference
    **{name: ([0, 1, 1, 0], [0, 1, 0, 0], 1, 1.0, 1.0) for name in DTYPES},
    "signs of zero": ([0.0, -0.0], [0.0, 0.0], 1, 0.0, 0.0),
    "several": ([1, 100, 0.5], [1, 101, 0.25], 2, 1.0, 0.5),
    "equal NaN": ([np.nan, 1], [np.nan, 1], 0, 0.0, 0.0),
}


def test_values_whose_bits_differ_are_counted(pair):
    other = pair[1].with_name("tuned")
    for place, run in enumerate((pair[1], other)):
        tensors = {
            name: torch.tensor(case[place]).to(vars(torch).get(name, torch.float32)).reshape(-1, 1)
            for name, case in VALUES.items()
        }
        save_file(tensors, run / "model.safetensors", {})
        shutil.rmtree(run / "checkpoints")
    ended = compare(pair[1], other)
    assert ended.code == 1 and "tensors: 1 equal, 8 different" in ended.out
    rows = re.findall(
        r"^(.*): (\d) of \d values differ, largest difference (\S+), relative (\S+)$",
        ended.out,
        re.M,
    )
    found = {name: (int(n), float(a), float(b)) for name, n, a, b in rows}
    assert found == {name: case[2:] for name, case in VALUES.items() if case[2]}


def test_tensors_that_differ_are_named_with_the_checkpoint_beside_them(pair):
    def change(tensors):
        tensors["fc.bias"][3] += 0.5
        tensors["conv1.weight"] = tensors["conv1.weight"][:5]
        tensors["new"] = tensors.pop("bn1.bias")

    change_weights(pair[1], change)
    ended = compare(*pair)
    assert ended.code == 1 and ended.out.endswith("\ndifferent\n")
    for text in (
        "fc.bias: 1 of 10 values differ, largest difference 0.5, ",
        "new: missing and (20,) torch.float32",
        "bn1.bias: (20,) torch.float32 and missing",
        "conv1.weight: (20, 1, 5, 5) torch.float32 and (5, 1, 5, 5) torch.float32",
        "records: equal",
    ):
        assert text in ended.out


def test_the_state_of_the_optimizer_alone(tmp_path):
    """With so small a learning rate, weight decay changes its state and not the weights."""
    pack = make_pack(tmp_path / "a.h5", {"train": 16}, (12, 12, 1))
    words = ["--model", "digits", "--lr", "1e-30", "--weight-decay"]
    runs = [train_once(pack, *words, decay, run=f"r{decay}") for decay in ("0", "0.1")]
    ended = compare(*runs)
    assert ended.code == 1
    named = re.findall(r"^(.*): .* values differ", ended.out, re.MULTILINE)
    assert named == ["checkpoint optimizer.momentum_buffer"]


def test_checkpoints_of_other_steps_and_none(pair):
    folder = pair[1] / "checkpoints"
    (newest,) = folder.iterdir()
    newest.unlink()
    ended = compare(*pair)
    assert (ended.code, "of steps 14 and none" in ended.out) == (0, True)
    words = ["--config", pair[1] / "config.toml", "--runs-dir", folder, "--run", "short"]
    assert command(1, "train", *words, "--epochs", "1").code == 0
    for path in (folder / "short/checkpoints").iterdir():
        path.rename(folder / path.name)
    ended = compare(*pair)
    assert ended.code == 1 and "the newest checkpoints are of steps 14 and 7" in ended.out


def set_field(kind, step, **fields):
    """A change of a record: other fields in the records of this kind and step."""

    def change(records):
        for record in records:
            if (record["kind"], record.get("step", 0)) == (kind, step):
                record |= fields
        return records

    return change


def without(kind, *steps):
    """A change of a record: no records of this kind (of these steps)."""
    return lambda records: [r for r in records if r["kind"] != kind or r.get("step") not in steps]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_field("step", 9, seconds={"total": 9}, images_per_second=1), ""),
        (set_field("step", 9, loss=1.5), r"records: differ at step 9, step: loss .* and 1.5"),
        (set_field("step", 9, rows=1), r"differ at step 9, step: rows 16 and 1"),
        (without("step", 12, 13, 14), "differ at step 12, one has step, the other digest"),
        (set_field("digest", 7, digest="ab"), r"differ at step 7, digest: digest \S+ and ab"),
        (without("digest", 7), ""),
        (set_field("evaluation", 14, loss=1.5), r"differ at step 14, evaluation: loss"),
        (set_field("end", 0, digest="ab"), r"differ at step 14, end: digest \S+ and ab"),
        (set_field("end", 0, digest=None), ""),
        (set_field("end", 0, status="preempted", reason="why"), r"plain: preempted \(why\)"),
    ],
)
def test_the_first_step_at_which_records_differ(pair, change, said):
    change_record(pair[1], change)
    ended = compare(*pair)
    assert re.search(said or "records: equal", ended.out)
    assert ended.code == ("differ" in said)


def test_settings_that_differ_are_shown_as_resolved(trained, pair):
    config = pair[1] / "config.toml"
    text = re.sub("^lr = .*|^seed = .*|^keep_checkpoints = .*", "", config.read_text(), flags=re.M)
    config.write_text(text + "keep_checkpoints = 3\n")
    ended = compare(*pair)
    assert ended.code == 0
    assert "settings that differ: keep_checkpoints 2 and 3" in ended.out
    config.write_text(text + "seed = 5\n")
    assert "settings that differ: seed 0 and 5" in compare(*pair).out
    tuned = compare(trained.run("plain"), trained.run("tuned"))
    assert "; learning_rate 0.005 and 0.001\n" in tuned.out
    plan = pair[1] / "plan.json"
    plan.write_text(plan.read_text().replace('"warmup_steps": 0', '"warmup_steps": 1', 1))
    ended = compare(*pair)
    assert ended.code == 0 and f"settings: {plan} is corrupt: " in ended.out


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).reshape(-1, 3)


def test_a_plot_has_bars_where_values_differ(pair, tmp_path):
    def change(tensors):
        tensors["conv1.weight"][0] += 0.5

    bars = []
    for name in ("equal", "apart"):
        output = tmp_path / f"{name}.png"
        ended = compare(*pair, "--plot", output)
        assert "differences of conv1.weight" in ended.out
        bars.append((pixels(output) == (0, 114, 178)).all(1).sum())
        change_weights(pair[1], change)
    assert bars[1] > bars[0] + 20


def test_the_first_convolution_is_that_of_the_model(pair, tmp_path):
    """Its name is the last in the alphabet; the library's order changes with the process."""
    layers = {f"z{n}": torch.nn.Conv2d(3, 3, 3) for n in range(7, 0, -1)}
    model = torch.nn.Sequential(OrderedDict({"norm": torch.nn.BatchNorm2d(3), **layers}))
    for run in (pair[1], pair[1].with_name("tuned")):
        save_model(run / "model.safetensors", model, {"model": "x"})
    ended = compare(pair[1], pair[1].with_name("tuned"), "--plot", tmp_path / "x.svg")
    assert ended.out.splitlines()[0] == f"{tmp_path}/x.svg: differences of z7.weight"


@pytest.mark.ranks(1)
def test_without_matplotlib_nothing_is_compared(comm, trained, monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command_line(["compare", *[str(trained.run("plain"))] * 2, "--plot", "a.png"]) == 2
    printed = capsys.readouterr()
    assert "matplotlib" in printed.err and not printed.out
