"""What launchers leave in the environment, and what Slurm is asked for."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time

import pytest

from hpctrain import launcher, scheduler
from hpctrain.errors import RunError
from hpctrain.launcher import local_size, place_in_step, tasks_by_node, tasks_here
from hpctrain.scheduler import find_job, job_end
from tests.support.launch import ROOT, Job


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("2(x3),1", [2, 2, 2, 1]), ("5", [5]), ("1,3(x2),2", [1, 3, 3, 2]), ("12(x2)", [12, 12])],
)
def test_tasks_of_every_node(text, tasks):
    assert tasks_by_node(text) == tasks
    for node, count in enumerate(tasks):
        assert tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == count
    assert tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(len(tasks))}) is None


def test_without_slurm_there_is_neither_node_nor_end(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert (tasks_by_node(""), tasks_here({}), job_end()) == ([], None, None)
    assert place_in_step(0, 1, {}) == (-1, -1)


def test_the_ranks_of_a_node_are_those_of_this_node(monkeypatch):
    """Not of the first one; mpirun's own count comes first."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2),1")
    for node, count in (("0", 2), ("1", 2), ("2", 1)):
        monkeypatch.setenv("SLURM_NODEID", node)
        assert local_size() == count
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
    assert local_size() == 3


def test_the_place_in_a_step_is_told_to_the_tasks_of_srun_alone():
    env = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7"}
    env |= {"SLURM_NODEID": "2", "SLURM_LOCALID": "1"}
    assert place_in_step(5, 7, env) == (2, 1)
    assert place_in_step(4, 7, env) == (-1, -1)  # mpirun numbers its ranks anew
    assert place_in_step(5, 8, env) == (-1, -1)
    del env["SLURM_LOCALID"]
    assert place_in_step(5, 7, env) == (-1, -1)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A function that lets squeue be this shell script, in job 12 of an array whose number is 12
    too.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    file = tmp_path / "squeue"

    def make(text):
        file.write_text(f"#!/bin/sh\necho $* >{tmp_path}/asked\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    return make


def test_the_end_of_a_job_is_asked_of_squeue(squeue, tmp_path):
    squeue("[ $SLURM_TIME_FORMAT = %s ] && printf '10 1700000001\\n12 1700000002\\n'")
    assert job_end() == 1700000002
    assert "--jobs=12" in (tmp_path / "asked").read_text()
    squeue("echo 12 N/A")
    assert job_end() is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo slurm_load_jobs error: Invalid job id >&2; exit 1", "load_jobs error: Invalid job"),
        ("echo 13 1700000002", "no such job"),
        ("echo 12 2026-11-21T22:10:44", "2026-11-21T22:10:44"),
        ("exec sleep 30", "no answer in 1 s"),
    ],
)
def test_an_end_that_cannot_be_found_out_is_said(squeue, monkeypatch, text, said):
    monkeypatch.setattr(scheduler, "ANSWER_WITHIN", 1.0)
    squeue(text)
    began = time.monotonic()
    with pytest.raises(RunError, match=f"squeue: .*{said}"):
        job_end()
    assert time.monotonic() - began < 25, "it waited for the command, which sleeps for 30 s"


def test_the_variable_wins_over_squeue(squeue, monkeypatch):
    squeue("echo 12 5")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000003")
    assert job_end() == 1700000003


@pytest.mark.parametrize(
    ("env", "facts"),
    [
        ({}, ("none", None, 0, 0, 1)),
        (
            # as flux run sets them, here with its plugin for the MPI of Cray
            {"FLUX_JOB_SIZE": "5", "FLUX_JOB_NNODES": "2", "FLUX_TASK_RANK": "4"}
            | {"FLUX_TASK_LOCAL_ID": "1", "PALS_NODEID": "1", "PALS_APID": "9"},
            ("flux run", 5, 4, 1, 3),
        ),
        (
            {"PMI_RANK": "6", "PMI_SIZE": "8", "PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2"}
            | {"PALS_LOCAL_SIZE": "4", "PALS_APID": "3fa8-1"},
            ("mpiexec (PALS)", 8, 6, 2, 4),
        ),
        (
            # srun with the plugin mpi/cray_shasta
            {"PALS_RANKID": "3", "PALS_APID": "7.0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
            | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
            ("srun", 4, 3, 1, 2),
        ),
        (
            # Open MPI's mpirun in a task of flux run: the inner launcher counts
            {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2", "FLUX_TASK_RANK": "0"}
            | {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
            | {"FLUX_JOB_SIZE": "1", "FLUX_TASK_LOCAL_ID": "0"},
            ("mpirun (Open MPI)", 3, 2, 2, 3),
        ),
    ],
)
def test_the_variables_of_every_launcher(monkeypatch, env, facts):
    monkeypatch.setattr(os, "environ", env)
    found = (launcher.launcher_name(), launcher.launched_size(), launcher.launched_rank())
    found += (launcher.launched_local_rank(), local_size())
    assert found == facts
    assert all(
        name.startswith((*launcher.LAUNCHER_PREFIXES, "SLURM_JOB")) for name in env
    )  # none is left for a process that is started without the launcher


def test_the_job_is_that_of_the_outermost_scheduler():
    flux = {"FLUX_URI": "local:///run/flux"}
    found = [flux, {**flux, "FLUX_JOB_ID": "f7"}, {**flux, "PBS_JOBID": "5.head"}]
    found.append({**found[-1], "SLURM_JOB_ID": "12"})
    jobs = [(job[0].name, job[1]) for job in map(find_job, found) if job]
    assert jobs == [("Flux", ""), ("Flux", "f7"), ("PBS", "5.head"), ("Slurm", "12")]
    assert find_job({"SLURM_JOB_ID": ""}) is None


FAKE_SRUN = """#!/bin/bash
trap 'echo told >>"$OUT/told"; sleep 0.3; exit 75' USR2
echo "$*" >"$OUT/launched"
touch "$OUT/begun"
for _ in $(seq 100); do sleep 0.1; done
"""

FAKE_FLUX = f"""#!/bin/bash
echo $* >>"$OUT/flux"
[ $1 = getattr ] && echo 2 && exit
{FAKE_SRUN}"""


@pytest.fixture
def site(tmp_path):
    """A folder with programs of a Slurm that is none, and the environment of a job in it."""
    programs = {"srun": FAKE_SRUN, "mpirun": FAKE_SRUN, "mpiexec": FAKE_SRUN}
    programs |= dict.fromkeys(("scontrol", "qrerun"), 'echo $* >"$OUT/requeued"')
    programs["flux"] = FAKE_FLUX
    (tmp_path / "bin").mkdir()
    for name, text in {**programs, "activate": "", "python": f'exec {sys.executable} "$@"'}.items():
        file = tmp_path / "bin" / name
        file.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    shape = {"SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    own = {"HPCTRAIN_VENV": str(tmp_path), "OUT": str(tmp_path), "PATH": path, "PACK": "p.h5"}
    return tmp_path, {**job, **shape, **own}


@pytest.mark.parametrize("name", ["train", "train_mpirun", "staged", "sweep"])
def test_a_signal_to_the_batch_shell_reaches_the_ranks(site, name):
    """`--signal=B:USR2` is sent to the shell alone, and would end it: it passes it on, waits
    for what the ranks save, and requeues.
    """
    folder, env = site
    words = [str(folder)] if name == "sweep" else []
    (folder / "01-a.toml").write_text('run = "a"\n')
    job = Job(["bash", str(ROOT / "slurm" / f"{name}.sbatch"), *words], env)
    try:
        for sign, number in (("begun", None), ("told", signal.SIGUSR2), ("requeued", None)):
            if number:
                job.send_signal(number)
            until = time.monotonic() + 20
            while not (folder / sign).exists() and job.poll() is None:
                assert time.monotonic() < until
                time.sleep(0.02)
        assert (job.wait(20), (folder / "told").read_text()) == (75, "told\n")
        assert (folder / "requeued").read_text().startswith("requeue 7")
    finally:
        job.end()


@pytest.mark.parametrize("name", ["train.pbs", "train.flux"])
def test_a_notice_to_the_templates_of_pbs_and_flux_reaches_the_ranks(site, name):
    """PBS requeues; Flux cannot, and the supervisor names the command that resumes."""
    folder, env = site
    env = {key: value for key, value in env.items() if not key.startswith("SLURM_")}
    (folder / "nodes").write_text("n1\nn1\nn2\nn2\n")
    words = []
    if name == "train.pbs":
        env |= {"PBS_JOBID": "5.head", "PBS_NODEFILE": str(folder / "nodes")}
        env |= {"PBS_O_WORKDIR": str(folder), "HPCTRAIN_ARGS": "--data p.h5 --run first"}
    else:
        env |= {"FLUX_URI": "local:///run/flux"}
        words = ["--data", "p.h5", "--run", "first"]
    job = Job(["bash", str(ROOT / "slurm" / name), *words], env, folder)
    try:
        until = time.monotonic() + 20
        while not (folder / "begun").exists() and job.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR2)
        _, err = job.communicate(timeout=20)
        assert (job.returncode, (folder / "told").read_text()) == (75, "told\n")
        if name == "train.pbs":
            words = "-n 4 --ppn 2 python -m hpctrain --run job-5 --time-limit 58m"
            left = "--data p.h5 --run first --time-limit 34"  # what is left, in seconds
            assert (folder / "launched").read_text().startswith(f"{words} {left}")
            assert (folder / "requeued").read_text() == "5.head\n"
            assert "job 5.head is requeued" in err
        else:
            assert not (folder / "requeued").exists()
            assert "the same command with --run first resumes" in err
            assert "run --nodes=2 --tasks-per-node=2" in (folder / "flux").read_text()
            assert " --time-limit 58m --data p.h5 " in (folder / "flux").read_text()
    finally:
        job.end()
