"""The batch scripts of slurm/: a notice before the end of the job reaches the ranks, which save;
the job is requeued, or the command that resumes is named.

srun, mpirun, mpiexec, scontrol, qrerun and flux are stand-ins.
"""

from __future__ import annotations

import signal
import sys

import pytest

from tests.support.launch import ROOT, Job
from tests.support.scripts import write_scripts
from tests.support.wait import wait_for

FAKE_SRUN = """
trap 'echo told >>"$OUT/told"; sleep 0.3; exit 75' USR1
echo "$*" >"$OUT/launched"
touch "$OUT/begun"
for _ in $(seq 1000); do sleep 0.1; done
"""
PROGRAMS = {
    **dict.fromkeys(("srun", "mpirun", "mpiexec"), FAKE_SRUN),
    **dict.fromkeys(("scontrol", "qrerun"), 'echo $* >"$OUT/requeued"'),
    "flux": "echo $* >>$OUT/flux\n[ $1 = getattr ] && echo 2 && exit" + FAKE_SRUN,
    "python": f'exec {sys.executable} "$@"',
    "activate": "",
}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
SLURM |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}


@pytest.fixture
def notice(tmp_path):
    """A function that starts a script in a job with these variables, sends its shell SIGUSR2 when
    the ranks have begun, and returns its exit code and what it prints to stderr.
    """
    path = write_scripts(tmp_path / "bin", **PROGRAMS)
    own = {"HPCTRAIN_VENV": str(tmp_path), "OUT": str(tmp_path), "PATH": path, "PACK": "p.h5"}

    def send(script, words, variables):
        words = ["bash", str(ROOT / "slurm" / script), *words]
        job = Job(words, own | variables, tmp_path)
        try:
            wait_for(lambda: (tmp_path / "begun").exists() or job.poll() is not None)
            job.send_signal(signal.SIGUSR2)
            _, err = job.communicate(timeout=60)
            return job.returncode, err
        finally:
            job.end()

    return send


@pytest.mark.parametrize("name", ["train", "train_mpirun", "staged"])  # sweep: test_sweep_launch
def test_slurm_sends_it_to_the_batch_shell_which_passes_it_on_and_requeues(notice, tmp_path, name):
    code, _ = notice(f"{name}.sbatch", [], SLURM)
    assert (code, (tmp_path / "told").read_text()) == (75, "told\n")
    assert (tmp_path / "requeued").read_text().startswith("requeue 7")


def test_pbs_sends_it_to_the_supervisor_which_requeues(notice, tmp_path):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    job = {"PBS_JOBID": "5.head", "PBS_NODEFILE": str(tmp_path / "nodes")}
    job |= {"PBS_O_WORKDIR": str(tmp_path), "HPCTRAIN_ARGS": "--data p.h5 --run first"}
    code, err = notice("train.pbs", [], job)
    assert (code, (tmp_path / "told").read_text()) == (75, "told\n")
    launched = (tmp_path / "launched").read_text()
    assert launched.startswith("-n 4 --ppn 2 python -m hpctrain --run job-5 --time-limit 58m")
    assert "--data p.h5 --run first --time-limit 34" in launched  # what is left, in seconds
    assert (tmp_path / "requeued").read_text() == "5.head\n" and "5.head is requeued" in err


def test_flux_cannot_requeue_and_the_supervisor_names_the_command_that_resumes(notice, tmp_path):
    words = ["--data", "p.h5", "--run", "first"]
    code, err = notice("train.flux", words, {"FLUX_URI": "local:///run/flux"})
    assert (code, (tmp_path / "told").read_text()) == (75, "told\n")
    assert not (tmp_path / "requeued").exists()
    assert "the same command with --run first resumes" in err
    launched = (tmp_path / "flux").read_text()
    assert "run --nodes=2 --tasks-per-node=2" in launched
    assert " --time-limit 58m --data p.h5 " in launched


@pytest.mark.parametrize("path", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda p: p.stem)
def test_gpus_are_asked_for_by_node_with_enough_cores(path):
    """By task, Slurm hides the GPUs of the other ranks from NCCL."""
    lines = [line for line in path.read_text().splitlines() if "SBATCH" in line]
    assert [line for line in lines if line.startswith("##SBATCH --gpus-per-node=")]
    assert not [line for line in lines if "per-task" in line and "gpu" in line.partition("=")[0]]
    (cores,) = (line for line in lines if "--cpus-per-task" in line)
    assert "8 or more on GPU" in cores
