"""scripts/cluster_check: report, verdicts and time limits, with fake checks; a real run is slow."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from hpctrain import launch
from hpctrain.data.pack import write_pack
from hpctrain.errors import RunError, UsageError
from hpctrain.models import build
from hpctrain.parallel.transport import Transport
from scripts.benchmarks import allreduce
from scripts.benchmarks.cluster import check, checks, rank
from scripts.benchmarks.cluster.site import NotPossible, Site, find_launcher
from tests.launch import ROOT, run

RANKS = [
    {"host": host, "started": 1.5, "MPI": "Open MPI v5.0.11", "system": "Linux", "network": "ib0"}
    for host in ("gpu17.site.edu", "gpu17.site.edu", "gpu18.site.edu")
]


@pytest.fixture
def site(tmp_path):
    """A site of three ranks on two nodes, on which nothing is launched."""
    made = Site(tmp_path / "out" / "work", ["true"], tmp_path / "out" / "log.txt")
    made.folder.mkdir(parents=True)
    made.log.touch()
    made.facts, made.ranks, made.ends = RANKS, 3, time.monotonic() + 60
    return made


def use(monkeypatch, **found):
    """Replace the checks by these functions."""
    monkeypatch.setattr(
        check, "CHECKS", {name: lambda site, f=f: f(site) for name, f in found.items()}
    )


def fail(error):
    def function(site):
        with open(site.log, "a") as file:
            print("what a rank printed", file=file)
        raise error

    return function


def test_a_check_that_fails_does_not_end_the_others(monkeypatch, site, tmp_path, capsys):
    use(
        monkeypatch,
        first=lambda _: ("4 ranks | 2 nodes", "details of first\n"),
        second=fail(RunError("two digests")),
        third=fail(KeyError("digest")),
        fourth=fail(NotPossible("no such program")),
        fifth=lambda _: ("fine", ""),
    )
    assert check.check(site, tmp_path / "report.md") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "passed             first: 4 ranks | 2 nodes",
        "failed             second: two digests",
        "failed             third: KeyError: 'digest'",
        "not possible here  fourth: no such program",
        "passed             fifth: fine",
        "2 passed, 2 failed, 1 not possible here",
    ]
    report = (tmp_path / "report.md").read_text()
    assert "| first | passed | 4 ranks \\| 2 nodes |" in report and "details of first" in report
    assert "| fourth | not possible here | no such program |" in report
    assert report.count("what a rank printed") == 2  # the log of those that failed
    assert "| MPI | Open MPI v5.0.11 |" in report and "| file system | " in report
    assert not site.folder.exists() and site.log.exists()


def test_the_report_of_a_crash_holds_the_checks_before_it(monkeypatch, site, tmp_path):
    use(monkeypatch, first=lambda _: ("fine", ""), second=fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        check.check(site, tmp_path / "report.md")
    assert "| first | passed | fine |" in (tmp_path / "report.md").read_text()
    assert not site.folder.exists()


def test_a_check_that_is_not_possible_is_no_failure(monkeypatch, site, tmp_path):
    use(monkeypatch, first=lambda _: ("fine", ""), second=fail(NotPossible("none here")))
    assert check.check(site, tmp_path / "report.md") == 0


def test_the_report_names_no_user_host_path_account_or_secret(monkeypatch, site, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "proj123")
    text = (
        f"{site.folder}/a {ROOT}/x {sys.prefix}/bin /home/ada/data ada_1@slurmd-gpu18"
        f" gpu17.site.edu: 10.1.2.3 proj123 WANDB_API_KEY=abc secret: x adamw {os.uname().nodename}"
    )
    use(monkeypatch, first=lambda _: (text, text), second=fail(RunError(text)))
    check.check(site, tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text()
    hidden = (
        "OUTPUT/work/a CLONE/x ENVIRONMENT/bin HOME/data USER_1@slurmd-node2 node1: ADDRESS ACCOUNT"
    )
    assert report.count(f"{hidden} WANDB_API_KEY=HIDDEN secret: HIDDEN adamw login") == 3
    for name in (str(ROOT), sys.prefix, str(tmp_path), "/home/ada", "gpu1", "site.edu", "proj123"):
        assert name not in report


def test_the_report_names_no_account_of_the_command_line(monkeypatch, site, tmp_path):
    site.launcher, site.submit = ["srun", "-A", "one", "-n", "2"], "-p debug --account=two -Athree"
    use(monkeypatch, first=lambda _: ("one two three done", ""))
    check.check(site, tmp_path / "report.md")
    report = (tmp_path / "report.md").read_text()
    assert "srun -A ACCOUNT -n 2" in report and "ACCOUNT ACCOUNT ACCOUNT done" in report


def test_commands_end_at_the_time_limit_of_their_check(site):
    began = time.monotonic()
    site.ends, site.limit = began + 0.5, 0.5
    with pytest.raises(RunError, match=r"not done after 0.5 s"):
        site.run(["sleep", "60"])
    assert time.monotonic() < began + 30
    site.ends = began + 90
    assert site.run(["echo", "hello"]) == "hello"
    with pytest.raises(RunError, match=r"exit code 3: broken"):
        site.run(["sh", "-c", "echo hpctrain: broken; exit 3"])
    with pytest.raises(UsageError, match=r"^no GPU$"):
        site.run(["sh", "-c", "echo hpctrain: no GPU; exit 2"])
    assert "$ echo hello\nhello\n" in site.log.read_text()


def test_fewer_ranks_are_spread_over_the_nodes(site):
    site.launcher = ["mpirun", "-n", "3"]
    assert site.command() == ["mpirun", "-n", "3"]
    assert site.command(2) == ["mpirun", "--map-by", "node", "-n", "2"]
    site.facts = [{**each, "MPI": "MPICH 5"} for each in RANKS]
    assert site.command(3) == ["mpirun", "-ppn", "2", "-n", "3"]
    site.launcher = ["srun", "-N", "2"]
    assert site.command(1) == ["srun", "-N", "2", "-n", "1"]


def test_the_launch_command_is_found(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PBS_", "FLUX_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_launcher("srun -N 2") == ["srun", "-N", "2"]
    with pytest.raises(UsageError, match=r"--launch srun 'a: No closing quotation"):
        find_launcher("srun 'a")
    monkeypatch.setattr(launch, "mpirun", lambda: "/opt/mpi/bin/mpirun")  # as of a module
    assert find_launcher(None)[0] == "/opt/mpi/bin/mpirun"
    program(tmp_path, "sinfo", "echo normal up")
    with pytest.raises(UsageError, match=r"login node: run salloc -N 2 --ntasks-per-node 2 scri"):
        find_launcher(None)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert find_launcher(None) == [
        *("srun", "--mpi=pmix", "--kill-on-bad-exit=1", "--cpus-per-task=4")
    ]
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("PBS_JOBID", "1")
    with pytest.raises(UsageError, match=r"in a PBS job, give --launch"):
        find_launcher(None)


def program(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_digests_that_differ_and_ranks_that_are_missing_fail(monkeypatch, site):
    monkeypatch.setattr(Site, "ask", lambda self, name, ranks: RANKS[:ranks])
    monkeypatch.setattr(Site, "train", lambda self, run, ranks: "a" if ranks < 3 else "b")
    with pytest.raises(RunError, match=r"1 ranks: a; 2 ranks: a; 3 ranks: b"):
        checks.check_bits(site)
    assert site.undisturbed == ""
    monkeypatch.setattr(Site, "train", lambda self, run, ranks: "a")
    assert checks.check_bits(site)[0] == "1, 2, 3 ranks on up to 2 nodes: one digest"
    site.ranks = 1
    with pytest.raises(NotPossible, match=r"nothing to compare"):
        checks.check_bits(site)
    site.ranks = 4
    with pytest.raises(RunError, match=r"4 ranks asked for, 3 launched"):
        checks.check_bits(site)


def test_a_run_in_which_no_rank_was_killed_fails_the_check(monkeypatch, site):
    monkeypatch.setattr(Site, "words", lambda self, *words: list(words))
    lost = "launch 1 failed, exit code 14; restarting, from the start"
    for text, named in (("done", "no rank died"), (f"hpctrain supervise: {lost}\ndone", lost)):
        monkeypatch.setattr(Site, "run", lambda *_, text=text: text)
        with pytest.raises(RunError, match=f"not resumed from a checkpoint: {named}"):
            checks.check_kill(site)


def test_a_resumed_run_with_other_weights_fails(monkeypatch, site):
    site.undisturbed = "a"
    monkeypatch.setattr(Site, "digest", lambda self, run: "b")
    with pytest.raises(RunError, match=r"digest b, undisturbed a"):
        site.compare("killed")


STATES = {  # states of a job, and the expected result of the check
    "JobState=COMPLETED Restarts=1": "a job of 2 nodes was requeued after its signal",
    "JobState=COMPLETED Restarts=0": RunError,
    "JobState=FAILED Restarts=1": RunError,
    "JobState=PENDING Restarts=0 Reason=Priority": NotPossible,
}


@pytest.mark.parametrize("state", STATES)
def test_a_submitted_job_is_awaited_and_always_cancelled(monkeypatch, site, tmp_path, state):
    program(tmp_path, "sbatch", f'echo "$@" >{tmp_path}/submitted; echo 17')
    program(tmp_path, "scontrol", f"echo {state}")
    program(tmp_path, "scancel", f'echo "$@" >{tmp_path}/cancelled')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(checks.time, "sleep", lambda _: None)
    monkeypatch.setattr(Site, "words", lambda self, *words: list(words))
    monkeypatch.setattr(Site, "compare", lambda *_: "the same")
    site.undisturbed, site.submit = "a", "--partition=debug"
    site.ends = time.monotonic() + 2
    if isinstance(expected := STATES[state], str):
        assert checks.check_notice(site)[0].startswith(expected)
    else:
        with pytest.raises(expected):
            checks.check_notice(site)
    assert (tmp_path / "cancelled").read_text() == "--quiet 17\n"
    words = (tmp_path / "submitted").read_text()
    assert "--nodes=2" in words and "--ntasks-per-node=2" in words
    assert f"--partition=debug {ROOT}/slurm/train.sbatch requeued" in words


def test_containers_run_on_one_rank_and_on_two(monkeypatch, site, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotPossible, match=r"no --image was given; no apptainer or singularity or"):
        checks.check_container(site)
    program(tmp_path, "podman", "exit 1")
    with pytest.raises(NotPossible, match=r"no --image was given; podman is here"):
        checks.check_container(site)
    commands, digests = [], iter("aaab")
    monkeypatch.setattr(Site, "words", lambda self, *words: list(words))
    monkeypatch.setattr(Site, "run", lambda self, command, env: commands.append((command, env)))
    monkeypatch.setattr(Site, "digest", lambda *_: next(digests))
    site.image, site.undisturbed = "hpctrain.sif", "a"
    line = "podman: one digest on 1 and 2 ranks, the same as outside the container"
    assert checks.check_container(site)[0] == line
    assert commands[1][0][:4] == ["true", "-n", "2", "podman"]
    assert commands[1][0][-5:] == ["hpctrain.sif", "python", "-m", "hpctrain", "inside-2"]
    assert "PYTHONPATH" not in commands[1][1]
    program(tmp_path, "apptainer", "exit 1")
    with pytest.raises(RunError, match=r"1 rank: a, 2 ranks: b"):
        checks.check_container(site)
    assert commands[2][0][3:6] == ["apptainer", "exec", "--nv"]


def test_paced_and_mortal_have_the_weights_of_digits(monkeypatch):
    monkeypatch.setenv(rank.PACE, "0")
    killed = []
    monkeypatch.setattr(rank.os, "kill", lambda *words: killed.append(words))
    images, weights = torch.rand(4, 1, 28, 28), []
    for make in (rank.paced, rank.mortal, lambda *words: build("digits", *words)):
        torch.manual_seed(0)
        network = make((28, 28, 1), 10)
        weights.append(torch.cat([p.flatten() for p in network.state_dict().values()]))
        for _ in range(rank.LIFE + (make is rank.mortal)):
            network(images)
        assert killed == ([(os.getpid(), signal.SIGKILL)] if make is rank.mortal else [])
        killed.clear()
    assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[2])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    resumed = rank.mortal((28, 28, 1), 10)
    for _ in range(rank.LIFE + 1):
        resumed(images)
    assert killed == []


def test_reads_are_verified_and_small_files_removed(comm, tmp_path):
    numbers = (np.arange(600) % 251).astype(np.uint8)[:, None, None, None]
    pixels = np.broadcast_to(numbers, (600, 4, 4, 3)).copy()
    labels = np.zeros(600, np.int64)
    write_pack(tmp_path / "a.h5", {"train": (pixels, labels)}, "a", {"source": "test"})
    found = rank.files(comm, str(tmp_path / "a.h5"), tmp_path)
    assert min(found[name] for name in found if "files/s" in name) > 0
    assert found["lock of a run"] == "works"
    assert not list(tmp_path.glob("small-*"))
    pixels[599] += 1
    write_pack(tmp_path / "b.h5", {"train": (pixels, labels)}, "a", {"source": "test"})
    with pytest.raises(RunError, match=r"other pixels were read than were written"):
        rank.read(comm, str(tmp_path / "b.h5"))


def test_a_file_system_without_locks_is_named(monkeypatch, tmp_path):
    assert rank.locks(tmp_path) == "work"

    def refuse(*_, **__):
        raise OSError("unable to lock file, errno = 524")

    monkeypatch.setattr(h5py, "File", refuse)
    assert rank.locks(tmp_path) == "fail: unable to lock file, errno = 524"


def test_slow_file_systems_and_starts_get_advice(monkeypatch, site):
    slow = {"read by all ranks, MB/s": 100, "create, files/s of all ranks": 999}
    monkeypatch.setattr(Site, "ask", lambda *_: slow)
    line, details = checks.check_files(site)
    assert line.startswith(
        "100 MB/s by all ranks; 999 operations/s: slow, use slurm/local_python.sh"
    )
    assert "| create, files/s of all ranks | 999 |" in details
    assert not list(site.folder.iterdir())
    monkeypatch.setattr(Site, "ask", lambda *_: [{**each, "started": 15.1} for each in RANKS])
    line, details = checks.check_launch(site)
    assert line.startswith("3 ranks on 2 nodes; start of Python and its packages: 15.1 s: slow")
    assert "| gpu17.site.edu | 2 | Linux | ib0 |" in details


def test_a_missing_transport_is_not_reported_as_passed(monkeypatch, site):
    def sums(self, command):
        if command[-1] != "mpi":
            raise UsageError("torch sees no GPU")
        Path(command[-2]).write_text(json.dumps({"1000": {"Allreduce": 1e-5}}))

    monkeypatch.setattr(Site, "run", sums)
    line, details = checks.check_allreduce(site)
    assert line == "sums are right with MPI, host memory"
    assert "| MPI, host memory | 4,000 | Allreduce | 10.0 |" in details
    assert "* NCCL: not possible here: torch sees no GPU" in details


def test_a_wrong_sum_is_found(comm, monkeypatch):
    monkeypatch.setattr(allreduce, "LEAST", 1)
    monkeypatch.setattr(allreduce, "SECONDS", 0.0)
    times = allreduce.measure_sums(Transport(comm), 100, torch.device("cpu"))
    assert list(times) == ["Allreduce", "tree order", "gradients in bf16"]
    wrong = SimpleNamespace(comm=comm, allreduce=lambda vector: vector[-1:].add_(1))
    with pytest.raises(RunError, match=r"Allreduce of 100 ones: a sum is not 1"):
        allreduce.measure_sums(wrong, 100, torch.device("cpu"))


def cluster_check(*words, timeout=60, env=None):
    return run([sys.executable, str(ROOT / "scripts/cluster_check"), *words], timeout, env)


def test_usage_errors_come_before_anything_is_launched(tmp_path):
    done = cluster_check("--launch", "mpirun", "--output", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"cluster_check: --output {tmp_path}: File exists; name a new folder\n"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_machine_is_checked_with_mpirun(tmp_path):
    out, tools = tmp_path / "out", tmp_path / "tools"
    tools.mkdir()
    program(tools, "apptainer", 'while [ "$1" != a.sif ]; do shift; done; shift; exec "$@"')
    words = ["--launch", "mpirun -n 2", "--image", "a.sif", "--output", str(out)]
    done = cluster_check(*words, timeout=900, env={"PATH": f"{tools}:{os.environ['PATH']}"})
    report = (out / "report.md").read_text()
    assert done.returncode == 0, done.stdout + report
    verdicts = [line.split("  ")[0] for line in done.stdout.splitlines()[:8]]
    assert verdicts == ["passed"] * 8
    assert re.search(
        r"resumed after step (15|20), the same digest as undisturbed; cause: ", done.stdout
    )
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "report.md"]
    assert str(tmp_path) not in report and str(ROOT) not in report
