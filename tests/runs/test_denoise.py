"""The denoising task: noise belongs to its key, the network removes it, files are restored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain as hp
from tests.support.api import add_noise
from tests.support.external import pixels, write
from tests.support.packs import make_pack
from tests.support.ranks import command
from tests.support.records import read_strictly
from tests.support.runs import train_once


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
    assert hp.build("autoencoder", shape, 7).eval()(images).shape == images.shape


def test_a_run_removes_noise(tmp_path):
    pack = make_pack(tmp_path / "a.h5", {"train": 101, "validation": 13, "test": 23})
    run = train_once(pack, "--task", "denoise", "--lr", "0.01", "--epochs", "20", ranks=2)
    records = read_strictly(run)
    (test,) = [record for record in records if record.get("split") == "test"]
    assert test["loss"] < 0.5 * test["noisy"], "the network does not remove noise"
    assert records[-1]["test_loss"] == test["loss"]


def test_images_are_restored_with_the_values_of_the_training(tmp_path):
    """12 bits in 16; where they are not in [0, 1], noise and its removal have no meaning."""
    images, labels = pixels(64, (28, 28, 1), 3)
    path = write(tmp_path / "a.h5", images.astype("u2") * 16, labels)
    given = ["--images", "x", "--labels", "y", "--task", "denoise", "--epochs", "20"]
    given += ["--lr", "0.01"]
    run = train_once(path, *given, "--max-value", "4095")
    Image.fromarray(images[5, ..., 0].astype("u2") * 16).save(tmp_path / "5.png")
    ended = command(1, "predict", run, tmp_path / "5.png", "--output", tmp_path / "clean")
    assert ended.code == 0, ended.err
    assert "1 images restored as .png files of uint16, values as in the training" in ended.out
    network = hp.load(run)
    with torch.no_grad():
        output = network.model(network.preprocess(tmp_path / "5.png"))[0, 0].numpy()
    words = ["predict", run, tmp_path / "5.png", "--output"]
    ended = command(2, *words, tmp_path / "clean")
    assert ended.code == 0 and "as in the training, in place of 1 earlier file\n" in ended.out
    before = (tmp_path / "5.png").read_bytes()
    ended = command(2, *words, tmp_path)
    assert ended.code == 2 and "5.png is read, and would be replaced" in ended.err
    assert (tmp_path / "5.png").read_bytes() == before
    restored = np.asarray(Image.open(tmp_path / "clean/5.png"))
    assert np.abs(output.clip(0) * 4095 - restored).max() < 0.6 and restored.max() > 255
    with pytest.raises(
        AssertionError, match="uint16 values from 0 to .*: give another --max-value"
    ):
        train_once(path, *given, "--max-value", "255", run="b")


def test_values_that_png_cannot_hold_are_restored_as_arrays(tmp_path):
    images, labels = pixels(64, (8, 8, 3), 3)
    path = write(tmp_path / "a.h5", (images / 255).astype("f4"), labels)
    words = ["--images", "x", "--labels", "y", "--task", "denoise", "--epochs", "1"]
    run = train_once(path, *words)
    Image.fromarray(images[5]).save(tmp_path / "5.png")
    ended = command(1, "predict", run, tmp_path / "5.png", "--output", tmp_path / "clean")
    assert "1 images restored as .npy files of float32, values as in the training" in ended.out
    network = hp.load(run)
    with torch.no_grad():
        output = network.model(network.preprocess(images[5]))[0].permute(1, 2, 0).numpy()
    restored = np.load(tmp_path / "clean/5.npy")
    assert restored.dtype == np.float32 and restored.shape == (8, 8, 3)
    assert np.allclose(restored, output, atol=1e-6)


@pytest.mark.parametrize("nodata", [-9.0, float("nan")])
def test_restored_images_have_no_data_where_the_given_ones_have_none(tmp_path, nodata):
    images, labels = pixels(64, (8, 8, 3), 3)
    images = (images / 255).astype("f4")
    images[:, 2, 3:5, 1] = nodata
    path = write(tmp_path / "a.h5", images, labels)
    words = ["--images", "x", "--labels", "y", "--task", "denoise", "--epochs", "1"]
    run = train_once(path, *words, f"--nodata={nodata}")
    np.save(tmp_path / "5.npy", images[5])
    ended = command(1, "predict", run, tmp_path / "5.npy", "--output", tmp_path / "clean")
    assert ended.code == 0, ended.err
    restored = np.load(tmp_path / "clean/5.npy")
    is_missing = np.isnan(restored) if np.isnan(nodata) else restored == nodata
    assert np.argwhere(is_missing).tolist() == [[2, 3, 1], [2, 4, 1]]
    ended = command(1, "predict", run, path, "--output", tmp_path / "rows")
    assert ended.code == 0, ended.err
    assert len([*(tmp_path / "rows").iterdir()]) == 64
    of_row = np.load(tmp_path / "rows/a-5.npy")
    assert np.allclose(of_row, restored, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_images_are_restored_into_a_folder(trained, tmp_path, ranks):
    """One that cannot be read leaves no file; all are numbered if two have the same name."""
    (tmp_path / "noisy/more").mkdir(parents=True)
    for number in range(3):
        for folder in ("noisy", "noisy/more"):
            Image.new("L", (40, 28), number * 100).save(tmp_path / f"{folder}/{number}.png")
    (tmp_path / "noisy/1.png").write_bytes(b"no image")
    output = tmp_path / "clean"
    words = [trained.run("restored"), tmp_path / "noisy", "--output", output, "--threads", "1"]
    ended = command(ranks, "predict", *words)
    assert ended.code == 1 and "1 of 6 images cannot be used" in ended.err
    named = [Path(line.split()[0]) for line in ended.err.splitlines() if line.startswith("  ")]
    assert named == [tmp_path / "noisy/1.png"]
    restored = {path.name: np.asarray(Image.open(path)).shape for path in output.iterdir()}
    assert len(restored) == 5 and set(restored.values()) == {(28, 28)}
    assert {"000000-0.png", "000003-0.png", "000002-2.png", "000005-2.png"} < set(restored)
    ended = command(ranks, "evaluate", *words[:1], "--plot", tmp_path / "none.png")
    assert ended.code == 2 and "--plot shows classes or values, and this network" in ended.err
    ended = command(ranks, "predict", *words, "--output", tmp_path / "none.h5")
    assert ended.code == 2 and "none.h5: this network restores images: give a folder" in ended.err
    ended = command(ranks, "predict", *words[:1], "--output", tmp_path / "none")
    assert ended.code == 2 and not (tmp_path / "none").exists()
