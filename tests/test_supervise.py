"""hpctrain supervise: launches that die, are preempted or fail; nodes that are lost."""

import os
import re
import signal
import sys
import time

import pytest

from hpctrain.errors import UsageError
from hpctrain.launcher import LEFT
from hpctrain.report.record import is_done, read_history, read_records
from hpctrain.supervise import newest_step, nodes
from hpctrain.supervise.nodes import Allocation, find_allocation, nodes_of_job, requeue
from tests.launch import Job, mpirun
from tests.packs import make_pack

TRAIN = ["--data", "pack.h5", "--run", "a", "--batch-size", "16", "--shards", "4", "--epochs", "4"]
TRAIN += ["--deterministic", "--progress", "none", "--checkpoint-every", "3"]
# Rank 1 is killed in its forward pass of some steps, each of them once unless "always".
KILLING = """
import os, signal, torch
from pathlib import Path
from hpctrain.launcher import launched_rank
KILLED = {killed}
class Net(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        Net.calls += self.training
        marker = Path(f"killed-{{Net.calls}}")
        if launched_rank() == 1 and Net.calls in KILLED and ({always} or not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x.flatten(1))
def net(image_shape, classes): return Net(784, classes)
"""


@pytest.fixture
def supervise(tmp_path):
    """A function that starts `hpctrain supervise` of a run of two ranks."""
    make_pack(tmp_path / "pack.h5", {"train": 101, "validation": 13, "test": 23})
    jobs = []

    def begin(*flags, words=(), env=None, ranks=2):
        command = [sys.executable, "-m", "hpctrain", "supervise", *flags, "--"]
        command += [mpirun(), "-n", str(ranks), sys.executable, "-m", "hpctrain", *TRAIN, *words]
        jobs.append(Job(command, env, tmp_path))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def finish(job, seconds=120):
    """Exit code and the supervisor's own lines; no process may be left."""
    _, err = job.communicate(timeout=seconds)
    until = time.monotonic() + 10
    while job.members() and time.monotonic() < until:
        time.sleep(0.1)
    assert job.members() == []
    lines = [line for line in err.splitlines() if line.startswith("hpctrain supervise: ")]
    return job.returncode, "\n".join(lines), err


def test_a_killed_rank_is_launched_again_with_the_same_bits(supervise, tmp_path):
    (tmp_path / "killing.py").write_text(KILLING.format(killed={8, 14}, always=False))
    model = ["--model", "killing:net"]
    code, lines, err = finish(supervise(words=model))
    assert code == 0, err
    deaths = re.findall(
        r"launch (\d) died, exit code 137: killed, .*rank 1 on .*step (\d+)$", lines, re.M
    )
    assert [number for number, _ in deaths] == ["1", "2"], err
    assert all(int(step) % 3 == 0 and int(step) > 0 for _, step in deaths)
    assert is_done(tmp_path / "runs/a")
    code, _, err = finish(supervise(words=[*model, "--run", "b"]))  # the markers exist: unbroken
    assert code == 0 and "died" not in err
    ends = [list(read_records(tmp_path / "runs" / name))[-1]["digest"] for name in "ab"]
    assert ends[0] == ends[1]


def test_it_gives_up_after_deaths_without_a_new_checkpoint(supervise, tmp_path):
    (tmp_path / "killing.py").write_text(KILLING.format(killed={2}, always=True))
    code, lines, err = finish(supervise("--deaths", "2", words=["--model", "killing:net"]))
    assert code == 1
    assert "launch 2 died" in lines and "launch 3" not in lines
    assert lines.endswith("2 in succession without a new checkpoint: giving up"), err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--data", "no.h5"], 2, "no.h5"),
        (["--lr", "1e30"], 1, "not launched again: "),
    ],
)
def test_what_another_launch_would_repeat_is_not_launched_again(supervise, words, code, message):
    got, lines, err = finish(supervise(words=words))
    assert got == code, err
    assert message in err and "died" not in lines


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGTERM, False), (signal.SIGUSR2, True)])
def test_a_signal_saves_and_ends_and_a_notice_requeues(supervise, tmp_path, number, requeued):
    path = fake_command(tmp_path, "scontrol", 'echo "$@" >>"$(dirname "$0")/../requeued"')
    own = {"PATH": path, "SLURM_JOB_ID": "7"}
    job = supervise(words=["--epochs", "100000"], env=own)
    until = time.monotonic() + 60
    while not newest_step(tmp_path / "runs/a"):
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.kill(job.pid, number)
    code, lines, err = finish(job)
    assert code == LEFT, err
    assert read_history(tmp_path / "runs/a").outcome.status == "preempted"
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
        assert "job 7 is requeued" in lines
    else:
        assert "the same command with --run a resumes" in lines


def test_nothing_is_left_when_the_supervisor_is_killed(supervise, tmp_path):
    job = supervise(words=["--epochs", "100000"])
    until = time.monotonic() + 60
    while not newest_step(tmp_path / "runs/a"):
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGKILL)
    assert finish(job)[0] == -signal.SIGKILL


def test_a_run_without_a_name_is_given_one_and_the_time_limit_holds_over_launches(
    supervise, tmp_path, monkeypatch
):
    from hpctrain import supervise as module

    words, config = module.parse_command(("python", "-m", "hpctrain", "--data", "digits"))
    assert words[-2:] == ["--run", config.run] and config.run
    monkeypatch.setattr(module.time, "monotonic", lambda: 1000.0)
    limited = ("mpirun", "hpctrain", "--run", "a", "--time-limit", "60s", "--resume", "never")
    supervisor = module.Supervisor(*module.parse_command(limited), 3, None, [])
    supervisor._number = 2
    monkeypatch.setattr(module.time, "monotonic", lambda: 1045.0)
    monkeypatch.setattr(module.launch, "start", lambda words, log, env: words)
    assert supervisor._start()[-4:] == ["--resume", "auto", "--time-limit", "15s"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((), "supervise what?"),
        (("srun", "python", "train.py"), "supervise what?"),
        (("hpctrain", "evaluate", "a"), "launches train, not evaluate"),
        (("hpctrain", "--bach-size", "3"), "unknown option"),
    ],
)
def test_a_command_that_does_not_train_is_refused(command, message):
    from hpctrain.supervise import parse_command

    with pytest.raises(UsageError, match=re.escape(message)):
        parse_command(command)


def fake_command(folder, name, script):
    """The PATH with a command of this name first."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def test_dead_nodes_are_excluded_and_spares_take_their_place(tmp_path, monkeypatch):
    script = 'case "$*" in *nodelist=n2*|*nodelist=n4*) exit 1;; *) exit 0;; esac'
    monkeypatch.setenv("PATH", fake_command(tmp_path, "srun", script))
    spare = Allocation(["n1", "n2", "n3", "n4", "n5"], 2, 4)
    assert spare.command(["srun", "python"])[:3] == ["srun", "--nodes=4", "--ntasks=8"]
    assert spare.exclude_dead() == ""
    words = spare.command(["srun", "--mpi=pmix", "python"])
    assert words == ["srun", "--nodes=3", "--ntasks=6", "--ntasks-per-node=2", "--overlap"] + [
        "--exclude=n2,n4",
        "--mpi=pmix",
        "python",
    ]
    assert spare.describe() == "on 3 nodes, without n2, n4"
    whole = Allocation(["n1", "n3"], 2, None)
    assert whole.exclude_dead() == "" and whole.command(["srun", "x"]) == ["srun", "x"]
    few = Allocation(["n1", "n2", "n4"], 1, None)
    assert few.exclude_dead() == "1 of 3 nodes are left (n2, n4 gone)"
    half = Allocation(["n1", "n2"], 1, None)
    assert half.exclude_dead() == ""


def test_a_node_that_does_not_answer_in_time_is_dead(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_command(tmp_path, "srun", "exec sleep 60"))
    monkeypatch.setattr(nodes, "ANSWER_WITHIN", 0.2)
    assert not nodes.answers("n1")


def test_the_size_of_the_job_is_left_to_the_allocation(monkeypatch):
    monkeypatch.setattr(nodes, "nodes_of_job", lambda env: ["n1", "n2"])
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert find_allocation(["srun", "--nodes", "2"][:1], None)._tasks == 4
    assert find_allocation(["mpirun", "-n", "4"], None) is None
    for words, wanted, message in (
        (["srun", "-n4", "python"], None, "srun -n4: leave nodes and tasks"),
        (["srun", "--nodes=2"], None, "srun --nodes=2: leave"),
        (["srun"], 3, "--nodes 3: the job has 2"),
        (["mpirun"], 1, "--nodes is for srun"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            find_allocation(words, wanted)


def test_nodes_of_a_job_come_from_scontrol(tmp_path, monkeypatch):
    assert nodes_of_job({}) == []
    monkeypatch.setenv("PATH", fake_command(tmp_path, "scontrol", 'echo n1; echo "$3"'))
    assert nodes_of_job({"SLURM_JOB_NODELIST": "n7"}) == ["n1", "n7"]


def test_requeue(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert requeue() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", fake_command(tmp_path, "scontrol", "echo not allowed >&2; exit 1"))
    assert requeue() == "job 7 ends, it cannot be requeued: not allowed"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    assert requeue() == "job 7 ends, it was requeued 20 times"


def test_requeue_in_a_job_of_pbs_or_flux(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("FLUX_URI", "local:///run/flux")
    assert requeue() == ""  # there is no such command
    monkeypatch.setenv("PBS_JOBID", "5.head")
    monkeypatch.setenv("PATH", fake_command(tmp_path, "qrerun", '[ "$*" = 5.head ]'))
    assert requeue() == "job 5.head is requeued"
    fake_command(tmp_path, "qrerun", 'echo "qrerun: Unauthorized Request $1" >&2; exit 159')
    refused = "job 5.head ends, it cannot be requeued: qrerun: Unauthorized Request 5.head"
    assert requeue() == refused
