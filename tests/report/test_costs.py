"""Where steps spend their time, and the advice that follows."""

from __future__ import annotations

import pytest

from hpctrain.report.costs import Costs


def costs(data, compute, reduce, total=1.0, idle=0.0, slowest=(0,)):
    found = Costs()
    for number in range(10):
        seconds = {"data": data, "compute": compute, "reduce": reduce, "total": total, "idle": idle}
        found.add(seconds, slowest[number % len(slowest)])
    return found.facts()


def test_shares_are_of_the_whole_step():
    facts = costs(0.02, 0.9, 0.05, slowest=(0, 1, 1, 1, 1))
    assert facts["step_seconds"] == pytest.approx(1)
    assert facts["shares"] == pytest.approx(
        {"data": 0.02, "compute": 0.9, "reduce": 0.05, "other": 0.03}
    )
    assert (facts["slowest_rank"], facts["slowest_share"]) == (1, 0.8)
    assert facts["advice"] == []
    assert Costs().facts() == {}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"data": 0.06, "compute": 0.9, "reduce": 0.0}, ["data-bound"]),
        ({"data": 0.04, "compute": 0.9, "reduce": 0.0}, []),
        ({"data": 0.0, "compute": 0.7, "reduce": 0.3}, ["communication-bound: raise --batch-per"]),
        ({"data": 0.0, "compute": 0.85, "reduce": 0.15}, []),
        ({"data": 0.4, "compute": 0.2, "reduce": 0.4}, ["data-bound", "communication-bound"]),
        ({"data": 0.06, "compute": 0.2, "reduce": 0.7}, ["communication-bound", "data-bound"]),
        (
            {"data": 0.0, "compute": 1.0, "reduce": 0.0, "idle": 0.3, "slowest": (2, 2, 0)},
            ["rank 2 holds up the others: --worker-load auto"],
        ),
        ({"data": 0.0, "compute": 1.0, "reduce": 0.0, "idle": 0.3, "slowest": (0, 1, 2)}, []),
        ({"data": 0.0, "compute": 1.0, "reduce": 0.0, "idle": 0.05, "slowest": (2, 2, 0)}, []),
    ],
)
def test_what_would_help(case, words):
    advice = costs(**case)["advice"]
    assert len(advice) == len(words)
    assert all(line.startswith(word) for line, word in zip(advice, words, strict=True))


def test_a_narrow_wire_is_not_advised_twice():
    costs = Costs()
    costs.add({"data": 0.0, "compute": 0.5, "reduce": 0.5, "total": 1.0}, 0)
    assert costs.facts()["advice"] == [
        "communication-bound: raise --batch-per-rank or use --wire bf16"
    ]
    costs.may_narrow = False
    assert costs.facts()["advice"] == ["communication-bound: raise --batch-per-rank"]
