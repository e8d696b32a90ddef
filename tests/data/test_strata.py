"""Splits that are drawn by label sets and by values: the shares of each class, of tenths, groups.

Those of classes are in test_splits.py and test_external.py.
"""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import strata

SHARES = (Fraction(8, 10), Fraction(1, 10), Fraction(1, 10))
FOLDS = (Fraction(1, 5),) * 5


def draw_sets(rows, classes, density, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.random((rows, classes)) < density * 2 * rng.random(classes)).astype(np.uint8)


def counts(targets, splits, number=3):
    """How many of each split have each class, (S, K)."""
    return np.stack([(targets[splits == split] == 1).sum(0) for split in range(number)])


@pytest.mark.parametrize("shares", [SHARES, FOLDS], ids=["shares", "folds"])
def test_each_class_of_label_sets_is_divided_by_the_shares(shares):
    targets = draw_sets(2000, 20, 0.1)
    parts = np.array([float(share) for share in shares])
    splits = strata.assign(strata.label_sets([targets], 20), shares, 0)
    assert np.abs(np.bincount(splits) - 2000 * parts).max() <= 1
    assert np.abs(counts(targets, splits, len(shares)) - parts[:, None] * targets.sum(0)).max() < 3
    other = strata.assign(strata.label_sets([targets], 20), shares, 1)
    assert (splits != other).sum() > 200


@given(st.integers(3, 40), st.integers(1, 12), st.floats(0.01, 0.6), st.integers(0, 10**6))
def test_a_rare_class_is_in_every_split_or_is_named(rows, classes, density, seed):
    """All others have samples enough; the rare one is in 3 images or more."""
    targets = draw_sets(500, classes, density, seed)
    targets[:, 0] = 0
    targets[np.random.default_rng(seed).choice(500, rows, replace=False), 0] = 1
    sets = strata.label_sets([targets], classes)
    splits = strata.assign(sets, SHARES, seed)
    found = counts(targets, splits)
    rarest = targets.sum(0) == targets.sum(0).min()
    assert targets.sum(0).min() < 3 or (found[:, rarest] > 0).all()
    drawn = dict(
        zip(
            ("train", "validation", "test"),
            map(np.flatnonzero, (splits == k for k in range(3))),
            strict=True,
        )
    )
    notes = strata.check_splits(drawn, sets, [f"c{k}" for k in range(classes)], [*drawn], "a.h5")
    for name, present in zip(drawn, found, strict=True):
        absent = np.flatnonzero((present == 0) & (targets.sum(0) > 0))
        said = [note for note in notes if note.startswith(f"{name} has no image of")]
        assert bool(said) == bool(len(absent))
        for label in absent[:8].tolist():
            assert f"c{label} (" in said[0]


def test_entries_that_are_unknown_or_0_are_in_no_stratum():
    targets = draw_sets(300, 6, 0.2)
    unknown = np.where(np.random.default_rng(1).random(targets.shape) < 0.3, 255, targets)
    unknown[targets == 1] = 1
    expected = strata.assign(strata.label_sets([targets], 6), SHARES, 0)
    assert np.array_equal(
        strata.assign(strata.label_sets(np.split(unknown, 3), 6), SHARES, 0), expected
    )


@pytest.mark.parametrize("columns", [1, 3])
def test_each_split_has_its_share_of_small_and_large_values(columns):
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(size=(3000, columns))).astype(np.float32)
    values[::7, 0] = np.nan
    splits = strata.assign(strata.value_sets(values), SHARES, 0)
    assert np.abs(np.bincount(splits) - [2400, 300, 300]).max() <= 3 * columns
    for column in values.T:
        edges = np.nanquantile(column, np.arange(1, 10) / 10)
        tenths = np.searchsorted(edges, column[~np.isnan(column)])
        for split, share in enumerate((0.8, 0.1, 0.1)):
            found = np.bincount(tenths[splits[~np.isnan(column)] == split], minlength=10)
            assert np.abs(found - share * np.bincount(tenths)).max() <= 2 * columns


def test_few_values_are_strata_of_their_own():
    values = np.repeat([0.0, 1.0, 7.0], [50, 30, 20]).astype(np.float32)
    splits = strata.assign(strata.value_sets(values[:, None]), SHARES, 3)
    for value, count in ((0, 50), (1, 30), (7, 20)):
        assert np.bincount(splits[values == value]).tolist() == [
            count * 8 // 10,
            *[count // 10] * 2,
        ]


@pytest.mark.parametrize("shares", [SHARES, FOLDS], ids=["shares", "folds"])
def test_groups_are_whole_and_leave_each_class_its_share(shares):
    targets = draw_sets(3000, 8, 0.2)
    groups = np.random.default_rng(0).integers(0, 700, 3000)
    splits = strata.assign_groups(strata.label_sets([targets], 8), groups, shares, balanced=False)
    assert all(len(set(splits[groups == group])) == 1 for group in np.unique(groups))
    parts = np.array([float(share) for share in shares])
    assert np.abs(np.bincount(splits) / 3000 - parts).max() < 0.01
    found = counts(targets, splits, len(shares)) / targets.sum(0)
    assert np.abs(found - parts[:, None]).max() < 0.04


def test_a_split_without_an_image_is_refused():
    sets = strata.value_sets(np.arange(4, dtype=np.float32)[:, None])
    rows = {"train": np.arange(4), "validation": np.arange(0)}
    with pytest.raises(hp.UsageError, match="none of 4 images of a.h5 for validation"):
        strata.check_splits(rows, sets, (), ["train", "validation"], "a.h5")


def test_a_million_label_sets_are_divided_in_seconds():
    targets = draw_sets(10**6, 20, 0.1)
    began = time.process_time()
    splits = strata.assign(strata.label_sets([targets], 20), SHARES, 0)
    assert time.process_time() - began < 15
    assert np.bincount(splits).tolist() == [800_000, 100_000, 100_000]
