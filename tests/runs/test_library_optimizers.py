"""Runs with optimizers of other libraries, and with own ones: the same bits on any ranks."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from safetensors.torch import load_file

import hpctrain as hp
from tests.support.api import IN_FLIGHT
from tests.support.launch import Job, as_flags, mpirun
from tests.support.launches import check_same, launch, notes, run_of
from tests.support.ranks import command
from tests.support.records import statuses
from tests.support.short import digest, short_run
from tests.support.wait import wait_for

OWN = "tests.support.own_optimizers"
#: Each with other settings that concern the update.
RUNS = {
    "timm:lamb": {"clip_norm": 0.3, "no_decay": "norm,bias", "ema": 0.9, "final": "ema"},
    "timm:muon": {"lr_factors": "conv*=0.5", "overlap": 2},
    "torch:NAdam(betas=(0.9, 0.99))": {"schedule": "cosine", "warmup_epochs": 0.5},
    f"{OWN}:sgd_with_a_twist": {"freeze": "conv1", "batch_norm": "average"},
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Two epochs of 7 steps, the last of them smaller."""
    return {
        **short_run(tmp_path_factory.mktemp("optimizers")),
        **{"shards": 6, "lr": 0.01, "weight_decay": 0.01, "deterministic": True},
        **{"checkpoint_every": "2steps"},
    }


@pytest.mark.parametrize("optimizer", RUNS)
def test_a_run_that_is_interrupted_ends_with_the_same_bits_on_other_ranks(
    pack, tmp_path, optimizer
):
    settings = pack | RUNS[optimizer] | {"optimizer": optimizer, "runs_dir": str(tmp_path)}
    whole = settings | {"run": "whole"}
    assert launch(whole, 1).code == 0
    assert launch(settings, 2, leave=4).code == 75
    again = command(3, "train", *as_flags(settings))
    assert again.code == 0, again.err
    check_same(settings, whole)
    assert any(text.startswith(f"{optimizer}: ") for text in notes(settings)) or "own" in optimizer


def test_a_run_that_is_killed_ends_with_the_same_bits(pack, tmp_path):
    settings = pack | {"optimizer": f"{OWN}:sgd_with_a_twist", "runs_dir": str(tmp_path)}
    whole = settings | {"run": "whole"}
    assert launch(whole, 3).code == 0
    train = [sys.executable, "-m", "hpctrain", "train", *as_flags(settings)]
    job = Job([mpirun(), "-n", "2", *train], {"HPCTRAIN_FAULT": "step.done:stall:5"})
    file = run_of(settings) / "checkpoints/00000004.safetensors"
    try:
        wait_for(lambda: file.exists() or job.poll() is not None)
        assert job.poll() is None, job.communicate()
        os.kill(job.pid, signal.SIGKILL)
        job.communicate(timeout=60)
        wait_for(lambda: job.members() == [])
    finally:
        job.end()
    assert load_file(file)["optimizer.group.0.step"].item() == 4
    again = command(3, "train", *as_flags(settings))
    assert again.code == 0, again.err
    check_same(settings, whole)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("fault", "in_flight"), [("nan", 1), ("gradient", 0)])
def test_a_step_that_is_not_finite_changes_nothing(
    comm, pack, tmp_path, fault, in_flight, monkeypatch
):
    monkeypatch.setitem(IN_FLIGHT, "cpu", in_flight)  # as on GPUs: the next step has begun
    folder = comm.bcast(str(tmp_path))
    settings = pack | {"optimizer": "timm:lamb", "runs_dir": folder, "ema": 0.9, "final": "ema"}
    settings |= {"model": "tests.support.nets:Faulty", "test": False}
    whole = digest(comm, settings | {"run": "whole"})
    monkeypatch.setenv("HPCTRAIN_TEST_FAULT", fault)
    with pytest.raises(hp.RunError, match="not finite"):
        hp.train(**settings)
    monkeypatch.delenv("HPCTRAIN_TEST_FAULT")
    assert digest(comm, settings) == whole


def refused(pack, tmp_path, **settings):
    """The one line on which all ranks agree; nothing is written."""
    ended = launch(pack | {"runs_dir": str(tmp_path / "none")}, 2, **settings)
    assert ended.code == 2 and "\n" not in ended.error
    assert not (tmp_path / "none").exists()
    return ended.error


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "timm:lamb", "lr": None}, "--optimizer timm:lamb needs --lr"),
        ({"optimizer": "timm:lamb(lr=0.1)"}, "timm:lamb(lr=0.1): hpctrain gives lr"),
        ({"optimizer": "timm:lamb(weight_decay=0.1)"}, "hpctrain gives weight_decay"),
        ({"optimizer": "torch:Adam(fused=True)"}, "fused is refused"),
        ({"optimizer": "torch:Adam(capturable=True)"}, "capturable is refused"),
        ({"optimizer": "torch:Adam(foreach=True)"}, "foreach is refused"),
        ({"optimizer": "torch:Adam(differentiable=True)"}, "differentiable is refused"),
        ({"optimizer": "torch:LBFGS"}, "closure"),
        ({"optimizer": "torch:SparseAdam"}, "sparse gradients"),
        ({"optimizer": "torch:Muon"}, "timm:muon"),
        ({"optimizer": "timm:lamb", "momentum": 0.5}, "--momentum is for sgdm"),
        ({"optimizer": f"{OWN}:CountOutside"}, "gives other bits in a second run"),
        ({"optimizer": f"{OWN}:NoisyByNumpy"}, "draws random numbers"),
        ({"optimizer": f"{OWN}:HasModes"}, "modes of training and evaluation"),
        ({"optimizer": f"{OWN}:Fails"}, "its step failed: ValueError: 4-d weights only"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["optimizer"],
)
def test_what_cannot_be_is_refused_before_the_first_step(pack, tmp_path, settings, said):
    assert said in refused(pack, tmp_path, **settings)


@pytest.mark.parametrize("other", ["timm:lars", "timm:lamb(eps=1e-5)", "adam"])
def test_a_run_is_not_resumed_with_another_optimizer(pack, tmp_path, other):
    settings = pack | {"optimizer": "timm:lamb", "runs_dir": str(tmp_path)}
    assert launch(settings, 1, leave=1).code == 75
    ended = launch(settings, 1, optimizer=other)
    assert ended.code == 2 and f"not with --optimizer {other}" in ended.error


def test_the_step_of_an_own_optimizer_that_fails_later_is_one_line(pack, tmp_path):
    settings = pack | {"optimizer": f"{OWN}:FailsLater", "runs_dir": str(tmp_path), "epochs": 5}
    ended = launch(settings, 1)
    assert ended.code == 2 and "\n" not in ended.error
    assert "FailsLater: its step failed: ValueError: 30 steps are enough" in ended.error
    assert "own_optimizers.py, line" in ended.error


def test_networks_in_float64_keep_their_types(pack, tmp_path):
    settings = pack | {"optimizer": "timm:adafactorbv", "runs_dir": str(tmp_path)}
    settings |= {"model": "tests.support.nets:typed_float64"}
    assert launch(settings | {"run": "whole"}, 1).code == 0
    assert launch(settings, 2, leave=3).code == 75
    assert launch(settings, 3).code == 0
    check_same(settings, settings | {"run": "whole"})


def test_a_sweep_over_optimizers(pack, tmp_path, monkeypatch):
    """Also of one with arguments, whose text is part of the name of a folder."""
    monkeypatch.chdir(tmp_path)
    base = {key: pack[key] for key in ("data", "model", "batch_size", "deterministic")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in base.items()]
    (tmp_path / "s.toml").write_text(
        "\n".join(["[base]", *lines, "epochs = 1", "shards = 1", "[grid]", "lr = [0.01]"])
        + """\noptimizer = ["sgdm", "timm:lamb", "torch:NAdam(betas=(0.9, 0.99))"]\n"""
    )
    words = [sys.executable, "-m", "hpctrain", "sweep", "s.toml", "--run", "s", "--slots", "1"]
    job = Job(words, cwd=tmp_path)
    _, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    assert [*statuses(tmp_path / "runs/s").values()] == ["done"] * 3
