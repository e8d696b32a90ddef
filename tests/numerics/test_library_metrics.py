"""Metrics of torchmetrics over blocks: the same bits on any ranks, and the values of scikit-learn.

Predictions are float64, and so are all figures, also where torchmetrics itself computes in float32.
"""

from __future__ import annotations

import functools
import math
import random

import numpy as np
import pytest
import torch
from mpi4py import MPI
from scipy import stats
from sklearn import metrics

import hpctrain as hp
from tests.support.api import find_part, library_metrics, parts, tallied

torchmetrics = pytest.importorskip("torchmetrics")
ON_RANKS = pytest.mark.ranks(3)
EXACT = dict(rel=1e-12, abs=1e-12, nan_ok=True)
NEEDED = {"FBetaScore": "beta=0.5", "MinkowskiDistance": "p=3.0"}
NEEDED |= {"CriticalSuccessIndex": "threshold=0.8"}
WIDTHS = {"class": 5, "classes": 4, "values": 2, "": 1}


def draw(kind, rows, width, seed=0):
    """Predictions, and targets as a pack has them: some unknown, the last class rare or absent."""
    numbers = np.random.default_rng([seed, rows])
    drawn = numbers.standard_normal((rows, width))
    if kind == "class":
        targets = numbers.integers(0, width, rows) % max(width - (rows < 20), 1)
        powers = np.exp(np.round(drawn + np.eye(width)[targets], 1))  # with ties
        return powers / powers.sum(1, keepdims=True), targets
    if kind == "classes":
        present = numbers.choice(np.array([0, 1, 255], np.uint8), (rows, width), p=[0.5, 0.4, 0.1])
        return 1 / (1 + np.exp(-np.round(drawn + (present == 1), 1))), present
    values = (numbers.random((rows, width)) + 0.5).astype(np.float32)
    predictions = values + 0.3 * np.abs(drawn)
    if kind == "values":
        values[numbers.random((rows, width)) < 0.1] = np.nan
        return predictions, values
    shape = (rows, 1, 3, 2)
    return np.repeat(predictions, 6, 1).reshape(shape) + 0.1, np.repeat(values, 6, 1).reshape(shape)


def make(texts, kind, width):
    names = [f"c{number}" for number in range(width)] if kind else []
    named = [find_part("metric", f"torchmetrics:{text}") for text in texts]
    return library_metrics.make_metrics({part.name: part for part in named}, kind, names)


def tally_of(comm, made, kind, predictions, targets, **options):
    """The tally of all rows, on the ranks and in this process alone."""

    def measured(chosen):
        values = {"predictions": predictions[chosen]}
        if not kind:
            values["targets"] = targets[chosen]
        return targets[chosen], values

    def figures_on(ranks):
        tally = library_metrics.LibraryMetrics(made, kind, None, **options)
        return tallied(ranks, tally, len(targets), measured).figures()

    figures = figures_on(comm)
    if comm.rank == 0 and comm.size > 1:
        assert repr(figures) == repr(figures_on(MPI.COMM_SELF)), "the same bits"
    return figures


@functools.cache
def all_of(kind, width):
    """Every accepted name that is for targets of this kind, with the arguments that it needs."""
    texts = []
    for name in parts.accepted_names("metric", "torchmetrics"):
        needed = next((given for end, given in NEEDED.items() if name.endswith(end)), "")
        try:
            make([f"{name}({needed})"], kind, width)
        except hp.UsageError:
            continue
        texts.append(f"{name}({needed})")
    return texts


def whole(made, kind, predictions, targets):
    """The figures of torchmetrics, updated once with all rows, in float64."""
    sample = library_metrics.make_sample(predictions, targets, kind)
    figures = {}
    for metric in made:
        figures |= metric.named(metric.of_parts(sample, (slice(None),)))
    return figures


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.ranks(1, 3, pytest.param(5, marks=pytest.mark.slow))
def test_every_metric_has_the_same_bits_on_any_ranks_and_the_value_of_the_whole(comm, kind):
    """On splits of 1 row, of few in which a class is missing, and of many."""
    width = WIDTHS[kind]
    made = make(all_of(kind, width), kind, width)
    assert len(made) > {"class": 30, "classes": 30, "values": 15, "": 15}[kind]
    for rows in (1, 13, 61):
        drawn = draw(kind, rows, width)
        figures = tally_of(comm, made, kind, *drawn)
        for metric in made if comm.rank == 0 else ():
            try:
                expected = whole([metric], kind, *drawn)
            except hp.UsageError:  # the library fails, for example of one row
                expected = dict.fromkeys(metric.figures, np.nan)
            assert {name: figures[name] for name in expected} == pytest.approx(expected, **EXACT)


CLASSES = {
    "MulticlassAccuracy(average=micro)": lambda p, t: metrics.accuracy_score(t, p.argmax(1)),
    "MulticlassAUROC()": lambda p, t: metrics.roc_auc_score(t, p, multi_class="ovr"),
    "MulticlassF1Score()": lambda p, t: metrics.f1_score(t, p.argmax(1), average="macro"),
    "MulticlassCohenKappa()": lambda p, t: metrics.cohen_kappa_score(t, p.argmax(1)),
    "MulticlassJaccardIndex()": lambda p, t: metrics.jaccard_score(t, p.argmax(1), average="macro"),
    "MulticlassMatthewsCorrCoef()": lambda p, t: metrics.matthews_corrcoef(t, p.argmax(1)),
    "MulticlassAveragePrecision()": lambda p, t: metrics.average_precision_score(
        np.eye(5)[t], p, average="macro"
    ),
}
VALUES = {
    "R2Score()": metrics.r2_score,
    "MeanSquaredError(squared=False)": metrics.root_mean_squared_error,
    "MeanAbsoluteError()": metrics.mean_absolute_error,
    "MeanSquaredLogError()": metrics.mean_squared_log_error,
    "ExplainedVariance()": metrics.explained_variance_score,
    "PearsonCorrCoef()": lambda t, p: stats.pearsonr(t, p)[0],
    "SpearmanCorrCoef()": lambda t, p: stats.spearmanr(t, p)[0],
    "KendallRankCorrCoef()": lambda t, p: stats.kendalltau(t, p)[0],
}


@ON_RANKS
def test_figures_of_classes_are_those_of_scikit_learn(comm):
    predictions, targets = draw("class", 301, 5)
    predictions += np.random.default_rng(1).random(predictions.shape) * 1e-3  # argmax has no ties
    predictions /= predictions.sum(1, keepdims=True)
    made = make(CLASSES, "class", 5)
    expected = {
        metric.name: compute(predictions, targets)
        for metric, compute in zip(made, CLASSES.values(), strict=True)
    }
    assert tally_of(comm, made, "class", predictions, targets) == pytest.approx(expected, **EXACT)


@ON_RANKS
def test_unknown_entries_of_classes_are_left_out(comm):
    predictions, targets = draw("classes", 301, 4)
    made = make(["MultilabelAUROC()", "MultilabelF1Score()"], "classes", 4)
    areas, scores = [], []
    for column, true in zip(predictions.T, targets.T, strict=True):
        known = true < 255
        areas.append(metrics.roc_auc_score(true[known], column[known]))
        scores.append(metrics.f1_score(true[known], column[known] > 0.5))
    expected = {"MultilabelAUROC": np.mean(areas), "MultilabelF1Score": np.mean(scores)}
    assert tally_of(comm, made, "classes", predictions, targets) == pytest.approx(expected, **EXACT)


@ON_RANKS
@pytest.mark.parametrize("left", [0, 20])
def test_samples_of_which_no_class_is_known_are_left_out(comm, left):
    """Also if it is none that is left: figures by class, too, are NaN then."""
    predictions, targets = draw("classes", 61, 4)
    targets[left:] = 255
    texts = ["MultilabelExactMatch()", "MultilabelRankingAveragePrecision()"]
    made = make([*texts, "MultilabelEER()", "MultilabelRecall(average=None)"], "classes", 4)
    figures = tally_of(comm, made, "classes", predictions, targets)
    known = (predictions[:left], targets[:left])
    assert len(figures) == 10
    if not left:
        assert all(math.isnan(figure) for figure in figures.values())
    else:
        assert figures == pytest.approx(tally_of(comm, made, "classes", *known), **EXACT)


@ON_RANKS
def test_figures_of_values_are_those_of_scikit_learn_for_the_known_of_each_column(comm):
    """Also far from 0, and the mean over columns."""
    predictions, targets = draw("values", 301, 2)
    targets[:, 1] += 1000
    predictions[:, 1] += 1000
    made = make(VALUES, "values", 2)
    expected = {}
    for metric, compute in zip(made, VALUES.values(), strict=True):
        by_column = []
        for number in range(2):
            known = ~np.isnan(targets[:, number])
            true = targets[known, number].astype(np.float64)
            by_column.append(compute(true, predictions[known, number]))
            expected[f"{metric.name} of c{number}"] = by_column[-1]
        expected[metric.name] = np.mean(by_column)
    figures = tally_of(comm, made, "values", predictions, targets)
    # torchmetrics subtracts squares of 1,000, and adds a small number to deviations of ranks
    close = dict(rel=1e-8, abs=1e-12)
    for name, value in expected.items():
        is_far = name.startswith(("R2", "Explained", "Spearman"))
        assert figures[name] == pytest.approx(value, **(close if is_far else EXACT)), name


@pytest.mark.ranks(3)
def test_two_classes_have_figures_of_the_second_one(comm):
    predictions, targets = draw("class", 61, 2)
    made = make(["BinaryAUROC()", "BinaryF1Score(threshold=0.3)"], "class", 2)
    expected = {
        "BinaryAUROC": metrics.roc_auc_score(targets, predictions[:, 1]),
        "BinaryF1Score": metrics.f1_score(targets, predictions[:, 1] > 0.3),
    }
    assert tally_of(comm, made, "class", predictions, targets) == pytest.approx(expected, **EXACT)


@ON_RANKS
def test_figures_by_class_have_their_names_and_classes_without_samples_are_as_the_library_says(
    comm, monkeypatch
):
    said = []
    monkeypatch.setattr("hpctrain.tasks.library_metrics.say", lambda text, file: said.append(text))
    predictions, targets = draw("class", 13, 5)  # none is of class 4
    made = make(["MulticlassAUROC(average=None)", "MulticlassRecall(average=None)"], "class", 5)
    figures = tally_of(comm, made, "class", predictions, targets)
    assert [*figures][::5] == ["MulticlassAUROC of c0", "MulticlassRecall of c0"]
    assert figures["MulticlassRecall of c4"] == 0 and figures["MulticlassAUROC of c4"] == 0
    right = predictions.argmax(1) == targets
    assert figures["MulticlassRecall of c1"] == right[targets == 1].mean()
    warned = "--metric torchmetrics:MulticlassAUROC(average=None): No positive samples"
    assert sum(text.startswith(warned) for text in said) == (comm.rank == 0), "once"


@ON_RANKS
def test_predictions_of_nan_and_a_failing_library_give_nan_and_no_error(comm, monkeypatch):
    said = []
    monkeypatch.setattr("hpctrain.tasks.library_metrics.say", lambda text, file: said.append(text))
    predictions, targets = draw("class", 61, 5)
    predictions[40, 2] = np.nan
    made = make(["MulticlassAUROC()", "MulticlassAccuracy()"], "class", 5)
    figures = tally_of(comm, made, "class", predictions, targets)
    assert np.isnan([*figures.values()]).all() and len(figures) == 2
    predictions, targets = draw("values", 61, 1)
    predictions[50] = -1  # not in the domain of this deviance
    made = make(["TweedieDevianceScore(power=1.5)", "MeanSquaredError()"], "values", 1)
    figures = tally_of(comm, made, "values", predictions, targets)
    assert np.isnan(figures["TweedieDevianceScore"]) and figures["MeanSquaredError"] > 0
    failed = "(power=1.5): NaN: ValueError: For power=1.5, "
    assert sum(failed in text for text in said) == (comm.rank == 0)


@ON_RANKS
def test_what_rank_0_cannot_hold_is_refused_with_what_helps(comm):
    predictions, targets = draw("class", 61, 5)
    made = make(["MulticlassAUROC()", "MulticlassAccuracy()"], "class", 5)
    size = 61 * 8 * 6
    tally_of(comm, made, "class", predictions, targets, largest=size)
    with pytest.raises(hp.UsageError, match=r"AUROC\(\) needs all .* 61 samples.*thresholds=200"):
        tally_of(comm, made, "class", predictions, targets, largest=size - 1)
    made = make(["MulticlassAUROC(thresholds=200)"], "class", 5)
    tally_of(comm, made, "class", predictions, targets, largest=0)


# What is refused, and why


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        ("MulticlassConfusionMatrix()", "class", "is refused: it gives a matrix"),
        ("MulticlassROC()", "class", "is refused: it gives a curve"),
        ("MulticlassAUROCC()", "class", "did you mean 'MulticlassAUROC'"),
        ("MulticlassAUROC(num_classes=5)", "class", "hpctrain gives num_classes: leave it out"),
        ("MulticlassAUROC(ignore_index=0)", "class", "hpctrain gives ignore_index"),
        (
            "MulticlassAUROC(avrage=None)",
            "class",
            "avrage.*it is MulticlassAUROC\\(num_classes, av",
        ),
        ("MulticlassAUROC(average=makro)", "class", "average.*makro"),
        ("MultilabelAUROC()", "class", "not for one class an image: MulticlassAUROC is"),
        ("BinaryAUROC()", "class", "not for one class an image: MulticlassAUROC is"),
        ("MulticlassAUROC()", "classes", "number of classes an image: MultilabelAUROC is"),
        ("R2Score()", "class", "is not for one class an image$"),
        ("MulticlassAUROC()", "values", "is not for columns of values$"),
        ("AUROC()", "", "is not for images"),
        ("AUROC(task=binary)", "class", "hpctrain gives task"),
        ("Accuracy(multidim_average=samplewise)", "class", "hpctrain gives multidim_average"),
        ("MulticlassAUROC(sync_on_compute=True)", "class", "sync_on_compute is refused"),
    ],
)
def test_what_is_no_metric_of_a_task_is_refused_by_name(text, kind, error):
    with pytest.raises(hp.UsageError, match=f"^--metric torchmetrics:.*{error}"):
        make([text], kind, WIDTHS[kind])


class Cheat(torchmetrics.Metric):
    """A metric that sums right answers, with a defect."""

    calls = 0

    def __init__(self, defect):
        super().__init__()
        self.defect = defect
        self.add_state("right", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predictions, targets):
        Cheat.calls += 1
        right = (predictions.argmax(1) == targets).double()
        self.right += right.sum()
        self.total += len(targets)
        match self.defect:
            case "counter":
                self.right += Cheat.calls
            case "blocks":
                self.right += right[0]
            case "mean of blocks":
                self.total += 1 - len(targets)
                self.right += right.mean() - right.sum()
            case "draws":
                self.right += 0 * torch.rand(())
            case "draws of numpy":
                self.right += 0 * np.random.random()
            case "draws of Python":
                self.right += 0 * random.random()

    def compute(self):
        return self.right / self.total


def check_cheat(defect):
    made = Cheat(defect).set_dtype(torch.float64)
    cheat = library_metrics.LibraryMetric(
        "Cheat", "--metric cheat", [made], lambda sample: [sample], ()
    )
    predictions, targets = draw("class", 32, 5)
    cheat.check(library_metrics.make_sample(predictions, targets, "class"))


def test_metrics_that_would_depend_on_the_ranks_are_refused():
    check_cheat("")
    for defect in ("counter", "blocks", "mean of blocks"):
        with pytest.raises(hp.UsageError, match="--metric cheat gives other figures when the same"):
            check_cheat(defect)
    generators = {
        "draws": "torch's default generator",
        "draws of numpy": "numpy.random",
        "draws of Python": "random",
    }
    for defect, generator in generators.items():
        text = f"--metric cheat draws random numbers from {generator}:"
        with pytest.raises(hp.UsageError, match=text):
            check_cheat(defect)


def test_no_process_group_is_begun():
    assert not torch.distributed.is_initialized()


def test_sums_of_blocks_are_rounded_once():
    """Also where they differ by 16 orders of magnitude."""
    numbers = np.random.default_rng(3)
    predictions = numbers.random((700, 1)) * 10.0 ** numbers.integers(-8, 8, (700, 1))
    targets = np.zeros((700, 1), np.float32)
    (metric,) = made = make(["MeanAbsoluteError()"], "values", 1)
    figures = tally_of(MPI.COMM_SELF, made, "values", predictions, targets)
    blocks = [block.sum().item() for block in torch.from_numpy(predictions).split(7)]
    assert figures == {metric.name: math.fsum(blocks) / 700}
    assert sum(blocks) != math.fsum(blocks)
