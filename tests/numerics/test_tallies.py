"""Areas under curves, F1 and errors of values: those of scikit-learn, to the last bit on any ranks.

Scores that are counted in intervals differ by at most the pairs within one.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi4py import MPI
from scipy.special import logsumexp
from sklearn import metrics

from tests.support.api import Residuals, Scores, tallied, task_class

NAMES = ("ties", "extremes", "floats", "all", "none", "unknown")
SIZES = (1, 61, 500)
ON_RANKS = pytest.mark.ranks(1, 3, 5)
exact = dict(rel=1e-12, abs=1e-12)


def draw(rows):
    """Scores (n, 6) and targets, of which some are unknown, and three classes have one kind."""
    random = np.random.default_rng(rows)
    targets = random.choice(np.array([0, 1, 255], np.uint8), (rows, 6), p=[0.5, 0.4, 0.1])
    targets[:, 3] = 1
    targets[:, 4] = random.choice([0, 255], rows)
    targets[:, 5] = 255
    scores = random.standard_normal((rows, 6)) + (targets == 1)
    scores[:, 0] = np.round(scores[:, 0])
    extremes = [-3.4e38, -1e-45, -0.0, 0.0, 1e-45, 1.0, np.nextafter(1, 2, dtype="f"), 3.4e38]
    scores[:, 1] = random.choice(extremes, rows)
    return scores.astype(np.float32), targets


def merged(comm, scores, targets, *arguments):
    """The tally of all rows, on the ranks and in this process alone."""

    def measured(chosen):
        return targets[chosen], {"scores": scores[chosen]}

    several, alone = (
        tallied(ranks, Scores(NAMES[: scores.shape[1]], *arguments), len(scores), measured)
        for ranks in (comm, MPI.COMM_SELF)
    )
    assert repr(several.by_class) == repr(alone.by_class)
    assert repr(several.figures()) == repr(alone.figures())
    return several


@ON_RANKS
@pytest.mark.parametrize("rows", SIZES)
def test_areas_and_f1_are_those_of_scikit_learn(comm, rows):
    scores, targets = draw(rows)
    cutoffs = (0.0, 1.0, -0.3, 0.0, 0.0, 0.0)
    tally = merged(comm, scores, targets, cutoffs)
    expected, right, answered, positives = [], 0, 0, 0
    for k, found in enumerate(tally.by_class):
        known = targets[:, k] < 255
        true, score = targets[known, k], scores[known, k].astype(np.float64)
        assert (found.known, found.positives) == (known.sum(), true.sum())
        answer = score >= cutoffs[k]
        right += (answer & (true == 1)).sum()
        answered, positives = answered + answer.sum(), positives + true.sum()
        if true.any():
            assert found.f1 == pytest.approx(metrics.f1_score(true, answer), **exact)
        if not 0 < true.sum() < len(true):
            assert np.isnan([found.auroc, found.average_precision]).all()
            assert NAMES[k] in tally.left_out
            continue
        areas = metrics.roc_auc_score(true, score), metrics.average_precision_score(true, score)
        assert (found.auroc, found.average_precision) == pytest.approx(areas, **exact)
        cutoffs_to_try = np.unique(score.clip(-80, 12))  # beyond, none is chosen
        best = max(metrics.f1_score(true, score >= cutoff) for cutoff in cutoffs_to_try)
        at_best = metrics.f1_score(true, score >= found.best_threshold)
        assert at_best == pytest.approx(best, **exact)
        of_same = [c for c in cutoffs_to_try if metrics.f1_score(true, score >= c) >= at_best]
        assert (score >= found.best_threshold).sum() == (score >= max(of_same)).sum(), "the highest"
        expected.append((areas[1], areas[0], found.f1))
    figures = tally.figures()
    if expected:
        means = dict(zip(("mAP", "auroc", "f1_macro"), np.mean(expected, 0), strict=True))
        assert {name: figures[name] for name in means} == pytest.approx(means, **exact)
        assert figures["f1_micro"] == pytest.approx(2 * right / (answered + positives), **exact)
    assert len(expected) == (3 if rows > 1 else 0) and np.isnan(figures["mAP"]) == (rows == 1)


@ON_RANKS
def test_the_best_thresholds_give_the_f1_that_they_promise(comm):
    scores, targets = draw(500)
    chosen = merged(comm, scores, targets)
    given = merged(comm, scores, targets, chosen.best_thresholds)
    assert given.figures() == pytest.approx(chosen.figures(), nan_ok=True, **exact)
    assert chosen.best_thresholds[3:] == (0, 0, 0), "classes of which nothing can be chosen"
    fixed = merged(comm, scores, targets, (0.0,) * 6)
    assert given.figures()["f1_macro"] > fixed.figures()["f1_macro"]


@pytest.mark.ranks(1)
def test_rounding_does_not_move_a_score_below_the_best_threshold(comm):
    """Also the lowest of all, where F1 is largest if each sample is of the class."""
    scores = np.array([[-0.3], [-0.25], [0.1], [2.0]], np.float32)
    targets = np.array([[1], [1], [0], [1]], np.uint8)
    (threshold,) = merged(comm, scores, targets).best_thresholds
    assert -0.5 < threshold < -0.31


@ON_RANKS
def test_scores_in_intervals_differ_by_the_pairs_within_one(comm):
    """1,024 of them from -16 to 16; 0 is the end of one, so that F1 at 0.5 is exact."""
    random = np.random.default_rng(0)
    targets = (random.random((3001, 3)) < 0.2).astype(np.uint8)
    targets[:, 2] = random.choice([0, 1, 255], 3001)
    scores = (4 * random.standard_normal((3001, 3)) + 3 * (targets == 1)).astype(np.float32)
    whole = merged(comm, scores, targets, (0.0,) * 3)
    parts = merged(comm, scores, targets, (0.0,) * 3, 4 * scores.size - 1)
    assert not merged(comm, scores, targets, (0.0,) * 3, 4 * scores.size).is_binned
    assert [*parts.figures()] == ["mAP_binned", "auroc_binned", "f1_macro", "f1_micro"]
    for k, (one, other) in enumerate(zip(whole.by_class, parts.by_class, strict=True)):
        known = targets[:, k] < 255
        rounded = np.clip(np.floor(scores[known, k] * 32) / 32, -16, 16 - 1 / 32)
        expected = metrics.roc_auc_score(targets[known, k], rounded)
        assert other.auroc == pytest.approx(expected, **exact)
        assert abs(one.auroc - other.auroc) < 2e-4 and one.auroc != other.auroc
        assert one.average_precision == pytest.approx(other.average_precision, abs=0.02)
        assert (one.f1, one.right, one.answered) == (other.f1, other.right, other.answered)
        answer = scores[known, k] >= other.best_threshold
        best = metrics.f1_score(targets[known, k], answer)
        assert best == pytest.approx(one._replace(f1=0).f1 + best) and best > other.f1 - 0.01


@ON_RANKS
@pytest.mark.parametrize("largest", [1 << 30, 0])
def test_scores_of_nan_give_figures_of_nan(comm, largest):
    scores, targets = draw(61)
    scores[40, 2] = np.nan
    scores[:, 5] = np.nan  # of which none counts
    tally = merged(comm, scores, targets, (0.0,) * 6, largest)
    assert all(np.isnan(value) for value in tally.figures().values())
    assert np.isnan(tally.by_class[2].auroc) and not np.isnan(tally.by_class[0].auroc)
    assert tally.by_class[5].known == 0
    (table,) = tally.tables()
    assert table.row_count == 6
    rows = json.loads(json.dumps(tally.as_json()))["per_class"]
    assert [row["class"] for row in rows] == [*NAMES] and rows[0]["threshold"] == 0.5


@ON_RANKS
@pytest.mark.parametrize("classes", [2, 4, 7])
def test_areas_of_a_classifier_are_those_of_each_class_against_the_rest(comm, classes):
    """Of two classes, that of the second; also where probabilities are rounded to 0 and 1."""
    generator = torch.Generator().manual_seed(classes)
    labels = torch.randint(0, classes, (101,), generator=generator)
    outputs = 30 * torch.randn(101, classes, generator=generator)
    outputs[range(101), labels] += 20
    outputs[50:60] = outputs[40:50]  # equal scores
    task = task_class("classify")(classes=("a",) * classes, has_all_figures=True)

    def measured(chosen):
        block = outputs[chosen], None, labels[chosen]
        return labels[chosen].numpy(), {
            name: value.numpy() for name, value in tally.measure(*block).items()
        }

    figures = {}
    for tally in task.tallies():
        figures |= tallied(comm, tally, 101, measured).figures()
    pair = labels.numpy(), outputs.double().numpy()
    logits = pair[1]
    if classes == 2:
        expected = metrics.roc_auc_score(labels, logits[:, 1] - logits[:, 0])
    else:
        others = [np.delete(logits, k, 1) for k in range(classes)]
        odds = [logits[:, k] - logsumexp(rest, 1) for k, rest in enumerate(others)]
        areas = [metrics.roc_auc_score(labels == k, odds[k]) for k in range(classes)]
        expected = np.mean(areas)
    assert figures["auroc"] == pytest.approx(expected, **exact)
    answers = logits.argmax(1)
    f1 = metrics.f1_score(labels, answers, average="macro")
    assert figures["f1_macro"] == pytest.approx(f1, **exact)
    assert ("top5_accuracy" in figures) == (classes > 5)
    if classes > 5:
        assert figures["top5_accuracy"] == metrics.top_k_accuracy_score(labels, logits, k=5)


@ON_RANKS
@pytest.mark.parametrize("rows", SIZES)
def test_errors_of_values_are_those_of_scikit_learn(comm, rows):
    """Of a column far from 0, too; R2 of equal values is undefined."""
    random = np.random.default_rng(rows)
    true = random.standard_normal((rows, 4)).astype(np.float32)
    true[:, 0] += np.float32(1e5)
    true[random.random(rows) < 0.3, 1] = np.nan
    true[:, 2] = 0.1
    true[:, 3] = np.nan
    predicted = np.nan_to_num(true) + random.standard_normal((rows, 4)) * 0.1
    deviations = (0.5, 2.0, 1.0, 3.0)

    def measured(chosen):
        return true[chosen], {"predicted": predicted[chosen]}

    tally, alone = (
        tallied(ranks, Residuals("abcd", deviations, None, most=3), rows, measured)
        for ranks in (comm, MPI.COMM_SELF)
    )
    assert repr((tally.by_column, tally.worst)) == repr((alone.by_column, alone.worst))
    assert np.array_equal(tally.sample.rows, alone.sample.rows)
    shares = []
    for k, found in enumerate(tally.by_column[:3]):
        known = ~np.isnan(true[:, k])
        if not known.any():
            continue
        pair = true[known, k].astype(np.float64), predicted[known, k]
        mae = metrics.mean_absolute_error(*pair)
        errors = mae, metrics.root_mean_squared_error(*pair), mae / deviations[k]
        assert (found.mae, found.rmse, found.relative_mae) == pytest.approx(errors, **exact)
        if rows > 1 and k < 2:
            assert found.r2 == pytest.approx(metrics.r2_score(*pair), **exact)
        shares.append(found.relative_mae)
    assert np.isnan([tally.by_column[2].r2, tally.by_column[3].mae]).all()
    figures = tally.figures()
    assert figures["relative_mae"] == pytest.approx(np.mean(shares), **exact)
    if rows > 1:
        assert figures["r2"] == pytest.approx(np.mean([c.r2 for c in tally.by_column[:2]]), **exact)
    relative = np.nanmean(np.abs(predicted - true)[:, :3] / deviations[:3], axis=1)
    assert [e.row for e in tally.worst] == np.argsort(-relative)[:3].tolist()
    assert [e.error for e in tally.worst] == pytest.approx(relative[[e.row for e in tally.worst]])
    assert [*tally.sample.rows] == [*range(rows)]
    assert np.array_equal(tally.sample.true, true, equal_nan=True)
    (table,) = tally.tables()
    assert table.row_count == len(tally.as_json()["per_column"]) == 4


@ON_RANKS
def test_the_rows_of_a_scatter_plot_are_spread_over_the_split(comm):
    """At most 2,000, the same on any ranks; one column also has its errors as figures."""
    rows = 9001

    def measured(chosen):
        values = chosen[:, None].astype(np.float32)
        return values, {"predicted": values + 1.0}

    tally = tallied(comm, Residuals("a", [4.0], None), rows, measured)
    found = tally.sample.rows
    assert len(found) == 2000 and np.diff(found).min() > 0 and np.diff(found).max() < 12
    assert np.array_equal(tally.sample.predicted[:, 0], found + 1)
    figures = tally.figures()
    assert figures == pytest.approx(
        {"relative_mae": 0.25, "r2": figures["r2"], "mae": 1, "rmse": 1}
    )
    assert tally.worst == []


@ON_RANKS
def test_predictions_of_nan_are_the_worst(comm):
    def measured(chosen):
        values = chosen[:, None].astype(np.float32)
        return values, {"predicted": np.where(chosen[:, None] == 11, np.nan, values)}

    tally = tallied(comm, Residuals("a", [1.0], None, most=2), 29, measured)
    assert all(np.isnan(value) for value in tally.figures().values())
    assert [estimate.row for estimate in tally.worst] == [11, 0]


@pytest.mark.ranks(1)
def test_errors_of_blocks_are_added_exactly(comm):
    """So their order, which depends on the ranks, has no effect: here of very unlike errors."""
    random = np.random.default_rng(0)
    tally = Residuals(("a",), (1.0,), lambda outputs: outputs)
    for number in range(30):
        true = random.standard_normal((7, 1)).astype(np.float32)
        predicted = true * 10.0 ** random.uniform(-3, 12, (7, 1))
        block = SimpleNamespace(rows=np.arange(7) + 7 * number, targets=true)
        tally.add(block, {"predicted": predicted})
    blocks, *others = tally.part()
    merged_columns = set()
    for _ in range(20):
        order = random.permutation(30)
        tally.merge([([blocks[place] for place in order], *others)], MPI.COMM_SELF)
        merged_columns.add(repr(tally.by_column))
    assert len(merged_columns) == 1
