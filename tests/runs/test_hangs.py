"""Nothing hangs for ever, and what ended a launch is named: stopped, stuck and killed ranks."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.api import Watchdog, fake_clock, heartbeats
from tests.support.killed import run_each
from tests.support.launch import Job, mpirun
from tests.support.launches import launch
from tests.support.short import records, short_run
from tests.support.wait import wait_for

pytestmark = pytest.mark.timeout(300)  # jobs wait for 15 s, and start slowly on a busy machine
MPI_INIT = "waiting for all in MPI_Init"


@pytest.fixture
def settings(tmp_path):
    return short_run(tmp_path) | {"shards": 4}


def words(settings, *more):
    """The same settings as a command line, for a run without end."""
    given = {**settings, "epochs": 100000}
    flags = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
    return ["-m", "hpctrain", "train", *flags, *more]


def start(settings, faults, *more):
    """Start a rank for each of these faults (hpctrain/fault.py; "" = none) under one mpirun."""
    command = [mpirun()]
    for fault in faults:
        command += [":"] if len(command) > 1 else []
        command += ["-n", "1", "env", f"HPCTRAIN_FAULT={fault}", sys.executable]
        command += words(settings, *more)
    return Job(command)


def ended(job, seconds=200):
    """Exit code and error output of a job that has to end by itself, with all its processes."""
    try:
        _, err = job.communicate(timeout=seconds)
        wait_for(lambda: job.members() == [])
    finally:
        job.end()
    return job.returncode, err


# Whole jobs


def test_a_rank_that_is_stopped_is_named_by_one_other_and_all_end(settings, tmp_path):
    job = start(settings, ["step.done:stop:5", "", ""], "--hang-timeout=15s")
    code, err = ended(job)
    assert code == 1
    hung = r"\[rank \d of 3 @.*nothing new for 15 s while in: waiting for all"
    assert len(re.findall(hung, err)) == 1
    assert len(re.findall(r"rank 0 \(process \d+ on .*gave no sign for", err)) == 1
    assert "ranks" in err and "Thread" not in err
    for rank in (1, 2):  # whichever collective it waits in
        stack = (tmp_path / f"runs/a/ranks/{rank}.stack").read_text()
        assert "hpctrain/parallel/" in stack, stack


def test_a_rank_that_is_stuck_is_named(settings, tmp_path):
    code, err = ended(start(settings, ["", "step.done:stall:5"], "--hang-timeout=15s"))
    assert code == 1
    assert re.search(r"rank 1 \(process \d+ on .*\) did not arrive, it is in: ", err)
    assert "fault.py" in (tmp_path / "runs/a/ranks/1.stack").read_text()


def test_a_rank_that_is_stuck_while_it_sets_up_ends_all(settings):
    """No folder of the run is there yet, so that each rank looks after itself."""
    settings = settings | {"run": "b"}
    assert launch(settings, epochs=1).code == 0  # rank 0 takes the lock of a run that is there
    code, err = ended(start(settings, ["lock.taken:stall", ""], "--hang-timeout=15s"))
    assert code == 1
    assert re.search(r"\[rank 0 of 2 @.*nothing new for 15 s while in: setting up", err)
    (stacks,) = re.findall(r"stacks are in (\S+)", err)
    assert "fault.py" in Path(stacks).read_text()


@pytest.mark.slow
def test_a_rank_that_stops_before_mpi_runs_ends_all(settings):
    """While modules are imported: no MPI that could tell of it runs yet."""
    code, err = ended(start(settings, ["", "mpi.starting:stop"], "--hang-timeout=1s"))
    assert code not in (0, 75)
    hung = re.findall(r"\[rank (\d) of 2 @.* nothing new for 31 s while in: (.*)", err)
    assert hung == [("0", MPI_INIT)]
    assert "Thread" not in err and "MPI_Init_thread" not in err, "stacks are in files"


def test_signals_to_processes_that_start_and_crash(settings, tmp_path):
    """A notice before MPI starts is not lost; a crash is named by the next launch."""
    faults = {"notice": "mpi.starting:usr2", "crash": "step.done:segv:3"}
    each = {name: words(settings | {"run": name})[2:] for name in faults}
    cases = [({"HPCTRAIN_FAULT": faults[name]}, each[name]) for name in faults]
    assert run_each(cases, tmp_path) == [75, -11]
    assert records(settings | {"run": "notice"}, "end")[-1]["reason"] == "SIGUSR2; saved"
    assert len(records(settings | {"run": "notice"}, "step")) >= 1
    crashed = settings | {"run": "crash", "epochs": 100000}
    assert launch(crashed, time_limit="5s").code == 75
    first, _ = records(crashed, "end")
    assert first["status"] == "failed"
    assert re.match(r"rank 0 crashed \(Segmentation fault\), last heartbeat: ", first["reason"])


def test_of_launches_at_once_one_trains(settings, tmp_path):
    """Whichever comes first: it goes on until the others have answered."""
    jobs = [Job([sys.executable, *words(settings)]) for _ in range(3)]
    try:
        wait_for(lambda: sum(job.poll() is not None for job in jobs) == 2)
        (trains,) = [job for job in jobs if job.poll() is None]
        for other in set(jobs) - {trains}:
            _, err = other.communicate()
            assert other.returncode == 2 and re.search("another (launch|job)", err), err
        record = tmp_path / "runs/a/progress.jsonl"
        wait_for(lambda: record.exists() and records(settings, "step"))
        (tmp_path / "runs/a/STOP").touch()
        code, err = ended(trains)
    finally:
        for job in jobs:
            job.end()
    assert code == 0, err
    assert records(settings)[-1]["status"] == "stopped"


# What heartbeats tell


def beat(rank, doing="step 3", **more):
    given = {"rank": rank, "host": "h", "pid": 7, "doing": doing, "seconds": 0.0, "time": 0.0}
    return heartbeats.Beat(**given | more)


def write(folder, beats, age=0):
    """Write heartbeats that are so many seconds old."""
    now = time.time()
    for each in beats:
        heartbeats.write_beat(folder, each)
        os.utime(folder / f"{each.rank}.json", (now - age, now - age))


@pytest.mark.parametrize(
    ("failed", "stacks", "cause"),
    [
        ({}, {}, "all ranks were killed, .*: rank 0 on h, last heartbeat: step 3; rank 1"),
        ({1: "ValueError: x"}, {0: "File"}, "rank 1: ValueError: x"),
        ({}, {0: "File", 2: "Fatal Python error: Bus error\n"}, r"rank 2 crashed \(Bus error\), l"),
        ({}, {0: "File", 1: "File"}, "killed, .* unknown: rank 2 on h, last heartbeat: step 3 "),
        ({}, {0: "F", 1: "F", 2: "F"}, r"ended from outside \(SIGTERM\), rank 0 was in: step 3"),
    ],
)
def test_what_a_launch_left_tells_why_it_ended(tmp_path, failed, stacks, cause):
    write(tmp_path, [beat(r, time=99.0 + r, failed=failed.get(r, "")) for r in range(3)])
    for rank, text in stacks.items():
        (tmp_path / f"{rank}.stack").write_text(text)
    text, when = heartbeats.find_cause(tmp_path, True)
    assert re.match(cause, text) and when == 101.0
    assert bool(heartbeats.find_cause(tmp_path, False)) == bool(failed), "h is another machine"
    assert heartbeats.find_cause(tmp_path / "nothing", True) is None


def test_heartbeats_tell_who_did_not_arrive(tmp_path):
    write(tmp_path, [beat(0, "waiting for all in step 9"), beat(1, "step 9")], age=1)
    write(tmp_path, [beat(2, "step 9")], age=300)
    write(tmp_path, [beat(5, "waiting for rank 0 in saving")], age=1)
    (tmp_path / "3.json").write_text("torn")
    assert heartbeats.blame(heartbeats.read_beats(tmp_path), 6, time.time(), 60.0) == [
        "ranks 3-4 gave no sign at all",
        "rank 1 (process 7 on h) did not arrive, it is in: step 9",
        "rank 2 (process 7 on h) gave no sign for 300 s, last in: step 9",
    ]


def test_what_is_said_of_many_ranks_is_short():
    lines = heartbeats.blame([beat(rank) for rank in range(0, 1024, 2)], 1024, 100.0, 60.0)
    assert len(lines) == 9 and lines[-1] == "and 505 ranks more"
    assert lines[0] == "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 504 more gave no sign at all"


@pytest.mark.parametrize("how", ["clean", "error", "said"])
def test_a_clean_end_leaves_no_sign_of_a_crash(tmp_path, how):
    """Else a record that was cut afterwards would be told to have lost its ranks."""
    with suppress(ValueError), Watchdog(0, 1, "h", 60) as dog:
        dog.keep_in(tmp_path)
        assert heartbeats.find_cause(tmp_path, True)
        if how == "error":
            raise ValueError
        if how == "said":
            dog.fail("no memory")
    cause = heartbeats.find_cause(tmp_path, True)
    assert cause is None if how == "clean" else cause
    assert how != "said" or cause[0] == "rank 0: no memory"


# A watchdog by a clock of the test's


@pytest.fixture
def clock(monkeypatch):
    return fake_clock(monkeypatch)


@pytest.fixture
def exits(monkeypatch):
    """The exit codes with which a watchdog wanted to end this process."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    yield codes
    faulthandler.cancel_dump_traceback_later()


def test_one_rank_reads_the_heartbeats_until_it_is_silent(tmp_path, clock):
    first, second, third = (heartbeats.Turn(tmp_path, 0.2) for _ in range(3))
    assert first.take() and not second.take() and not third.take()
    for number in range(4):
        clock.now += 0.1
        assert first.take()
        os.utime(tmp_path / first.FILE, (number, number))  # another time than the last, surely
        assert not second.take()
    clock.now += 0.3  # the first is stopped
    assert not second.take(), "it takes the file away"
    assert second.take() and not third.take()
    assert not third.over
    second.announce()
    assert not third.take() and third.over
    second.give_back()
    assert third.take() and len(list(tmp_path.iterdir())) == 1


def test_a_rank_waits_as_long_as_another_goes_on(tmp_path, clock, exits):
    """As where rank 0 unpacks an archive: what it says is new."""
    dog = Watchdog(1, 2, "h", 2.0)
    dog.keep_in(tmp_path)
    dog.doing("waiting for rank 0 in start")
    for age, codes in ((0, []), (500, []), (2000, [1])):  # since rank 0 told of a new file
        write(tmp_path, [beat(0, f"file {age}", limit=1000.0)], age)
        clock.now += 2.5
        dog.look()
        assert exits == codes
    assert "nothing new for 2 s" in heartbeats.read_beat(tmp_path / "1.json").failed


def test_where_no_heartbeats_are_a_rank_that_waits_has_patience(clock, exits, capsys):
    """Another may be staging for long; a rank that works is ended by its own watchdog."""
    dog = Watchdog(1, 2, "h", 2.0)
    limits = {"setting up": 2, MPI_INIT: 2, "waiting for all in setting up": 6}
    for activity, seconds in limits.items():
        dog.doing(activity)
        clock.now += seconds - 0.5
        dog.look()
        assert exits == [], activity
        clock.now += 1
        dog.look()
        assert exits.pop() == 1
        assert f"nothing new for {seconds} s while in: {activity}" in capsys.readouterr().err


def test_what_is_done_starts_the_time_anew(tmp_path, clock, exits):
    dog = Watchdog(0, 1, "h", 0.5)
    dog.keep_in(tmp_path)
    for number in range(8):
        dog.doing(f"step {number}")
        clock.now += 0.4
        dog.look()
    dog.beat()
    told = json.loads((tmp_path / "0.json").read_text())
    assert exits == []
    assert (told["doing"], told["pid"]) == ("step 7", os.getpid())
    clock.now += 0.2
    dog.look()
    assert exits == [1]


def test_another_phase_is_written_at_once(tmp_path, clock, exits):
    """Else the last heartbeat of a rank that is killed tells of its setup, seconds ago."""

    def written():
        return heartbeats.read_beat(tmp_path / "0.json").doing

    dog = Watchdog(0, 1, "h", 2400)
    dog.keep_in(tmp_path)
    for first in ("waiting for all in setting up", "step 7", "block 3 in the evaluation"):
        dog.doing(first)
        clock.now += 1
        dog.look()
        assert written() == first
    for same in ("step 8", "recording step 8"):  # no phase of its own
        dog.doing(same)
        dog.look()
    assert written() == "step 8"


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_one_rank_of_each_host_tells_once_that_mpi_init_is_slow(
    monkeypatch, clock, capsys, local_rank
):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    dog = Watchdog(8, 16, "node3", 1800.0)
    dog.doing("importing MPI")
    clock.now += 100
    dog.look()
    dog.doing(MPI_INIT)
    for seconds in (59, 2, 1, 938):
        clock.now += seconds
        dog.look()
        printed = capsys.readouterr().err
        if local_rank == "0" and seconds == 2:
            assert "[rank 8 of 16 @node3] still in MPI_Init after 60 s" in printed
            assert "4 of 16 ranks here" in printed
        else:
            assert not printed
