"""What a run leaves for figures: its test with the confusion matrix, and its settings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hpctrain.report.find import evaluation_file
from hpctrain.report.record import read_records
from hpctrain.training import train as loop

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
    chosen = dataclasses.replace(
        settings, epochs=1, momentum=0.8, keep_checkpoints=5, clip_norm=9.0
    )
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
