"""What a run leaves for figures: its test with the confusion matrix, its settings, its mistakes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.report import pictures
from hpctrain.report.find import evaluation_file
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from hpctrain.training import validate

pytestmark = pytest.mark.mpi
TEST = 23  # rows


def folder_of(settings):
    return Path(settings.runs_dir) / "a"


def test_a_run_leaves_the_figures_of_its_test(comm, settings):
    loop.train(settings, comm)
    if comm.rank == 0:
        recorded = [r for r in read_records(folder_of(settings)) if r.get("split") == "test"][-1]
        figures = json.loads(evaluation_file(folder_of(settings), "test").read_text())
        for name in ("rows", "loss", "accuracy"):
            assert figures[name] == recorded[name]
        assert np.sum(figures["confusion"]) == TEST
        assert np.trace(figures["confusion"]) / TEST == figures["accuracy"]
        assert len(figures["classes"]) == len(figures["confusion"])
        assert Path(figures["model"]).is_file()
        assert len(list(folder_of(settings).glob("evaluation-*"))) == 1


def test_they_go_when_the_run_goes_on(comm, settings):
    loop.train(dataclasses.replace(settings, epochs=1), comm)
    loop.train(dataclasses.replace(settings, epochs=2, test=False), comm)
    comm.Barrier()
    assert not evaluation_file(folder_of(settings), "test").exists()


def test_the_record_has_the_hyper_parameters(comm, settings):
    chosen = dataclasses.replace(settings, epochs=1, momentum=0.8, keep=5, clip_norm=9.0)
    loop.train(chosen, comm)
    if comm.rank == 0:
        (first,) = [r for r in read_records(folder_of(settings)) if r["kind"] == "run"]
        assert first["settings"] == {
            "data": settings.data,
            "epochs": 1,
            "momentum": 0.8,
            "clip_norm": 9.0,
            "model": "digits",
            "optimizer": "sgdm",
            "lr": 0.01,
            "batch_size": 16,
            "seed": 0,
        }


@pytest.mark.parametrize("task", ["classify", "denoise"])
@pytest.mark.filterwarnings("default")  # those of the reader are not ours
def test_tensorboard_shows_mistakes_after_each_evaluation(comm, settings, task):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loop.train(dataclasses.replace(settings, tensorboard=True, task=task, lr=1e-6), comm)
    if comm.rank == 0:
        events = EventAccumulator(str(folder_of(settings)), size_guidance={"images": 0})
        events.Reload()
        steps = {tag: [i.step for i in events.Images(tag)] for tag in events.Tags()["images"]}
        every = {"validation/mistakes": [7, 14], "test/mistakes": [14]}
        assert steps == (every if task == "classify" else {})


def test_the_mistakes_are_those_of_the_network(comm, settings, monkeypatch):
    """Each picture has its true class, and all of them what the confusion matrix counts."""
    pytest.importorskip("tensorboard")
    shown = []

    def draw(images, captions, marked):
        assert [*marked] == [*range(len(images))]
        shown.append((images, captions))
        return np.zeros((5, 5, 3), np.uint8)

    monkeypatch.setattr(pictures, "draw_captioned", draw)
    monkeypatch.setattr(validate, "MISTAKES", 1000)
    loop.train(dataclasses.replace(settings, tensorboard=True, lr=1e-6), comm)
    if comm.rank == 0:
        images, captions = shown[-1]
        figures = json.loads(evaluation_file(folder_of(settings), "test").read_text())
        counts = np.array(figures["confusion"])
        classes = {name: k for k, name in enumerate(figures["classes"])}
        for line, answer, _ in captions:
            pair = classes[line.removeprefix("true: ")], classes[answer.removeprefix("answer: ")]
            counts[pair] -= 1
        assert (counts == np.diag(np.diag(counts))).all()
        assert np.trace(counts) / TEST == figures["accuracy"] < 1
        with Split(read_pack(settings.data), "test") as source:
            rows = source.gather(np.arange(TEST), np.empty((TEST, *source.image_shape), np.uint8))
            for image, (line, _, _) in zip(images, captions, strict=True):
                row = np.flatnonzero((rows == np.rint(image * 255)).all((1, 2, 3)))[0]
                assert source.labels[row] == classes[line.removeprefix("true: ")]
    else:
        assert shown == []
