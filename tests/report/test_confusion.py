"""Sparse confusion matrices equal dense ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hpctrain.report import confusion
from hpctrain.report.confusion import Confusion, from_json


@pytest.fixture
def answers():
    rng = np.random.default_rng(0)
    return rng.integers(0, 7, 500), rng.integers(0, 5, 500)


@pytest.mark.parametrize("pending", [1, 30, 10**6])
@pytest.mark.parametrize("whole", [0, 1024])
def test_all_sums_equal_those_of_the_dense_matrix(answers, monkeypatch, pending, whole):
    monkeypatch.setattr(confusion, "PENDING", pending)
    monkeypatch.setattr(confusion, "WRITTEN_WHOLE", whole)
    expected, found = np.zeros((8, 8), np.int64), Confusion(8)
    np.add.at(expected, answers, 1)
    for part in range(0, 500, 50):
        found.add(*(each[part : part + 50] for each in answers))
    for each in (found, from_json(json.loads(json.dumps(found.as_json())), 8)):
        assert np.array_equal(each.dense(), expected)
        assert np.array_equal(each.diagonal(), np.diag(expected))
        assert np.array_equal(each.by_true(), expected.sum(1))
        assert np.array_equal(each.by_predicted(), expected.sum(0))
    assert isinstance(found.as_json(), dict if whole == 0 else list)


@pytest.mark.parametrize("answer", [(0, 3), (3, 0), (-1, 1), (2, -1)])
def test_a_prediction_of_no_class_is_refused(answer):
    with pytest.raises(ValueError, match="invalid entry"):
        Confusion(3).add(*(np.array([each]) for each in answer))


def test_adding_predictions_one_by_one_takes_linear_time(monkeypatch):
    merged, merge = [], confusion._merged
    monkeypatch.setattr(confusion, "_merged", lambda cells: merged.append(0) or merge(cells))
    monkeypatch.setattr(confusion, "PENDING", 5000)
    found, one = Confusion(3), np.array([1])
    for _ in range(20_000):
        found.add(one, one)
    assert len(merged) == 4, "it does not sum up those before it each time"
    assert found.diagonal().tolist() == [0, 20_000, 0]


def test_an_empty_matrix():
    assert not Confusion(3).dense().any() and not Confusion(3).by_true().any()


@pytest.mark.parametrize("written", [{"true": [0]}, [[1, 2, 3, 4]] * 3, "text"])
def test_invalid_json_is_refused(written):
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_json(written, 3)
