"""--normalize auto; networks of timm, from the first step to the answer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from hpctrain.config import Config, EvaluateConfig, PredictConfig
from hpctrain.data.augment import IMAGENET_MEAN, IMAGENET_STD
from hpctrain.errors import UsageError
from hpctrain.inference import evaluate, predict
from hpctrain.inference.opening import open_network
from hpctrain.models import build, read_model
from hpctrain.plan_check import read_plan
from hpctrain.plan_text import describe_plan
from hpctrain.report.record import read_records
from hpctrain.training import train as program
from hpctrain.training.setup import set_up
from tests.support.packs import make_pack

IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
TINY = ((0.125, 0.5, 0.75), (0.25, 0.5, 1.0))  # of timm:tiny_net
FLAGS = {"epochs": 1, "threads": 1, "progress": "none", "batch_size": 10}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Settings of a run over a pack of 16x16x3, and the same for gray images, in a new folder."""
    monkeypatch.chdir(tmp_path)
    for name, channels in (("colour", 3), ("gray", 1)):
        make_pack(tmp_path / f"{name}.h5", {"train": 29, "test": 7}, (16, 16, channels), 5)
    return Config(data="colour.h5", model="resnet18", **FLAGS)


def foreign(name, shape=(16, 16, 3)):
    """The file of a network's weights by torch.save."""
    torch.save(build(name, shape, 5).state_dict(), "foreign.pth")
    return "foreign.pth"


@pytest.mark.parametrize(
    ("settings", "scaling", "said"),
    [
        ({}, (), ""),
        ({"normalize": "imagenet"}, IMAGENET, ""),
        ({"init": "foreign.pth"}, IMAGENET, "those of ImageNet, as --init does not say"),
        ({"init": "foreign.pth", "normalize": "unit"}, (), ""),
        ({"init": "foreign.pth", "data": "gray.h5"}, ((0.449,), (0.226,)), "those of ImageNet"),
        ({"model": "timm:tiny_net"}, TINY, "as published for timm:tiny_net"),
        ({"model": "timm:tiny_net", "normalize": "unit"}, (), ""),
        ({"model": "timm:tiny_net", "data": "gray.h5"}, ((11 / 24,), (1.75 / 3,)), "mean 0.4583"),
    ],
)
def test_auto_scales_as_the_first_weights_expect(
    timm_stand_in, given, comm, settings, scaling, said
):
    foreign("resnet18")
    job = set_up(dataclasses.replace(given, **settings), comm)
    torch.testing.assert_close(torch.tensor(job.plan.scaling), torch.tensor(scaling))
    notes = [note for note in job.notes if note.startswith("--normalize auto")]
    assert len(notes) == bool(said) and all(said in note for note in notes)
    channels = job.pack.image_shape[2]
    black = job.prepare(torch.zeros(1, 16, 16, channels, dtype=torch.uint8), 0)[0, :, 0, 0]
    expected = [-m / s for m, s in zip(*scaling, strict=True)] if scaling else [0.0] * channels
    torch.testing.assert_close(black, torch.tensor(expected))
    line = [line for line in describe_plan(job.plan) if line.startswith("input")]
    assert len(line) == len(scaling)


def test_a_run_gives_its_scaling_to_the_next(given, comm):
    """Also through a file of hpctrain that says [0, 1], and not to one that says otherwise."""
    for normalize, expected in (("pack", None), ("unit", ())):
        first = dataclasses.replace(given, normalize=normalize, run=normalize)
        program.train(first, comm)
        known = read_model(f"runs/{normalize}/model.safetensors")[1]
        job = set_up(dataclasses.replace(given, init=normalize), comm)
        mean = known["mean"] or ()
        assert list(job.plan.scaling[:1]) == ([tuple(mean)] if expected is None else [])
        job = set_up(dataclasses.replace(given, init=normalize, normalize="imagenet"), comm)
        assert job.plan.scaling == IMAGENET


def test_a_resumed_run_keeps_its_scaling(given, comm):
    config = dataclasses.replace(given, init=foreign("resnet18"), run="a")
    program.train(config, comm)
    Path("foreign.pth").unlink()
    program.train(dataclasses.replace(config, epochs=2), comm)
    known = read_model("runs/a/model.safetensors")[1]
    assert known["mean"] == list(IMAGENET_MEAN) and known["epoch"] == 2
    notes = [line["text"] for line in read_records(Path("runs/a")) if line["kind"] == "note"]
    assert [note.startswith("--normalize auto") for note in notes].count(True) == 1
    plan = read_plan(json.loads(Path("runs/a/plan.json").read_text()))
    black = set_up(config, comm, plan, True).prepare(
        torch.zeros(1, 16, 16, 3, dtype=torch.uint8), 0
    )
    expected = [-m / s for m, s in zip(*IMAGENET, strict=True)]
    torch.testing.assert_close(black[0, :, 0, 0], torch.tensor(expected))
    with pytest.raises(
        UsageError, match="was begun with --normalize auto, not with --normalize unit"
    ):
        program.train(dataclasses.replace(config, epochs=3, normalize="unit"), comm)


def test_a_network_of_timm_from_first_step_to_answer(timm_stand_in, given, comm, capsys):
    name = "timm:tiny_vit.clip"
    config = dataclasses.replace(given, model=name, run="a")
    program.train(config, comm)
    program.train(dataclasses.replace(config, epochs=2), comm)
    known = read_model("runs/a/model.safetensors")[1]
    assert known["model"] == name and known["mean"] and known["epoch"] == 2
    network = open_network(EvaluateConfig(run="a", threads=1), comm)  # names no --model
    assert network.saved.scaling[0].tolist() == known["mean"]
    evaluate.main(EvaluateConfig(run="a", threads=1))
    predict.main(PredictConfig(run="a", threads=1, output="p.csv"))
    assert len(Path("p.csv").read_text().splitlines()) == 8
