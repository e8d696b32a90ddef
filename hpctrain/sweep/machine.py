"""Where networks are trained: how many run side by side, and the commands that launch them.

On a workstation, a slot is a set of cores and GPUs of its own. In a Slurm allocation, it is a share
of the tasks, and Slurm gives each job step (`srun --exact`) its own cores and GPUs.
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

from hpctrain.cluster import REQUESTS, tasks_by_node
from hpctrain.config import SweepConfig
from hpctrain.errors import UsageError
from hpctrain.launch import UNBOUND, mpirun
from hpctrain.sweep.file import SweepNetwork
from hpctrain.sweep.folder import settings_file
from hpctrain.text import ranges


@dataclass(frozen=True)
class Slot:
    """A place for one network."""

    number: int  # 1, 2, ...
    cores: tuple[int, ...] = ()  # empty: all that this process may use
    gpus: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment variables to set for its ranks."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {**UNBOUND, **visible}

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU {', '.join(self.gpus)}"
        return f"cores {ranges(self.cores)}" if self.cores else "any core"


@dataclass(frozen=True)
class Machine:
    """The slots to compute in, and how ranks are launched in them."""

    launcher: tuple[str, ...]  # the launch command up to python
    slots: tuple[Slot, ...]
    slurm: bool = False  # slots are job steps of a Slurm job
    trust_code: bool = False  # passed on to train

    def command(self, folder: Path, network: SweepNetwork) -> list[str]:
        """Return the command that launches a network of the sweep in `folder`."""
        words = [sys.executable, "-m", "hpctrain", "train"]
        words += ["--config", str(settings_file(folder, network))]
        return [*self.launcher, *words, *(["--trust-code"] if self.trust_code else [])]


def find_machine(settings: SweepConfig, gpus_wanted: bool) -> Machine:
    """Return the machine with as many slots as fit, or as requested. Raises UsageError."""
    ranks = settings.ranks_per_network
    inside = "SLURM_JOB_ID" in os.environ
    if settings.launcher == "srun" and not inside:
        raise UsageError(
            "--launcher srun: this is no Slurm allocation; --prepare is for a job array"
        )
    if inside and settings.launcher != "mpirun":
        words, count = step_words(ranks, os.environ)
        slots = tuple(Slot(number) for number in range(1, (settings.slots or count) + 1))
        return Machine(words, slots, slurm=True, trust_code=settings.trust_code)
    cores = sorted(os.sched_getaffinity(0))
    gpus = visible_gpus() if gpus_wanted else []
    slots = make_slots(settings.slots, ranks, cores, gpus)
    return Machine((mpirun(), "-n", str(ranks)), slots, trust_code=settings.trust_code)


def make_slots(
    wanted: int | None, ranks: int, cores: Sequence[int], gpus: Sequence[str]
) -> tuple[Slot, ...]:
    """Split cores and GPUs into disjoint slots, as long as there is at least one per slot."""
    count = wanted or max(1, len(gpus or cores) // ranks)
    slots = []
    for number in range(count):
        own = _cut(cores, number, count) if len(cores) >= count else ()
        devices = _cut(gpus, number, count) if len(gpus) >= count else ()
        if gpus and not devices:  # more networks than GPUs: several networks share a GPU
            devices = (gpus[number % len(gpus)],)
        slots.append(Slot(number + 1, tuple(own), tuple(devices)))
    return tuple(slots)


def _cut(items: Sequence, number: int, count: int) -> Sequence:
    return items[len(items) * number // count : len(items) * (number + 1) // count]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs visible to CUDA programs; empty without a driver."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return [name for name in names if name.strip() not in ("", "-1")]
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return found.stdout.split()
    return []


def step_words(ranks: int, env: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """Return the srun command of one network in this allocation, and how many such steps fit.

    Raises UsageError if not even one fits.
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
    if memory.isdigit() and int(memory):  # MiB; else one step takes it all and the others wait
        words.append(f"--mem={int(memory) * -(-ranks // nodes) // max(tasks)}M")
    if any(name in env for name in ("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")):
        words.append("--gpus-per-task=1")
    return tuple(words), max(1, fit)
