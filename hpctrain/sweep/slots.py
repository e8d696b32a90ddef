"""The slots of a sweep: cores and GPUs of this machine, or job steps of a Slurm allocation."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from hpctrain import launch
from hpctrain.cluster import srun_words, tasks_by_node
from hpctrain.config import SweepConfig
from hpctrain.cores import allowed_cores, core_count
from hpctrain.errors import UsageError
from hpctrain.sweep.file import SweepNetwork
from hpctrain.text import ranges


class Slot(NamedTuple):
    """A place for one network: cores and GPUs of this machine, or a job step of Slurm."""

    number: int  # 1, 2, ...
    command: list[str]  # launches a network: the path of its settings is appended
    cores: Sequence[int] = ()  # empty: all that this process may use
    gpus: Sequence[str] = ()

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU {', '.join(self.gpus)}"
        if self.cores:
            return f"cores {ranges(self.cores)}"
        return "any core"


def find_slots(settings: SweepConfig, networks: list[SweepNetwork]) -> list[Slot]:
    """Return as many slots as fit, or as requested. Raises UsageError.

    On this machine, they share GPUs or cores only if there are too few for one per slot.
    """
    ranks = settings.ranks_per_network
    is_slurm_job = "SLURM_JOB_ID" in os.environ
    train = [sys.executable, "-m", "hpctrain", "train"]
    if settings.trust_code:
        train.append("--trust-code")
    train.append("--config")
    if settings.launcher == "srun" and not is_slurm_job:
        raise UsageError("--launcher srun: this is no Slurm job; --prepare is for job arrays")
    if is_slurm_job and settings.launcher != "mpirun":
        words, count = step_words(ranks)
        return [Slot(n + 1, [*words, *train]) for n in range(settings.slots or count)]
    cores = sorted(allowed_cores())[: core_count()]  # a quota may allow fewer
    gpus: list[str] = []
    if any(network.config.device != "cpu" for network in networks):
        gpus = visible_gpus()
    count = settings.slots or max(1, len(gpus or cores) // ranks)
    if len(cores) < count:
        cores = []
    if 0 < len(gpus) < count:
        gpus = [gpus[n % len(gpus)] for n in range(count)]
    command = [launch.mpirun(), "-n", str(ranks), *train]

    def share(items: list, n: int) -> list:
        return items[len(items) * n // count : len(items) * (n + 1) // count]

    return [
        Slot(
            number=n + 1,
            command=command,
            cores=share(cores, n),
            gpus=share(gpus, n),
        )
        for n in range(count)
    ]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs visible to CUDA programs; empty without a driver."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return [name for name in names.split(",") if name.strip() not in ("", "-1")]
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.check_output(query, text=True, timeout=30).split()
    return []


def step_words(ranks: int) -> tuple[list[str], int]:
    """Return the srun command of one network in this allocation, and how many such steps fit.

    Raises UsageError if not even one fits.
    """
    env = os.environ
    tasks = tasks_by_node(env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_NTASKS", "1"))
    if sum(tasks) < ranks:
        raise UsageError(f"--ranks-per-network {ranks}: the allocation has {sum(tasks)} tasks")
    if ranks <= max(tasks):  # a step is on one node
        fit = sum(count // ranks for count in tasks)
    else:
        fit = sum(tasks) // ranks
    nodes = math.ceil(ranks / max(tasks))
    cores = env.get("SLURM_CPUS_PER_TASK") or env.get("SLURM_CPUS_PER_GPU", "1")
    words = [
        *srun_words(),
        "--exact",
        f"--nodes={nodes}",
        f"--ntasks={ranks}",
        "--kill-on-bad-exit=1",
        f"--mpi={env.get('HPCTRAIN_PMI', 'pmix')}",
        f"--cpus-per-task={cores}",
    ]
    memory = env.get("SLURM_MEM_PER_NODE", "")
    if memory.isdigit() and int(memory):  # MiB; else one step takes it all and the others wait
        words.append(f"--mem={int(memory) * math.ceil(ranks / nodes) // max(tasks)}M")
    if any(name in env for name in ("SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")):
        # Not bound, each task sees all GPUs of its step on its node: NCCL copies between them.
        words += ["--gpus-per-task=1", "--gpu-bind=none"]
    return words, fit
