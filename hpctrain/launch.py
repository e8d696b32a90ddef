"""Start ranks from a program: the launcher, its environment, a process that dies with this one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hpctrain.cluster import end_with_parent, signals_handled
from hpctrain.errors import RunError, UsageError
from hpctrain.report.history import History, Outcome

ROOT = Path(__file__).resolve().parents[1]
#: Allow root, and more ranks than cores. Open MPI 4 and 5 read different names.
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
OVERSUBSCRIBE = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
#: Do not bind ranks: they use the cores that the launcher itself has been given.
UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "HYDRA_BINDING": "none",
}
CAUGHT = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
REPEATED_AFTER = 1.0  # seconds; schedulers may send the same signal twice in a row
KILL_AFTER = 10.0  # seconds from SIGTERM to SIGKILL
MOST_READ = 1 << 16  # bytes of a log that are searched for the cause of a failure
ERROR = re.compile(r"hpctrain: |\b\w*Error\b|\w+Exception\b", re.ASCII)
SIGNAL = re.compile(r"signal \d+|Killed|out of memory", re.IGNORECASE)


def mpirun() -> str:
    """Return the mpirun beside this Python, else the one on the PATH. Raises UsageError if none."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UsageError("there is no mpirun on the PATH: load an MPI module")
    return found


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a job, with this hpctrain first on PYTHONPATH.

    Root and more ranks than cores are allowed, unless the user has set the variables.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    root = dict.fromkeys(AS_ROOT, "1") if os.geteuid() == 0 else {}
    return {**OVERSUBSCRIBE, **root, **os.environ, "PYTHONPATH": path, **(extra or {})}


def own_sessions(folder: str) -> dict[str, str]:
    """Return variables that make an mpirun keep its sockets in `folder`: those that a killed one
    left would conflict with the next one of the same process ID.
    """
    return {"OMPI_MCA_orte_tmpdir_base": folder, "PRTE_MCA_prte_tmpdir_base": folder}


@contextmanager
def caught_signals() -> Iterator[list[tuple[signal.Signals, float]]]:
    """Within the block, append each signal in `CAUGHT` and its time to the list yielded."""
    received: list[tuple[signal.Signals, float]] = []
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    with signals_handled(CAUGHT[ignored:], lambda n: received.append((n, time.monotonic()))):
        yield received


def is_repeated(signals: Sequence[tuple[signal.Signals, float]]) -> bool:
    """Whether Ctrl-C or SIGTERM was received twice: the sender does not want to wait."""
    times = [at for number, at in signals if number in (signal.SIGINT, signal.SIGTERM)]
    return bool(times) and times[-1] > times[0] + REPEATED_AFTER


class LaunchedRun:
    """A launcher process that trains the run in `folder`, and what this launch records."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path | None = None,
        cores: Collection[int] = (),
    ) -> None:
        """Start the process as `start` does. Raises RunError if it cannot be started."""
        self.folder = folder
        self._history = History(folder, "none")
        self._began_before = self.history().launch.began
        self._killed_at: float | None = None
        try:
            self.process = start(command, log, env, cores)
        except OSError as error:
            raise RunError(f"cannot start {command[0]}: {error.strerror}") from error

    def history(self) -> History:
        """Read new lines of the run's record and return its history."""
        self._history.follow()
        return self._history

    def has_begun(self) -> bool:
        """Whether this launch has written to the record. Compares no clocks of two hosts."""
        return self.history().launch.began != self._began_before

    def recorded(self) -> Outcome:
        """Return how this launch ended according to its record; an empty outcome if unknown."""
        return self.history().launch.outcome if self.has_begun() else Outcome()

    def preempt(self) -> None:
        """Ask the run to save and exit with 75: launchers forward SIGUSR2 to all ranks."""
        self.process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Send SIGTERM, and SIGKILL `KILL_AFTER` seconds later. To be called until it has ended."""
        if self._killed_at is None:
            self._killed_at = time.monotonic()
            self.process.terminate()
        elif time.monotonic() > self._killed_at + KILL_AFTER:
            self.process.kill()


def start(
    command: Sequence[str],
    log: Path | None,
    env: Mapping[str, str],
    cores: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a launcher on these cores (all if none are given) and append its output to `log`.

    Without a log, it writes where this process writes. It runs in a session of its own, so that
    Ctrl-C reaches only this process, with which it dies. Raises OSError if it cannot start.
    """
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(parent)
        if cores:
            os.sched_setaffinity(0, cores)

    with open(log, "ab") if log else nullcontext() as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            env=dict(env),
            start_new_session=True,
            preexec_fn=prepare,
        )


def log_tail(log: Path, start: int) -> str:
    """Return what was appended to a log after its first `start` bytes, at most the last 64 KiB."""
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - MOST_READ))
        return file.read().decode(errors="replace")


def last_error_line(text: str) -> str:
    """Return the line of a failed job's output that shows why it failed.

    It is the last line with an error, else the last one with a signal, else the last line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*=\t")]
    for pattern in (ERROR, SIGNAL):
        if found := [line for line in lines if pattern.search(line)]:
            return found[-1]
    return lines[-1] if lines else "nothing printed"
