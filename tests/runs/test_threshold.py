"""Thresholds of classes: given, or those of the largest F1 in a validation of the network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import hpctrain as hp
from tests.support.short import records

CLASSES = ("rare", "often", "half")


def draw(rows):
    """Images with up to three bright columns, of which few have the first and most the second."""
    random = np.random.default_rng(rows)
    targets = (random.random((rows, 3)) < [0.15, 0.85, 0.5]).astype(np.uint8)
    images = random.integers(0, 200, (rows, 12, 12, 1), np.uint8)
    for k in range(3):
        images[targets[:, k] == 1, :, 4 * k] //= 2
        images[targets[:, k] == 1, :, 4 * k] += 100
    targets[::11, 2] = 255
    return images, targets


@pytest.fixture
def settings(tmp_path):
    splits = {"train": draw(101), "validation": draw(53), "test": draw(37)}
    hp.write_pack(tmp_path / "pack.h5", splits, CLASSES)
    files = {"data": str(tmp_path / "pack.h5"), "runs_dir": str(tmp_path / "runs"), "run": "a"}
    how = {"model": "digits", "batch_size": 16, "epochs": 7, "lr": 0.01, "progress": "none"}
    return {**files, **how, "task": "multilabel", "threads": 1}


def f1_of(network, images, targets, thresholds):
    """F1 by class of what a network answers, and the largest that any threshold gives."""
    with torch.no_grad():
        scores = network.model(network.preprocess(images)).sigmoid().numpy()
    values, best = [], []
    for k, threshold in enumerate(thresholds):
        known = targets[:, k] < 255
        true, score = targets[known, k], scores[known, k]
        values.append(f1_score(true, score >= threshold))
        best.append(max(f1_score(true, score >= cutoff) for cutoff in np.unique(score)))
    return values, best


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("final", ["best", "last"])
def test_the_best_thresholds_are_those_of_the_saved_network(comm, settings, final):
    """Also if it was resumed; they are used by the test, by evaluate and by predict."""
    settings |= {"threshold": "best", "final": final, "best_by": "loss"}
    settings |= {"deterministic": True, "shards": 3}
    hp.train(**{**settings, "epochs": 2})
    run = hp.train(**settings).folder
    hp.train(**{**settings, "run": "whole"})
    evaluated = hp.evaluate(run, split="validation", threads=1)
    tested = hp.evaluate(run, threads=1)
    if comm.rank:
        return
    network = hp.load(run)
    thresholds = network.metadata["thresholds"]
    whole = hp.load("whole", runs_dir=settings["runs_dir"]).metadata
    assert thresholds == whole["thresholds"] and len({*thresholds, 0.5}) == 4
    found, best = f1_of(network, *draw(53), thresholds)
    assert (
        found == pytest.approx(best, rel=1e-12) and f1_of(network, *draw(53), [0.5] * 3)[0] != best
    )
    step = network.metadata["step"]
    assert (step < 49) == (final == "best"), "the last is not the best"
    (record,) = [r for r in records(settings, "evaluation") if r["step"] == step][:1]
    assert evaluated.means["f1_macro"] == record["f1_macro"] == pytest.approx(np.mean(found))
    of_test, best_of_test = f1_of(network, *draw(37), thresholds)
    assert tested.means["f1_macro"] == pytest.approx(np.mean(of_test)) and of_test != best_of_test
    (test,) = [r for r in records(settings, "evaluation") if r["split"] == "test"]
    assert test["f1_macro"] == tested.means["f1_macro"]
    with torch.no_grad():
        scores = network.model(network.preprocess(draw(37)[0])).sigmoid().numpy()
    named = [";".join(np.array(CLASSES)[row]) for row in scores >= np.array(thresholds, "f")]
    assert [*network.predict(draw(37)[0])["prediction"]] == named


@pytest.mark.ranks(1)
def test_a_threshold_that_is_given_is_kept_with_the_network(comm, settings):
    run = hp.train(**settings, threshold=0.25).folder
    assert hp.load(run).metadata["thresholds"] == [0.25] * 3
    found, _ = f1_of(hp.load(run), *draw(37), [0.25] * 3)
    assert hp.evaluate(run, threads=1).means["f1_macro"] == pytest.approx(np.mean(found))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("threshold", ["0", "1", "nan", "worst"])
def test_other_thresholds_are_refused(comm, settings, threshold):
    with pytest.raises(hp.UsageError, match="best, or a probability above 0 and below 1"):
        hp.train(**settings, threshold=threshold)
    with pytest.raises(hp.UsageError, match="needs --task multilabel"):
        hp.train(**{**settings, "task": "classify"}, threshold="best")
