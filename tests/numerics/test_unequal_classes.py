"""Classes of unequal size: weights in the loss, and sampling that makes up for them.

Gradients with class weights are compared with torch in tests/contract/test_truth.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hpctrain as hp
from tests.support.short import ROWS, digest, images, records

pytestmark = pytest.mark.ranks(3)
WEIGHTS = [0.5, 1, 2, 1, 1, 3, 1, 1, 1, 10]


def labels_of(settings: dict, split: str) -> torch.Tensor:
    return torch.from_numpy(images(ROWS[split], (12, 12, 1), 10)[1])


def scores_of(settings: dict, split: str) -> torch.Tensor:
    """What the trained network answers to a split."""
    pack = hp.read_pack(settings["data"])
    network = hp.load(settings["run"], runs_dir=settings["runs_dir"], trust_code=True)
    with hp.Split(pack, split) as source, torch.no_grad():
        return network.model(hp.read_samples(source, range(len(source))))


def test_an_evaluation_gives_both_losses_and_the_balanced_accuracy(comm, short):
    settings = short | {"class_weights": WEIGHTS, "label_smoothing": 0.2, "epochs": 1}
    result = hp.train(**settings)
    scores, labels = scores_of(settings, "test"), labels_of(settings, "test")
    right = (scores.argmax(1) == labels).double()
    again = Path(result.folder) / "again.json"
    hp.evaluate(result.folder, split="test", batch_size=5, output=str(again))
    expected = {
        "loss": F.cross_entropy(scores, labels, torch.tensor(WEIGHTS)).item(),
        "unweighted_loss": F.cross_entropy(scores, labels).item(),
        "accuracy": right.mean().item(),
        "balanced_accuracy": np.mean([right[labels == k].mean() for k in labels.unique()]),
    }
    assert abs(expected["loss"] - expected["unweighted_loss"]) > 1e-4
    if comm.rank == 0:
        found = [r for r in records(settings, "evaluation") if r["split"] == "test"]
        found += [json.loads(again.with_name("evaluation-test.json").read_text())]
        found += [json.loads(again.read_text())]
        for figures in found:
            assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_an_epoch_is_the_weighted_mean_also_after_a_resume(comm, short):
    """At a learning rate of nothing, it is the loss of the first weights over all images."""
    settings = short | {"class_weights": WEIGHTS, "lr": 1e-12, "validate_every": "3steps"}
    settings |= {"model": "tests.support.nets:frozen"}
    stopped = hp.train(**settings, on_evaluation=lambda record: record["step"] == 3)
    assert (stopped.status, stopped.step) == ("stopped", 4)
    assert hp.train(**settings).status == "done"
    loss = F.cross_entropy(
        scores_of(settings, "train"), labels_of(settings, "train"), torch.tensor(WEIGHTS)
    )
    if comm.rank == 0:
        losses = [record["loss"] for record in records(settings, "epoch")]
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-4)


@pytest.mark.ranks(1)
def test_a_run_goes_on_with_the_weights_that_it_began_with(comm, fixed):
    settings = fixed | {"class_weights": WEIGHTS}
    whole = digest(comm, settings | {"run": "whole"})
    digest(comm, settings | {"epochs": 1})
    with pytest.raises(hp.UsageError, match="begun with --class-weights 0.5,1,.* not with"):
        hp.train(**settings | {"class_weights": WEIGHTS[::-1]})
    assert digest(comm, settings) == whole != digest(comm, fixed | {"run": "plain"})


@pytest.mark.ranks(1)
def test_balanced_weights_are_those_of_scikit_learn(comm, short):
    """Samples by classes times samples of the class; of no sample it would be infinite."""
    settings = short | {"class_weights": "balanced", "epochs": 1}
    hp.train(**settings)
    if comm.rank == 0:
        plan = json.loads((Path(settings["runs_dir"]) / "a/plan.json").read_text())
        counts = np.bincount(labels_of(settings, "train"), minlength=10)
        assert plan["class_weights"] == pytest.approx((101 / (10 * counts)).tolist())
        splits = {"train": images(31, (12, 12, 1), 4)}
        hp.write_pack(Path(settings["runs_dir"]) / "yak.h5", splits, [*"abcd", "yak"])
    comm.Barrier()
    with pytest.raises(hp.UsageError, match="no training image is of class yak"):
        hp.train(**settings | {"data": f"{settings['runs_dir']}/yak.h5", "run": "b"})


@pytest.mark.parametrize("shuffle", ["partition", "global"])
def test_balanced_sampling_is_the_same_when_staged_or_resumed(comm, fixed, shuffle):
    """Also where a host stages only its part of the pack, and reads with a small buffer."""
    settings = fixed | {"balanced_sampling": True, "shuffle": shuffle, "validate_every": "3steps"}
    whole = digest(comm, settings | {"run": "whole"})
    staged = {"stage": f"{settings['runs_dir']}/local", "read_buffer": "4K"}
    assert digest(comm, settings | staged | {"run": "staged"}) == whole
    stopped = hp.train(**settings, on_evaluation=lambda record: record["step"] == 3)
    assert stopped.status == "stopped"
    assert digest(comm, settings) == whole


@pytest.mark.parametrize(
    ("settings", "most"),  # images of a class above those of another
    [
        ({"shuffle": "global"}, 1),
        ({}, 4),
        ({"balanced_sampling": False}, 101),
    ],
    ids=["global", "partition", "off"],
)
def test_balanced_sampling_draws_all_classes_equally_often(comm, fixed, settings, most):
    """The loss tells them: that of an image of class k is 128^k."""
    data = f"{fixed['runs_dir']}-3.h5"
    if comm.rank == 0:
        labels = np.zeros(101, int)
        labels[::11], labels[1::5] = 1, 2  # all classes in each shard
        splits = {"train": (images(101, (8, 8, 1), 3)[0], labels)}
        hp.write_pack(data, splits, ["a", "b", "c"])
    comm.Barrier()
    own = {"data": data, "loss": "tests.support.own_functions:power_of_class", "epochs": 1}
    hp.train(**fixed | own | {"balanced_sampling": True} | settings)
    if comm.rank == 0:
        (epoch,) = records(fixed, "epoch")
        total = round(epoch["loss"] * 101)
        counts = [total // 128**k % 128 for k in range(3)]
        assert sum(counts) == 101 and min(counts) > 0
        assert max(counts) - min(counts) <= most
        assert most < 101 or counts == [73, 8, 20]
