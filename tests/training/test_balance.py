"""Shards follow the speed of ranks; the bits do not change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpctrain.parallel.overlap import Overlapped
from hpctrain.parallel.placement import Balance
from hpctrain.plan import resolve
from hpctrain.report.record import read_records
from hpctrain.training import train as loop


def runs(*counts):
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def test_a_rank_that_takes_three_times_as_long_gets_a_third():
    balance = Balance(runs(4, 4))
    assert balance.better([0.0, 0.0]) is None, "nothing measured yet"
    for _ in range(7):
        balance.add(1.0)
    assert balance.seconds == 7.0
    assert balance.better([7.0, 21.0]) == runs(6, 2) == balance.runs
    assert balance.seconds == 0.0
    assert balance.better([10.5, 10.5]) is None, "as good as can be"
    assert balance.better([1.5, 0.5]) == runs(4, 4), "fast again"


def test_what_gains_little_does_not_move():
    assert Balance(runs(4, 4)).better([1.0, 1.04]) is None


def test_every_rank_keeps_a_shard():
    found = Balance(runs(2, 2, 2)).better([1.0, 1000.0, 1.0])
    assert [len(run) for run in found] == [3, 1, 2]


@pytest.mark.mpi
@pytest.mark.parametrize("overlap", [0, 2])
def test_shards_move_and_the_bits_stay(comm, settings, monkeypatch, overlap):
    """The last rank says that it is slow; it hands shards over after the first epoch."""
    config = dataclasses.replace(settings, shards=8, deterministic=True, epochs=3, digest_every=2)
    assert loop.train(dataclasses.replace(config, run="even"), comm) == 0
    original = Balance.add

    def slowed(self, compute):
        of_a_shard = 4.0 if comm.rank == comm.size - 1 else 1.0
        original(self, of_a_shard * len(self.runs[comm.rank]))

    monkeypatch.setattr(Balance, "add", slowed)
    close, closed = Overlapped.close, []
    monkeypatch.setattr(Overlapped, "close", lambda self: (closed.append(self), close(self)))
    config = dataclasses.replace(config, worker_load="auto", overlap=overlap)
    assert loop.train(config, comm) == 0
    assert len(closed) == (1 + (comm.size > 1) if overlap else 0), "each when it was done with"
    if comm.rank == 0:
        records = [list(read_records(Path(settings.runs_dir) / name)) for name in ("even", "a")]
        assert records[0][-1]["digest"] == records[1][-1]["digest"]
        notes = [r["text"] for r in records[1] if r["kind"] == "note"]
        assert len(notes) == (comm.size > 1)
        if comm.size == 2:
            assert notes == ["shards by rank from epoch 2 on: 7, 1"]


@pytest.mark.mpi
def test_nothing_moves_after_the_last_epoch(comm, settings, monkeypatch):
    monkeypatch.setattr(Balance, "better", lambda self, seconds: self.runs)
    config = dataclasses.replace(settings, worker_load="auto", epochs=2)
    assert loop.train(config, comm) == 0
    if comm.rank == 0:
        records = read_records(Path(settings.runs_dir) / "a")
        notes = [r["text"] for r in records if r["kind"] == "note" and "shards by" in r["text"]]
        assert len(notes) == 1 and "from epoch 2 on" in notes[0]


@pytest.mark.mpi
def test_without_tree_order_too(comm, settings):
    config = dataclasses.replace(settings, worker_load="auto", epochs=2)
    assert loop.train(config, comm) == 0
    if comm.rank == 0:
        first = next(iter(read_records(Path(settings.runs_dir) / "a")))
        assert first["shards"] == 4 * comm.size


def test_the_plan_has_shards_to_move():
    from tests.test_plan import FACTS, Config

    assert resolve(Config(worker_load="auto"), FACTS).shards == 16
    assert resolve(Config(worker_load="auto", shards=5), FACTS).shards == 5
