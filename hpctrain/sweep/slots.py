"""How many networks fit side by side, and where each of them computes.

On a workstation a slot is some cores of its own, or some GPUs; in a Slurm allocation it is a share
of the tasks, and Slurm gives each step (`srun --exact`) cores and GPUs of its own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config import SweepConfig
from hpctrain.errors import UsageError
from hpctrain.launch import UNBOUND, mpirun
from hpctrain.launcher import launched_size, under_mpirun
from hpctrain.slurm import REQUESTS, tasks_by_node
from hpctrain.sweep.file import Network


@dataclass(frozen=True)
class Slot:
    """A place for one network."""

    number: int  # 1, 2, ...
    cores: tuple[int, ...] = ()  # none: all that we may use
    gpus: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """What its ranks are told."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {**UNBOUND, **visible}

    def place(self) -> str:
        """For a reader."""
        if self.gpus:
            return f"GPU {', '.join(self.gpus)}"
        return f"cores {_ranges(self.cores)}" if self.cores else "any core"


@dataclass(frozen=True)
class Machine:
    """What there is to compute with, and how ranks are started on it."""

    launcher: tuple[str, ...]  # the words before python
    slots: tuple[Slot, ...]
    slurm: bool = False  # slots are steps of a Slurm job

    def command(self, settings: Path, network: Network, program: Sequence[str]) -> list[str]:
        """The launch line of a network."""
        model = ["--model", network.imported] if network.imported else []
        return [*self.launcher, *program, "train", "--config", str(settings), *model]


def python_program() -> list[str]:
    """This very hpctrain."""
    return [sys.executable, "-m", "hpctrain"]


def find_machine(settings: SweepConfig, gpus_wanted: bool) -> Machine:
    """The slots that are there, or as many as are asked for. Raises UsageError."""
    if under_mpirun() or (launched_size() or 1) > 1:
        raise UsageError("a sweep starts its own ranks: call it without mpirun or srun")
    ranks = settings.ranks_per_network
    inside = "SLURM_JOB_ID" in os.environ
    if settings.launcher == "srun" and not inside:
        raise UsageError(
            "--launcher srun: this is no Slurm allocation; --slurm submits a job array"
        )
    if inside and settings.launcher != "mpirun":
        words, count = step_words(ranks, os.environ)
        slots = tuple(Slot(number) for number in range(1, (settings.slots or count) + 1))
        return Machine(words, slots, slurm=True)
    cores = sorted(os.sched_getaffinity(0))
    gpus = visible_gpus() if gpus_wanted else []
    return Machine((mpirun(), "-n", str(ranks)), make_slots(settings.slots, ranks, cores, gpus))


def make_slots(
    wanted: int | None, ranks: int, cores: Sequence[int], gpus: Sequence[str]
) -> tuple[Slot, ...]:
    """Cut cores and GPUs into slots that share none, as long as there is one for each slot."""
    count = wanted or max(1, len(gpus or cores) // ranks)
    slots = []
    for number in range(count):
        own = _cut(cores, number, count) if len(cores) >= count else ()
        devices = _cut(gpus, number, count) if len(gpus) >= count else ()
        if gpus and not devices:  # more networks than GPUs: they take turns on them
            devices = (gpus[number % len(gpus)],)
        slots.append(Slot(number + 1, tuple(own), tuple(devices)))
    return tuple(slots)


def _cut(things: Sequence, number: int, count: int) -> Sequence:
    return things[len(things) * number // count : len(things) * (number + 1) // count]


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-3,6" of 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def visible_gpus() -> list[str]:
    """The GPUs that CUDA programs see here, as they name them; none without a driver."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return [name for name in names if name.strip() not in ("", "-1")]
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return found.stdout.split()
    return []


def step_words(ranks: int, env: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """The srun of one network inside this allocation, and how many such steps fit side by side.
    UsageError where not even one does.
    """
    tasks = tasks_by_node(env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_NTASKS", "1"))
    if sum(tasks) < ranks:
        raise UsageError(
            f"--ranks-per-network {ranks}: the allocation has {sum(tasks)} tasks; ask Slurm for"
            " more with --ntasks"
        )
    fit = sum(count // ranks for count in tasks) if ranks <= max(tasks) else sum(tasks) // ranks
    nodes = 1 if ranks <= max(tasks) else math.ceil(ranks / max(tasks))
    inherited = [word for name in REQUESTS if name in env for word in ("-u", name)]
    words = ["env", *inherited] if inherited else []
    words += ["srun", "--exact", f"--nodes={nodes}", f"--ntasks={ranks}"]
    words += [f"--mpi={env.get('HPCTRAIN_PMI', 'pmix')}", "--kill-on-bad-exit=1"]
    cores = env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_PER_GPU", "1")
    words += [f"--cpus-per-task={cores}"]
    memory = env.get("SLURM_MEM_PER_NODE", "")
    if memory.isdigit() and int(memory):  # MiB; a step would take it all, and the next one wait
        words.append(f"--mem={int(memory) * -(-ranks // nodes) // max(tasks)}M")
    if any(name in env for name in ("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")):
        words.append("--gpus-per-task=1")
    return tuple(words), max(1, fit)
