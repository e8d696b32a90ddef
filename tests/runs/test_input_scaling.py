"""--normalize: how images are scaled, as the first weights expect it; networks of timm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.api import command_line
from tests.support.external import pixels, write
from tests.support.packs import make_pack

pytestmark = pytest.mark.ranks(1)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # of timm:test_resnet


@pytest.fixture
def given(tmp_path):
    """Settings of a run over images of 16x16x3; gray.h5 and foreign.pth are beside its pack."""
    for name, channels in (("colour", 3), ("gray", 1)):
        make_pack(tmp_path / f"{name}.h5", {"train": 29, "test": 7}, (16, 16, channels), 5)
    torch.save(hp.build("digits", (16, 16, 3), 5).state_dict(), tmp_path / "foreign.pth")
    data = {"data": str(tmp_path / "colour.h5"), "runs_dir": str(tmp_path / "runs")}
    return data | dict(model="digits", epochs=1, threads=1, progress="none", batch_size=10, run="a")


def scaling_of(folder):
    """Mean and std that the network of a run knows, and what it makes of black images."""
    network = hp.load(folder)
    known = (network.metadata["mean"], network.metadata["std"])
    height, width, channels = network.image_shape
    black = network.preprocess(np.zeros((1, height, width, channels), np.uint8))[0, :, 0, 0]
    expected = [-m / s for m, s in zip(*known, strict=True)] if known[0] else [0.0] * channels
    assert black.tolist() == pytest.approx(expected, rel=1e-6)
    return known


def notes(folder):
    text = (Path(folder) / "progress.jsonl").read_text()
    return [line for line in text.splitlines() if "--normalize auto" in line and '"note"' in line]


@pytest.mark.parametrize(
    ("settings", "scaling", "said"),
    [
        ({}, None, ""),
        ({"normalize": "imagenet"}, IMAGENET, ""),
        (
            {"normalize": "imagenet", "images": "train/images", "labels": "train/targets"},
            IMAGENET,
            "",
        ),
        ({"init": "foreign.pth"}, IMAGENET, "ImageNet"),
        ({"init": "foreign.pth", "normalize": "unit"}, None, ""),
        ({"init": "foreign.pth", "data": "gray.h5"}, ((0.449,), (0.226,)), "ImageNet"),
        ({"model": "timm:test_resnet"}, HALF, "timm:test_resnet"),
        ({"model": "timm:test_resnet", "normalize": "unit"}, None, ""),
        ({"model": "timm:test_byobnet", "data": "gray.h5"}, ((0.449,), (0.226,)), "mean 0.449"),
    ],
)
def test_auto_scales_as_the_first_weights_expect(comm, given, tmp_path, settings, scaling, said):
    files = {n: str(tmp_path / v) if n in ("init", "data") else v for n, v in settings.items()}
    folder = hp.train(**{**given, **files}).folder
    found = scaling_of(folder)
    for values, expected in zip(found, scaling or (None, None), strict=True):
        assert values == (expected and pytest.approx(list(expected), rel=1e-3))
    assert len(notes(folder)) == bool(said) and all(said in note for note in notes(folder))


def test_a_run_gives_its_scaling_to_the_next(comm, given):
    """Also through a file of hpctrain that says [0, 1], and not to one that says otherwise."""
    for normalize in ("pack", "unit"):
        folder = hp.train(**{**given, "run": normalize}, normalize=normalize).folder
        known = scaling_of(folder)
        assert bool(known[0]) == (normalize == "pack")
        after = hp.train(**{**given, "run": f"{normalize}-2"}, init=str(folder))
        assert scaling_of(after.folder) == known
        more = {"init": str(folder), "normalize": "imagenet"}
        after = hp.train(**{**given, "run": f"{normalize}-3"}, **more)
        assert scaling_of(after.folder)[0] == list(IMAGENET[0])


def test_first_weights_of_another_scale_are_said(comm, given, tmp_path):
    """Bytes and 16 bits are of one scale, in [0, 1]; divided by something else, they are not."""
    images, labels = pixels(40, (16, 16, 3), 5)
    files = {"images": "x", "labels": "y", "data": str(tmp_path / "a.h5")}
    write(tmp_path / "a.h5", images.astype("u2") * 257, labels)
    first = hp.train(**given).folder
    noted = {}
    for run, more in {"wide": {}, "other": {"max_value": 4095.0}}.items():
        folder = hp.train(**{**given, **files, **more, "run": run, "init": str(first)}).folder
        noted[run] = "; this one is on uint16" in (Path(folder) / "progress.jsonl").read_text()
    assert noted == {"wide": False, "other": True}


def test_mean_and_std_of_images_in_0_to_1_are_not_applied_to_others(comm, given, tmp_path):
    images, labels = pixels(40, (16, 16, 3), 5)
    files = {"images": "x", "labels": "y", "data": str(tmp_path / "a.h5")}
    write(tmp_path / "a.h5", images.astype("f4"), labels)
    for more in ({"normalize": "imagenet"}, {"init": str(tmp_path / "foreign.pth")}):
        with pytest.raises(hp.UsageError, match="float32 values from 0 to .* --normalize unit"):
            hp.train(**{**given, **files, **more, "max_value": 1.0})
        hp.train(**{**given, **files, **more, "max_value": 255.0, "run": next(iter(more))})


def test_a_resumed_run_keeps_its_scaling(comm, given, tmp_path):
    first = {**given, "init": str(tmp_path / "foreign.pth")}
    hp.train(**first)
    (tmp_path / "foreign.pth").unlink()
    folder = hp.train(**{**first, "epochs": 2}).folder
    assert scaling_of(folder)[0] == list(IMAGENET[0])
    assert len(notes(folder)) == 1, "of the first launch"
    with pytest.raises(hp.UsageError, match="--normalize"):
        hp.train(**{**first, "epochs": 3, "normalize": "unit"})


def test_a_network_of_timm_from_first_step_to_answer(comm, given, tmp_path):
    name = "timm:test_vit.r160_in1k(num_heads=4, pos_drop_rate=0.1)"
    hp.train(**{**given, "model": name})
    folder = hp.train(**{**given, "model": name, "epochs": 2}).folder
    network = hp.load(folder)  # names no --model
    assert network.metadata["model"] == name and network.metadata["epoch"] == 2
    assert scaling_of(folder)[0]
    assert hp.evaluate(folder, threads=1).rows == 7
    words = [str(folder), "--threads=1", f"--output={tmp_path}/p.csv"]
    assert command_line(["predict", *words]) == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 8


def test_a_network_of_smp_restores_images(comm, given, tmp_path):
    name = "smp:Unet(encoder_name='tu-test_resnet', encoder_depth=3, decoder_channels=(16, 8, 4))"
    denoise = {"model": name, "task": "denoise", "data": str(tmp_path / "gray.h5")}
    folder = hp.train(**{**given, **denoise}).folder
    network = hp.load(folder)
    with torch.no_grad():
        assert network.model(torch.zeros(2, 1, 16, 16)).shape == (2, 1, 16, 16)
    with pytest.raises(hp.UsageError, match="networks that return images are for --task denoise"):
        hp.train(**{**given, "model": name, "run": "b"})
