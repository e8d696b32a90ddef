"""Totals that are read a step late, as on GPUs: the same run, bit by bit, and the same ends; and
nothing in a step that would have to wait for the device.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain import streams
from hpctrain.data.loader import Batch
from hpctrain.models import build
from hpctrain.parallel.message import Message
from hpctrain.report.find import checkpoint_steps
from hpctrain.report.record import read_records
from hpctrain.streams import IN_FLIGHT
from hpctrain.training import loop as steps_module
from hpctrain.training.checkpoint import Writer
from hpctrain.training.step import rank_digest
from hpctrain.training.steps import NonFinite
from hpctrain.training.train import train
from tests.training.runs import digest, leave_after
from tests.training.test_step import Config, make_trainer, train_step

pytestmark = pytest.mark.mpi
WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique"}


@pytest.fixture
def late(monkeypatch):
    """A function that sets how many steps are begun before the totals of one are read."""
    return lambda number: monkeypatch.setitem(IN_FLIGHT, "cpu", number)


@pytest.fixture
def settings(settings):
    return dataclasses.replace(settings, shards=8, deterministic=True, threads=None)


def recorded(settings, comm, name):
    """What all ranks may compare of a run's record. Collective."""
    if comm.rank:
        return comm.bcast(None)
    own = ("step", "epoch", "loss", "accuracy", "learning_rate", "rows", "digest", "reason")
    records = read_records(Path(settings.runs_dir) / name)
    return comm.bcast([{k: r[k] for k in own if k in r} | {"kind": r["kind"]} for r in records])


@pytest.mark.parametrize("change", [{}, {"validate_every": "3steps", "checkpoint_every": "4steps"}])
def test_a_late_run_is_the_same_run(comm, settings, late, change):
    found = []
    for name, number in (("at once", 0), ("one", 1), ("three", 3)):
        late(number)
        assert train(dataclasses.replace(settings, run=name, **change), comm) == 0
        found.append(recorded(settings, comm, name))
    assert found[0] == found[1] == found[2]
    assert [r["step"] for r in found[0] if r["kind"] == "step"] == list(range(1, 15))
    if comm.rank == 0 and change:
        kept = checkpoint_steps(Path(settings.runs_dir) / "one/checkpoints")
        assert kept == [12, 14] == checkpoint_steps(Path(settings.runs_dir) / "at once/checkpoints")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_seconds_of_steps_that_are_read_together_are_their_own(
    comm, settings, late, monkeypatch, number
):
    """Before validations and at ends of epochs: no step takes no time, or that of several."""
    original, now, lasted = steps_module.train_step, [0.0], []
    monkeypatch.setattr(streams, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(*args):
        lasted.append(0.06 + 0.01 * len(lasted))
        now[0] += lasted[-1]
        return original(*args)

    monkeypatch.setattr(steps_module, "train_step", slow)
    late(number)
    assert train(dataclasses.replace(settings, validate_every="5steps"), comm) == 0
    if comm.rank == 0:
        found = [r for r in read_records(Path(settings.runs_dir) / "a") if r["kind"] == "step"]
        assert [record["seconds"]["total"] for record in found] == pytest.approx(lasted)
        for record in found:
            expected = record["rows"] / record["seconds"]["total"]
            assert record["images_per_second"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("vote", "code"), [("preempted", 75), ("stop", 0)])
def test_votes_end_a_late_run_one_step_later_on_all_ranks(comm, settings, late, vote, code):
    late(1)
    with leave_after(3, vote=vote, votes=comm.rank == comm.size - 1) as begun:
        assert train(settings, comm) == code
    assert len(begun) == 4
    assert [r["step"] for r in recorded(settings, comm, "a") if r["kind"] == "step"][-1] == 4
    assert train(settings, comm) == 0
    late(0)
    assert train(dataclasses.replace(settings, run="whole"), comm) == 0
    ends = [recorded(settings, comm, name)[-1]["digest"] for name in ("a", "whole")]
    assert ends[0] == ends[1]


def test_the_clock_of_rank_0_lets_all_read_first(comm, settings, late, monkeypatch):
    """A checkpoint by time holds the step that was sent last, and is not taken again at once."""
    late(1)
    saved = []
    original = Writer.save
    overdue = iter([False, False, True, True, *[False] * 10])
    monkeypatch.setattr(Writer, "overdue", lambda self: next(overdue))

    def save(self, step, *rest):
        saved.append(step)
        original(self, step, *rest)

    monkeypatch.setattr(Writer, "save", save)
    assert train(settings, comm) == 0
    assert comm.bcast(saved) == [4, 14]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_nothing_follows_a_step_that_is_not_finite(comm, settings, late, monkeypatch, number):
    """Steps that were begun before it was known change nothing, though they are finite."""
    late(number)
    original, counted = Message.set_flags, []

    def set_flags(self, *votes):
        counted.append(1)
        if len(counted) == 5 and comm.rank == 0:
            self.gradients[3] = float("inf")
        original(self, *votes)

    few = dataclasses.replace(settings, epochs=1)
    with monkeypatch.context() as patch, pytest.raises(NonFinite, match="gradient of step 5"):
        patch.setattr(Message, "set_flags", set_flags)
        train(few, comm)
    assert len(counted) == 5 + number
    if comm.rank == 0:
        from safetensors.torch import load_file

        left = load_file(Path(settings.runs_dir) / "a/model.safetensors")
    late(0)
    with leave_after(4, vote="stop"):
        assert train(dataclasses.replace(few, run="four"), comm) == 0
    if comm.rank == 0:
        four = load_file(Path(settings.runs_dir) / "four/model.safetensors")
        assert all(torch.equal(left[name], four[name]) for name in four)
    assert digest(few, comm, "a") == digest(few, comm, "whole")  # it was saved after step 4
    if comm.rank == 0:
        notes = [r for r in read_records(Path(settings.runs_dir) / "a") if r["kind"] == "note"]
        assert "going on after step 4" in [note["text"] for note in notes]


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result the host needs."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        if name in WAITING:
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["exact", "running", "average"])
def test_a_step_does_not_wait_for_the_device(comm, mode):
    torch.manual_seed(5)
    model = build("digits", (28, 28, 1), 10)
    config = Config(lr=0.1, optimizer="adam", batch_norm=mode)
    trainer = make_trainer(model, comm, config)
    trainer.clip_norm, trainer.in_flight = 1.0, 1
    labels = torch.arange(6)
    with NoWaiting():
        for key in range(2):
            batch = Batch(comm.rank, torch.rand(6, 1, 28, 28), labels, key)
            digest = rank_digest(trainer)
            train_step(trainer, [batch], 6 * comm.size)
            report = trainer.message.report()
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            digest.item()
    totals = report.totals()
    assert totals.rows == 6 * comm.size and totals.finite
