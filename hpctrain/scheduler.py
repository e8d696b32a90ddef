"""The job that this process belongs to: Slurm, PBS or Flux; its ID, how it is requeued, its end.

Only Slurm is asked for the end of a job; in PBS and Flux, --time-limit gives it.

What these schedulers document, and what of it was tested, is the table of docs/cluster.md. Sources:

* Slurm: sbatch(1), squeue(1), scontrol(1).
* PBS Professional and OpenPBS: qsub(1B), qrerun(1B). ``qrerun`` needs the privilege of an
  operator, and PBS holds a job after 21 starts.
* Flux: flux-environment(7). A batch script has no FLUX_JOB_ID, but FLUX_URI.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import RunError

ANSWER_WITHIN = 10.0  # seconds for squeue and scontrol
MOST_REQUEUES = 20


@dataclass(frozen=True)
class Scheduler:
    """How one scheduler describes a job and requeues it."""

    name: str
    variables: tuple[str, ...]  # any of them means that there is a job; the first is its ID
    requeue: tuple[str, ...] = ()  # command to which the ID is appended; none cannot requeue
    restarts: str = ""  # variable with the number of requeues so far


def find_job(env: Mapping[str, str]) -> tuple[Scheduler, str] | None:
    """Return the scheduler of the job of a process and its ID, which is empty if it is not known.

    A Flux instance may run in a job of another scheduler: that job ends and is requeued.
    """
    for scheduler in SCHEDULERS:
        if any(env.get(name) for name in scheduler.variables):
            return scheduler, env.get(scheduler.variables[0], "")
    return None


def ask(*command: str, within: float | None = None, **variables: str) -> str:
    """Return the output of a scheduler's command. Raises RunError if it fails or times out.

    `within` is the time limit in seconds, by default `ANSWER_WITHIN`.
    """
    within = within or ANSWER_WITHIN
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=within,
        )
    except OSError as error:
        raise RunError(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]}: no answer in {within:.0f} s") from error
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise RunError(f"{command[0]}: {reason}")
    return done.stdout


def job_end() -> float | None:
    """Return the time at which this process's Slurm job ends, in seconds since 1970.

    None outside of Slurm, or for a job without a time limit. Slurm 22.05 does not set the variable:
    then squeue is run. Raises RunError if the time cannot be determined.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        return float(end)
    # %A distinguishes the tasks of an array; the last one has the ID of the whole array.
    words = ("--noheader", f"--jobs={job}", "--states=running", "--format=%A %e")
    lines = ask("squeue", *words, SLURM_TIME_FORMAT="%s").splitlines()
    end = dict(line.split(maxsplit=1) for line in lines if " " in line).get(job, "").strip()
    if end.isdigit():
        return float(end)
    if end in ("N/A", "Unknown", "NONE"):
        return None
    raise RunError(f"squeue: {end or 'no such job'}")


SCHEDULERS = (
    Scheduler("Slurm", ("SLURM_JOB_ID",), ("scontrol", "requeue"), "SLURM_RESTART_COUNT"),
    Scheduler("PBS", ("PBS_JOBID",), ("qrerun",)),
    Scheduler("Flux", ("FLUX_JOB_ID", "FLUX_URI")),
)
