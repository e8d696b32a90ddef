"""Which transport carries the messages: from what is true on all ranks, and from --reduce.

mpi       all ranks compute on CPUs: MPI sums host memory
none      one rank with a GPU: nothing travels
nccl      every rank has a GPU of its own, and CuPy finds the same NCCL everywhere
host      GPUs, through pinned host memory: works everywhere, with any MPI
mpi-gpu   GPUs, whose memory MPI is given: only where asked for, after a trial in another process
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hpctrain.errors import UsageError
from hpctrain.launcher import LAUNCHER_PREFIXES
from hpctrain.parallel.device import gpu_uuid, nccl_version
from hpctrain.parallel.mpi import Comm, host_name
from hpctrain.parallel.nccl import Nccl
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Nothing, Pinned, Transport

TRIAL_SECONDS = 120.0
PACKAGES = str(Path(__file__).resolve().parents[2])  # the folder that holds hpctrain


class Place(NamedTuple):
    """Where one rank computes, and what it can do there."""

    host: str
    device: str  # "cpu" or "cuda"
    gpu: str = ""  # its UUID
    nccl: int = 0  # version that CuPy finds, such as 22304; 0 = none
    refusal: str | None = None  # why MPI may not be given device memory; None = it may; see trial


class Choice(NamedTuple):
    """A transport by name, and why it is that one."""

    name: str
    reason: str


def choose(places: Sequence[Place], wanted: str = "auto") -> Choice:
    """The transport for these ranks. UsageError where the one `wanted` cannot be, and why."""
    on_cpu = [rank for rank, place in enumerate(places) if place.device == "cpu"]
    if wanted in ("nccl", "mpi-gpu") and on_cpu:
        raise UsageError(f"--reduce {wanted} is for GPUs: {_named(places, on_cpu[0])} has none")
    if len(on_cpu) == len(places):
        return Choice("mpi", "all ranks compute on CPUs")
    against = _against_nccl(places)
    if wanted == "nccl" and against:
        raise UsageError(f"--reduce nccl: {against}")
    if wanted == "mpi-gpu":
        for rank, place in enumerate(places):
            if place.refusal is not None:
                raise UsageError(f"--reduce mpi-gpu: on {_named(places, rank)} {place.refusal}")
        return Choice("mpi-gpu", "asked for, and MPI took device memory in a trial")
    if wanted == "host":
        return Choice("host", "asked for")
    if against:
        return Choice("host", against)
    if wanted == "auto" and len(places) == 1:
        return Choice("none", "one rank")
    return Choice("nccl", "every rank has a GPU of its own" if wanted == "auto" else "asked for")


def _against_nccl(places: Sequence[Place]) -> str:
    """What NCCL cannot do with these ranks; nothing where it can."""
    seen: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        if place.device == "cpu":
            return f"{_named(places, rank)} computes on the CPU"
        if not place.nccl:
            return f"{_named(places, rank)} finds no NCCL through CuPy"
        if place.nccl != places[0].nccl:
            return f"NCCL is {places[0].nccl} on rank 0, {place.nccl} on {_named(places, rank)}"
        other = seen.setdefault((place.host, place.gpu), rank)
        if other != rank:
            return f"ranks {other} and {rank} share a GPU of {place.host}"
    return ""


def _named(places: Sequence[Place], rank: int) -> str:
    return f"rank {rank} ({places[rank].host})"


def make(choice: Choice, comm: Comm) -> Transport:
    """The transport of this name. Collective."""
    match choice.name:
        case "none":
            return Nothing(comm)
        case "nccl":
            return Nccl(comm)
        case "mpi-gpu":
            return DeviceMemory(comm)
        case "host":
            return Pinned(comm)
    return HostMemory(comm)


def place_of(device: torch.device, wanted: str) -> Place:
    """What this rank has to tell. A trial is made only for "mpi-gpu"."""
    if device.type == "cpu":
        return Place(host_name(), "cpu")
    refusal = trial(device.index) if wanted == "mpi-gpu" else None
    return Place(host_name(), "cuda", gpu_uuid(device), nccl_version(), refusal)


def trial(gpu: int, program: Sequence[str] = ("-m", "hpctrain.parallel.trial")) -> str | None:
    """Let a process that is no rank of this job give device memory to MPI: None where the bytes
    came back, else what happened. A MPI that does not take it crashes, so it is not tried here.
    """
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)
    }
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (PACKAGES, own.get("PYTHONPATH"))))
    command = [sys.executable, *program, str(gpu)]
    try:
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"MPI was given device memory in a trial and did not return in {TRIAL_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"MPI was given device memory in a trial and crashed ({name}): it is not GPU-aware"
    words = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing was said"]
    return f"MPI was given device memory in a trial and failed: {words[-1]}"
