"""Ranks that a program starts: the launcher, its environment, a process that dies with us."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.files import open_itself
from hpctrain.launcher import PR_SET_PDEATHSIG

ROOT = Path(__file__).resolve().parents[1]
#: As root, and with more ranks than cores. Open MPI 4 and 5 read different names.
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
#: Ranks stay on the cores that the launcher itself has been given.
UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "HYDRA_BINDING": "none",
}
MOST_READ = 1 << 16  # bytes of a log that are searched for a reason
ERROR = re.compile(r"hpctrain: |\b\w*Error\b|\w+Exception\b", re.ASCII)
SIGNAL = re.compile(r"signal \d+|Killed|out of memory", re.IGNORECASE)


def mpirun() -> str:
    """The mpirun that belongs to this Python, else the one on the PATH. UsageError for none."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("there is no mpirun on the PATH: load an MPI module")
    return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a job inherits: this very hpctrain, leave to run as root and with more ranks than cores;
    what the user has set stays, what `extra` says wins.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    root = dict.fromkeys(AS_ROOT, "1") if os.geteuid() == 0 else {}
    return {**OVERSUBSCRIBE, **root, **os.environ, "PYTHONPATH": path, **(extra or {})}


def own_sessions(folder: str) -> dict[str, str]:
    """Keep the sockets of an mpirun in `folder`: one that was killed leaves them, and the next
    one of its process number would trip over them.
    """
    return {"OMPI_MCA_orte_tmpdir_base": folder, "PRTE_MCA_prte_tmpdir_base": folder}


def start(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    cores: Collection[int] = (),
    outlives_us: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a launcher on these cores (all, where none are given), its output appended to `log`.

    It has a session of its own, so that Ctrl-C reaches us alone, and unless it `outlives_us` the
    kernel kills it when we die, even by SIGKILL; mpirun and srun take their ranks along. OSError
    where it cannot start.
    """
    parent, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

    def prepare() -> None:
        if prctl is not None and not outlives_us:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # we died before the kernel knew
                os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    with open(log, "ab", opener=open_itself) as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
            preexec_fn=prepare,
        )


def log_tail(log: Path, start: int) -> str:
    """What was appended to a log after its first `start` bytes, its last 64 KiB at most."""
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - MOST_READ))
        return file.read().decode(errors="replace")


def last_error_line(text: str) -> str:
    """The line of a failed job's output with the last error, else with the signal that ended it,
    else the last line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*=\t")]
    for pattern in (ERROR, SIGNAL):
        if found := [line for line in lines if pattern.search(line)]:
            return found[-1]
    return lines[-1] if lines else "nothing printed"
