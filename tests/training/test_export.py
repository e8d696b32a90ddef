"""Export: files that other programs run give the answers of `evaluate` and `predict`."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from hpctrain.cli import main as command
from hpctrain.config import Config, EvaluateConfig, ExportConfig, PredictConfig
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference import export, network
from hpctrain.inference.evaluate import main as evaluate_main
from hpctrain.inference.predict import main as predict_main
from hpctrain.models import build, save_model
from hpctrain.plan import Facts, resolve
from hpctrain.training.train import train
from tests.support.packs import make_pack
from tests.training.runs import short_run

ROWS = 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with packs and two short runs: digits, and denoise in bf16."""
    folder = tmp_path_factory.mktemp("export")
    make_pack(folder / "gray.h5", {"train": 40, "test": ROWS})
    make_pack(folder / "colour.h5", {"train": 40, "test": ROWS}, (18, 22, 3))
    given = {"threads": 1, "batch_size": 20}
    train(short_run(folder, "gray.h5", run="digits", normalize="pack", **given))
    train(
        short_run(
            folder,
            "gray.h5",
            run="denoise",
            task="denoise",
            precision="bf16",
            lr=0.01,
            **(given | {"epochs": 10}),
        )
    )
    return folder


def settings(folder, run, **given):
    return ExportConfig(run=str(folder / "runs" / run), **given)


def save_untrained(folder, name, model, pack="colour.h5", **config):
    """A network as a run would save it: the path of its file."""
    pack = read_pack(folder / pack)
    config = Config(model=model, **config)
    torch.manual_seed(3)
    made = build(model, pack.image_shape, 10).eval()
    facts = Facts(1, "cpu", 1, 29, pack.image_shape, 1, 10, pack.uuid, 1)
    path = folder / f"{name}.safetensors"
    save_model(path, made, network.describe(config, resolve(config, facts), pack, {"step": 1}))
    return path


def run_onnx(path, images):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"images": images})[0]


def run_pt2(path, images):
    return torch.export.load(path).module()(torch.from_numpy(images)).numpy()


@pytest.mark.parametrize("preprocess", [False, True])
@pytest.mark.parametrize(("suffix", "run"), [(".onnx", run_onnx), (".pt2", run_pt2)])
def test_answers_are_those_of_evaluate_and_predict_on_the_whole_split(
    folder, tmp_path, capsys, suffix, run, preprocess
):
    output = tmp_path / f"model{suffix}"
    asked = settings(folder, "digits", preprocess=preprocess, output=str(output))
    assert export.main(asked) == 0
    shown = capsys.readouterr().out
    assert "-> scores (N, 10)" in shown and "16 images of random bytes" in shown
    assert ("uint8 (N, 28, 28, 1)" if preprocess else "float32 (N, 1, 28, 28)") in shown

    pack = read_pack(folder / "gray.h5")
    with Split(pack, "test") as split:
        images, labels = (
            split.gather(np.arange(ROWS), np.empty((ROWS, 28, 28, 1), np.uint8)),
            split.labels,
        )
    if not preprocess:
        images = (images.transpose(0, 3, 1, 2) / 255 - pack.mean[0]) / pack.std[0]
        images = images.astype(np.float32)
    scores = torch.from_numpy(run(str(output), images).copy())
    assert scores.shape == (ROWS, 10)
    assert torch.equal(
        scores[:1].argmax(1), torch.from_numpy(run(str(output), images[:1])).argmax(1)
    )

    run_folder = str(folder / "runs" / "digits")
    evaluate_main(EvaluateConfig(run=run_folder, output=str(tmp_path / "e.json"), threads=1))
    figures = json.loads((tmp_path / "e.json").read_text())
    loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels)).item()
    assert loss == pytest.approx(figures["loss"], rel=1e-5)
    confusion = np.zeros((10, 10), int)
    np.add.at(confusion, (labels, scores.argmax(1).numpy()), 1)
    assert confusion.tolist() == figures["confusion"]

    predict_main(PredictConfig(run=run_folder, output=str(tmp_path / "p.csv"), threads=1))
    with open(tmp_path / "p.csv", newline="") as file:
        table = list(csv.DictReader(file))
    expected = [[float(row[name]) for name in pack.classes] for row in table]
    assert np.allclose(scores.softmax(1), expected, atol=1e-5)


def test_the_file_says_what_it_is(folder, tmp_path):
    for suffix in export.SUFFIXES:
        output = str(tmp_path / f"m{suffix}")
        export.main(settings(folder, "digits", preprocess=True, output=output))
    found = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    props = found.get_modelmeta().custom_metadata_map
    extra = {"hpctrain.json": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    pack = read_pack(folder / "gray.h5")
    for told in (
        {k: json.loads(props[k]) for k in ("classes", "image_shape", "mean", "std")},
        json.loads(extra["hpctrain.json"]),
    ):
        assert told["classes"] == list(pack.classes)
        assert told["image_shape"] == [28, 28, 1]
        assert told["mean"] == pytest.approx(pack.mean) and told["std"] == pytest.approx(pack.std)
    assert (props["model"], props["run"], props["preprocess"]) == ("digits", "digits", "true")
    (taken,), (given,) = found.get_inputs(), found.get_outputs()
    assert (taken.name, taken.shape[1:], taken.type) == ("images", [28, 28, 1], "tensor(uint8)")
    assert (given.name, given.shape[1:]) == ("scores", [10])


@pytest.mark.parametrize(("suffix", "run"), [(".onnx", run_onnx), (".pt2", run_pt2)])
def test_a_network_that_restores_images_takes_and_gives_bytes(
    folder, tmp_path, capsys, suffix, run
):
    """Those that predict writes, up to a level of rounding."""
    output = tmp_path / f"model{suffix}"
    export.main(settings(folder, "denoise", preprocess=True, output=str(output)))
    shown = capsys.readouterr().out
    assert "-> restored (N, 28, 28, 1)" in shown
    assert "computes in float32: compare it with evaluate --precision fp32" in shown
    image = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "a.png")
    predict_main(
        PredictConfig(
            run=str(folder / "runs" / "denoise"),
            images=(str(tmp_path / "a.png"),),
            output=str(tmp_path / "restored"),
            precision="fp32",
            threads=1,
        )
    )
    expected = np.asarray(Image.open(tmp_path / "restored" / "a.png")).astype(int)
    found = run(str(output), image[None, :, :, None])
    assert found.dtype == np.uint8 and found.shape == (1, 28, 28, 1)
    assert expected.std() > 1 and np.abs(found[0, :, :, 0] - expected).max() <= 1
    assert (found[0, :, :, 0] == expected).mean() > 0.9  # not cut off instead of rounded


@pytest.mark.parametrize("model", ["resnet18", "tests.support.nets:with_dropout", "autoencoder"])
def test_other_networks(folder, tmp_path, model):
    task = "denoise" if model == "autoencoder" else "classify"
    path = save_untrained(
        folder, "other", model, task=task, normalize="unit" if task == "denoise" else "imagenet"
    )
    for suffix, preprocess in ((".onnx", True), (".pt2", False)):
        output = str(tmp_path / f"model{suffix}")
        asked = ExportConfig(str(path), trust_code=":" in model, output=output)
        asked = dataclasses.replace(asked, preprocess=preprocess)
        assert export.main(asked) == 0


def test_a_fixed_number_of_images(folder, tmp_path):
    output = tmp_path / "three.onnx"
    export.main(settings(folder, "digits", batch_size=3, output=str(output)))
    assert onnxruntime.InferenceSession(str(output)).get_inputs()[0].shape == [3, 1, 28, 28]


def test_the_file_lies_beside_the_weights_and_needs_no_pack(folder, tmp_path):
    path = save_untrained(folder, "lonely", "digits", "gray.h5").rename(
        tmp_path / "model.safetensors"
    )
    (folder / "gray.h5").rename(folder / "away.h5")
    try:
        assert export.main(ExportConfig(str(path))) == 0
    finally:
        (folder / "away.h5").rename(folder / "gray.h5")
    assert (tmp_path / "model.onnx").is_file()


@pytest.mark.parametrize("suffix", export.SUFFIXES)
def test_a_file_with_other_answers_is_not_kept(folder, tmp_path, monkeypatch, suffix):
    output = tmp_path / f"model{suffix}"
    monkeypatch.setattr(export, "network_output", lambda model, x, how: model(x) + 0.01)
    asked = settings(folder, "digits", output=str(output))
    with pytest.raises(RunError, match="differs from the network's by 0.01, more than 0.0"):
        export.main(asked)
    monkeypatch.setattr(export, "network_output", lambda model, x, how: model(x) * np.nan)
    with pytest.raises(RunError, match="differs from the network's by nan"):
        export.main(asked)
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_cannot_be_traced_is_refused_in_one_line(folder, tmp_path):
    for model in ("tests.support.nets:data_dependent", "tests.support.nets:asking"):
        path = save_untrained(folder, "odd", model)
        for suffix in export.SUFFIXES:
            output = str(tmp_path / f"odd{suffix}")
            with pytest.raises(RunError, match="torch cannot export this network") as caught:
                export.main(ExportConfig(str(path), True, output=output))
            assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    model = "tests.support.nets:pairs_only"
    path, output = save_untrained(folder, "pairs", model), str(tmp_path / "pairs.pt2")
    asked = ExportConfig(str(path), True, output=output)
    with pytest.raises(RunError, match="try --batch-size N, a fixed number"):
        export.main(asked)
    assert export.main(dataclasses.replace(asked, batch_size=2)) == 0


def test_refusals(folder, tmp_path, monkeypatch):
    existing = tmp_path / "there.onnx"
    existing.write_text("mine")
    with pytest.raises(UsageError, match="there.onnx exists: remove it, or name another"):
        export.main(settings(folder, "digits", output=str(existing)))
    assert existing.read_text() == "mine"
    with pytest.raises(UsageError, match="model.pt: export writes .onnx and .pt2 files"):
        export.main(settings(folder, "digits", output="model.pt"))

    find, absent = importlib.util.find_spec, {"onnxscript"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    with pytest.raises(UsageError, match=r"needs onnxscript: pip install 'hpctrain\[export\]'"):
        export.main(settings(folder, "digits", output=str(tmp_path / "new.onnx")))


def test_without_onnxruntime_it_says_that_nothing_was_compared(
    folder, tmp_path, monkeypatch, capsys
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name)
    )
    words = ["export", str(folder / "runs" / "digits"), "--output", str(tmp_path / "a.onnx")]
    assert command(words) == 0
    shown = capsys.readouterr().out
    assert "not compared with torch: pip install onnxruntime" in shown and "differs" not in shown
