"""Totals that are read a step late, as on GPUs: the same run, bit by bit, and the same ends."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import hpctrain as hp
from tests.support.launches import check_same, checkpoint_steps, launch, notes, run_of
from tests.support.short import records, short_run


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("pack")) | {"deterministic": True, "shards": 4}


@pytest.fixture
def settings(pack, tmp_path):
    return pack | {"runs_dir": str(tmp_path / "runs")}


def late(number):
    """Begin so many steps before the totals of one are read."""
    return partial(begin_early, number)


def begin_early(number, patch):
    from tests.support.api import IN_FLIGHT  # the rank's own, not a copy that is sent

    patch.setitem(IN_FLIGHT, "cpu", number)


@pytest.mark.parametrize("change", [{}, {"validate_every": "3steps", "checkpoint_every": "4steps"}])
def test_a_late_run_is_the_same_run(settings, change):
    whole = settings | change | {"run": "at once"}
    assert launch(whole, first=late(0)).code == 0
    for number in (1, 3):
        own = settings | change | {"run": f"{number} late"}
        assert launch(own, first=late(number)).code == 0
        check_same(own, whole)
        assert checkpoint_steps(own) == checkpoint_steps(whole)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_seconds_of_steps_that_are_read_together_are_their_own(settings, number):
    """Before validations and at ends of epochs: no step takes no time, or that of several."""
    assert launch(settings, first=late(number), validate_every="5steps").code == 0
    steps = records(settings, "step")
    seconds = [record["seconds"]["total"] for record in steps]
    assert min(seconds) > 1e-4
    epochs = [record["seconds"] for record in records(settings, "epoch")]
    assert [sum(seconds[:7]), sum(seconds[7:])] == pytest.approx(epochs)
    for record, spent in zip(steps, seconds, strict=True):
        assert record["images_per_second"] == pytest.approx(record["rows"] / spent)


def test_a_notice_ends_a_late_run_one_step_later_on_all_ranks(settings):
    whole = settings | {"run": "whole"}
    assert launch(whole).code == 0
    assert launch(settings, leave=2).step == 3
    assert launch(settings, leave=2, first=late(1)).step == 3 + 4
    assert launch(settings).code == 0
    check_same(settings, whole)


def test_a_checkpoint_by_time_of_a_late_run_holds_a_whole_step(settings):
    """The clock of rank 0 tells: then all ranks read first."""
    by_step, by_time = (
        settings | {"run": name, "checkpoint_every": name, "keep_checkpoints": 99}
        for name in ("1step", "0.001s")
    )
    assert launch(by_step).code == launch(by_time, first=late(1)).code == 0
    found = checkpoint_steps(by_time)
    assert len(found) > 3 and found[-1] == 14
    for step in found:
        file = f"checkpoints/{step:08}.safetensors"
        one, other = (load_file(run_of(each) / file) for each in (by_step, by_time))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), step


@pytest.mark.parametrize("number", [0, 1, 2])
def test_nothing_follows_a_step_that_is_not_finite(settings, number):
    """Steps that were begun before it was known change nothing, though they are finite."""
    few, four, whole = (settings | {"epochs": 1, "run": run} for run in ("a", "four", "whole"))

    def spoil(patch):
        begin_early(number, patch)
        original, calls = hp.Message.set_flags, []

        def set_flags(self, *votes):
            calls.append(1)
            if len(calls) == 5:
                self.gradients[3] = float("inf")
            original(self, *votes)

        patch.setattr(hp.Message, "set_flags", set_flags)

    failed = launch(few, first=spoil)
    assert failed.code == 1 and "gradient of step 5" in failed.error
    assert launch(four, leave=3).step == 4
    left = load_file(run_of(few) / "model.safetensors")
    name = "checkpoints/00000004.safetensors"
    saved, expected = (load_file(run_of(each) / name) for each in (few, four))
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert all(torch.isfinite(tensor.double()).all() for tensor in left.values())
    assert launch(few).code == launch(whole).code == 0
    check_same(few, whole)
    assert "going on after step 4" in notes(few)
