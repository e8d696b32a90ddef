"""Start ranks from a program, and end them: used by sweep, supervise, scripts and tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from hpctrain.cluster import end_with_parent, signals_handled
from hpctrain.cores import cgroup_folders
from hpctrain.errors import RunError, UsageError
from hpctrain.outcome import Outcome
from hpctrain.report.history import History

ROOT = Path(__file__).resolve().parents[1]
PROC = Path("/proc")
#: Allow root, and more ranks than cores. Open MPI 4 and 5 read different names.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
#: Do not bind ranks: they use the cores that the launcher itself has been given.
UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "HYDRA_BINDING": "none",
}
# Sent to a launcher, which forwards it to all ranks: they save and end. (mpirun of Open MPI and
# MPICH, srun and flux forward it; MPICH's mpirun does not survive SIGUSR2.)
NOTICE = signal.SIGUSR1
CAUGHT = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ReceivedSignals = list[tuple[signal.Signals, float]]  # with their times
REPEATED_AFTER = 1.0  # seconds; schedulers may send the same signal twice in a row
KILL_AFTER = 10.0  # seconds from SIGTERM to SIGKILL
ERROR = re.compile(r"hpctrain: |\b\w*Error\b|\w+Exception\b", re.ASCII)
SIGNAL = re.compile(r"signal \d+|Killed|out of memory", re.IGNORECASE)


def mpirun() -> str:
    """Return the mpirun beside this Python, else the one on the PATH. Raises UsageError if none."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", "")]
    path = shutil.which("mpirun", path=os.pathsep.join(folders))
    if path is None:
        raise UsageError("there is no mpirun on the PATH: load an MPI module")
    return path


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a job: this hpctrain is first on PYTHONPATH, and root and more
    ranks than cores are allowed, unless the user has set the variables.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {
        **ALLOWED,
        **os.environ,
        "PYTHONPATH": path,
        **(extra or {}),
    }


def own_sessions(folder: str) -> dict[str, str]:
    """Return variables that keep an mpirun's sockets apart from those that a killed one left."""
    return {
        "OMPI_MCA_orte_tmpdir_base": folder,
        "PRTE_MCA_prte_tmpdir_base": folder,
    }


@contextmanager
def caught_signals() -> Iterator[ReceivedSignals]:
    """Within the block, append each signal in `CAUGHT` and its time to the list yielded."""
    received: ReceivedSignals = []
    caught = set(CAUGHT)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
        caught.remove(signal.SIGHUP)
    with signals_handled(caught, lambda number: received.append((number, time.monotonic()))):
        yield received


def is_repeated(signals: ReceivedSignals) -> bool:
    """Whether Ctrl-C or SIGTERM was received twice: the sender does not want to wait."""
    times = [at for number, at in signals if number in (signal.SIGINT, signal.SIGTERM)]
    return bool(times) and times[-1] > times[0] + REPEATED_AFTER


def start(
    command: Sequence[str], log: Path | None, env: Mapping[str, str], cores: Collection[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a launcher on these cores (all if none are given) and append its output to `log`.

    Without a log, it writes where this process writes. It leads a session, so that Ctrl-C reaches
    only this process. It dies with the thread that calls this: call it in the main thread. Raises
    RunError.
    """
    parent = os.getpid()

    def prepare() -> None:
        end_with_parent(parent)
        if cores:
            os.sched_setaffinity(0, cores)

    try:
        with open(log, "ab") if log else nullcontext() as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
                env=env,
                start_new_session=True,
                preexec_fn=prepare,
            )
    except OSError as error:
        raise RunError(f"cannot start {command[0]}: {error.strerror}") from error


def end(*processes: subprocess.Popen[bytes]) -> None:
    """End processes that lead sessions, with their process groups, and wait for them.

    They get SIGTERM, once, so that launchers end their ranks; what is left `KILL_AFTER` seconds
    later gets SIGKILL.
    """

    def send(number: int) -> bool:
        left = False
        for process in processes:
            process.poll()  # a zombie would count
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
                left = True
        return left

    send(signal.SIGTERM)
    until = time.monotonic() + KILL_AFTER
    while send(0) and time.monotonic() < until:
        time.sleep(0.05)
    send(signal.SIGKILL)
    for process in processes:
        process.wait()


def oom_kills() -> dict[str, int]:
    """Return how many processes the kernel has killed for lack of memory so far, by where.

    Counted are those of the cgroup of this process, or of its Slurm job on this node ("oom_kill" in
    memory.events of cgroup-v2, in memory.oom_control of version 1); if no cgroup has a count, those
    of this machine (/proc/vmstat).
    """
    files: dict[str, Path] = {}
    for folders in cgroup_folders("memory", PROC / "self"):
        upwards = list(folders)
        job = [folder for folder in upwards if folder.name.startswith("job_")]
        folder = (job or upwards)[0]
        for path in (folder / "memory.events", folder / "memory.oom_control"):
            if path.is_file():
                files[f"in the cgroup {folder}"] = path
    kills = {}
    for where, path in (files or {"on this machine": PROC / "vmstat"}).items():
        with suppress(OSError, StopIteration):
            lines = path.read_text().splitlines()
            kills[where] = next(int(line[9:]) for line in lines if line.startswith("oom_kill "))
    return kills


class LaunchedRun:
    """One launch of the run in `folder`: its process, the notice sent to it, and its record."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path | None = None,
        cores: Collection[int] = (),
    ) -> None:
        """Start the launcher; see `start`."""
        self.history = History.read(folder, "none")
        self.is_notified = False
        self._killed_before = oom_kills()
        self._began_before = self.history.launch.began
        self.process = start(command, log, env, cores)

    def notify(self) -> None:
        """Send the launcher the `NOTICE`, once."""
        if not self.is_notified:
            self.is_notified = True
            self.process.send_signal(NOTICE)

    def has_begun(self) -> bool:
        """Whether the launch has written to the record. Compares no clocks of two hosts."""
        self.history.follow()
        return self.history.launch.began != self._began_before

    def outcome(self) -> Outcome:
        """Return how the launch ended according to the record; an empty outcome if unknown."""
        return self.history.launch.outcome if self.has_begun() else Outcome()

    def memory_hint(self) -> str:
        """Return "; likely out of memory: ..." if the kernel says so of this launch, else ""."""
        for where, kills in oom_kills().items():
            more = kills - self._killed_before.get(where, kills)
            if more > 0:
                return f"; likely out of memory: OOM kills {where}: {more}"
        return ""


def last_error_line(text: str) -> str:
    """Return the line of a failed job's output that shows why: the last one with an error, else
    the last one with a signal, else the last one.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*=\t")]
    for pattern in (ERROR, SIGNAL):
        telling = [line for line in lines if pattern.search(line)]
        if telling:
            return telling[-1].removeprefix("hpctrain: ")
    if lines:
        return lines[-1]
    return "nothing printed"
