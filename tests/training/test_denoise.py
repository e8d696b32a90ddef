"""The denoising task: noise belongs to the shard, the network learns to remove it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.config import EvaluateConfig, PredictConfig
from hpctrain.data.augment import add_noise
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.evaluate import main as evaluate_main
from hpctrain.inference.predict import main as predict_main
from hpctrain.inference.predict import own_names
from hpctrain.models import build
from hpctrain.report.record import read_records
from hpctrain.report.tables import psnr
from hpctrain.training import train as loop


def load(path):
    with Image.open(path) as image:
        return image.convert("L")


def test_salt_and_pepper_replaces_a_share_of_the_values():
    images = torch.full((50, 1, 28, 28), 0.5)
    noisy = add_noise(images, "salt-pepper", 0.2, 7)
    assert set(noisy.unique().tolist()) == {0.0, 0.5, 1.0}
    for value in (0.0, 1.0):
        assert (noisy == value).double().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(images, torch.full((50, 1, 28, 28), 0.5))


def test_gaussian_noise_has_its_standard_deviation_and_stays_in_range():
    images = torch.full((50, 1, 28, 28), 0.5)
    noisy = add_noise(images, "gaussian", 0.1, 7)
    assert (noisy - images).std().item() == pytest.approx(0.1, rel=0.02)
    strong = add_noise(images, "gaussian", 1.0, 7)
    assert (strong.min(), strong.max()) == (0, 1)


@pytest.mark.parametrize("kind", ["salt-pepper", "gaussian"])
def test_noise_depends_on_its_key_and_not_on_memory_format(kind):
    images = torch.rand(5, 3, 9, 7)
    last = images.contiguous(memory_format=torch.channels_last)
    noisy = add_noise(images, kind, 0.3, 7)
    assert torch.equal(add_noise(last, kind, 0.3, 7), noisy)
    assert add_noise(last, kind, 0.3, 7).stride() == last.stride()
    assert not torch.equal(add_noise(images, kind, 0.3, 8), noisy)


@pytest.mark.parametrize("shape", [(28, 28, 1), (13, 11, 3), (1, 1, 1)])
def test_the_autoencoder_keeps_the_shape(shape):
    height, width, channels = shape
    images = torch.rand(2, channels, height, width)
    assert build("autoencoder", shape, 7).eval()(images).shape == images.shape


def test_psnr_is_in_decibels():
    assert psnr(0.01) == pytest.approx(20)
    assert psnr(0.0) == math.inf


@pytest.fixture
def settings(settings):
    return dataclasses.replace(settings, task="denoise", lr=0.01, epochs=20, shards=4)


@pytest.mark.mpi
def test_a_denoising_run_from_training_to_a_picture(comm, settings, monkeypatch):
    loop.train(settings, comm)
    folder = Path(settings.runs_dir) / "a"
    comm.Barrier()
    for module in ("evaluate", "predict"):
        monkeypatch.setattr(f"hpctrain.inference.{module}.start_mpi", lambda: comm)
    again = EvaluateConfig(run=str(folder), output=str(folder / "e.json"), batch_size=64, threads=1)
    assert evaluate_main(again) == 0
    if comm.rank > 0:
        return
    records = list(read_records(folder))
    steps = [r for r in records if r["kind"] == "step"]
    assert {r["accuracy"] for r in steps} == {None}
    test = next(r for r in records if r.get("split") == "test")
    assert test["loss"] < 0.5 * test["noisy"], "the network does not remove noise"
    assert records[-1]["test_loss"] == test["loss"]
    figures = json.loads((folder / "e.json").read_text())
    assert (figures["loss"], figures["noisy"]) == (test["loss"], test["noisy"])
    assert figures["accuracy"] is figures["confusion"] is None
    picture = np.asarray(load(folder / "denoised.png"))
    assert picture.shape[0] > 3 * 28
    assert picture.shape[1] > 10 * 28
    assert len(np.unique(picture)) > 20


@pytest.mark.mpi
def test_images_are_restored_into_a_folder(comm, settings, shared_tmp, monkeypatch):
    loop.train(dataclasses.replace(settings, epochs=1), comm)
    noisy = shared_tmp / "noisy"
    if comm.rank == 0:
        noisy.mkdir()
        for number in range(3):
            Image.new("L", (40, 28), number * 100).save(noisy / f"{number}.png")
    comm.Barrier()
    monkeypatch.setattr("hpctrain.inference.predict.start_mpi", lambda: comm)
    run = str(Path(settings.runs_dir) / "a")
    output = str(shared_tmp / "clean")
    predict = PredictConfig(run=run, images=(str(noisy),), output=output, threads=1)
    assert predict_main(predict) == 0
    comm.Barrier()
    names = sorted(p.name for p in Path(output).iterdir())
    assert names == ["0.png", "1.png", "2.png"]
    assert {np.asarray(load(p)).shape for p in Path(output).iterdir()} == {(28, 28)}
    comm.Barrier()
    if comm.rank == 0:
        (noisy / "1.png").write_bytes(b"no image")
        (Path(output) / "1.png").unlink()
    comm.Barrier()
    with pytest.raises(RunError, match=r"^1 of 3 images cannot be used.*\n  .*1\.png cannot be"):
        predict_main(predict)
    comm.Barrier()
    assert sorted(p.name for p in Path(output).iterdir()) == ["0.png", "2.png"]
    with pytest.raises(UsageError, match="name image files"):
        predict_main(dataclasses.replace(predict, images=()))


def test_restored_images_never_share_a_name(tmp_path):
    files = [Path(name) for name in ("a/x.png", "b/x.png", "c/x-2.png", "d/x.png", "e/y.jpg")]
    names = own_names(tmp_path / "out", files)
    assert names == ["x.png", "x-2.png", "x-2-2.png", "x-3.png", "y.png"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "digits"}, r"so it must give \(2, 1, 28, 28\)"),
        ({"noise_level": 0.0}, r"--noise-level 0.0: give a number in \(0, 1\]"),
        ({"normalize": "pack"}, "--normalize has no meaning for --task denoise"),
        ({"label_smoothing": 0.1}, "--label-smoothing has no meaning for --task denoise"),
        ({"task": "classify", "model": "autoencoder"}, "the data has 10 classes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit_are_refused(comm, settings, flags, message):
    with pytest.raises(UsageError, match=message):
        loop.train(dataclasses.replace(settings, **flags), comm)
