"""Nothing hangs for ever, and what ended a launch is named: stopped, stuck and killed ranks."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import hpctrain as hp
from tests.support.api import Watchdog, fake_clock
from tests.support.killed import run_each
from tests.support.launch import Job, as_flags, mpirun
from tests.support.launches import launch
from tests.support.records import beat
from tests.support.short import records, short_run
from tests.support.wait import wait_for

pytestmark = pytest.mark.timeout(300)  # jobs wait for 10 s, and start slowly on a busy machine
MPI_INIT = "waiting for all in MPI_Init"
LIMIT = "--hang-timeout=10s"


@pytest.fixture
def settings(tmp_path):
    return short_run(tmp_path) | {"shards": 4}


def words(settings, *more):
    """The same settings as a command line, for a run without end."""
    return ["-m", "hpctrain", "train", *as_flags({**settings, "epochs": 100000}), *more]


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


def test_a_rank_that_is_stopped_and_one_that_is_stuck_are_named_once_and_all_end(
    settings, tmp_path
):
    code, err = ended(start(settings, ["step.done:stop:5", "step.done:stall:5", ""], LIMIT))
    assert code == 1
    assert len(re.findall(r"\[rank \d of 3 @.*nothing new for 10 s while in: ", err)) == 1
    assert len(re.findall(r"rank 0 \(process \d+ on .*gave no sign for", err)) == 1
    assert len(re.findall(r"rank 1 \(process \d+ on .*\) did not arrive, it is in: ", err)) == 1
    assert "rank 2 (" not in err and "Thread" not in err
    for rank, place in ((1, "fault.py"), (2, "hpctrain/parallel/")):  # whichever collective
        assert place in (tmp_path / f"runs/a/ranks/{rank}.stack").read_text()


def test_a_rank_that_is_stuck_while_it_sets_up_ends(settings):
    """No folder of the run is there yet, so that each rank looks after itself."""
    assert launch(settings, epochs=1).code == 0  # it takes the lock of a run that is there
    job = Job([sys.executable, *words(settings, LIMIT)], {"HPCTRAIN_FAULT": "lock.taken:stall"})
    code, err = ended(job)
    assert code == 1
    assert re.search(r"\[rank 0 of 1 @.*nothing new for 10 s while in: setting up", err)
    (stacks,) = re.findall(r"stacks are in (\S+)", err)
    assert "fault.py" in Path(stacks).read_text()


@pytest.mark.slow
def test_a_rank_that_stops_before_mpi_runs_ends_all(settings):
    """While modules are imported: no MPI that could tell of it runs yet."""
    code, err = ended(start(settings, ["", "mpi.starting:stop"], "--hang-timeout=1s"))
    assert code not in (0, 75)
    hung = re.findall(r"\[rank (\d) of 2 @.* nothing new for 31 s while in: (.*)", err)
    assert hung[0] == ("0", MPI_INIT)  # the end of all may let the other one run on for a moment
    assert "Thread" not in err and "MPI_Init_thread" not in err, "stacks are in files"


def test_signals_to_processes_that_start_and_crash(settings, tmp_path):
    """A notice before MPI starts is not lost; a crash is named by the next launch."""
    faults = {"notice": "mpi.starting:usr2", "crash": "step.done:segv:3"}
    each = {name: words(settings | {"run": name})[2:] for name in faults}
    cases = [({"HPCTRAIN_FAULT": faults[name]}, each[name]) for name in faults]
    assert run_each(cases, tmp_path) == [75, -11]
    assert records(settings | {"run": "notice"}, "end")[-1]["reason"].startswith("SIGUSR2; saved")
    crashed = settings | {"run": "crash", "epochs": 100000}
    assert launch(crashed, leave=1).code == 75
    first, _ = records(crashed, "end")
    assert first["status"] == "failed"
    assert re.match(r"rank 0 crashed \(Segmentation fault\), last heartbeat: ", first["reason"])


@pytest.mark.slow
def test_a_job_that_is_suspended_for_longer_than_the_hang_timeout_goes_on(settings):
    """All of its processes stand still, as under Slurm's suspend or Ctrl-Z."""
    flags = as_flags({**settings, "epochs": 1})
    command = [mpirun(), "-n", "2", sys.executable, "-m", "hpctrain", "train", *flags]
    command += ["--hang-timeout=1s", "--time-limit=1h"]
    job = Job(command, {"HPCTRAIN_FAULT": "step.done:stop:5"})
    try:
        wait_for(lambda: sum(state_of(pid) == "T" for pid in job.members()) >= 2)
        for pid in job.members():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8)  # longer than the kernel's timer, 2 * 1 s + 5 s
        for pid in job.members():
            os.kill(pid, signal.SIGCONT)
        code, err = ended(job)
    finally:
        job.end()
    assert code == 0, err
    assert "nothing new" not in err


def state_of(pid):
    """The state of a process, "T" if it is stopped; "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


LIMITED = """
import ctypes
import signal
import sys
from hpctrain.watchdog import limit_time
limit_time(0.2)
if sys.argv[1] == "stops":
    signal.raise_signal(signal.SIGSTOP)
    limit_time(0)
    signal.alarm(1)
    signal.pause()
deadline = ctypes.PyDLL(None)
while True:
    deadline.sleep(30)  # holds the interpreter's lock
"""


def start_limited(what):
    return Job([sys.executable, "-c", LIMITED, what])


def test_the_timer_of_the_kernel_lets_a_process_that_was_suspended_restart_it():
    job = start_limited("stops")
    try:
        os.waitpid(job.pid, os.WUNTRACED)
        time.sleep(0.4)  # longer than 0.2 s
        os.kill(job.pid, signal.SIGCONT)
        began = time.monotonic()
        job.communicate(timeout=60)
    finally:
        job.end()
    assert job.returncode == -signal.SIGALRM, "it is an ordinary alarm again"
    assert 0.9 < time.monotonic() - began < 13


def test_a_timer_of_the_program_is_left_to_it(monkeypatch):
    """Also if its signal is to end the program."""
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    before = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        with Watchdog(0, 1, "h", 60):
            assert 490 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
        assert 490 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


@pytest.mark.slow
def test_the_timer_of_the_kernel_ends_a_process_that_is_stuck_in_native_code():
    job = start_limited("hangs")
    assert ended(job, 60)[0] == -signal.SIGALRM


def test_of_launches_at_once_one_trains(settings, tmp_path):
    """Whichever comes first: it goes on until the other has answered."""
    jobs = [Job([sys.executable, *words(settings)]) for _ in range(2)]
    try:
        wait_for(lambda: sum(job.poll() is not None for job in jobs) == 1)
        trains, other = sorted(jobs, key=lambda job: job.poll() is not None)
        _, err = other.communicate()
        assert other.returncode == 2 and re.search("another (launch|job)", err), err
        record = tmp_path / "runs/a/progress.jsonl"  # its last line may be half written
        wait_for(lambda: record.exists() and b'"kind": "step"' in record.read_bytes())
        (tmp_path / "runs/a/STOP").touch()
        code, err = ended(trains)
    finally:
        for job in jobs:
            job.end()
    assert code == 0, err
    assert records(settings)[-1]["status"] == "stopped"


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
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture
def ranks(tmp_path):
    """The folder of heartbeats."""
    (tmp_path / "ranks").mkdir()
    return tmp_path / "ranks"


def beat_of(ranks, rank, doing, age=0.0, **more):
    """Write the heartbeat of a rank as it was so many seconds ago."""
    file = beat(ranks.parent, rank=rank, doing=doing, **more)
    os.utime(file, (time.time() - age, time.time() - age))


def hung(ranks, rank, size, clock, limit=60.0):
    """A watchdog whose rank has waited for longer than it may."""
    dog = Watchdog(rank, size, "h", limit)
    dog.keep_in(ranks)
    dog.doing("waiting for all in step 9")
    clock.now += limit + 1
    return dog


@pytest.mark.parametrize("how", ["clean", "error", "said"])
def test_a_clean_end_leaves_no_sign_of_a_crash(ranks, how):
    """Else a record that was cut afterwards would be told to have lost its ranks."""
    with suppress(ValueError), Watchdog(0, 1, "h", 60) as dog:
        dog.keep_in(ranks)
        assert os.listdir(ranks)
        if how == "error":
            raise ValueError
        if how == "said":
            dog.fail("no memory")
    assert [path.suffix for path in ranks.iterdir()] == ([".json"] if how != "clean" else [])
    if how == "said":
        assert json.loads((ranks / "0.json").read_text())["failed"] == "no memory"


def test_who_did_not_arrive_is_told(ranks, clock, exits, capsys):
    dog = hung(ranks, 0, 6, clock)
    beat_of(ranks, 1, "step 9", 1, seconds=100)
    beat_of(ranks, 2, "step 9", 300)
    (ranks / "3.json").write_text("torn")
    beat_of(ranks, 5, "waiting for rank 0 in saving", 1, seconds=100)
    dog.look()
    assert exits == [1]
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first == "[rank 0 of 6 @h] nothing new for 60 s while in: waiting for all in step 9"
    told = "\n".join(line.removeprefix("[rank 0 of 6 @h] ") for line in lines)
    assert re.sub(r"\b30\d s", "300 s", told).splitlines() == [
        "ranks 3-4 gave no sign at all",
        "rank 1 (process 1 on far) did not arrive, it is in: step 9",
        "rank 2 (process 1 on far) gave no sign for 300 s, last in: step 9",
    ]
    assert last.endswith(f" stacks are in {ranks}")


def test_what_is_said_of_many_ranks_is_short(ranks, clock, exits, capsys):
    dog = hung(ranks, 0, 1024, clock)
    for rank in range(2, 40, 2):
        beat_of(ranks, rank, "step 3", seconds=100)
    dog.look()
    lines = capsys.readouterr().err.splitlines()[1:-1]
    assert len(lines) == 9 and lines[-1].endswith("] and 12 ranks more")
    assert "ranks 1, 3, 5, 7, 9, 11, 13, 15 and " in lines[0] and "no sign at all" in lines[0]


def test_one_rank_tells_of_a_hang_and_another_in_its_place_if_that_one_is_stopped(
    ranks, clock, exits, capsys
):
    first, second, third = (hung(ranks, rank, 4, clock, 2.0) for rank in range(3))
    beat_of(ranks, 3, "step 9", limit=1000.0)  # it goes on: nobody ends
    for _ in range(3):
        for dog in (first, second, third):
            dog.look()
        clock.now += 0.4
    assert exits == []
    beat_of(ranks, 3, "step 9", 2000, limit=1000.0)
    beat_of(ranks, 0, "waiting for all in step 9", 10, limit=2.0)  # the first is stopped
    second.look()
    assert exits == [1]
    printed = capsys.readouterr().err
    assert printed.startswith("[rank 1 of 4 @h] nothing new for 2 s while in: waiting for all")
    third.look()
    assert exits == [1, 1] and capsys.readouterr().err == ""


def test_a_rank_waits_as_long_as_another_goes_on(ranks, clock, exits):
    """As where rank 0 unpacks an archive: what it says is new."""
    dog = hung(ranks, 1, 2, clock, 2.0)
    for age, codes in ((0, []), (500, []), (2000, [1])):  # since rank 0 told of a new file
        beat_of(ranks, 0, f"file {age}", age, limit=1000.0)
        clock.now += 2.5
        dog.look()
        assert exits == codes
    assert "nothing new for 2 s" in json.loads((ranks / "1.json").read_text())["failed"]


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


def test_time_in_which_the_watchdog_did_not_run_does_not_count(ranks, clock, exits):
    dog = Watchdog(0, 1, "h", 10.0)
    dog.keep_in(ranks)
    with open(ranks / "0.stack", "w") as file:
        file.write("stacks, by the timer that was up when the process went on")
    began = dog.running_time()
    for suspended in (500, 0, 1e6, 0, 0):
        clock.now += suspended + 1
        dog.tick()
        dog.look()
    assert exits == [] and (ranks / "0.stack").read_text() == ""
    assert dog.running_time() - began == 5
    for _ in range(6):
        assert exits == []
        clock.now += 1
        dog.tick()
        dog.look()
    assert exits == [1]
    clock.now += 1e6
    assert dog.running_time() - began < 14, "also before the thread has seen it"


def test_what_is_done_starts_the_time_anew(ranks, clock, exits):
    dog = Watchdog(0, 1, "h", 0.5)
    dog.keep_in(ranks)
    for number in range(8):
        dog.doing(f"step {number}")
        clock.now += 0.4
        dog.look()
    assert exits == []
    clock.now += 0.2
    dog.look()
    assert exits == [1]


def test_another_phase_is_written_at_once(ranks, clock, exits):
    """Else the last heartbeat of a rank that is killed tells of its setup, seconds ago."""

    def written():
        return json.loads((ranks / "0.json").read_text())["doing"]

    dog = Watchdog(0, 1, "h", 2400)
    dog.keep_in(ranks)
    for first in ("waiting for all in setting up", "step 7", "block 3 in the evaluation"):
        dog.doing(first)
        clock.now += 1
        dog.look()
        assert written() == first
    for same in ("step 8", "recording step 8", "waiting for all in recording step 8"):
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


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_call_in_on_evaluation_that_other_ranks_do_not_make_is_refused(name):
    with Watchdog(0, 2, "h", 60) as dog:
        dog.doing("calling on_evaluation")
        with pytest.raises(hp.UsageError, match=f"hpctrain.{name} in on_evaluation: all ranks"):
            hp.train() if name == "train" else hp.evaluate("a")
