"""Validation: when it comes, when it ends a run, which network it chooses."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from safetensors import safe_open

import hpctrain as hp
from tests.support.launches import checkpoint_steps, run_of
from tests.support.short import records, short_run

pytestmark = pytest.mark.ranks


@pytest.fixture
def settings(tmp_path):
    return short_run(tmp_path)


def validations(settings):
    """Steps and losses."""
    found = [r for r in records(settings, "evaluation") if r["split"] == "validation"]
    return [r["step"] for r in found], [r["loss"] for r in found]


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["hpctrain"])


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("3steps", [3, 6, 9, 12, 14]),
        ("5steps", [5, 10, 14]),
        ("99steps", [14]),
        ("1epoch", [7, 14]),
        ("2epochs", [14]),
        ("0", [14]),
    ],
)
def test_validation_comes_every_so_many_steps_or_epochs_and_at_the_end(
    comm, settings, every, expected
):
    hp.train(**settings, validate_every=every)
    if comm.rank == 0:
        assert validations(settings)[0] == expected


@pytest.fixture
def overfitting(tmp_path, settings):
    """A run over random labels, so that its validation loss falls once and rises from then on."""
    random, splits = np.random.default_rng(0), {}
    for split, rows in {"train": 48, "validation": 40, "test": 23}.items():
        images = random.integers(0, 256, (rows, 12, 12, 1), np.uint8)
        splits[split] = images, random.integers(0, 3, rows)
    hp.write_pack(tmp_path / "noise.h5", splits, "abc")
    data = {"data": str(tmp_path / "noise.h5"), "epochs": 12, "lr": 0.05}
    return {**settings, **data, "batch_size": 24, "validate_every": "2steps"}


@pytest.mark.parametrize("patience", [1, 3])
def test_patience_is_counted_in_validations_without_a_smaller_loss(comm, overfitting, patience):
    found = hp.train(**overfitting, patience=patience)
    assert found.status == "done" and found.step < 24
    if comm.rank == 0:
        steps, losses = validations(overfitting)
        best = min(range(len(losses)), key=losses.__getitem__)
        assert len(losses) - 1 - best == patience and steps[-1] == found.step
        for place in range(best):  # it had not ended earlier
            assert min(losses[place + 1 : place + 1 + patience]) < min(losses[: place + 1])
        reason = records(overfitting, "end")[-1]["reason"]
        assert f"{patience} validations" in reason and f"step {steps[best]}" in reason


@pytest.mark.parametrize("final", ["last", "best"])
def test_the_network_of_the_last_or_the_best_step_is_tested_and_saved(comm, overfitting, final):
    found = hp.train(**overfitting, final=final)
    tested = hp.evaluate(found.folder, threads=1)
    better = max(Path(found.folder).glob("best-*.safetensors"))
    best = hp.evaluate(better, split="validation", threads=1)
    if comm.rank:
        return
    steps, losses = validations(overfitting)
    place = min(range(len(losses)), key=losses.__getitem__)
    assert place < len(losses) - 1, "the last is not the best"
    files = {"model": run_of(overfitting) / "model.safetensors", "best": better}
    known = {name: metadata_of(file) for name, file in files.items()}
    assert known["best"]["step"] == steps[place]
    assert best.loss == pytest.approx(losses[place], rel=1e-6)
    assert known["model"]["step"] == (steps[place] if final == "best" else 24)
    (test,) = [r for r in records(overfitting, "evaluation") if r["split"] == "test"]
    assert (test["step"], test["loss"]) == (known["model"]["step"], tested.loss)
    assert known["model"]["epoch"] == known["model"]["step"] // 2


@pytest.mark.parametrize(
    ("every", "reached"), [("5steps", 5), ("7steps", 7), ("1epoch", 7), ("0", 14)]
)
def test_a_validation_that_fails_loses_no_step(comm, settings, every, reached):
    """The run ends with 1, saved; once its pack is sound again, it comes to the same end."""
    more = {"validate_every": every, "deterministic": True, "shards": 4}
    settings = {**settings, **more}
    whole = hp.train(**{**settings, "run": "whole"})
    comm.Barrier()
    if comm.rank == 0:
        with h5py.File(settings["data"]) as file:
            place = file["validation/images"].id.get_offset() + 11 * 144
        pack = Path(settings["data"])
        sound = pack.read_bytes()
        pack.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
    comm.Barrier()
    with pytest.raises(hp.RunError, match="validation cannot be evaluated") as caught:
        hp.train(**settings)
    assert caught.value.exit_code == 1
    if comm.rank == 0:
        assert checkpoint_steps(settings) == [reached]
        assert records(settings, "end")[-1]["status"] == "failed"
        assert metadata_of(run_of(settings) / "model.safetensors")["step"] == reached
        pack.write_bytes(sound)
    comm.Barrier()
    assert hp.train(**settings).figures == whole.figures
    if comm.rank == 0:
        digests = [records({**settings, "run": run})[-1]["digest"] for run in ("a", "whole")]
        assert digests[0] == digests[1]
