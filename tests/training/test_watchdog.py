"""Nothing hangs for ever: whole jobs with a rank that stops, loops, dies or is preempted."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain import heartbeats, watchdog
from hpctrain.config import Config
from hpctrain.errors import RunError, UsageError
from hpctrain.heartbeats import (
    Beat,
    Turn,
    blame,
    find_cause,
    name_ranks,
    read_beat,
    read_beats,
    write_beat,
)
from hpctrain.plot import read_curves
from hpctrain.report.record import read_records
from hpctrain.training.control import RunLock, is_locked
from hpctrain.training.folder import find_previous_launch, make_run_folder, open_run_folder
from hpctrain.training.state import Progress
from hpctrain.typed import from_fields, parse_toml
from hpctrain.watch import runs as watch_runs
from hpctrain.watch.runs import WatchedRuns
from hpctrain.watchdog import MPI_INIT, Watchdog
from scripts.benchmarks.harness import timestamp
from tests.support.launch import Job, mpirun, run
from tests.support.packs import make_pack
from tests.support.wait import wait_for

LONG = ["--epochs", "100000", "--batch-size", "16", "--shards", "4", "--progress", "none"]


@pytest.fixture
def start(tmp_path):
    """A function that starts a long run on two ranks and waits for its first steps."""
    make_pack(tmp_path / "pack.h5", {"train": 101, "validation": 13, "test": 23})
    jobs = []

    def begin(*flags, ranks=2, wait=True):
        words = ["--data", "pack.h5", "--run", "a", *LONG, *flags]
        command = [mpirun(), "-n", str(ranks), sys.executable, "-m", "hpctrain", "train", *words]
        jobs.append(Job(command, cwd=tmp_path))

        def trains():
            assert jobs[-1].poll() is None, jobs[-1].communicate()
            return len(beats(tmp_path)) == ranks and steps(tmp_path)

        if wait:
            wait_for(trains)
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def beats(folder):
    found = {}
    for path in (folder / "runs/a/ranks").glob("[0-9]*.json"):
        beat = json.loads(path.read_text())
        found[beat["rank"]] = beat
    return found


def steps(folder):
    path = folder / "runs/a/progress.jsonl"
    return [r for r in read_records(path) if r["kind"] == "step"] if path.exists() else []


def ended(job, seconds=90):
    """Exit code and error output of a job that has to end by itself, with all its processes."""
    _, err = job.communicate(timeout=seconds)
    wait_for(lambda: job.members() == [])
    return job.returncode, err


def test_a_rank_that_is_stopped_is_named_by_one_other_and_all_end(start, tmp_path):
    stopped = 0
    job = start("--hang-timeout", "15s", ranks=3)
    pid = beats(tmp_path)[stopped]["pid"]
    os.kill(pid, signal.SIGSTOP)
    code, err = ended(job)
    assert code == 1
    assert (
        len(re.findall(r"\[rank \d of 3 @.*nothing new for 15 s while in: waiting for all", err))
        == 1
    )
    assert len(re.findall(rf"rank {stopped} \(process {pid} on .*gave no sign for", err)) == 1
    assert "stacks are in runs/a/ranks" in err and "Thread" not in err
    for rank in {0, 1, 2} - {stopped}:  # whichever collective it stopped in: a step's or an epoch's
        stack = (tmp_path / f"runs/a/ranks/{rank}.stack").read_text()
        assert re.search(r"hpctrain/parallel/(mpi|transport)\.py.* in \w+", stack), stack


def test_a_rank_that_loops_is_named(start, tmp_path):
    (tmp_path / "looping.py").write_text(
        "import time, torch\n"
        "from hpctrain.launcher import launched_rank\n"
        "class Net(torch.nn.Linear):\n"
        "    steps = 0\n"
        "    def forward(self, x):\n"
        "        Net.steps += self.training\n"
        "        while Net.steps > 20 and launched_rank() == 1: time.sleep(0.1)\n"
        "        return super().forward(x.flatten(1))\n"
        "def net(image_shape, classes): return Net(784, classes)\n"
    )
    job = start("--hang-timeout", "15s", "--model", "looping:net")
    code, err = ended(job)
    assert code == 1
    assert re.search(r"rank 1 \(process \d+ on .*\) did not arrive, it is in: step \d+", err)
    assert "looping.py" in (tmp_path / "runs/a/ranks/1.stack").read_text()


@pytest.mark.parametrize(
    ("whom", "number", "cause"),
    [
        (
            "rank",
            "SIGKILL",
            r"killed, reason unknown: rank 1 on \S+, last heartb.*\(the others were",
        ),
        ("rank", "SIGSEGV", r"rank 1 crashed \(Segmentation fault\), last heartbeat: "),
        ("mpirun", "SIGKILL", "all ranks were killed, reason unknown: rank 0 on .*; rank 1 on .*"),
    ],
)
def test_what_kills_ends_everything_soon_and_is_named_afterwards(
    start, tmp_path, monkeypatch, whom, number, cause
):
    monkeypatch.setattr(watch_runs, "GRACE", 0.0)
    monkeypatch.setattr(watch_runs, "OVERDUE", 0.0)
    job = start()
    os.kill(beats(tmp_path)[1]["pid"] if whom == "rank" else job.pid, getattr(signal, number))
    code, _ = ended(job)
    assert code not in (0, 75)
    folder, lock = tmp_path / "runs/a", RunLock()
    wait_for(lambda: not is_locked(folder))  # the kernel may be closing the files of the killed
    (watched,) = WatchedRuns([str(folder)], "runs").all()
    watched.poll()
    assert watched.status.kind == "failed", watched.status
    assert re.search(cause, watched.status.text)
    curves = read_curves(folder, "a")
    assert curves.status == "failed" and re.search(cause, curves.reason)
    config = from_fields(Config, parse_toml((folder / "config.toml").read_bytes()))
    earlier = find_previous_launch(replace(config, runs_dir=str(tmp_path / "runs")), lock)
    assert re.search(f"the launch before did not record its end: {cause}", earlier.problems[0])
    plan = SimpleNamespace(to_json=(folder / "plan.json").read_text)
    open_run_folder(SimpleNamespace(config=config, plan=plan), earlier, Progress())
    *_, end = read_records(folder)
    assert (end["kind"], end["status"]) == ("end", "failed") and re.search(cause, end["reason"])
    assert list((folder / "ranks").iterdir()) == []
    assert not find_previous_launch(replace(config, runs_dir=str(tmp_path / "runs")), lock).crash
    lock.release()


@pytest.mark.parametrize(
    ("failed", "stacks", "cause"),
    [
        (
            {},
            {},
            "all ranks were killed, .*: rank 0 on h, last heartbeat: step 3; rank 1",
        ),
        ({1: "ValueError: x"}, {0: "File"}, "rank 1: ValueError: x"),
        ({}, {0: "File", 2: "Fatal Python error: Bus error\n"}, r"rank 2 crashed \(Bus error\), l"),
        (
            {},
            {0: "File", 1: "File"},
            "killed, .* unknown: rank 2 on h, last heartbeat: step 3 ",
        ),
        ({}, {0: "F", 1: "F", 2: "F"}, r"ended from outside \(SIGTERM\), rank 0 was in: step 3"),
    ],
)
def test_what_a_launch_left_tells_why_it_ended(tmp_path, failed, stacks, cause):
    for rank in range(3):
        beat = Beat(rank, "h", 7, "step 3", 0.0, 99.0 + rank, failed=failed.get(rank, ""))
        write_beat(tmp_path, beat)
    for rank, text in stacks.items():
        (tmp_path / f"{rank}.stack").write_text(text)
    text, when = find_cause(tmp_path, True)
    assert re.match(cause, text) and when == 101.0
    assert bool(find_cause(tmp_path, False)) == bool(failed), "h is another machine"
    assert find_cause(tmp_path / "nothing", True) is None


def test_a_notice_to_one_rank_saves_and_exits_75(start, tmp_path):
    job = start()
    os.kill(beats(tmp_path)[1]["pid"], signal.SIGUSR1)
    code, _ = ended(job)
    assert code == 75
    records = list(read_records(tmp_path / "runs/a"))
    assert records[-1]["status"] == "preempted"
    done = records[-1]["steps"]
    assert records[-1]["reason"] == "SIGUSR1; saved"
    assert (tmp_path / f"runs/a/checkpoints/{done:08}.json").exists()
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, done + 1))


def test_a_notice_while_starting_is_not_lost(start, tmp_path):
    job = start(wait=False)
    rank = new_ranks(job)[-1]
    wait_for(lambda: signal.SIGUSR2 in caught(rank))  # the interpreter has to come up first
    os.kill(rank, signal.SIGUSR2)
    code, err = ended(job)
    assert code == 75, err
    assert len(steps(tmp_path)) >= 1


def stacks_of(err):
    """What stands in the files that the messages name, one of each rank."""
    return "".join(Path(name).read_text() for name in re.findall(r"stacks are in (\S+)", err))


def caught(pid):
    """The signals for which this process has a handler."""
    mask = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    return [number for number in range(1, 65) if mask >> number - 1 & 1]


def new_ranks(job):
    """The process ids of two ranks, as soon as they are there."""

    def ranks():
        found = [p for p in job.members() if p != job.pid and b"hpctrain" in command(p)]
        return found if len(found) == 2 else None

    return wait_for(ranks)


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
    except OSError:
        return b""
    return words if b"mpirun" not in words and b"prterun" not in words else b""


def test_the_time_limit_is_kept(start, tmp_path):
    job = start("--time-limit", "20s")
    code, _ = ended(job)
    assert code == 75
    first, *_, last = read_records(tmp_path / "runs/a")
    assert "the time is up; saved" in last["reason"]
    assert timestamp(last) - timestamp(first) < 20, "the limit counts from before the run line"


def test_two_jobs_do_not_work_in_one_folder(start, tmp_path):
    start()
    second = start(wait=False)
    code, err = ended(second)
    assert code == 2
    assert "another job works in runs/a" in err


def test_a_rank_that_hangs_while_starting_ends_all(start, tmp_path):
    (tmp_path / "stuck.py").write_text(
        "import time\n"
        "from hpctrain.launcher import launched_rank\n"
        "if launched_rank() == 1: time.sleep(1000)\n"
        "from hpctrain.models import build\n"
        "def net(image_shape, classes): return build('digits', image_shape, classes)\n"
    )
    job = start("--hang-timeout", "15s", "--model", "stuck:net", wait=False)
    code, err = ended(job)
    assert code == 1
    assert re.search(r"\[rank 1 of 2 @.*nothing new for 15 s while in: setting up", err)
    assert "stuck.py" in stacks_of(err)


def test_a_rank_that_stops_before_mpi_runs_ends_all(tmp_path):
    """While modules are imported: no MPI that could tell of it runs yet."""
    code = (
        "import os, signal; from hpctrain import cli, launcher, watchdog; watchdog.SLOW_INIT = 1.0;"
        "launcher.launched_rank() == 1 and os.kill(os.getpid(), signal.SIGSTOP); cli.main()"
    )
    words = ["train", "--data", "pack.h5", "--hang-timeout", "1s"]
    job = Job([mpirun(), "-n", "2", sys.executable, "-c", code, *words], cwd=tmp_path)
    try:
        code, err = ended(job)
    finally:
        job.end()
    assert code not in (0, 75)
    hung = re.findall(r"\[rank (\d) of 2 @.* nothing new for 31 s while in: (.*)", err)
    assert hung == [("0", MPI_INIT)]
    slow = re.findall(r"\[rank 0 of 2 @.* still in MPI_Init after 1 s; .* 2 of 2 ranks here", err)
    assert len(slow) == 1
    assert "Thread" not in err and "MPI_Init_thread" not in err, "stacks are in files"


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_one_rank_of_each_host_tells_once_that_mpi_init_is_slow(monkeypatch, capsys, local_rank):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    dog = Watchdog(8, 16, "node3", 1800.0)
    dog.doing("importing MPI")
    dog.report_slow_init(time.monotonic() + 100)
    dog.doing(MPI_INIT)
    began = time.monotonic()
    for seconds in (59, 61, 62, 1000):
        dog.report_slow_init(began + seconds)
        printed = capsys.readouterr().err
        if local_rank == "0" and seconds == 61:
            assert printed == (
                "[rank 8 of 16 @node3] still in MPI_Init after 60 s; the launcher started 4 of 16"
                " ranks here: a host without such a line is missing\n"
            )
        else:
            assert not printed


def test_heartbeats_tell_who_did_not_arrive(tmp_path):
    now = time.time()
    for rank, what, age in (
        (0, "waiting for all in step 9", 1),
        (1, "step 9", 1),
        (2, "step 9", 300),
        (5, "waiting for rank 0 in saving", 1),
    ):
        write_beat(tmp_path, Beat(rank, "h", 7, what, 0.0, 0.0))
        os.utime(tmp_path / f"{rank}.json", (now - age, now - age))
    (tmp_path / "3.json").write_text("torn")
    assert blame(read_beats(tmp_path), 6, now, 60.0) == [
        "ranks 3-4 gave no sign at all",
        "rank 1 (process 7 on h) did not arrive, it is in: step 9",
        "rank 2 (process 7 on h) gave no sign for 300 s, last in: step 9",
    ]


def test_what_is_said_of_many_ranks_is_short():
    beats = [Beat(rank, "h", 7, "step 9", 0.0, 0.0) for rank in range(0, 1024, 2)]
    lines = blame(beats, 1024, 100.0, 60.0)
    assert len(lines) == 9 and lines[-1] == "and 505 ranks more"
    assert lines[0] == "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 504 more gave no sign at all"
    assert name_ranks([4]) == "rank 4"


@pytest.fixture
def clock(monkeypatch):
    """The clock of watchdogs and turns, moved by `clock.now += seconds`; nobody sleeps."""
    clock = SimpleNamespace(now=1000.0, time=time.time, sleep=lambda seconds: None)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(heartbeats, "time", clock)
    return clock


@pytest.fixture
def exits(monkeypatch):
    """The exit codes with which a watchdog wanted to end this process."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    yield codes
    faulthandler.cancel_dump_traceback_later()


def test_one_rank_reads_the_heartbeats_until_it_is_silent(tmp_path, clock):
    first, second, third = (Turn(tmp_path, 0.2) for _ in range(3))
    assert first.take() and not second.take() and not third.take()
    for number in range(4):
        clock.now += 0.1
        assert first.take()
        os.utime(tmp_path / Turn.FILE, (number, number))  # another time than the last, surely
        assert not second.take()
    clock.now += 0.3  # the first is stopped
    assert not second.take(), "it takes the file away"
    assert second.take() and not third.take()
    assert not third.over
    second.announce()
    assert not third.take() and third.over
    second.give_back()
    assert third.take() and not list(tmp_path.glob("[!r]*"))


def test_a_rank_waits_as_long_as_another_goes_on(tmp_path, clock, exits):
    """As where rank 0 unpacks an archive: what it says is new."""
    dog = Watchdog(1, 2, "h", 2.0)
    dog.keep_in(tmp_path)
    dog.doing("waiting for rank 0 in start")
    for age, ended in ((0, []), (500, []), (2000, [1])):  # seconds since rank 0 told of a new file
        write_beat(tmp_path, Beat(0, "h", 7, f"file {age}", 0.0, 0.0, limit=1000.0))
        os.utime(tmp_path / "0.json", (time.time() - age, time.time() - age))
        clock.now += 2.5
        dog.look()
        assert exits == ended
    assert "nothing new for 2 s" in read_beat(tmp_path / "1.json").failed


def test_where_no_heartbeats_are_a_rank_that_waits_has_patience(clock, exits, capsys):
    """Another may be staging for long; a rank that works is ended by its own watchdog."""
    dog = Watchdog(1, 2, "h", 2.0)
    for activity, seconds in (
        ("setting up", 2),
        (MPI_INIT, 2),
        ("waiting for all in setting up", 6),
    ):
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
    beat = json.loads((tmp_path / "0.json").read_text())
    assert exits == []
    assert (beat["doing"], beat["pid"]) == ("step 7", os.getpid())
    clock.now += 0.2
    dog.look()
    assert exits == [1]


def test_another_phase_is_written_at_once(tmp_path, clock, exits):
    """Else the last heartbeat of a rank that is killed tells of its setup, seconds ago."""

    def written():
        return read_beat(tmp_path / "0.json").doing

    dog = Watchdog(0, 1, "h", 2400)
    assert dog.interval == 5
    dog.keep_in(tmp_path)
    for first in ("waiting for all in setting up", "step 7", "block 3 in the evaluation"):
        dog.doing(first)
        clock.now += 1
        dog.look()
        assert written() == first
    dog.doing("step 8")
    dog.look()
    dog.doing("recording step 8")  # no phase of its own
    dog.look()
    assert written() == "step 8"


@pytest.mark.parametrize("how", ["clean", "error", "said"])
def test_a_clean_end_leaves_no_sign_of_a_crash(tmp_path, how):
    """Else a record that was cut afterwards would be told to have lost its ranks."""
    with suppress(ValueError), Watchdog(0, 1, "h", 60) as dog:
        dog.keep_in(tmp_path)
        assert find_cause(tmp_path, True)
        if how == "error":
            raise ValueError
        if how == "said":
            dog.fail("no memory")
    cause = find_cause(tmp_path, True)
    assert cause is None if how == "clean" else cause
    assert how != "said" or cause[0] == "rank 0: no memory"


def test_a_run_that_another_launch_begins_meanwhile(tmp_path):
    """What a launch that found no run meets as it makes the folder; in between it is locked."""
    job = SimpleNamespace(
        config=Config(run="a", runs_dir=str(tmp_path)), plan=SimpleNamespace(to_json=lambda: "{}")
    )
    first, second = RunLock(), RunLock()
    folder = make_run_folder(job, first)
    code = f"from hpctrain.training.control import *; print(is_locked(Path({str(folder)!r})))"
    try:
        assert run([sys.executable, "-c", code]).stdout == "True\n"
        with pytest.raises(UsageError, match="another launch has just begun the run .*/a: wait"):
            make_run_folder(job, second)
        assert run([sys.executable, "-c", code]).stdout == "True\n", "the first is unharmed"
    finally:
        first.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_of_launches_at_once_one_trains(tmp_path):
    """Whichever comes first: it goes on until the others have answered."""
    make_pack(tmp_path / "pack.h5", {"train": 29})
    words = ["--data", "pack.h5", "--run", "a", *LONG, "--shards", "1", "--threads", "1"]
    jobs = [Job([sys.executable, "-m", "hpctrain", *words], cwd=tmp_path) for _ in range(3)]
    try:
        wait_for(lambda: sum(job.poll() is not None for job in jobs) == 2)
        (trains,) = [job for job in jobs if job.poll() is None]
        for other in set(jobs) - {trains}:
            _, err = other.communicate()
            assert other.returncode == 2 and re.search("another (launch|job)", err), err
        wait_for(lambda: steps(tmp_path))
        (tmp_path / "runs/a/STOP").touch()
        code, err = ended(trains)
    finally:
        for job in jobs:
            job.end()
    assert code == 0, err
    assert list(read_records(tmp_path / "runs/a"))[-1]["status"] == "stopped"


@pytest.mark.parametrize(("place", "said"), [("rf", "rf/q"), ("rf/deep", "rf/deep/q")])
def test_a_file_in_the_place_of_runs_dir_is_no_other_launch(tmp_path, place, said):
    (tmp_path / "rf").write_text("")
    job = SimpleNamespace(config=Config(run="q", runs_dir=str(tmp_path / place)))
    with pytest.raises(RunError, match=f"cannot make .*{said}: Not a directory"):
        make_run_folder(job, RunLock())
