"""scripts/cluster_check: report, verdicts and time limits, with fake checks; a real run is slow."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest
import torch

from hpctrain import launch
from hpctrain.errors import RunError, UsageError
from hpctrain.models import build
from scripts.benchmarks.cluster import check, checks, rank
from scripts.benchmarks.cluster.site import Site, find_launcher
from tests.support.launch import ROOT, run

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
        fourth=lambda _: ("fine", ""),
    )
    assert check.check(site, tmp_path / "report.md") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "passed   first: 4 ranks | 2 nodes",
        "failed   second: two digests",
        "failed   third: KeyError: 'digest'",
        "passed   fourth: fine",
        "2 passed, 2 failed",
    ]
    report = (tmp_path / "report.md").read_text()
    assert "| first | passed | 4 ranks \\| 2 nodes |" in report and "details of first" in report
    assert report.count("what a rank printed") == 2  # the log of those that failed
    assert "| MPI | Open MPI v5.0.11 |" in report and "| file system | " in report
    assert not site.folder.exists() and site.log.exists()


def test_the_report_of_a_crash_holds_the_checks_before_it(monkeypatch, site, tmp_path):
    use(monkeypatch, first=lambda _: ("fine", ""), second=fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        check.check(site, tmp_path / "report.md")
    assert "| first | passed | fine |" in (tmp_path / "report.md").read_text()
    assert not site.folder.exists()


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
    monkeypatch.setattr(Site, "ask", lambda self, ranks: RANKS[:ranks])
    monkeypatch.setattr(Site, "train", lambda self, run, ranks: "a" if ranks < 3 else "b")
    with pytest.raises(RunError, match=r"1 ranks: a; 2 ranks: a; 3 ranks: b"):
        checks.check_bits(site)
    assert site.undisturbed == ""
    monkeypatch.setattr(Site, "train", lambda self, run, ranks: "a")
    assert checks.check_bits(site)[0] == "1, 2, 3 ranks on up to 2 nodes: one digest"
    site.ranks = 1
    with pytest.raises(RunError, match=r"nothing to compare"):
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


def test_a_slow_start_gets_advice(monkeypatch, site):
    monkeypatch.setattr(Site, "ask", lambda *_: [{**each, "started": 15.1} for each in RANKS])
    line, details = checks.check_launch(site)
    assert line.startswith("3 ranks on 2 nodes; start of Python and its packages: 15.1 s: slow")
    assert "| gpu17.site.edu | 2 | Linux | ib0 |" in details


def test_paced_and_mortal_have_the_weights_of_digits(monkeypatch):
    monkeypatch.setattr(rank, "PACE", 0)
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


def cluster_check(*words, timeout=60):
    return run([sys.executable, str(ROOT / "scripts/cluster_check"), *words], timeout)


def test_usage_errors_come_before_anything_is_launched(tmp_path):
    done = cluster_check("--launch", "mpirun", "--output", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"cluster_check: --output {tmp_path}: File exists; name a new folder\n"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_machine_is_checked_with_mpirun(tmp_path):
    out = tmp_path / "out"
    done = cluster_check("--launch", "mpirun -n 2", "--output", str(out), timeout=900)
    report = (out / "report.md").read_text()
    assert done.returncode == 0, done.stdout + report
    verdicts = [line.split("  ")[0] for line in done.stdout.splitlines()[:5]]
    assert verdicts == ["passed"] * 5
    assert re.search(
        r"resumed after step (15|20), the same digest as undisturbed; cause: ", done.stdout
    )
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "report.md"]
