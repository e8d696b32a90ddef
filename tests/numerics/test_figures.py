"""What runs tell and save: class weights, averaged weights, frozen parts.

What they learn is compared with torch in tests/contract/test_truth.py; how all classes are drawn
equally often is in test_orders.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn import metrics
from torch.nn import functional as F

import hpctrain as hp
from tests.support.short import ROWS, images, records

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


def more_figures(probabilities, labels):
    """Those of an evaluation after the training, by scikit-learn."""
    areas = [
        metrics.roc_auc_score(labels == k, probabilities[:, k]) for k in np.unique(labels).tolist()
    ]
    answers = probabilities.argmax(1)
    return {
        "top5_accuracy": metrics.top_k_accuracy_score(
            labels, probabilities, k=5, labels=np.arange(10)
        ),
        "auroc": np.mean(areas),
        "f1_macro": metrics.f1_score(labels, answers, average="macro"),
    }


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
    if comm.rank == 0:
        files = Path(result.folder) / "evaluation-test.json", again
        expected_more = more_figures(scores.double().softmax(1).numpy(), labels.numpy())
        for file in files:
            figures = json.loads(file.read_text())
            assert {name: figures[name] for name in expected_more} == pytest.approx(expected_more)
        assert "auroc" not in records(settings, "evaluation")[-1]
    assert abs(expected["loss"] - expected["unweighted_loss"]) > 1e-4
    if comm.rank == 0:
        found = [r for r in records(settings, "evaluation") if r["split"] == "test"]
        found += [json.loads(again.with_name("evaluation-test.json").read_text())]
        found += [json.loads(again.read_text())]
        for figures in found:
            assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)


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


@pytest.mark.parametrize(("balanced", "shuffle"), [(True, "global"), (True, None), (False, None)])
def test_balanced_sampling_draws_all_classes_equally_often(comm, fixed, balanced, shuffle):
    """The loss tells them: that of an image of class k is 128^k."""
    settings = fixed | {"data": f"{fixed['runs_dir']}-3.h5", "epochs": 1, "shuffle": shuffle}
    if comm.rank == 0:
        labels = np.zeros(101, int)
        labels[::11], labels[1::5] = 1, 2  # all classes in each shard
        splits = {"train": (images(101, (8, 8, 1), 3)[0], labels)}
        hp.write_pack(settings["data"], splits, ["a", "b", "c"])
    comm.Barrier()
    loss = "tests.support.own_functions:power_of_class"
    hp.train(**settings, loss=loss, balanced_sampling=balanced)
    if comm.rank == 0:
        total = round(records(settings, "epoch")[0]["loss"] * 101)
        counts = [total // 128**k % 128 for k in range(3)]
        assert sum(counts) == 101 and (counts == [73, 8, 20]) != balanced
        assert max(counts) - min(counts) <= {"global": 1}.get(shuffle, 4) or not balanced


def weights(settings: dict, name: str = "model") -> dict[str, torch.Tensor]:
    folder = Path(settings["runs_dir"]) / settings["run"]
    return load_file(max(folder.glob(f"{name}*.safetensors")))


def test_the_average_is_what_is_validated_tested_and_saved_as_the_best_too(comm, short):
    settings = short | {"ema": 0.999, "final": "ema", "data": f"{short['runs_dir']}-same.h5"}
    if comm.rank == 0:
        same = images(ROWS["test"], (12, 12, 1), 10)
        splits = {"train": images(101, (12, 12, 1), 10), "validation": same, "test": same}
        hp.write_pack(settings["data"], splits, list("abcdefghij"))
    comm.Barrier()
    result = hp.train(**settings)
    assert hp.evaluate(result.folder).loss == pytest.approx(result.figures["test_loss"], rel=1e-5)
    assert result.figures["test_loss"] == result.figures["validation_loss"]
    if comm.rank == 0:
        losses = [record["loss"] for record in records(settings, "evaluation")]
        assert max(losses) - min(losses) < 0.1, "it barely moves"
    best, final = weights(settings, "best"), weights(settings)
    assert all(torch.equal(best[name], final[name]) for name in final)


@pytest.mark.parametrize("tied", ["second", "third"])
def test_tied_parameters_are_frozen_by_either_name(comm, short, tied):
    settings = short | {"model": "tests.support.nets:FineTuned", "freeze": f"{tied}.weight"}
    settings |= {"epochs": 1, "lr": 0.1}
    hp.train(**settings)
    hp.train(**settings | {"run": "slow", "lr": 1e-12})
    found, first = weights(settings), weights(settings | {"run": "slow"})
    assert torch.equal(found["second.weight"], first["second.weight"])
    assert not torch.allclose(found["second.bias"], first["second.bias"], atol=1e-6)
