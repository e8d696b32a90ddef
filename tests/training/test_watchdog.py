"""Nothing hangs for ever: whole jobs with a rank that stops, loops, dies or is told to leave."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest

from hpctrain.bench.jobs import moment
from hpctrain.report.record import read_records
from hpctrain.training.watchdog import Watchdog, hung
from tests.launch import Job, mpirun
from tests.packs import make_pack

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
        until = time.monotonic() + 60
        while wait and len(beats(tmp_path)) < ranks and time.monotonic() < until:
            time.sleep(0.1)
        while wait and not steps(tmp_path) and time.monotonic() < until:
            time.sleep(0.1)
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


def ended(job, seconds):
    """Exit code and error output of a job that has to end by itself, with all its processes."""
    began = time.monotonic()
    _, err = job.communicate(timeout=seconds)
    while job.members() and time.monotonic() < began + seconds:
        time.sleep(0.1)
    assert job.members() == []
    return job.returncode, err, time.monotonic() - began


def test_a_rank_that_is_stopped_is_named_and_all_end(start, tmp_path):
    job = start("--timeout", "6s")
    pid = beats(tmp_path)[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    code, err, _ = ended(job, 40)
    assert code == 1
    assert re.search(r"\[rank 0 of 2 @.*nothing new for 6 s while in: waiting for all in ", err)
    assert f"rank 1 (process {pid} on " in err
    assert "gave no sign for" in err
    stack = (tmp_path / "runs/a/ranks/0.stack").read_text()
    assert "Allreduce" in stack or "allreduce" in stack


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
    job = start("--timeout", "5s", "--model", "looping:net")
    code, err, _ = ended(job, 40)
    assert code == 1
    assert re.search(r"rank 1 \(process \d+ on .*\) did not arrive, it is in: step \d+", err)
    assert "looping.py" in (tmp_path / "runs/a/ranks/1.stack").read_text()


@pytest.mark.parametrize("whom", ["rank", "mpirun"])
def test_kill_9_ends_everything_soon(start, tmp_path, whom):
    job = start()
    os.kill(beats(tmp_path)[1]["pid"] if whom == "rank" else job.pid, signal.SIGKILL)
    code, _, seconds = ended(job, 20)
    assert code not in (0, 75)
    assert seconds < 10


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_notice_to_one_rank_saves_and_exits_75(start, tmp_path, name):
    job = start()
    os.kill(beats(tmp_path)[1]["pid"], getattr(signal, name))
    code, _, seconds = ended(job, 30)
    assert code == 75
    assert seconds < 15
    records = list(read_records(tmp_path / "runs/a"))
    assert records[-1]["status"] == "left"
    done = records[-1]["steps"]
    assert records[-1]["reason"] == f"{name}; saved"
    assert (tmp_path / f"runs/a/checkpoints/{done:08}.json").exists()
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, done + 1))


def test_a_notice_while_starting_is_not_lost(start, tmp_path):
    job = start(wait=False)
    ranks = new_ranks(job)
    time.sleep(0.3)  # the interpreter itself has to come up first
    os.kill(ranks[-1], signal.SIGUSR2)
    code, err, _ = ended(job, 60)
    assert code == 75, err
    assert len(steps(tmp_path)) >= 1


def new_ranks(job):
    """The process ids of two ranks, as soon as they are there."""
    until = time.monotonic() + 30
    ranks = []
    while len(ranks) < 2 and time.monotonic() < until:
        ranks = [p for p in job.members() if p != job.pid and b"hpctrain" in command(p)]
        time.sleep(0.02)
    return ranks


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
    except OSError:
        return b""
    return words if b"mpirun" not in words and b"prterun" not in words else b""


def test_the_time_limit_is_kept(start, tmp_path):
    job = start("--time-limit", "12s")
    code, _, _ = ended(job, 40)
    assert code == 75
    first, *_, last = read_records(tmp_path / "runs/a")
    assert "the time is up; saved" in last["reason"]
    assert moment(last) - moment(first) < 12, "the limit counts from before the run line"


def test_two_jobs_do_not_work_in_one_folder(start, tmp_path):
    start()
    second = start(wait=False)
    code, err, _ = ended(second, 60)
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
    job = start("--timeout", "5s", "--model", "stuck:net", wait=False)
    code, err, _ = ended(job, 60)
    assert code == 1
    assert "nothing new for 5 s while in: start" in err
    assert "stuck.py" in err


def test_a_rank_that_stops_before_mpi_runs_ends_all(start):
    """While modules are imported: nobody knows of anybody yet."""
    job = start("--timeout", "1s", wait=False)
    ranks = new_ranks(job)
    time.sleep(0.4)  # the interpreter itself has to come up first
    os.kill(ranks[-1], signal.SIGSTOP)
    code, err, seconds = ended(job, 90)
    assert code not in (0, 75)
    assert seconds < 60
    assert "Timeout" in err


def test_heartbeats_tell_who_did_not_arrive(tmp_path):
    def beat(rank, doing, age):
        found = {"rank": rank, "host": "h", "pid": 7, "doing": doing, "time": time.time() - age}
        (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    beat(0, "waiting for all in step 9", 1)
    beat(1, "step 9", 1)
    beat(2, "step 9", 300)
    (tmp_path / "3.json").write_text("torn")
    assert hung(tmp_path, 0, 60.0) == [
        "rank 1 (process 7 on h) did not arrive, it is in: step 9",
        "rank 2 (process 7 on h) gave no sign for 300 s, last in: step 9",
    ]


def test_what_is_done_starts_the_time_anew(tmp_path):
    ended = []
    with Watchdog(0, 1, "h", 0.5, ended.append) as dog:
        dog.keep_in(tmp_path)
        for number in range(8):
            dog.doing(f"step {number}")
            time.sleep(0.15)
    assert ended == []
    beat = json.loads((tmp_path / "ranks" / "0.json").read_text())
    assert (beat["doing"], beat["pid"]) == ("step 7", os.getpid())
