"""--metric and --loss of other libraries in whole runs: recorded, ranked by, evaluated again."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.api import find_part, losses
from tests.support.packs import draw_entries, make_pack
from tests.support.pictures import arrays
from tests.support.ranks import command
from tests.support.records import read_strictly
from tests.support.runs import train_once

ROWS = {"train": 101, "validation": 13, "test": 23}
OWN = "tests.support.own_functions:correct"


def kinds(run, kind):
    return [record for record in read_strictly(run) if record["kind"] == kind]


def entries_pack(path, kind):
    """A pack of several classes (1), or values (2) in two columns; some are unknown."""
    splits = {}
    for split, rows in ROWS.items():
        drawn = draw_entries(np.random.default_rng(rows), rows, (28, 28, 1))
        splits[split] = drawn[0], drawn[kind]
    names = [f"c{number}" for number in range(splits["train"][1].shape[1])]
    hp.write_pack(path, splits, **({"columns": names} if kind == 2 else {"classes": names}))
    return path


def test_a_classifier_has_equal_figures_on_any_ranks_and_is_ranked_by_one(tmp_path):
    """Parts, two of one class among them, and a function; the loss is one of torch.nn."""
    pack = make_pack(tmp_path / "small.h5", ROWS)
    words = ["--loss", "torch:CrossEntropyLoss(label_smoothing=0.1)", "--metric", OWN]
    words += ["--metric", "torchmetrics:MulticlassAUROC()", "--best-by", "MulticlassAUROC"]
    words += ["--metric", "torchmetrics:Accuracy()", "--final", "best", "--patience", "3"]
    words += ["--metric", "torchmetrics:MulticlassFBetaScore(beta=2.0, average=None)"]
    words += ["--metric", "torchmetrics:MulticlassFBetaScore(beta=0.5)"]
    run, *others = (train_once(pack, *words, run=f"on{ranks}", ranks=ranks) for ranks in (1, 2, 3))
    for other in others:
        for kind in ("evaluation", "digest", "epoch"):
            for mine, theirs in zip(kinds(run, kind), kinds(other, kind), strict=True):
                for record in (mine, theirs):
                    for measured in ("seconds", "images_per_second", "time"):
                        record.pop(measured, None)
                assert mine == theirs
    first, *_ = kinds(run, "run")
    directions = {"MulticlassAUROC": "max", "accuracy": "max", "loss": "min", "Accuracy": "max"}
    directions["torchmetrics:MulticlassFBetaScore(beta=0.5)"] = "max"
    assert first["figures"] == directions and next(iter(first["figures"])) == "MulticlassAUROC"
    *_, test = kinds(run, "evaluation")
    metrics = test["metrics"]
    assert metrics["Accuracy"] == metrics["correct"] == test["accuracy"]
    of_classes = [name for name in metrics if "(beta=2.0, average=None) of " in name]
    assert len(of_classes) == 10 and len(metrics) == 14
    ended = command(3, "evaluate", run, "--trust-code", "--batch-size", "7")
    assert f"MulticlassAUROC {metrics['MulticlassAUROC']:.4f}" in ended.out
    ended = command(1, "evaluate", run)
    assert ended.code == 2 and f"names {OWN}: a function that a file names" in ended.err
    given = ["--metric", "torchmetrics:MulticlassCalibrationError()", "--output", tmp_path / "e"]
    ended = command(2, "evaluate", run, *given)
    written = json.loads((tmp_path / "e").read_text())
    assert [*written["metrics"]] == ["MulticlassCalibrationError"], "a loss needs no trust"
    assert written["loss"] == pytest.approx(test["loss"], rel=1e-6)
    answers = hp.load(run).predict(arrays(pack, "test")[0])
    assert len(answers["label"]) == ROWS["test"], "needs no library"


TASKS = {
    "multilabel": (1, {"MultilabelAveragePrecision": "mAP", "MultilabelF1Score": None}),
    "regress": (2, {"R2Score": "r2", "MeanAbsoluteError of c1": None}),
    "denoise": (1, {"MeanSquaredError": "loss"}),
}


@pytest.mark.parametrize("task", TASKS)
def test_figures_of_a_library_are_those_of_the_task(tmp_path, task):
    """The targets, units and unknown entries are the right ones, on 3 ranks."""
    kind, expected = TASKS[task]
    pack = entries_pack(tmp_path / "p.h5", kind)
    words = ["--task", task]
    for name in expected:
        words += ["--metric", f"torchmetrics:{name.partition(' ')[0]}()"]
    if task == "regress":
        words += ["--best-by", "R2Score", "--loss", "torch:SmoothL1Loss(beta=0.5)"]
    run = train_once(pack, *words, ranks=3)
    for record in kinds(run, "evaluation"):
        for name, figure in expected.items():
            value = record["metrics"][name]
            assert value is not None
            if figure:
                assert value == pytest.approx(record[figure], rel=1e-5), name


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--metric", "torchmetrics:MultilabelAUROC()"], "MulticlassAUROC is"),
        (["--metric", "torchmetrics:AUROC()"] * 2, "AUROC() is given twice"),
        (["--metric", "torchmetrics:AUROC(beta=1)"], "it is AUROC(task, thresholds=None"),
        (["--metric", "torchmetrics:AUROC()", "--best-by", "AUROC:min"], "the max is the best"),
        (["--best-by", "AUROC"], "no figure of --task classify"),
        (
            ["--metric", "torchmetrics:Recall(average=None)", "--best-by", "Recall"],
            "have no Recall, but",
        ),
        (
            ["--metric", OWN, "--metric", OWN.replace("correct", "also_correct")],
            "more than one figure is named correct",
        ),
        (["--loss", "torch:HuberLoss()"], "there are CrossEntropyLoss, MultiMarginLoss"),
        (["--loss", "torch:NLLLoss()"], "it takes logarithms of probabilities"),
        (["--loss", "torch:CrossEntropyLoss(reduction=sum)"], "hpctrain gives reduction"),
        (["--loss", "torch:CrossEntropyLoss(weight=[1, 2])"], "2 numbers for 10 classes"),
        (["--loss", "torch:CrossEntropyLoss([1, 2])"], "weight has 2 numbers for 10 classes"),
        (["--loss", "torch:CrossEntropyLoss(weight=2)"], "weight is a list of numbers"),
        (["--loss", "torch:CrossEntropyLoss()", "--label-smoothing", "0.1"], "exclude each other"),
        (["--loss", "torch:MultiMarginLoss(p=3)"], "only p == 1 and p == 2"),
    ],
)
def test_what_cannot_be_computed_is_one_line_before_the_first_step(tmp_path, words, error):
    pack = make_pack(tmp_path / "small.h5", ROWS)
    given = ["--data", pack, "--runs-dir", tmp_path / "runs", "--progress", "none"]
    ended = command(1, "train", *given, *words)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and error in line and not (tmp_path / "runs").exists()


def test_no_gradient_of_an_unknown_entry_is_nan():
    """Also of losses with an infinite slope: outputs are masked, too."""
    outputs = torch.tensor([[1.0, torch.inf], [2.0, 3.0]], requires_grad=True)
    targets = torch.tensor([[0.5, torch.nan], [torch.nan, 1.0]])
    loss = losses.make_loss(find_part("loss", "torch:MSELoss()"), "values", ("a", "b"), outputs)
    values = loss(outputs, targets)
    values.sum().backward()
    assert values.tolist() == [0.25, 4.0]
    assert outputs.grad.tolist() == [[1.0, 0.0], [0.0, 4.0]]
