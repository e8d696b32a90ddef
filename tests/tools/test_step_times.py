"""Where steps spend their time, as the end of a record says it, and the advice that follows."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.api import open_recorder, read_records
from tests.support.records import tell

ENOUGH = 5  # steps, without which there is no advice


def ended(folder, steps=10, slowest=(0,), facts=None, **seconds):
    """The end of a launch of equal steps whose phases took these seconds."""
    with open_recorder(folder, "none") as recorder:
        tell(recorder, "run", **(facts or {}))
        own = {"total": 1.0, "idle": 0.0, **seconds}
        for step in range(1, steps + 1):
            rank = slowest[step % len(slowest)]
            tell(recorder, "step", step=step, seconds=own, slowest_rank=rank)
        recorder.end("done")
    return list(read_records(folder))[-1]


@pytest.mark.parametrize(
    ("steps", "slowest", "idle", "named"),
    [
        (5, (1,), 0.06, (1, 1.0)),  # in every step
        (100, (0, 1, 1, 1, 1), 0.06, (1, 0.8)),
        (1000, (1, 2, 1, 0, 1), 0.06, (1, 0.6)),
        (10, (1, 1, 1, 0), 0.5, None),  # by chance
        (4, (1,), 0.5, None),
        (20, (0, 1, 1), 0.5, None),
        (1000, (0, 1), 0.5, None),
        (1000, (0, 1, 2, 0, 3), 0.5, None),
        (1000, (1,), 0.04, None),  # nobody waits for it
    ],
)
def test_a_rank_is_named_for_which_the_others_wait_but_not_by_chance(
    tmp_path, steps, slowest, idle, named
):
    found = ended(tmp_path, steps, slowest, idle=idle, compute=1.0)
    names = ("slowest_rank", "slowest_share")
    assert [found.get(name) for name in names] == [*(named or (None, None))]


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [((0.02, 0.9, 0.05), (0.02, 0.9, 0.05, 0.03)), ((0.5, 0.75, 0.25), (1 / 3, 0.5, 1 / 6, 0.0))],
)
def test_shares_are_of_the_whole_step_and_add_up_also_where_clocks_exceed_it(
    tmp_path, seconds, shares
):
    found = ended(tmp_path, **dict(zip(("data", "compute", "reduce"), seconds, strict=True)))
    assert [*found["shares"].values()] == pytest.approx(shares)
    assert (found["step_seconds"], found["images_per_second"]) == pytest.approx((1, 101))
    assert "shares" not in ended(tmp_path, steps=0)


LARGE = {"comm_dtype": "fp32", "parameters": 25_000_000}
DATA, REDUCE = {"data": 0.7, "compute": 0.3}, {"reduce": 0.7, "compute": 0.3}
SLOW = {"compute": 1.0, "idle": 0.3}
CASES = [  # seconds of the phases; slowest ranks; facts of the run; words of the advice, if any
    ({"data": 0.22, "compute": 0.7}, (0,), {}, ["data-bound"]),
    ({"data": 0.18, "compute": 0.8}, (0,), {}, []),
    ({"reduce": 0.3, "compute": 0.7}, (0,), {}, ["communication-bound"]),
    ({"reduce": 0.15, "compute": 0.85}, (0,), {}, []),
    ({"data": 0.4, "compute": 0.2, "reduce": 0.4}, (0,), {}, ["data-bound"]),
    ({"data": 0.12, "compute": 0.2, "reduce": 0.6}, (0,), {}, ["communication-bound"]),
    ({"data": 0.22, "compute": 0.7, "idle": 0.3}, (2,), {}, ["rank 2"]),
    (SLOW, (2,), {}, ["rank 2", "--worker-load"]),
    (SLOW, (0, 1, 2), {}, []),
    ({**SLOW, "idle": 0.09}, (2,), {}, []),
    (DATA, (0,), LARGE, ["data-bound", "--stage"]),
    (DATA, (0,), {"staged": True}, ["data-bound", "not --stage"]),
    (REDUCE, (0,), LARGE, ["communication-bound", "--comm-dtype bf16"]),
    (REDUCE, (0,), LARGE | {"parameters": 30_000}, ["communication-bound", "not bf16"]),
    (REDUCE, (0,), LARGE | {"comm_dtype": "bf16"}, ["communication-bound", "not bf16"]),
    (REDUCE, (0,), LARGE | {"deterministic": True}, ["communication-bound", "not bf16"]),
]


@pytest.mark.parametrize(("seconds", "slowest", "facts", "words"), CASES)
def test_only_what_would_help_and_is_not_done_is_advised(tmp_path, seconds, slowest, facts, words):
    advice = ended(tmp_path, slowest=slowest, facts=facts, **seconds)["advice"]
    assert len(advice) == bool(words)
    for word in words:
        wanted = word.removeprefix("not ")
        assert (wanted in advice[0]) == (wanted == word)


@pytest.mark.parametrize("steps", range(1, ENOUGH + 2))
def test_a_few_steps_give_no_advice(tmp_path, steps):
    assert bool(ended(tmp_path, steps, **DATA)["advice"]) == (steps >= ENOUGH)


PHASES = st.sampled_from(["data", "compute", "reduce"])


@given(seconds=st.dictionaries(PHASES, st.floats(0, 1), min_size=1))
def test_percentages_add_up_to_100_and_each_is_less_than_one_off(seconds, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", shown := io.StringIO())
        with open_recorder(tmp_path_factory.mktemp("run"), "plain") as recorder:
            tell(recorder, "run")
            tell(recorder, "step", step=1, seconds={**seconds, "total": 1.0})
            recorder.end("done")
    found = re.findall(r"(\w+) (\d+) %", re.search(r"\n  step .*", shown.getvalue())[0])
    percents = {name: int(value) for name, value in found}
    whole = max(1.0, sum(seconds.values()))
    assert sum(percents.values()) == 100
    assert all(abs(percents[name] - 100 * seconds[name] / whole) < 1 for name in seconds)
