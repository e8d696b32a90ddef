"""Jobs of ``hpctrain bench``: started under mpirun, ended in any case, read from their records."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from hpctrain.errors import RunError, UsageError

ROOT = Path(__file__).resolve().parents[2]
JOB_LIMIT = 1800.0  # seconds


def steps_rate(steps: list[dict[str, Any]], warm: int) -> tuple[float, float]:
    """images/s by the wall clock from the end of step `warm` to the end of the last, and the share
    of that time which the steps' own seconds account for (the rest lies between epochs).
    """
    timed = steps[warm:]
    elapsed = moment(timed[-1]) - moment(steps[warm - 1])
    own = sum(step["seconds"]["total"] for step in timed)
    return sum(step["rows"] for step in timed) / elapsed, own / elapsed


def moment(record: dict[str, Any]) -> float:
    """When a record was made, in seconds since 1970."""
    return datetime.fromisoformat(record["time"]).timestamp()


def run_job(command: list[str], name: str) -> None:
    """Run a job to its end. RunError with its last words if it fails or takes too long."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(),
    )
    try:
        printed, _ = process.communicate(timeout=JOB_LIMIT)
    except subprocess.TimeoutExpired:
        raise RunError(f"{name}: not done after {JOB_LIMIT:.0f} s: {' '.join(command)}") from None
    finally:
        if process.poll() is None:  # also on Ctrl-C: mpirun then ends its ranks
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    if process.returncode:
        lines = [line for line in printed.splitlines() if line.strip(" -")] or ["nothing printed"]
        telling = [line for line in lines if "Error" in line or "hpctrain:" in line] or lines
        raise RunError(f"{name} failed ({process.returncode}): {telling[-1].strip()}")


def environment() -> dict[str, str]:
    """One thread a rank, this very hpctrain, and more ranks than cores for the start."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = os.pathsep.join(filter(None, (str(ROOT), own.pop("PYTHONPATH", ""))))
    allowed = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    }
    if os.geteuid() == 0:
        allowed |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**allowed, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def mpirun() -> str:
    """The mpirun that belongs to this Python, else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("bench needs mpirun, and there is none on the PATH: load an MPI module")
    return found


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
