"""hpctrain supervise: launches that die, are preempted or fail; nodes that are lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import hpctrain as hp
from tests.support.api import command_line, heartbeats, nodes, supervision
from tests.support.launch import Job, mpirun
from tests.support.launches import check_same, launch, run_of
from tests.support.records import line
from tests.support.short import records, short_run
from tests.support.wait import wait_for, when

Allocation, EndedLaunch, Outcome = nodes.Allocation, supervision.EndedLaunch, supervision.Outcome
LEFT = 75


@pytest.fixture
def settings(tmp_path):
    """14 steps, with a checkpoint after every third."""
    same = {"deterministic": True, "shards": 4, "checkpoint_every": "3steps"}
    return short_run(tmp_path) | same


@pytest.fixture
def supervise(settings, tmp_path):
    """A function that starts `hpctrain supervise` of a run, on one rank unless more are given."""
    jobs = []

    def begin(*flags, ranks=1, fault="", env=None, **more):
        words = (f"--{name.replace('_', '-')}={v}" for name, v in {**settings, **more}.items())
        words = [word.removesuffix("=True") for word in words]
        command = [sys.executable, "-m", "hpctrain", "supervise", *flags, "--"]
        command += [mpirun(), "-n", str(ranks), sys.executable, "-m", "hpctrain", *words]
        jobs.append(Job(command, {"HPCTRAIN_FAULT": fault, **(env or {})}, tmp_path))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def finish(job, seconds=200):
    """Exit code and the supervisor's own lines; no process may be left."""
    _, err = job.communicate(timeout=seconds)
    wait_for(lambda: job.members() == [])
    lines = re.findall("hpctrain supervise: .*", err)  # mpirun may leave a NUL before it
    return job.returncode, "\n".join(lines), err


def wait_for_checkpoint(job, settings):
    found = run_of(settings) / "checkpoints"
    wait_for(lambda: job.poll() is not None or list(found.glob("*.json")))
    assert job.poll() is None, job.communicate()


@pytest.mark.timeout(300)
def test_ranks_that_die_are_launched_again_with_the_same_bits(supervise, settings):
    """Each launch is killed after nine steps: at least six are saved then, so the second ends."""
    code, lines, err = finish(supervise("--max-failures", "1", ranks=2, fault="step.done:kill:9"))
    assert code == 0, err
    ((number, cause, step),) = re.findall(
        r"launch (\d) failed, exit code 137: (.*); restarting, after step (\d+)$", lines, re.M
    )
    assert number == "1" and step in ("6", "9")
    assert re.search(r"killed, reason unknown: rank [01] on ", cause)
    whole = settings | {"run": "whole"}
    assert launch(whole).code == 0
    check_same(settings, whole)


@pytest.mark.timeout(300)
def test_it_gives_up_after_failures_without_a_new_checkpoint(supervise):
    code, lines, err = finish(supervise("--max-failures", "2", fault="step.done:kill:1"))
    assert code == 1
    assert "launch 2 failed" in lines and "launch 3" not in lines
    assert lines.endswith("2 in a row without a new checkpoint: giving up"), err


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [({"data": "no.h5"}, 2, "no.h5"), ({"lr": 1e30}, 1, "not restarted: ")],
    ids=["mistake", "not finite"],
)
def test_what_another_launch_would_repeat_is_not_launched_again(supervise, change, code, message):
    got, lines, err = finish(supervise(**change))
    assert got == code, err
    assert message in err and "failed," not in lines


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGTERM, False), (signal.SIGUSR2, True)])
def test_a_signal_saves_and_ends_and_a_notice_requeues(
    supervise, settings, tmp_path, number, requeued
):
    path = fake_command(tmp_path, "scontrol", 'echo "$@" >>"$(dirname "$0")/../requeued"')
    job = supervise(epochs=100000, env={"PATH": path, "SLURM_JOB_ID": "7"})
    wait_for_checkpoint(job, settings)
    os.kill(job.pid, number)
    code, lines, err = finish(job)
    assert code == LEFT, err
    assert records(settings, "end")[-1]["status"] == "preempted"
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
        assert "job 7 is requeued" in lines
    else:
        assert "the same command with --run a resumes" in lines


def test_nothing_is_left_when_the_supervisor_is_killed(supervise, settings):
    job = supervise(epochs=100000, ranks=2)
    wait_for_checkpoint(job, settings)
    os.kill(job.pid, signal.SIGKILL)
    assert finish(job)[0] == -signal.SIGKILL


def test_a_run_without_a_name_is_given_one_and_the_time_limit_holds_over_launches(monkeypatch):
    words, config = supervision.parse_command(("python", "-m", "hpctrain", "--data", "digits"))
    assert words[-2:] == ["--run", config.run] and config.run
    monkeypatch.setattr(supervision.time, "monotonic", lambda: 1000.0)
    limited = ("mpirun", "hpctrain", "--run", "a", "--time-limit", "60s", "--resume", "never")
    supervisor = supervision.Supervisor(*supervision.parse_command(limited), 3, None, [])
    supervisor._number = 2
    monkeypatch.setattr(supervision.time, "monotonic", lambda: 1045.0)
    monkeypatch.setattr(supervision.launch, "LaunchedRun", lambda folder, words, env: (words, env))
    words, env = supervisor._start()
    assert words[-4:] == ["--resume", "auto", "--time-limit", "15s"]
    assert env == os.environ  # a container has packages of its own, and mpirun its own defaults
    supervisor._number = 1
    assert supervisor._start()[0][-4:-2] == ["--resume", "never"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # the first launch of a job that was requeued
    assert supervisor._start()[0][-4:-2] == ["--resume", "auto"]
    monkeypatch.setattr(supervision.time, "monotonic", lambda: 1061.0)
    monkeypatch.setattr(supervisor, "_launch", lambda: ENDED)
    assert supervisor.run() == LEFT


ENDED = EndedLaunch(1, 137, Outcome(), repeats=False, began=True, saved=6, saved_before=3)
PREEMPTED, FAILED = Outcome("preempted", "the time is up"), Outcome("failed", "the disk is full")


@pytest.mark.parametrize(
    ("facts", "asked", "code", "text"),
    [
        ({"code": 0}, True, 0, ""),
        ({}, False, None, "launch 1 failed, exit code 137: no rank recorded a reason, see above"),
        ({"code": -9}, False, None, "launch 1 failed, SIGKILL: "),
        ({}, True, LEFT, "ended, exit code 137: .*; the newest checkpoint is of step 6"),
        ({"code": LEFT}, False, LEFT, "saved after step 6"),
        ({"code": 143, "outcome": PREEMPTED}, False, LEFT, "saved after step 6"),  # by srun
        ({"code": 1, "outcome": PREEMPTED, "saved": 3}, False, 1, "not restarted: the time is up"),
        ({"code": 1, "outcome": PREEMPTED, "saved": 3}, True, LEFT, "saved after step 3"),
        ({"code": 1, "outcome": FAILED}, False, None, "launch 1 failed, exit code 1: the disk"),
        ({"code": 1, "outcome": FAILED, "repeats": True}, False, 1, "not restarted: the disk"),
        ({"code": 2, "began": False}, False, 2, ""),
        ({"code": 2, "began": False, "number": 2}, False, None, "launch 2 failed, exit code 2"),
        ({"code": 1, "began": False, "saved": 0}, False, 1, ""),
        ({"code": 1, "began": False}, False, None, "launch 1 failed"),  # hung at a later start
    ],
)
def test_what_follows_a_launch(facts, asked, code, text):
    got, said = replace(ENDED, **facts).verdict(asked)
    assert got == code and re.match(f"{text}.*" if text else "$", said), said


def supervisor_of(run, script, signals=()):
    """A supervisor whose launches run a shell script."""
    config = hp.Config(run=run.name, runs_dir=str(run.parent))
    return supervision.Supervisor(["sh", "-c", script], config, 3, None, list(signals))


def test_what_an_earlier_launch_left_is_not_taken_for_the_cause(tmp_path, monkeypatch):
    """Its heartbeats, by a clock that is ahead, and its crash, which the next launch records."""
    begun = line("run", time=2e9)
    (tmp_path / "a/ranks").mkdir(parents=True)
    (tmp_path / "a/progress.jsonl").write_bytes(begun)
    beat = heartbeats.Beat(0, "elsewhere", 1, "step 3", 1.0, time.time() + 600, failed="hung")
    heartbeats.write_beat(tmp_path / "a/ranks", beat)
    ended = supervisor_of(tmp_path / "a", "exit 1")._launch()
    assert (ended.outcome, ended.began) == (Outcome(), False)
    (tmp_path / "end").write_bytes(line("end", status="failed", reason="of the launch before"))
    script = f"cat {tmp_path}/end >>{tmp_path}/a/progress.jsonl; exit 1"
    ended = supervisor_of(tmp_path / "a", script)._launch()
    assert (ended.outcome, ended.began, ended.repeats) == (Outcome(), False, False)
    own = line("run", time=1e9)  # by a clock that is behind
    (tmp_path / "end").write_bytes(own + line("end", status="failed", reason="x", repeats=True))
    ended = supervisor_of(tmp_path / "a", script)._launch()
    assert ended.began and ended.repeats and ended.outcome.reason == "x"


def test_a_launcher_that_does_not_end_is_killed_after_the_second_request(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision.launch, "KILL_AFTER", 0.3)
    script = "trap '' USR2; trap 'echo x >>terms' TERM; touch ready; while :; do sleep 0.05; done"
    monkeypatch.chdir(tmp_path)
    twice = [(signal.SIGINT, 0.0), (signal.SIGINT, 2.0)]
    supervisor = supervisor_of(tmp_path / "a", script)

    when((tmp_path / "ready").exists, lambda: supervisor._signals.extend(twice))
    assert supervisor._launch().code == -signal.SIGKILL
    assert (tmp_path / "terms").read_text() == "x\n"  # mpirun ends in disorder at a second one
    assert not supervision.launch.is_repeated(twice[:1])
    assert not supervision.launch.is_repeated([(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.1)])
    assert not supervision.launch.is_repeated([(signal.SIGUSR2, 0.0), (signal.SIGTERM, 9.0)])


def test_a_launcher_that_starts_no_ranks_is_ended(tmp_path, monkeypatch, capsys):
    """Such as an srun that waits for nodes; not if ranks write heartbeats or a record."""
    waiting = supervisor_of(tmp_path / "a", "sleep 60")
    waiting._timeout = 0.2
    assert waiting._launch().code == -signal.SIGTERM
    assert "no rank of launch 1 has started in 0 s: ending it" in capsys.readouterr().err
    for folder in (tmp_path / "b/ranks", tmp_path / "ranks"):
        folder.mkdir(parents=True)
    beat = heartbeats.Beat(0, "here", 1, "step 3", 1.0, time.time())
    heartbeats.write_beat(tmp_path / "ranks", beat)
    copied = tmp_path / "b/ranks/0.json"
    script = f"cp {tmp_path}/ranks/0.json {copied};"
    script += f"until [ -e {tmp_path}/over ]; do sleep 0.05; done"
    alive = supervisor_of(tmp_path / "b", script)
    original, alive._timeout = alive._is_silent, 0.0

    def is_silent(*arguments):
        wait_for(copied.exists)
        found = original(*arguments)
        (tmp_path / "over").touch()
        return found

    monkeypatch.setattr(alive, "_is_silent", is_silent)
    assert alive._launch().code == 0
    assert capsys.readouterr().err == ""


def test_a_signal_before_a_launch_is_not_lost(tmp_path, capsys):
    notice = [(signal.SIGUSR2, 0.0)]
    assert supervisor_of(tmp_path / "a", "touch launched", notice).run() == LEFT
    assert not (tmp_path / "launched").exists()
    assert "SIGUSR2 while no launch was running; the same command" in capsys.readouterr().err


def test_the_next_launch_waits_for_the_lock_of_the_last_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "a").mkdir()
    hold = "import fcntl, sys; lock = open(sys.argv[1] + '/lock', 'w');"
    hold += "fcntl.lockf(lock, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", hold, str(tmp_path / "a")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        waited = []
        clock = SimpleNamespace(monotonic=time.monotonic)
        clock.sleep = lambda _: waited.append(holder.communicate() and holder.returncode)
        monkeypatch.setattr(supervision, "time", clock)
        supervisor_of(tmp_path / "a", "")._pause(0.0)
    assert waited == [0], "it waited until the other process had ended"
    assert f"{tmp_path}/a is still locked: waiting 120 s at most" in capsys.readouterr().err
    supervisor_of(tmp_path / "b", "")._pause(0.0)  # without a folder


def test_pauses_before_restarts_grow_without_progress(tmp_path, monkeypatch, capsys):
    supervisor, pauses = supervisor_of(tmp_path / "a", ""), []
    saved = iter([6, 6, 6, 9, 9, 9, 9])
    monkeypatch.setattr(supervisor, "_launch", lambda: replace(ENDED, saved=next(saved)))
    monkeypatch.setattr(supervisor, "_pause", pauses.append)
    assert supervisor.run() == 1
    assert pauses == [0.0, 0.0, 5.0, 0.0, 0.0, 5.0]
    assert "3 in a row without a new checkpoint" in capsys.readouterr().err


def test_a_job_that_is_requeued_finds_its_run(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    words, _ = supervision.parse_command(("srun", "python", "-m", "hpctrain"))
    assert words[-2:] == ["--run", "job-7"]


def test_the_word_hpctrain_in_a_path_is_not_the_program():
    words = ("mpirun", "--wdir", "/home/me/hpctrain", "python", "-m", "hpctrain", "--run", "a")
    assert supervision.parse_command(words)[1].run == "a"


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
    with pytest.raises(hp.UsageError, match=re.escape(message)):
        supervision.parse_command(command)


def test_a_command_whose_file_names_a_function_needs_trust_code(tmp_path):
    (tmp_path / "net.toml").write_text('model = "killing:net"\n')
    words = ("python", "-m", "hpctrain", "--run", "a", "--config", str(tmp_path / "net.toml"))
    with pytest.raises(hp.UsageError, match=r"net\.toml names killing:net: .* --trust-code"):
        supervision.parse_command(words)
    given, config = supervision.parse_command((*words, "--trust-code"))
    assert given == [*words, "--trust-code"] and config.model == "killing:net"


def test_the_command_comes_after_dashes(capsys):
    assert command_line(["supervise", "mpirun", "-n", "2", "python", "-m", "hpctrain"]) == 2
    assert "'-n'" in (err := capsys.readouterr().err) and "after --" in err
    with pytest.raises(SystemExit):
        command_line(["supervise", "--help"])
    assert "usage: hpctrain supervise [options] -- COMMAND\n" in capsys.readouterr().out


def fake_command(folder, name, script):
    """The PATH with a command of this name first."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def test_dead_nodes_are_excluded_and_spares_take_their_place(tmp_path, monkeypatch):
    script = 'case "$*" in *nodelist=n2*|*nodelist=n4*) exit 1;; *) exit 0;; esac'
    monkeypatch.setenv("PATH", fake_command(tmp_path, "srun", script))
    monkeypatch.setenv("SLURM_GPUS", "10")
    spare = Allocation(["n1", "n2", "n3", "n4", "n5"], 5 * [2], 4)
    assert spare.command(["srun", "python"])[:3] == ["srun", "--nodes=4", "--ntasks=8"]
    assert spare.exclude_dead() == ""
    words = spare.command(["srun", "--mpi=pmix", "python"])
    assert words == ["srun", "--nodes=3", "--ntasks=6", "--ntasks-per-node=2", "--overlap"] + [
        "--exclude=n2,n4",
        "--mpi=pmix",
        "python",
    ]
    assert spare.describe() == "on 3 nodes, without n2, n4"
    assert "SLURM_GPUS" not in spare.environment()
    whole = Allocation(["n1", "n3"], [2, 2], None)
    assert whole.environment() == os.environ
    assert whole.exclude_dead() == "" and whole.command(["srun"]) == ["srun", "--overlap"]
    uneven = Allocation(["n1", "n2", "n3"], [2, 2, 1], None)
    assert uneven.exclude_dead() == ""
    assert uneven.command(["srun"])[1:3] == ["--nodes=2", "--ntasks=3"]
    assert not any("per-node" in word for word in uneven.command(["srun"]))
    mute = Allocation(["n2", "n4"], [1, 1], None)  # n2 is this one: Slurm does not answer
    assert mute.exclude_dead() == "" and mute.command(["srun"]) == ["srun", "--overlap"]
    few = Allocation(["n1", "n2", "n4"], [1, 1, 1], None)
    assert few.exclude_dead() == "1 of 3 nodes are left (n2, n4 lost)"
    half = Allocation(["n1", "n2"], [1, 1], None)
    assert half.exclude_dead() == ""


def test_a_step_that_slurm_considers_alive_does_not_block_a_restart(tmp_path, monkeypatch):
    """Its step daemon was killed: without --overlap, srun would wait until the job ends."""
    monkeypatch.setenv("PATH", fake_command(tmp_path, "srun", "exit 0"))
    whole = Allocation(["n1", "n2"], [1, 1], None)
    assert whole.command(["srun", "python"]) == ["srun", "python"]
    assert whole.exclude_dead() == ""
    assert whole.command(["srun", "python"]) == ["srun", "--overlap", "python"]


def test_a_node_that_does_not_answer_in_time_is_dead(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_command(tmp_path, "srun", "exec sleep 60"))
    monkeypatch.setattr(nodes, "ANSWER_WITHIN", 0.2)
    assert not nodes.answers("n1")


def test_the_size_of_the_job_is_left_to_the_allocation(monkeypatch):
    monkeypatch.setattr(nodes, "nodes_of_job", lambda env: ["n1", "n2"])
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert nodes.find_allocation(["srun"], None)._tasks == {"n1": 4, "n2": 4}
    assert nodes.find_allocation(["srun", "env", "-n", "python"], None)  # of another command
    assert nodes.find_allocation(["mpirun", "-n", "4"], None) is None
    for words, wanted, message in (
        (["srun", "-n4", "python"], None, "srun -n4: leave nodes and tasks"),
        (["srun", "--nodes=2"], None, "srun --nodes=2: leave"),
        (["srun", "--mpi", "pmix", "-x", "n3", "python"], None, "srun -x: leave"),
        (["srun"], 3, "--nodes 3: the job has 2"),
        (["mpirun"], 1, "--nodes is for srun"),
    ):
        with pytest.raises(hp.UsageError, match=re.escape(message)):
            nodes.find_allocation(words, wanted)


def test_nodes_of_a_job_come_from_scontrol(tmp_path, monkeypatch):
    assert nodes.nodes_of_job({}) == []
    monkeypatch.setenv("PATH", fake_command(tmp_path, "scontrol", 'echo n1; echo "$3"'))
    assert nodes.nodes_of_job({"SLURM_JOB_NODELIST": "n7"}) == ["n1", "n7"]


def test_a_failing_scontrol_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("PATH", fake_command(tmp_path, "scontrol", "echo no contact >&2; exit 1"))
    assert nodes.find_allocation(["srun", "python"], None) is None
    text = "lost nodes will not be excluded (scontrol: no contact)"
    assert f"hpctrain supervise: {text}\n" in capsys.readouterr().err
    with pytest.raises(hp.RunError, match="scontrol: no contact"):
        nodes.find_allocation(["srun", "python"], 2)
    assert nodes.find_allocation(["mpirun", "python"], None) is None  # does not ask
    assert capsys.readouterr().err == ""


def test_requeue(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert nodes.requeue() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", fake_command(tmp_path, "scontrol", "echo not allowed >&2; exit 1"))
    assert nodes.requeue() == "job 7 ends, it cannot be requeued: scontrol: not allowed"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")  # this task is the last, which has the same ID
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("PATH", fake_command(tmp_path, "scontrol", '[ "$*" = "requeue 7_3" ]'))
    assert nodes.requeue() == "job 7_3 is requeued"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    assert nodes.requeue() == "job 7_3 ends, it was requeued 20 times"


def test_requeue_in_a_job_of_pbs_or_flux(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("FLUX_URI", "local:///run/flux")
    assert nodes.requeue() == ""  # there is no such command
    monkeypatch.setenv("PBS_JOBID", "5.head")
    monkeypatch.setenv("PATH", fake_command(tmp_path, "qrerun", '[ "$*" = 5.head ]'))
    assert nodes.requeue() == "job 5.head is requeued"
    fake_command(tmp_path, "qrerun", 'echo "qrerun: Unauthorized Request $1" >&2; exit 159')
    refused = "job 5.head ends, it cannot be requeued: qrerun: qrerun: Unauthorized Request 5.head"
    assert nodes.requeue() == refused


def test_ranks_of_nodes():
    assert nodes.tasks_of_nodes({"SLURM_NTASKS_PER_NODE": "4"}, 2) == [4, 4]
    assert nodes.tasks_of_nodes({"SLURM_TASKS_PER_NODE": "2(x2),1"}, 3) == [2, 2, 1]
    assert nodes.tasks_of_nodes({}, 2) == [1, 1]
