"""The job that this process belongs to: Slurm, PBS or Flux; its ID, its end, how it is requeued.

What these schedulers document, and what of it was tested, is the table of docs/cluster.md. Sources:

* Slurm: sbatch(1), squeue(1), scontrol(1).
* PBS Professional and OpenPBS: qsub(1B), qstat(1B), qrerun(1B), pbs_job_attributes(7B).
  ``qrerun`` needs the privilege of an operator, and PBS holds a job after 21 starts.
* Flux: flux-environment(7), flux-job(1), flux-batch(1). A batch script has no FLUX_JOB_ID, but
  FLUX_URI. A job without a time limit of its own has that of the enclosing job (RFC 14).
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.errors import RunError

ANSWER_WITHIN = 10.0  # seconds for squeue, qstat and flux
STARTED = "%a %b %d %H:%M:%S %Y"  # stime of qstat -f, in local time
MOST_REQUEUES = 20
FLUX_UNLIMITED = 2**32 - 1  # flux job timeleft without a time limit


@dataclass(frozen=True)
class Scheduler:
    """How one scheduler describes a job and requeues it."""

    name: str
    variables: tuple[str, ...]  # any of them means that there is a job; the first is its ID
    find_end: Callable[[str], float | None]  # see `job_end`
    requeue: tuple[str, ...] = ()  # command to which the ID is appended; none cannot requeue
    restarts: str = ""  # variable with the number of requeues so far
    facts: tuple[tuple[str, str], ...] = ()  # what doctor shows besides the ID, by variable


def job_end() -> float | None:
    """Return the time at which this process's job ends, in seconds since 1970.

    None without a job, or for a job without a time limit. Raises RunError if the time cannot be
    determined.
    """
    found = find_job(os.environ)
    return found[0].find_end(found[1]) if found else None


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


def _slurm_end(job: str) -> float | None:
    """Slurm 22.05 does not set the variable; then squeue is run."""
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


def _pbs_end(job: str) -> float | None:
    """The time at which this life of the job started, and its time limit."""
    found = dict(re.findall(r"^\s*(\S+) = (.*\S)", ask("qstat", "-f", job), re.MULTILINE))
    limit, start = found.get("Resource_List.walltime"), found.get("stime", "none")
    if limit is None:
        return None
    try:
        began = time.mktime(time.strptime(start, STARTED))
        fields = [int(field) for field in reversed(limit.split(":"))]
    except ValueError as error:
        raise RunError(f"qstat: job {job} has stime {start}, walltime {limit}") from error
    return began + sum(field * 60**place for place, field in enumerate(fields))


def _flux_end(job: str) -> float | None:
    """The command finds the job, or the one whose batch script this is, by itself."""
    left = ask("flux", "job", "timeleft").strip()
    if not left.isdigit():
        raise RunError(f"flux job timeleft: {left or 'no answer'}")
    return None if int(left) >= FLUX_UNLIMITED else time.time() + int(left)


SCHEDULERS = (
    Scheduler(
        "Slurm",
        ("SLURM_JOB_ID",),
        _slurm_end,
        ("scontrol", "requeue"),
        "SLURM_RESTART_COUNT",
        (
            ("partition", "SLURM_JOB_PARTITION"),
            ("nodes", "SLURM_JOB_NUM_NODES"),
            ("cores per task", "SLURM_CPUS_PER_TASK"),
        ),
    ),
    Scheduler("PBS", ("PBS_JOBID",), _pbs_end, ("qrerun",), facts=(("queue", "PBS_QUEUE"),)),
    Scheduler(
        "Flux", ("FLUX_JOB_ID", "FLUX_URI"), _flux_end, facts=(("nodes", "FLUX_JOB_NNODES"),)
    ),
)
