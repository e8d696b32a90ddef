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
        ({"data": 0.12, "compute": 0.8, "reduce": 0.0}, ["data-bound"]),
        ({"data": 0.09, "compute": 0.9, "reduce": 0.0}, []),
        ({"data": 0.0, "compute": 0.7, "reduce": 0.3}, ["communication-bound: raise --batch-per"]),
        ({"data": 0.0, "compute": 0.85, "reduce": 0.15}, []),
        ({"data": 0.4, "compute": 0.2, "reduce": 0.4}, ["data-bound", "communication-bound"]),
        ({"data": 0.12, "compute": 0.2, "reduce": 0.6}, ["communication-bound", "data-bound"]),
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


LARGE = {"wire": "fp32", "parameters": 25_000_000}


@pytest.mark.parametrize(
    ("facts", "narrow", "stage"),
    [
        (LARGE, True, True),
        ({**LARGE, "parameters": 30_000}, False, True),
        ({**LARGE, "wire": "bf16"}, False, True),
        ({**LARGE, "deterministic": True}, False, True),
        ({**LARGE, "staged": True}, True, False),
    ],
)
def test_only_what_may_help_and_is_not_done_is_advised(facts, narrow, stage):
    costs = Costs()
    costs.know(facts)
    costs.add({"data": 0.3, "compute": 0.0, "reduce": 0.7, "total": 1.0}, 0)
    wire, disk = costs.facts()["advice"]
    assert wire.endswith(" or use --wire bf16") == narrow
    assert ("(--stage)" in disk) == stage and disk.endswith("use more cores")
