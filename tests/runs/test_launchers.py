"""What started the ranks: variables that launchers leave in the environment, and what Slurm says of
the job.
"""

from __future__ import annotations

import os
import re

import pytest

import hpctrain as hp
from tests.support.api import cluster, command_line, mpi
from tests.support.launch import LAUNCHER_PREFIXES
from tests.support.scripts import write_scripts

RANKS = {  # name, ranks, and of this rank: number, number on its host, ranks there
    "no launcher": ({}, ("none", None, 0, 0, 1)),
    "flux run, with its plugin for the MPI of Cray": (
        {"FLUX_JOB_SIZE": "5", "FLUX_JOB_NNODES": "2", "FLUX_TASK_RANK": "4"}
        | {"FLUX_TASK_LOCAL_ID": "1", "PALS_NODEID": "1", "PALS_APID": "9"},
        ("flux run", 5, 4, 1, 3),
    ),
    "PALS": (
        {"PMI_RANK": "6", "PMI_SIZE": "8", "PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2"}
        | {"PALS_LOCAL_SIZE": "4", "PALS_APID": "3fa8-1"},
        ("mpiexec (PALS)", 8, 6, 2, 4),
    ),
    "srun with the plugin mpi/cray_shasta": (
        {"PALS_RANKID": "3", "PALS_APID": "7.0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
        | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        ("srun", 4, 3, 1, 2),
    ),
    "srun, on the second of three nodes": (
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "2"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"},
        ("srun", 5, 2, 0, 2),
    ),
    "srun, on the last of three nodes": (
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"}
        | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"},
        ("srun", 5, 4, 0, 1),
    ),
    "MPICH's mpiexec": (
        {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "1"},
        ("mpiexec (Hydra)", 3, 1, 1, 3),
    ),
    "Open MPI's mpirun in a task of flux run: the inner launcher counts": (
        {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2", "FLUX_TASK_RANK": "0"}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
        | {"FLUX_JOB_SIZE": "1", "FLUX_TASK_LOCAL_ID": "0"},
        ("mpirun (Open MPI)", 3, 2, 2, 3),
    ),
    "jsrun": (
        {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"}
        | {"PMIX_RANK": "4"},
        ("jsrun", 6, 4, 1, 1),
    ),
    "MVAPICH2's mpirun_rsh": (
        {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"}
        | {"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        ("mpirun_rsh (MVAPICH2)", 4, 3, 1, 2),
    ),
    "prterun, which does not say how many": (
        {"PRTE_LAUNCHED": "1", "PMIX_RANK": "1"},
        ("prterun", None, 1, 0, 1),
    ),
    "aprun": ({"ALPS_APP_PE": "5"}, ("aprun", None, 5, 0, 1)),
    "torchrun in a task of srun": (
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}
        | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        ("torchrun", 8, 5, 0, 1),
    ),
    "torchrun of one process": (
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1", "RANK": "0"},
        ("none", None, 0, 0, 1),
    ),
    "the variables of torch.distributed in a batch script": (
        {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "MASTER_ADDR": "n1"}
        | {"MASTER_PORT": "29500"},
        ("none", None, 0, 0, 1),
    ),
    "deepspeed": (
        {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "MASTER_PORT": "29500"}
        | {"CROSS_SIZE": "2", "CROSS_RANK": "0", "LOCAL_SIZE": "4"},
        ("deepspeed", 8, 3, 0, 1),
    ),
    "horovodrun without MPI": (
        {"HOROVOD_SIZE": "3", "HOROVOD_RANK": "2", "HOROVOD_LOCAL_RANK": "2"},
        ("horovodrun", 3, 2, 0, 1),
    ),
}


def forget_launcher(monkeypatch):
    """As is done for a process that is started without the launcher."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", RANKS)
def test_the_variables_of_every_launcher(monkeypatch, name):
    variables, facts = RANKS[name]
    forget_launcher(monkeypatch)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found = (cluster.launcher_name(), cluster.launched_size(), cluster.launched_rank())
    found += (cluster.launched_local_rank(), cluster.local_size())
    assert found == facts
    forget_launcher(monkeypatch)
    found = cluster.launcher_name(), cluster.launched_size(), cluster.local_size()
    assert found == ("none", None, 1)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}
REFUSED = {  # command line -> what is said under torchrun
    "train": "torchrun started 2 processes, and each would be a job of its own: .* mpirun -n 2",
    "--epochs 1": "torchrun started 2 processes, and each would be a job of its own: ",
    "evaluate a": "torchrun started 2 processes, and each would be a job of its own: ",
    "predict a b": "torchrun started 2 processes, and each would be a job of its own: ",
    "pack b": "pack needs one process, not 2: call it without torchrun",
    "sweep s.toml": "sweep starts its own ranks: call it without torchrun",
    "train --epochs x": "torchrun started 2 processes, and each would be a job of its own: ",
}


@pytest.mark.parametrize("words", REFUSED)
def test_processes_that_are_no_ranks_of_mpi_are_refused(monkeypatch, capsys, words):
    """Each would train a network of its own, and none would say so."""
    forget_launcher(monkeypatch)
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    assert command_line(words.split()) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"hpctrain: {REFUSED[words]}.*\n", err) and not out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_launcher_that_does_not_tell_how_many_it_started(monkeypatch, capsys, rank):
    forget_launcher(monkeypatch)
    monkeypatch.setenv("PRTE_LAUNCHED", "1")
    monkeypatch.setenv("PMIX_RANK", rank)
    assert command_line(["pack", "digits", "--output", "none.h5"]) == 2
    assert "pack needs one process: call it without prterun" in capsys.readouterr().err
    if rank == "1":  # of an MPI that does not belong to it
        with pytest.raises(hp.UsageError, match="started 2 processes, but each sees only itself"):
            hp.train(epochs=1)


def test_a_program_of_torchrun_or_of_torch_distributed_is_refused(monkeypatch):
    forget_launcher(monkeypatch)
    for variable, value in TORCHRUN.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(hp.UsageError, match="torchrun started 2 processes"):
        hp.train(epochs=1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setattr(mpi, "_torch_size", lambda: 4)
    with pytest.raises(hp.UsageError, match="torch.distributed has 4 processes here, and each"):
        hp.evaluate("a")


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("", []), ("2(x3),1", [2, 2, 2, 1]), ("5", [5]), ("1,3(x2),2", [1, 3, 3, 2])],
)
def test_tasks_of_every_node(text, tasks):
    assert cluster.tasks_by_node(text) == tasks


def test_the_job_is_that_of_the_outermost_scheduler():
    env, found = {}, []
    for more in (
        {"SLURM_JOB_ID": ""},
        {"FLUX_URI": "local:///run/flux"},
        {"FLUX_JOB_ID": "f7"},
        {"PBS_JOBID": "5.head"},
        {"SLURM_JOB_ID": "12"},
    ):
        env |= more
        job = cluster.find_job(env)
        found.append(job and (job[0].name, job[1]))
    assert found == [None, ("Flux", ""), ("Flux", "f7"), ("PBS", "5.head"), ("Slurm", "12")]


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A function that lets squeue be this shell script, in job 12 of an array whose number is 12
    too.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)

    def make(text):
        path = write_scripts(tmp_path, squeue=f"echo $* >{tmp_path}/asked\n{text}")
        monkeypatch.setenv("PATH", path)

    return make


def test_the_end_of_a_job_is_that_of_its_variable_or_asked_of_squeue(squeue, tmp_path, monkeypatch):
    squeue("[ $SLURM_TIME_FORMAT = %s ] && printf '10 1700000001\\n12 1700000002\\n'")
    assert cluster.job_end() == 1700000002
    assert "--jobs=12" in (tmp_path / "asked").read_text()
    squeue("echo 12 N/A")
    assert cluster.job_end() is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000003")
    assert cluster.job_end() == 1700000003
    monkeypatch.delenv("SLURM_JOB_ID")
    assert cluster.job_end() is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo slurm_load_jobs error: Invalid job id >&2; exit 1", "load_jobs error: Invalid job"),
        ("echo 13 1700000002", "no such job"),
        ("echo 12 2026-11-21T22:10:44", "2026-11-21T22:10:44"),
        ("exec sleep 300", "no answer in 1 s"),
    ],
)
def test_an_end_that_cannot_be_found_out_is_said(squeue, monkeypatch, text, said):
    if "sleep" in text:
        monkeypatch.setattr(cluster, "ANSWER_WITHIN", 1.0)
    squeue(text)
    with pytest.raises(hp.RunError, match=f"squeue: .*{said}"):
        cluster.job_end()
