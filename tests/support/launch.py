"""Start hpctrain in processes of its own, with and without mpirun, and never wait for ever.

For tests of what aborts, hangs, prints or starts MPI. Works with Open MPI 4 and 5 and with MPICH.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.cluster import launched_size
from hpctrain.launch import ALLOWED, end, mpirun, own_sessions

ROOT = Path(__file__).resolve().parents[2]
#: Prefixes of the variables that Open MPI, MPICH, Slurm, PALS and Flux set for ranks they start.
LAUNCHER_PREFIXES = (
    *("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL", "SLURM_STEP"),
    *("PALS_", "FLUX_TASK_", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "JSM_", "MV2_", "ALPS_"),
    *("TORCHELASTIC_", "CROSS_", "HOROVOD_"),
)
#: For the sockets of mpirun: one that was killed leaves them, and the next of its number trips.
SESSIONS = tempfile.mkdtemp(prefix="hpctrain-")
atexit.register(shutil.rmtree, SESSIONS, ignore_errors=True)
VARIABLES = {
    **ALLOWED,
    "OMPI_MCA_btl": "^ofi",  # which sleeps for a second when MPI starts; all ranks share a host
    **own_sessions(SESSIONS),
}


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a new job: not a rank of this one, able to import this hpctrain."""
    own = dict(os.environ)
    if launched_size() is not None:  # then they describe this rank, else they are the user's
        own = {name: own[name] for name in own if not name.startswith(LAUNCHER_PREFIXES)}
    path = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    return {**VARIABLES, **own, "PYTHONPATH": path, **(extra or {})}


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as flags of the command line: ``deterministic=True`` is --deterministic, and a
    tuple repeats its flag.
    """
    found = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    pairs = [
        (flag, one)
        for flag, value in found.items()
        for one in (value if isinstance(value, tuple) else (value,))
    ]
    return [flag if value is True else f"{flag}={value}" for flag, value in pairs]


def marked(mark: str) -> list[int]:
    """The processes alive (on Linux, from /proc) with `mark`, "NAME=value", in their environment.

    A session or process group would not do: launchers put their ranks into new ones.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            variables = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if mark.encode() in variables and state != "Z":
                found.append(int(folder.name))
    return found


class Job(subprocess.Popen[str]):
    """A process, and all that it starts: they carry a mark in their environment."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.mark = f"HPCTRAIN_TEST_JOB={uuid.uuid4()}"
        super().__init__(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment({**(env or {}), "HPCTRAIN_TEST_JOB": self.mark.partition("=")[2]}),
            cwd=cwd,
            start_new_session=True,
        )

    def members(self) -> list[int]:
        """The processes of this job that are alive."""
        return marked(self.mark)

    def end(self) -> tuple[str, str]:
        """End the job, with all that it started; what it had printed."""
        end(self)
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.communicate(timeout=5)


def run(
    command: Sequence[str],
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its output; fail the test if it takes too long."""
    job = Job(command, env, cwd)
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = job.end()
        line = " ".join(command)
        raise AssertionError(f"still running after {timeout} s: {line}\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, job.returncode, out, err)


def run_mpi(
    n: int,
    args: Sequence[str],
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`mpirun -n N python ARGS`: for example run_mpi(2, ["-m", "hpctrain", "doctor"]).

    What was printed is returned without NUL, which mpirun may write into it when ranks abort.
    """
    ended = run([mpirun(), "-n", str(n), sys.executable, *args], timeout, env, cwd)
    ended.stdout = ended.stdout.replace("\0", "")
    ended.stderr = ended.stderr.replace("\0", "")
    return ended


def run_cli(
    args: Sequence[str],
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python -m hpctrain ARGS`, one process without a launcher."""
    return run([sys.executable, "-m", "hpctrain", *args], timeout, env, cwd)
