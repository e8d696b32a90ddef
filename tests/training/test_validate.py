"""Validation: when it comes, when it ends a run, which network it chooses."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.inference import evaluate
from hpctrain.models import read_model
from hpctrain.report.find import checkpoint_steps
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from hpctrain.training import validate
from hpctrain.training.steps import CannotContinue, NonFinite
from tests.support.packs import make_pack
from tests.training.runs import digest

pytestmark = pytest.mark.mpi
STEPS = 7  # of an epoch: 101 rows in mini-batches of 16


@pytest.fixture
def losses(monkeypatch):
    """Make validations find these losses, one after another, and remember the weights then."""
    real, seen = validate.evaluation, []

    def script(values):
        rest = iter(values)

        def evaluation(run, split):
            found = real(run, split)
            if split == "validation":
                seen.append(run.job.trainer.model.conv1.weight.detach().clone())
                return dataclasses.replace(found, means={"loss": next(rest)})
            return found

        monkeypatch.setattr(validate, "evaluation", evaluation)
        return seen

    return script


def validations(settings):
    records = list(read_records(Path(settings.runs_dir) / "a"))
    return [r["step"] for r in records if r.get("split") == "validation"], records[-1]


@pytest.mark.parametrize(
    ("every", "expected"),
    [(3, [3, 6, 9, 12, 14]), (7, [7, 14]), (5, [5, 10, 14]), (99, [14])],
    ids=str,
)
def test_validation_comes_every_given_number_of_steps(comm, settings, every, expected):
    loop.train(dataclasses.replace(settings, validate_every=f"{every}steps"), comm)
    if comm.rank == 0:
        assert validations(settings)[0] == expected


@pytest.mark.parametrize(
    ("patience", "last"), [(0, 14), (1, 8), (2, 10), (3, 14)], ids=["never", "1", "2", "3"]
)
def test_patience_is_counted_in_validations_without_a_smaller_loss(
    comm, settings, losses, patience, last
):
    losses([5.0, 4.0, 3.0, 3.0, 3.5, 2.0, 9.0])
    loop.train(dataclasses.replace(settings, validate_every="2steps", patience=patience), comm)
    if comm.rank == 0:
        steps, end = validations(settings)
        assert steps[-1] == end["steps"] == last
        assert end["status"] == "done"
        reason = f"{patience} validations without a loss below the 3 of step 6"
        assert end["reason"] == (reason if last < 14 else None)


@pytest.mark.parametrize(("final", "place"), [("last", 3), ("best", 1)])
def test_the_network_of_the_last_or_the_best_step_is_tested_and_saved(
    comm, settings, losses, final, place
):
    seen = losses([5.0, 1.0, 3.0, 3.0])
    loop.train(dataclasses.replace(settings, validate_every="4steps", final=final), comm)
    assert len(seen) == 4
    if comm.rank == 0:
        folder = Path(settings.runs_dir) / "a"
        tensors, metadata = read_model(folder / "model.safetensors")
        assert torch.equal(tensors["conv1.weight"], seen[place])
        assert metadata["step"] == (8 if final == "best" else 14)
        assert tensors["bn1.num_batches_tracked"] == metadata["step"]
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
        best, known = read_model(folder / "best.safetensors")
        assert torch.equal(best["conv1.weight"], seen[1])
        assert (known["step"], known["epoch"]) == (8, 1)
        assert known["validation_loss"] != metadata["validation_loss"] or final == "best"
        assert metadata["epoch"] == (1 if final == "best" else 2)
        tests = [r for r in read_records(folder) if r.get("split") == "test"]
        assert [t["step"] for t in tests] == [metadata["step"]]
        assert np.isfinite(tests[0]["loss"])


@pytest.mark.parametrize(
    "flags", [{"final": "best"}, {"patience": 2}, {"validate_every": "3steps"}]
)
def test_what_needs_a_validation_split_is_refused_without_one(comm, settings, flags):
    name = "--" + next(iter(flags)).replace("_", "-")
    name += " best" if "final" in flags else ""
    none = Path(settings.data).with_name("none.h5")
    if comm.rank == 0:
        make_pack(none, {"train": 101, "test": 23})
    comm.Barrier()
    bare = dataclasses.replace(settings, data=str(none))
    with pytest.raises(UsageError, match=f"{name} needs a split validation"):
        loop.train(dataclasses.replace(bare, **flags), comm)
    assert loop.train(dataclasses.replace(bare, patience=0), comm) == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_the_test_split_is_evaluated_unless_told_otherwise(comm, settings, wanted):
    loop.train(dataclasses.replace(settings, epochs=1, test=wanted), comm)
    if comm.rank == 0:
        records = list(read_records(Path(settings.runs_dir) / "a"))
        assert any(r.get("split") == "test" for r in records) == wanted
        assert ("test_accuracy" in records[-1]) == wanted


def saved_steps(settings):
    return checkpoint_steps(Path(settings.runs_dir) / settings.run / "checkpoints")


@pytest.mark.parametrize(
    "settings_of", [("5steps", 5), ("7steps", 7), ("1epoch", 7), ("0", 14)], ids=str
)
@pytest.mark.parametrize("what", ["unreadable on one rank", "not finite"])
def test_a_validation_that_fails_loses_no_step(comm, settings, monkeypatch, settings_of, what):
    """The run ends with 1, saved; once the rows are sound again, it comes to the same end."""
    every, reached = settings_of
    settings = dataclasses.replace(settings, validate_every=every, deterministic=True, shards=4)
    whole, real = digest(settings, comm, "whole"), evaluate.find_nonfinite

    def find_nonfinite(source, rows, images):
        if 11 in rows and len(source.labels) == 13:
            if what == "not finite":
                return {11: "row 11 is NaN"}
            raise RunError("row 11 is NaN")
        return real(source, rows, images)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "find_nonfinite", find_nonfinite)
        said = "validation cannot be evaluated: .*row 11 is NaN"
        with pytest.raises(CannotContinue, match=said) as caught:
            loop.train(settings, comm)
    assert caught.value.agreed and caught.value.exit_code == 1
    if comm.rank == 0:
        assert saved_steps(settings) == [reached]
        end = list(read_records(Path(settings.runs_dir) / "a"))[-1]
        assert end["status"] == "failed" and "row 11 is NaN" in end["reason"]
        read_model(Path(settings.runs_dir) / "a" / "model.safetensors")
    assert digest(settings, comm, "a") == whole


def test_where_the_bad_image_cannot_be_read_again_the_weights_are_saved_all_the_same(
    comm, settings, monkeypatch
):
    def unreadable(source, rows):
        raise RunError("pack.h5 is gone")

    monkeypatch.setattr("hpctrain.training.steps.find_nonfinite", unreadable)
    said = r"is not finite.*are kept\. Its images cannot be read again: .*pack.h5 is gone"
    with pytest.raises(NonFinite, match=said):
        loop.train(dataclasses.replace(settings, lr=1e30), comm)
    if comm.rank == 0:
        reached = saved_steps(settings)
        assert len(reached) == 1 and reached[0] > 0
        metadata = read_model(Path(settings.runs_dir) / "a" / "model.safetensors")[1]
        assert metadata["step"] == reached[0]


def test_why_a_run_ended_is_said_where_it_cannot_be_saved_too(comm, settings, monkeypatch):
    def full(*_):
        raise RunError("no room left")

    monkeypatch.setattr(loop, "save_network", full)
    said = "is not finite.*; not saved: .*no room left"
    with pytest.raises(CannotContinue, match=said) as caught:
        loop.train(dataclasses.replace(settings, lr=1e30), comm)
    assert caught.value.agreed
    if comm.rank == 0:
        end = list(read_records(Path(settings.runs_dir) / "a"))[-1]
        assert end["status"] == "failed" and "no room left" in end["reason"]
