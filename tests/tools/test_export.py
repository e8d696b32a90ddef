"""Export: files say what they hold, and none is kept whose answers are not those of torch."""

from __future__ import annotations

import json

import h5py
import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import hpctrain as hp
from tests.support.api import command_line
from tests.support.packs import make_pack
from tests.support.ranks import command
from tests.support.runs import train_once

SUFFIXES = [".onnx", ".pt2"]


def export(run, output, *words):
    return command(1, "export", run, "--output", output, *words)


def run_onnx(path, images):
    return onnxruntime.InferenceSession(path).run(None, {"images": images})[0]


def run_pt2(path, images):
    return torch.export.load(path).module()(torch.from_numpy(images)).numpy()


def test_the_file_says_what_it_is(trained, tmp_path):
    for suffix in SUFFIXES:
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


@pytest.mark.parametrize(("suffix", "run"), [(".onnx", run_onnx), (".pt2", run_pt2)])
def test_a_network_that_restores_images_takes_and_gives_bytes(trained, tmp_path, suffix, run):
    """Those that predict writes, up to a level of rounding."""
    output = tmp_path / f"model{suffix}"
    ended = export(trained.run("restored"), output, "--preprocess")
    assert "-> restored uint8 (N, 28, 28, 1)" in ended.out
    with h5py.File(trained.pack("restored")) as file:
        image = file["test/images"][0]
    Image.fromarray(image[:, :, 0]).save(tmp_path / "a.png")
    words = [trained.run("restored"), tmp_path / "a.png", "--output", tmp_path / "restored"]
    assert command(1, "predict", *words).code == 0
    expected = np.asarray(Image.open(tmp_path / "restored/a.png")).astype(int)
    found = run(output, image[None])
    assert found.dtype == np.uint8 and found.shape == (1, 28, 28, 1)
    assert expected.std() > 1 and np.abs(found[0, :, :, 0] - expected).max() <= 1
    assert (found[0, :, :, 0] == expected).mean() > 0.9, "not cut off instead of rounded"


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


def test_the_file_lies_beside_the_weights_and_needs_no_pack(tmp_path):
    run = train_once(make_pack(tmp_path / "a.h5", {"train": 16}, (12, 12, 1)), "--model", "digits")
    (tmp_path / "a.h5").unlink()
    assert command(1, "export", run, "--batch-size", "3").code == 0
    (taken,) = onnxruntime.InferenceSession(run / "model.onnx").get_inputs()
    assert taken.shape == [3, 1, 12, 12]


@pytest.mark.parametrize(
    ("name", "suffix"), [("exported_with_an_error", ".onnx"), ("exported_as_nan", ".pt2")]
)
def test_a_file_with_other_answers_is_not_kept(tmp_path, name, suffix):
    pack = make_pack(tmp_path / "a.h5", {"train": 16}, (8, 8, 1))
    run = train_once(pack, "--model", f"tests.support.nets:{name}")
    (tmp_path / "new").mkdir()
    ended = export(run, tmp_path / f"new/model{suffix}", "--trust-code")
    assert ended.code == 1 and "differs from the network's by" in ended.err
    assert not [*(tmp_path / "new").iterdir()]


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("DataDependent", ".onnx"), ("Asking", ".pt2")],
)
def test_a_network_that_cannot_be_traced_is_refused_in_one_line(tmp_path, name, suffix):
    pack = make_pack(tmp_path / "a.h5", {"train": 16}, (8, 8, 1))
    run = train_once(pack, "--model", f"tests.support.nets:{name}")
    ended = export(run, tmp_path / f"odd{suffix}", "--trust-code")
    assert ended.code == 1
    assert "this network cannot be exported" in ended.err.splitlines()[-1]  # torch prints others
    assert not [*tmp_path.glob("*odd*")]


def test_a_network_for_pairs_needs_a_fixed_number_of_images(tmp_path):
    pack = make_pack(tmp_path / "a.h5", {"train": 16}, (8, 8, 1))
    run = train_once(pack, "--model", "tests.support.nets:PairsOnly")
    ended = export(run, tmp_path / "pairs.pt2", "--trust-code")
    assert ended.code == 1 and "--batch-size" in ended.err
    assert export(run, tmp_path / "pairs.pt2", "--trust-code", "--batch-size", "2").code == 0


def test_an_existing_file_stays(trained, tmp_path):
    there = tmp_path / "there.onnx"
    there.write_text("mine")
    assert export(trained.run("plain"), there).code == 2
    assert there.read_text() == "mine"


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("package", "code"), [("onnxscript", 2), ("onnxruntime", 0)])
def test_a_package_that_is_missing_is_named(
    comm, trained, tmp_path, monkeypatch, capsys, package, code
):
    """Without onnxruntime the file is written, but not compared."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != package and find(name))
    words = ["export", str(trained.run("plain")), "--output", str(tmp_path / "a.onnx")]
    assert command_line(words) == code
    shown = capsys.readouterr()
    assert package in shown.out + shown.err and "differs" not in shown.out
    assert (tmp_path / "a.onnx").exists() == (code == 0)
