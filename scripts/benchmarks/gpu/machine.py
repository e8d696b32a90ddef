"""What a figure of ``scripts/gpu_check`` was measured on."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from typing import Any

import torch

from hpctrain import __version__
from hpctrain.launch import ROOT
from hpctrain.parallel.device import processor_name
from hpctrain.parallel.memory import built_for
from hpctrain.parallel.nccl import nccl_version


def facts() -> dict[str, Any]:
    """GPU, driver, versions, commit, command: names to text. CUDA is not started here."""
    gpus = said(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    cudnn = torch.backends.cudnn.version() if built_for() else None
    changed = bool(said("git", "status", "--porcelain", "--untracked-files=no"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "commit": said("git", "rev-parse", "HEAD") + (" and changes" if changed else "")
        or "unknown",
        "hpctrain": __version__,
        "GPUs": gpus.splitlines() or "none",
        "torch built for": built_for() or "CPUs",
        "cuDNN": str(cudnn or "none"),
        "NCCL of torch": nccl_version() or "none",
        "torch": torch.__version__,
        "cupy": ", ".join(sorted(packages("cupy"))) or "none",
        "mpi4py": ", ".join(packages("mpi4py")) or "none",
        "Python": platform.python_version(),
        "processor": f"{processor_name()}, {len(os.sched_getaffinity(0))} cores allowed",
        "load before": round(os.getloadavg()[0], 2),
    }


def said(*command: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def packages(start: str) -> list[str]:
    """Installed packages whose name begins so, with their versions."""
    found = ((d.metadata["Name"] or "", d.version) for d in distributions())
    return [f"{name} {version}" for name, version in found if name.startswith(start)]
