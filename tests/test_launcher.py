"""What launchers leave in the environment, and what Slurm is asked for."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time

import pytest

from hpctrain import launcher as slurm
from hpctrain.config import Config, SweepConfig
from hpctrain.errors import RunError
from hpctrain.launcher import job_end, local_size, place_in_step, tasks_by_node, tasks_here
from hpctrain.sweep import machine
from hpctrain.sweep.file import SweepNetwork
from tests.launch import ROOT, Job


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
    monkeypatch.setattr(slurm, "SQUEUE_TIMEOUT", 1.0)
    squeue(text)
    began = time.monotonic()
    with pytest.raises(RunError, match=f"squeue: .*{said}"):
        job_end()
    assert time.monotonic() - began < 5


def test_the_variable_wins_over_squeue(squeue, monkeypatch):
    squeue("echo 12 5")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000003")
    assert job_end() == 1700000003


FAKE_SRUN = """#!/bin/bash
trap 'echo told >>"$OUT/told"; sleep 0.3; exit 75' USR2
touch "$OUT/begun"
for _ in $(seq 100); do sleep 0.1; done
"""


@pytest.fixture
def site(tmp_path):
    """A folder with programs of a Slurm that is none, and the environment of a job in it."""
    programs = {"srun": FAKE_SRUN, "mpirun": FAKE_SRUN, "scontrol": 'echo $* >"$OUT/requeued"'}
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


@pytest.mark.parametrize("name", ["train", "train_mpirun", "array", "staged", "sweep"])
def test_a_signal_to_the_batch_shell_reaches_the_ranks(site, monkeypatch, name):
    """`--signal=B:USR2` is sent to the shell alone, and would end it: it passes it on, waits
    for what the ranks save, and requeues.
    """
    folder, env = site
    script = ROOT / "slurm" / f"{name}.sbatch"
    if name == "sweep":
        network = SweepNetwork(1, "1-a", Config())
        monkeypatch.setattr(machine, "python_program", lambda: ["true"])
        script = machine.write_array_script(SweepConfig(), folder, [network])
        (folder / "1-a.toml").touch()
    job = Job(["bash", str(script)], env)
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
