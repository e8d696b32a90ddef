"""Export: files say what they hold, and none is kept whose answers are not those of torch."""

from __future__ import annotations

import csv
import json

import numpy as np
import onnxruntime
import pytest
import torch

import hpctrain as hp
from tests.support.api import command_line
from tests.support.external import pixels, write
from tests.support.packs import draw_entries, make_pack
from tests.support.ranks import command
from tests.support.runs import train_once


def export(run, output, *words):
    return command(1, "export", run, "--output", output, *words)


def test_the_file_says_what_it_is(trained, tmp_path):
    for suffix in (".onnx", ".pt2"):
        assert export(trained.run("plain"), tmp_path / f"m{suffix}", "--preprocess").code == 0
    found = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    props = found.get_modelmeta().custom_metadata_map
    extra = {"hpctrain.json": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    known = hp.load(trained.run("plain")).metadata
    names = ("classes", "image_shape", "mean", "std")
    for facts in ({k: json.loads(props[k]) for k in names}, json.loads(extra["hpctrain.json"])):
        assert {name: facts[name] for name in names} == {name: known[name] for name in names}
    assert (props["model"], props["run"], props["preprocess"]) == ("digits", "plain", "true")
    (taken,), (given,) = found.get_inputs(), found.get_outputs()
    assert (taken.name, taken.shape[1:], taken.type) == ("images", [28, 28, 1], "tensor(uint8)")
    assert (given.name, given.shape[1:]) == ("scores", [10])
    ended = export(trained.run("restored"), tmp_path / "r.pt2", "--preprocess")
    assert "images uint8 (N, 28, 28, 1) -> restored float32 (N, 1, 28, 28)" in ended.out


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param("resnet18", ["--normalize", "imagenet"], marks=pytest.mark.slow),
        ("tests.support.nets:with_dropout", []),
    ],
)
def test_other_networks_of_colour_images(tmp_path, model, words):
    pack = make_pack(tmp_path / "colour.h5", {"train": 16}, (18, 22, 3))
    run = train_once(pack, "--model", model, *words)
    for suffix, more in ((".onnx", ["--preprocess"]), (".pt2", [])):
        ended = export(run, tmp_path / f"model{suffix}", *more, *["--trust-code"] * (":" in model))
        assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("stored", "words", "type_name"),
    [
        ("u2", ["--max-value", "4095"], "tensor(uint16)"),
        ("f2", ["--max-value", "255"], "tensor(float)"),
        ("i2", ["--normalize", "image", "--nodata=-7"], "tensor(int16)"),
    ],
)
def test_networks_of_hdf5_files_take_what_these_hold(tmp_path, stored, words, type_name):
    images, labels = pixels(64, (12, 12, 1), 3)
    images = images.astype(stored)
    if stored == "i2":
        images[:, 3:5, 7:] = -7
    path = write(tmp_path / "a.h5", images, labels)
    run = train_once(path, "--images", "x", "--labels", "y", *words, "--model", "digits")
    assert export(run, tmp_path / "a.onnx", "--preprocess").code == 0
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    (taken,) = session.get_inputs()
    assert (taken.shape[1:], taken.type) == ([12, 12, 1], type_name)
    given = images.astype("f4" if stored == "f2" else stored)
    (scores,) = session.run(None, {"images": given})
    network = hp.load(run)
    expected = network.predict(images).probabilities
    assert np.allclose(torch.from_numpy(scores).softmax(1), expected, atol=1e-5)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["scale"]) == network.metadata["scale"]
    assert facts["normalization"] == network.metadata.get("normalization", "null")


@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_values_are_in_the_units_of_the_data_and_several_classes_are_logits(tmp_path, task):
    """In the file as by hp.load, and in the table of predict with the targets of the pack."""
    images, present, values = draw_entries(np.random.default_rng(0), 65, (12, 12, 1))
    names = {"classes": ["a", "b", "c"]}
    if task == "regress":
        names = {"columns": ["sum", "row"]}
    targets = present if task == "multilabel" else values
    hp.write_pack(tmp_path / "a.h5", dict.fromkeys(["train", "test"], (images, targets)), **names)
    run = train_once(tmp_path / "a.h5", "--model", "digits", "--task", task, "--epochs", "3")
    found = hp.load(run).predict(images)
    answered = ["a", "b", "c"] if task == "multilabel" else ["sum", "row (1)"]
    answers = np.stack([found[name] for name in answered], 1)
    assert np.array_equal(answers, found.probabilities)
    for suffix in (".onnx", ".pt2"):
        assert export(run, tmp_path / f"a{suffix}", "--preprocess").code == 0
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    (output,) = session.run(None, {"images": images})
    (given,) = session.get_outputs()
    assert given.name == ("scores" if task == "multilabel" else "values")
    facts = session.get_modelmeta().custom_metadata_map
    if task == "multilabel":
        assert json.loads(facts["thresholds"]) == [0.5, 0.5, 0.5]
        output = torch.from_numpy(output).sigmoid().numpy()
    np.testing.assert_allclose(output, answers, rtol=1e-4, atol=1e-4)
    if task == "regress":
        assert (abs(answers.mean(0) - np.nanmean(values, 0)) < 2 * np.nanstd(values, 0)).all()
    assert command(2, "predict", run, "--output", tmp_path / "a.csv").code == 0
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, target, answer in zip(rows, targets, answers, strict=True):
        if task == "multilabel":
            marks = zip("abc", target.tolist(), answer.tolist(), strict=True)
            labels = [f"{'?' * (value == 255)}{name}" for name, value, _ in marks if value]
            assert row["labels"] == ";".join(labels)
            assert row["prediction"] == ";".join(np.array([*"abc"])[answer >= 0.5])
            continue
        true = [float(row[f"true {name}"] or "nan") for name in names["columns"]]
        assert np.array_equal(np.float32(true), target, equal_nan=True)
        texts = [row[name] for name in answered]
        np.testing.assert_allclose(np.float32(texts), answer, rtol=1e-6)


def test_the_file_lies_beside_the_weights_and_needs_no_pack(tmp_path):
    run = train_once(make_pack(tmp_path / "a.h5", {"train": 16}, (12, 12, 1)), "--model", "digits")
    (tmp_path / "a.h5").unlink()
    assert command(1, "export", run, "--batch-size", "3").code == 0
    (taken,) = onnxruntime.InferenceSession(run / "model.onnx").get_inputs()
    assert taken.shape == [3, 1, 12, 12]


@pytest.mark.parametrize(
    ("name", "suffix", "text"),
    [
        ("exported_with_an_error", ".onnx", "differs from the network's by"),
        ("exported_as_nan", ".pt2", "differs from the network's by"),
        ("DataDependent", ".onnx", "this network cannot be exported"),
        ("Asking", ".pt2", "this network cannot be exported"),
        ("PairsOnly", ".pt2", "--batch-size"),
    ],
)
def test_a_file_that_is_not_the_network_is_not_kept(tmp_path, name, suffix, text):
    pack = make_pack(tmp_path / "a.h5", {"train": 16}, (8, 8, 1))
    run = train_once(pack, "--model", f"tests.support.nets:{name}")
    (tmp_path / "new").mkdir()
    words = [run, tmp_path / f"new/model{suffix}", "--trust-code"]
    ended = export(*words)
    assert ended.code == 1 and text in ended.err.splitlines()[-1]  # torch prints others
    assert not [*(tmp_path / "new").iterdir()]
    if name == "PairsOnly":
        assert export(*words, "--batch-size", "2").code == 0


def test_values_of_small_units_are_compared_in_deviations_of_their_columns(tmp_path):
    """Of 0.01 deviations a file differs; in the units of the data that is 1e-6."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, 8, 8, 1), np.uint8)
    values = rng.normal(size=(16, 2)) * 1e-4 + [1000, 0]
    hp.write_pack(tmp_path / "a.h5", {"train": (images, values)}, columns=["large", "small"])
    words = ["--task", "regress", "--model"]
    for name, text in (
        ("exported_with_an_error", "by 0.01 standard deviations, more than 0.0"),
        ("OneLayer", "differs from torch by at most "),
    ):
        run = train_once(tmp_path / "a.h5", *words, f"tests.support.nets:{name}", run=name)
        ended = export(run, tmp_path / f"{name}.onnx", "--trust-code")
        assert text in (ended.err if ended.code else ended.out)


def test_an_existing_file_stays(trained, tmp_path):
    there = tmp_path / "there.onnx"
    there.write_text("mine")
    assert export(trained.run("plain"), there).code == 2
    assert there.read_text() == "mine"


@pytest.mark.ranks(1)
def test_packages_that_are_missing_are_named(comm, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["export", str(trained.run("plain")), "--output", str(tmp_path / "a.onnx")]
    assert command_line(words) == 2
    assert "pip install onnx onnxscript onnxruntime" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
