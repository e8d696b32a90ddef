"""Validation: when it comes, when it ends a run, which network it chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hpctrain as hp
from tests.support.short import records

OWN = "tests.support.own_functions:counts"

pytestmark = pytest.mark.ranks


def validations(settings):
    """Steps and losses."""
    found = [r for r in records(settings, "evaluation") if r["split"] == "validation"]
    return [r["step"] for r in found], [r["loss"] for r in found]


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
        assert f"in {patience} validation" in reason and f"step {steps[best]}" in reason


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
    assert hp.load(better).metadata["step"] == steps[place]
    assert best.loss == pytest.approx(losses[place], rel=1e-6)
    known = hp.load(found.folder).metadata
    assert known["step"] == (steps[place] if final == "best" else 24)
    (test,) = [r for r in records(overfitting, "evaluation") if r["split"] == "test"]
    assert (test["step"], test["loss"]) == (known["step"], tested.loss)
    assert known["epoch"] == known["step"] // 2


BY = {"accuracy": max, "auroc": max, "brier:min": min}


@pytest.mark.parametrize("by", BY)
def test_the_best_network_is_that_of_the_figure_that_is_named(comm, overfitting, by):
    """It also ends the run, ranks it, and is found again by a launch that resumes it."""
    figure, better = by.partition(":")[0], BY[by]
    settings = {**overfitting, "best_by": by, "metric": OWN, "final": "best"}
    hp.train(**{**settings, "epochs": 3})
    found = hp.train(**settings)
    if comm.rank == 0:
        record = [r for r in records(settings, "evaluation") if r["split"] == "validation"]
        values = [{**r, **r["metrics"]}[figure] for r in record]
        place = values.index(better(values))
        metadata = hp.load(found.folder, trust_code=True).metadata
        assert metadata["step"] == record[place]["step"] < 24
        assert metadata["figures"][f"validation_{figure}"] == values[place]
        first = records(settings, "run")[0]["figures"]
        assert (next(iter(first)), first[figure]) == (figure, better.__name__)
        assert ("auroc" in record[0]) == (figure == "auroc")
    other = {**settings, "run": "patient", "patience": 2}
    ended = hp.train(**other)
    if comm.rank == 0:
        (end,) = records(other, "end")
        until = values[: end["steps"] // 2]
        reached = f"{better(until):.4g} of step {ended.step}"
        assert end["reason"] == f"no better {figure} than {reached} in 2 validations"
        assert until.index(better(until)) == len(until) - 3 == ended.step // 2 - 1
    with pytest.raises(hp.UsageError, match="was begun with --best-by"):
        hp.train(**{**settings, "best_by": "loss", "epochs": 13})


@pytest.mark.parametrize(
    ("by", "text"),
    [
        ("dice", "no figure of --task classify, which has accuracy, loss,.*dice:max or dice:min"),
        ("loss:max", "give --best-by loss"),
        ("brier:min", "needs the --metric"),
        ("top5_accuracy", "have no top5_accuracy, but loss, accuracy"),
        ("unweighted_loss", "have no unweighted_loss"),
    ],
)
def test_a_figure_that_a_run_does_not_have_is_refused_before_its_first_step(
    comm, overfitting, by, text
):
    with pytest.raises(hp.UsageError, match=text):
        hp.train(**overfitting, best_by=by)
    assert not Path(overfitting["runs_dir"]).exists()


def test_a_figure_that_is_undefined_in_the_first_validation_ends_the_run(comm, overfitting):
    settings = {**overfitting, "metric": OWN, "best_by": "recall of none:max"}
    with pytest.raises(hp.RunError, match="the first validation has no recall of none"):
        hp.train(**settings)
    if comm.rank == 0:
        (end,) = records(settings, "end")
        assert end["status"] == "failed" and end["repeats"]
