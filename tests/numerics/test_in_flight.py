"""Totals that are read a step late, as on GPUs: the same run, bit by bit, and the same ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import IN_FLIGHT
from tests.support.short import digest, records

pytestmark = pytest.mark.ranks
SHOWN = ("kind", "step", "epoch", "loss", "accuracy", "learning_rate", "rows", "digest")


@contextmanager
def before_forwards(act):
    """Within the block, call `act(n)` before the training forward n of the network."""
    count, kind = [0], type(hp.build("digits", (12, 12, 1), 10))

    def hook(module, inputs):
        if isinstance(module, kind) and torch.is_grad_enabled():
            count[0] += 1
            act(count[0])

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_a_late_run_is_the_same_run(comm, fixed, monkeypatch):
    found, every = [], {"validate_every": "3steps", "checkpoint_every": "4steps"}
    for number in (0, 1, 3):
        monkeypatch.setitem(IN_FLIGHT, "cpu", number)
        settings = fixed | every | {"run": str(number)}
        digest(comm, settings)
        if comm.rank == 0:
            found.append([{k: r[k] for k in SHOWN if k in r} for r in records(settings)])
            folder = Path(settings["runs_dir"]) / settings["run"] / "checkpoints"
            found[-1].append(sorted(file.name for file in folder.iterdir()))
    assert all(other == found[0] for other in found)
    if comm.rank == 0:
        assert [r["step"] for r in found[0][:-1] if r["kind"] == "step"] == list(range(1, 15))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("number", [0, 1, 3])
def test_seconds_of_steps_that_are_read_together_are_their_own(comm, short, monkeypatch, number):
    """Before validations and at ends of epochs: no step takes no time, or that of several."""
    now, lasted = [0.0], []

    def work(n):
        lasted.append(0.06 + 0.01 * n)
        now[0] += lasted[-1]

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setitem(IN_FLIGHT, "cpu", number)
    with before_forwards(work):
        assert hp.train(**short, validate_every="5steps", shards=1).exit_code == 0
    steps = records(short, "step")
    assert [r["seconds"]["total"] for r in steps] == pytest.approx(lasted[-len(steps) :])
    for step in steps:
        expected = step["rows"] / step["seconds"]["total"]
        assert step["images_per_second"] == pytest.approx(expected, rel=0.01)


def test_a_notice_ends_a_late_run_one_step_later_on_all_ranks(comm, fixed, monkeypatch):
    def notify(n):
        if n == 8 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)

    last = []
    whole = digest(comm, fixed | {"run": "whole"})
    for number in (0, 1):
        monkeypatch.setitem(IN_FLIGHT, "cpu", number)
        settings = fixed | {"run": str(number)}
        with before_forwards(notify):
            assert hp.train(**settings).exit_code == 75
        last.append(records(settings, "step")[-1]["step"] if comm.rank == 0 else 0)
        assert digest(comm, settings) == whole
    assert comm.rank or last[1] == last[0] + 1
