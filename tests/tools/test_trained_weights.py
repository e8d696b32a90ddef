"""Trained networks that are read back: by whom, from where, and never from what is broken."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

import hpctrain as hp
from tests.support.api import command_line, save_model
from tests.support.packs import make_pack
from tests.support.ranks import alone, command
from tests.support.records import read_strictly
from tests.support.runs import RUNS, SAME, train_once

TRAIN = ["--batch-size", "16", "--threads", "1", "--progress", "none"]
OWN = """from torch import nn
def net(image_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
"""
READERS = [["evaluate", "a"], ["predict", "a", "--output", "answers.csv"], ["export", "a"]]


@pytest.mark.ranks(1, 2)
def test_a_network_that_a_file_names_is_imported_with_trust_code_only(
    comm, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if comm.rank == 0:
        Path("own_network.py").write_text(OWN)
        make_pack(Path("pack.h5"), {"train": 29, "test": 7})
    comm.Barrier()
    sys.modules.pop("own_network", None)  # of an earlier test on this rank
    words = ["train", "--data", "pack.h5", "--run", "a", "--epochs", "1", *TRAIN]
    assert command_line([*words, "--model", "own_network:net"]) == 0
    comm.Barrier()
    for reader in READERS if comm.size == 1 else READERS[:2]:  # one process exports
        for trusted in ([], ["--trust-code"]):
            sys.modules.pop("own_network", None)
            capsys.readouterr()
            assert command_line([*reader, *trusted]) == (0 if trusted else 2)
            assert ("own_network" in sys.modules) == bool(trusted)
            assert trusted or comm.rank or "own_network:net" in capsys.readouterr().err


SCALE = {"dtype": "uint8", "divisor": 255.0, "low": 0.0, "high": 255.0, "nodata": None}
OTHERWISE = {
    **{key: [3, None, ["x"]] for key in ("model", "task", "precision", "pack")},
    "loss": [3, ["a:b"]],
    "metric": [3, [3], {"a": 1}],
    **{key: [3, None, "ab"] for key in ("classes", "image_shape")},
    **{key: ["x", [1, 2], {"a": 1}] for key in ("mean", "std", "class_weights")},
    **{key: ["x", 1] for key in ("small_stem", "channels_last")},
    "evaluation_rows": ["x", 0, -1, None, 64.0, True],
    "provenance": [3, None],
    "scale": [
        None,
        {},
        {**SCALE, "dtype": "u9"},
        {**SCALE, "high": None},
        {**SCALE, "nodata": "nan"},
    ],
    "external": [3, "x"],
}


def test_a_file_that_describes_its_network_otherwise_is_refused_by_name(trained, tmp_path):
    saved, path = hp.load(trained.run("plain")), tmp_path / "odd.safetensors"
    for name, values in OTHERWISE.items():
        for value in values:
            save_model(path, saved.model, saved.metadata | {name: value})
            with pytest.raises(hp.UsageError, match=f"^{path} holds weights but not .*[^\n]*$"):
                hp.load(path)


def test_weights_that_are_not_finite_give_no_answers(trained, tmp_path):
    path = trained.run("plain") / "model.safetensors"
    saved = hp.load(path)
    dict(saved.model.named_parameters())["fc.bias"].data[3] = float("nan")
    save_model(tmp_path / "bad.safetensors", saved.model, saved.metadata)
    with pytest.raises(hp.UsageError, match=r"fc\.bias"):
        hp.load(tmp_path / "bad.safetensors")


def test_first_weights_of_a_run_by_name_come_with_their_network(tmp_path):
    """Also when the run is resumed. A function of the user's own is named on the command line."""
    pack = make_pack(tmp_path / "a.h5", {"train": 29, "test": 7}, (16, 16, 3))
    networks = {"own": ["tests.support.nets:OneLayer"], "small": ["resnet18", "--small-stem"]}
    for name, model in networks.items():
        train_once(pack, "--model", *model, run=name)
        own = ["--model", *model] * (name == "own")
        words = ["--init", name, *own, "--lr", "1e-30", "--epochs"]
        for epochs in "12":
            train_once(pack, *words, epochs, run=f"from-{name}")
        first, then = (
            hp.load(tmp_path / f"runs/{n}", trust_code=True) for n in (name, f"from-{name}")
        )
        assert all(map(torch.equal, first.model.parameters(), then.model.parameters()))
        known = then.metadata
        assert known["model"] == model[0] and known["small_stem"] == (name == "small")
        assert known["epoch"] == 2
    words = ["--data", pack, "--runs-dir", tmp_path / "runs", "--init", "own", *TRAIN]
    for more, hint in (([], f"--model {networks['own'][0]}"), (["--model", "digits"], "own")):
        ended = command(1, "train", *words, *more)
        assert ended.code == 2 and hint in ended.err


def test_a_last_layer_that_starts_fresh_is_recorded_once(trained, trained_copy):
    facts = read_strictly(trained.run("tuned"))[0]
    assert facts["init"]["fresh"] == {"fc.weight": 10, "fc.bias": 10}
    assert (facts["init"]["tensors"], facts["init"]["adapted"]) == (17, {})
    place = ["--data", trained.pack("tuned"), "--runs-dir", trained_copy.runs, "--run", "tuned"]
    words = [*SAME, *RUNS["tuned"][1], "--epochs", "3"]
    words += ["--init", trained.run("plain") / "model.safetensors"]
    done = command(2, "train", *place, *words)
    assert done.code == 0, done.err
    notes = [each["text"] for each in read_strictly(trained_copy.run("tuned")) if "text" in each]
    (said,) = [text for text in notes if "of 17" in text]
    assert "15 of 17" in said and "fc" in said and "10 classes in the file" in said


def test_another_pack_in_the_place_of_the_one_of_training_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_pack(Path("pack.h5"), {"train": 29, "test": 7})
    words = ["train", "--data", "pack.h5", "--run", "a", "--epochs", "1", *TRAIN]
    assert command(1, *words, cwd=tmp_path).code == 0
    evaluate = ["evaluate", "a", "--threads", "1"]
    assert command(1, *evaluate, cwd=tmp_path).code == 0
    make_pack(Path("pack.h5"), {"train": 29, "test": 7}, seed=1)
    done = command(1, *evaluate, cwd=tmp_path)
    assert done.code == 2 and "is not the pack" in done.err.splitlines()[-1]
    assert command(1, *evaluate, "--data", "pack.h5", cwd=tmp_path).code == 0
    Path("pack.h5").unlink()
    done = command(1, *evaluate, cwd=tmp_path)
    assert done.code == 2 and "pack.h5" in done.err and "--data" in done.err


@pytest.mark.ranks(2)
def test_a_pack_that_is_replaced_ends_the_training_and_its_weights_are_kept(comm, tmp_path):
    rows = {"train": 61, "validation": 13, "test": 7}
    if comm.rank == 0:
        make_pack(tmp_path / "pack.h5", rows)
        make_pack(tmp_path / "other.h5", rows, seed=1)
    comm.Barrier()

    def replace(record):
        if record["epoch"] == 1:
            (tmp_path / "other.h5").replace(tmp_path / "pack.h5")

    settings = {"batch_size": 16, "threads": 1, "progress": "none", "runs_dir": tmp_path}
    with pytest.raises((hp.RunError, hp.UsageError), match=r"pack\.h5"):
        hp.train(data=tmp_path / "pack.h5", run="a", epochs=2, on_evaluation=replace, **settings)
    assert hp.load(tmp_path / "a").metadata["step"] >= 4  # those of an epoch


@pytest.mark.ranks(2)
def test_runs_that_begin_in_the_same_second_have_names_of_their_own(comm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if comm.rank == 0:
        make_pack(Path("pack.h5"), {"train": 29})
    comm.Barrier()
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    for _ in range(3):
        assert command_line(["train", "--data", "pack.h5", "--epochs", "1", *TRAIN]) == 0
    base = "20260101-000000-digits"
    assert sorted(os.listdir("runs")) == [base, f"{base}-2", f"{base}-3"]


def test_a_run_is_found_by_name_or_folder_also_its_best_network_so_far(trained_copy, capsys):
    run = trained_copy.run("tuned")
    by_name = hp.load("tuned", runs_dir=trained_copy.runs)
    assert by_name.path == hp.load(run, runs_dir="elsewhere").path == run / "model.safetensors"
    *earlier, best = sorted(run.glob("best-*.safetensors"))
    (run / "model.safetensors").unlink()
    capsys.readouterr()
    assert hp.load(run).path == best
    assert "has not ended" in capsys.readouterr().err
    for each in (*earlier, best):
        each.unlink()
    with pytest.raises(hp.UsageError, match="has not ended"):
        hp.load(run)
    assert alone("export", run).code == 2
