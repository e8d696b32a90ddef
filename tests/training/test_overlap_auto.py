"""--overlap auto: segments by measurement, the same on all ranks, and the bits stay."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.config import Config, check_settings
from hpctrain.errors import UsageError
from hpctrain.parallel import mpi
from hpctrain.parallel.message import Message
from hpctrain.parallel.overlap import (
    SEGMENTS,
    SKIPPED,
    STEPS,
    OverlapTrial,
    Times,
    best_segments,
    exposed,
)
from hpctrain.report.record import read_records
from hpctrain.training import loop as training_loop
from hpctrain.training import train as loop
from hpctrain.training.steps import record_step


def test_what_is_left_of_a_reduction():
    """Against a queue that is worked off segment by segment."""
    for compute, reduce in ((3.0, 1.0), (3.0, 5.0), (0.3, 7.0), (9.0, 0.1)):
        for n in (1, *SEGMENTS):
            backward, free = compute * 2 / 3, 0.0
            for segment in range(1, n + 1):
                free = max(free, backward * segment / n) + reduce / n
            assert exposed(Times(1, compute, reduce), n) == pytest.approx(free - backward)


def test_segments_are_chosen_where_they_save_time():
    assert best_segments(Times(1.0, 0.99, 0.01)) == 0
    assert best_segments(Times(1.0, 0.5, 0.5)) in SEGMENTS
    assert best_segments(Times(1.0, 0.01, 0.99)) == 0, "there is no backward to hide it behind"
    assert best_segments(Times(1.0, 0.7, 0.3)) > best_segments(Times(1.0, 0.94, 0.06)) > 0


def measured(trial, step, compute, reduce):
    for number in range(STEPS):
        slow = 9.0 if number < SKIPPED else 0.0  # while libraries warm up
        trial.add(step + slow, compute, reduce + slow)
    return trial.times()


@pytest.mark.parametrize(
    ("after", "kept", "words"),
    [(0.8, 8, "(+20%): 8 segments"), (0.99, 0, "(+1%): one Allreduce"), (1.5, 0, "(-50%): one")],
)
def test_they_stay_where_steps_were_shorter(after, kept, words):
    trial = OverlapTrial(7)
    assert [step for step in range(100) if trial.follows(step)] == [7 + STEPS]
    assert trial.decide(measured(trial, 1.0, 0.7, 0.3)) is None
    assert trial.segments == 8
    assert [step for step in range(100) if trial.follows(step)] == [7 + 2 * STEPS]
    text = trial.decide(measured(trial, after, 0.7, 0.1))
    assert trial.segments == kept and words in text
    assert "1,000.0 ms with one Allreduce (computation 700.0 ms, reduction 300.0 ms)" in text
    assert not any(map(trial.follows, range(100)))


def test_what_could_save_nothing_is_not_tried():
    trial = OverlapTrial(0)
    text = trial.decide(measured(trial, 1.0, 0.99, 0.01))
    assert trial.segments == 0 and text.endswith("segments could save less than 3%")
    assert not any(map(trial.follows, range(100)))


def test_a_rank_adds_its_own_times():
    """The times of other ranks in the message may be from earlier steps, if ranks take turns."""
    message = Message(nn.Linear(2, 1), 0, 0, 1)
    message.add_counts(torch.tensor(1.0), 0, 4)
    message.set_seconds(9.0, 0.0)
    added, nothing = [], SimpleNamespace(step=lambda **fields: None, slowest_step=0.0)
    trainer = SimpleNamespace(clock=SimpleNamespace(compute=0.5, reduce=0.1))
    run = SimpleNamespace(
        job=SimpleNamespace(trainer=trainer, task=SimpleNamespace(classes=())),
        state=SimpleNamespace(epoch=0, step=1, sums=(0, 0, 0, 0), weight=0, add=lambda each: None),
        overlap=SimpleNamespace(add=lambda *times: added.append(times)),
        **{"balance": None, "writer": None, "control": nothing, "recorder": nothing},
    )
    record_step(run, message.totals(), 0.1, 1.0)
    assert added == [(1.0, 0.5, 0.1)]


def test_what_is_asked_for_wrongly_is_one_line():
    check_settings(Config(overlap="auto"))
    with pytest.raises(UsageError, match="--overlap auto and --graphs exclude each other"):
        check_settings(Config(overlap="auto", graphs=True))
    with pytest.raises(UsageError, match="--overlap some: give 0 or more segments, or auto"):
        check_settings(Config(overlap="some"))


@pytest.mark.mpi
def test_an_mpi_without_threads_is_refused_before_anything_is_written(comm, settings, monkeypatch):
    monkeypatch.setattr(mpi.MPI, "Query_thread", lambda: mpi.MPI.THREAD_FUNNELED)
    config = dataclasses.replace(settings, overlap="auto" if comm.size > 1 else "2")
    with pytest.raises(UsageError, match="--overlap calls MPI from a thread of its own"):
        loop.train(config, comm)
    assert not Path(settings.runs_dir).exists()


@pytest.mark.mpi
@pytest.mark.parametrize("shorter", [True, False])
def test_the_choice_is_made_once_and_the_bits_stay(comm, settings, monkeypatch, shorter):
    """Every rank measures something else; the second phase is said to be shorter, or longer."""
    config = dataclasses.replace(settings, shards=8, deterministic=True, epochs=5, digest_every=4)
    assert loop.train(dataclasses.replace(config, run="whole"), comm) == 0
    seen, original, choose = [], OverlapTrial.times, OverlapTrial.decide
    after = 0.5 if shorter else 2.0

    def times(self):
        assert original(self).step > 0
        seen.append(1)
        step = 1.0 if len(seen) == 1 else after
        return Times(step + comm.rank, 0.6 / (comm.size - comm.rank), 0.3 + comm.rank)

    def decide(self, found):
        assert found == pytest.approx(Times(1.0 if len(seen) == 1 else after, 0.6, 0.3))
        return choose(self, found)

    asked, renew = [], training_loop.renew_reduction
    monkeypatch.setattr(OverlapTrial, "times", times)
    monkeypatch.setattr(OverlapTrial, "decide", decide)
    monkeypatch.setattr(
        training_loop, "renew_reduction", lambda *a: (asked.append(a[-1]), renew(*a))
    )
    assert loop.train(dataclasses.replace(config, overlap="auto"), comm) == 0
    tried = [8] if shorter else [8, 0]
    assert asked == (tried if comm.size > 1 else []) and len(seen) == 2 * (comm.size > 1)
    if comm.rank == 0:
        records = [list(read_records(Path(settings.runs_dir) / name)) for name in ("whole", "a")]
        assert records[0][-1]["digest"] == records[1][-1]["digest"]
        texts = [r["text"] for r in records[1] if r["kind"] == "note" and "auto" in r["text"]]
        assert len(texts) == (comm.size > 1)
        if texts:
            assert texts[0].endswith("8 segments" if shorter else "one Allreduce")
        assert next(r for r in records[1] if r["kind"] == "run")["overlap"] == "auto"
