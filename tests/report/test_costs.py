"""Where steps spend their time, and the advice that follows."""

from __future__ import annotations

import pytest

from hpctrain.parallel.placement import crowd
from hpctrain.report.step_stats import ENOUGH, Costs, whole_percents


def costs(data, compute, reduce, total=1.0, idle=0.0, slowest=(0,)):
    found = Costs()
    for number in range(10):
        seconds = {"data": data, "compute": compute, "reduce": reduce, "total": total, "idle": idle}
        found.add(seconds, slowest[number % len(slowest)])
    return found.facts()


def add_steps(costs, seconds):
    """As many equal steps as advice needs."""
    for _ in range(ENOUGH):
        costs.add(seconds, 0)


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
        ({"data": 0.4, "compute": 0.2, "reduce": 0.4}, ["data-bound"]),
        ({"data": 0.12, "compute": 0.2, "reduce": 0.6}, ["communication-bound"]),
        (
            {"data": 0.12, "compute": 0.8, "reduce": 0.0, "idle": 0.3, "slowest": (2, 2, 0)},
            ["rank 2 holds up"],
        ),
        (
            {"data": 0.0, "compute": 1.0, "reduce": 0.0, "idle": 0.3, "slowest": (2, 2, 0)},
            ["rank 2 holds up the others: --worker-load gives"],
        ),
        ({"data": 0.0, "compute": 1.0, "reduce": 0.0, "idle": 0.3, "slowest": (0, 1, 2)}, []),
        ({"data": 0.0, "compute": 1.0, "reduce": 0.0, "idle": 0.05, "slowest": (2, 2, 0)}, []),
    ],
)
def test_what_would_help(case, words):
    advice = costs(**case)["advice"]
    assert len(advice) == len(words)
    assert all(line.startswith(word) for line, word in zip(advice, words, strict=True))


def test_a_few_steps_tell_nothing():
    found = Costs()
    for number in range(1, ENOUGH + 1):
        found.add({"data": 0.9, "compute": 0.1, "reduce": 0.0, "total": 1.0, "idle": 0.0}, 0)
        assert bool(found.facts()["advice"]) == (number == ENOUGH > 2)


LARGE = {"comm_dtype": "fp32", "parameters": 25_000_000}


@pytest.mark.parametrize(
    ("facts", "narrow", "stage"),
    [
        (LARGE, True, True),
        ({**LARGE, "parameters": 30_000}, False, True),
        ({**LARGE, "comm_dtype": "bf16"}, False, True),
        ({**LARGE, "deterministic": True}, False, True),
        ({**LARGE, "staged": True}, True, False),
    ],
)
def test_only_what_may_help_and_is_not_done_is_advised(facts, narrow, stage):
    told = []
    for data, reduce in ((0.3, 0.4), (0.7, 0.3)):
        costs = Costs()
        costs.describe(facts)
        add_steps(costs, {"data": data, "compute": 0.0, "reduce": reduce, "total": 1.0})
        told += costs.facts()["advice"]
    disk, more = told
    assert ("(--stage)" in disk) == ("(--stage)" in more) == stage
    assert disk.endswith("use more cores")
    costs = Costs()
    costs.describe(facts)
    add_steps(costs, {"data": 0.0, "compute": 0.3, "reduce": 0.7, "total": 1.0})
    (advice,) = costs.facts()["advice"]
    assert advice.endswith(" or use --comm-dtype bf16") == narrow


def test_more_ranks_than_cores_are_said_before_one_bottleneck():
    costs = Costs()
    costs.describe({"host_ranks": 4, "host_cores": 2})
    add_steps(costs, {"data": 0.3, "compute": 0.0, "reduce": 0.7, "total": 1.0})
    crowd, *others = costs.facts()["advice"]
    assert crowd == "4 ranks share 2 cores of a host: start at most 2 there"
    assert len(others) == 1 and others[0].startswith("communication-bound")
    costs.describe({"host_ranks": 2, "host_cores": 2})
    assert costs.facts()["advice"] == others


def test_the_most_crowded_host():
    assert crowd([0b111, 0b111]) == (2 / 3, 2, 3)
    assert crowd([0b11, 0b11, 0b11]) == (1.5, 3, 2)
    assert crowd([0b1, 0b10, 0b100]) == (1, 3, 3)  # each bound to its own
    assert crowd([1 << 300, 1 << 300]) == (2, 2, 1)


@pytest.mark.parametrize(
    "shares",
    [
        {"data": 1 / 3, "compute": 1 / 3, "other": 1 / 3},
        {"data": 0.005, "compute": 0.985, "reduce": 0.005, "other": 0.005},
        {"data": 0.006, "compute": 0.006, "reduce": 0.006, "other": 0.982},
        {"data": 0.0, "compute": 1.0, "reduce": 0.0, "other": 0.0},
        {"data": 0.7, "compute": 0.7},
    ],
)
def test_shares_add_up_to_100_per_cent(shares):
    found = whole_percents(shares)
    whole = sum(shares.values())
    assert sum(found.values()) == 100
    assert all(abs(found[name] - 100 * shares[name] / whole) < 1 for name in shares)
    assert whole_percents({}) == {} and whole_percents({"data": 0.0}) == {"data": 0}


def test_clocks_that_exceed_the_step_still_add_up():
    facts = costs(0.5, 0.75, 0.25, idle=0.1)
    assert sum(facts["shares"].values()) == pytest.approx(1)
    assert facts["shares"]["other"] == pytest.approx(0, abs=1e-12)
