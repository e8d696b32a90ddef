"""Where a rank computes and what it can do there, and the transport that places.py chose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hpctrain.launcher import LAUNCHER_PREFIXES
from hpctrain.parallel.device import gpu_uuid
from hpctrain.parallel.mpi import Comm, host_name
from hpctrain.parallel.nccl import Nccl
from hpctrain.parallel.nccl_library import nccl_version
from hpctrain.parallel.places import Choice, RankDevice
from hpctrain.parallel.runtime import EXCLUSIVE, is_exclusive
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Nothing, Pinned, Transport
from hpctrain.parallel.trial import check_exchange

TRIAL_SECONDS = 120.0
PACKAGES = str(Path(__file__).resolve().parents[2])  # the folder that holds hpctrain


def make(choice: Choice, comm: Comm, device: torch.device) -> Transport:
    """The transport of this name, for vectors on `device`. Collective. UsageError on all ranks
    where MPI does not deliver what it is given there.
    """
    match choice.name:
        case "none":
            return Nothing(comm)
        case "nccl":
            return Nccl(comm)
        case "mpi-gpu":
            transport = DeviceMemory(comm)
            check_exchange(transport, device)
            return transport
        case "host":
            return Pinned(comm)
    return HostMemory(comm)


def describe_rank(device: torch.device, wanted: str) -> RankDevice:
    """What this rank has to tell. A trial is made only for "mpi-gpu"."""
    if device.type == "cpu":
        return RankDevice(host_name(), "cpu")
    refusal = None
    if wanted == "mpi-gpu":
        refusal = exclusive_refusal(device.index) or trial(device.index)
    return RankDevice(host_name(), "cuda", gpu_uuid(device), nccl_version(), refusal)


def exclusive_refusal(gpu: int) -> str | None:
    """Why no other process can try this GPU, which this one holds: None where it can."""
    if not is_exclusive(gpu):
        return None
    return (
        f"GPU {gpu} {EXCLUSIVE}: MPI cannot be tried with its memory; ask for the mode DEFAULT"
        f" (nvidia-smi -i {gpu} -c DEFAULT), or for --reduce nccl or host"
    )


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
