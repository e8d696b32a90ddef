"""What the launcher (mpirun, srun) wrote into the environment, read without starting MPI."""

from __future__ import annotations

import ctypes
import os
import signal

from hpctrain.slurm import tasks_here

PR_SET_PDEATHSIG = 1  # prctl(2)
LEFT = 75  # exit code, EX_TEMPFAIL of sysexits.h: saved, start me again
#: Of what Open MPI, MPICH and Slurm tell the ranks they start.
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL", "SLURM_STEP")
UNDER_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD", "MPI_LOCALNRANKS")


def _first_number(*names: str) -> int | None:
    values = [os.environ.get(name, "") for name in names]
    return next((int(value) for value in values if value.isdigit()), None)


def under_mpirun() -> bool:
    """Whether an mpirun, and not srun, started this process."""
    return any(name in os.environ for name in UNDER_MPIRUN)


def end_with_launcher() -> None:
    """Let the kernel kill this process when the mpirun that started it dies (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None and under_mpirun():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def launched_size() -> int | None:
    """How many processes the launcher says it started, None without a launcher."""
    return _first_number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_rank() -> int:
    """Which of its processes the launcher says this is; 0 without a launcher."""
    return _first_number("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") or 0


def launch_name() -> str | None:
    """What all processes of this launch, and no others, are called; None where nothing tells."""
    if name := os.environ.get("PMIX_NAMESPACE"):
        return name
    names = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    if not under_mpirun() and all(names):
        return ".".join(names)
    if launched_size() == local_size():  # one launcher, or one proxy of it, started them all
        return f"{os.uname().nodename}.{os.getppid()}"
    return None


def local_size() -> int:
    """How many of its processes run on this host; 1 without a launcher."""
    return _first_number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS") or tasks_here() or 1
