"""The launcher that started this process, the job around it, and the signals of both.

Nothing here initializes MPI. docs/cluster.md says which launchers and schedulers were tested.
Sources:

* Slurm: sbatch(1), srun(1), squeue(1), scontrol(1).
* PBS Professional and OpenPBS: qsub(1B), qrerun(1B), which needs the privilege of an operator.
* PALS, the launcher of HPE Cray systems with PBS: those that HPE's plugin mpi/cray_shasta of Slurm
  sets in its place. PALS_LOCAL_SIZE is from programs that run on such systems.
* Flux: flux-environment(7). A batch script has no FLUX_JOB_ID, but FLUX_URI.
* jsrun of IBM's JSM, mpirun_rsh of MVAPICH2, aprun of Cray's ALPS, and prterun, which gives a rank
  no number but PMIX_RANK: programs that run under them.
* torchrun, which `accelerate launch` calls: docs.pytorch.org/docs/stable/elastic/run.html; the
  launchers of DeepSpeed (launcher/launch.py) and of Horovod without MPI (runner/gloo_run.py).

SIGUSR2 and SIGUSR1 are notices that a batch script asks for before the end of the job (sbatch and
flux batch --signal); their handler only records them. SIGTERM is a notice if its sender then waits:
Slurm at preemption (to the tasks of srun), PBS for kill_delay, Flux for kill-timeout when a job is
cancelled, or a user who signals a single process. Under mpirun it is not a notice: the ranks are
killed a quarter of a second later. At a time limit Flux sends SIGALRM (flux-config-exec(5)), which
is no notice: only 5 seconds are left.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hpctrain.errors import RunError, UsageError

LEFT = 75  # exit code EX_TEMPFAIL of sysexits.h: the state is saved, the same command resumes
ANSWER_WITHIN = 10.0  # seconds for squeue and scontrol
UNDER_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD", "MPI_LOCALNRANKS")
PLACES = ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # may name cores for OpenMP
#: Requests of a job that a step with requests of its own must not inherit (srun(1), INPUT
#: ENVIRONMENT): a step that requests all GPUs waits until no other step runs.
REQUESTS = (
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_CPUS_PER_GPU",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_GRES",
    "SLURM_STEP_GRES",
    "SLURM_TRES_PER_TASK",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NNODES",
    "SLURM_CPUS_PER_TASK",
)
#: Variables of launchers, by what they hold. The first one that holds a number counts.
SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
    "PALS_RANKID",
    "ALPS_APP_PE",
    "PMIX_RANK",
)
LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
    "PALS_LOCAL_RANKID",
)


class ForeignLauncher(NamedTuple):
    """A launcher of processes that are not ranks of one MPI job: each would be alone."""

    name: str
    mark: tuple[str, ...]  # variables of its processes alone; batch scripts export the others
    size: str  # variable with the number of processes
    rank: str


FOREIGN = (
    ForeignLauncher("torchrun", ("TORCHELASTIC_RUN_ID",), "WORLD_SIZE", "RANK"),
    ForeignLauncher("deepspeed", ("CROSS_SIZE", "LOCAL_SIZE", "MASTER_PORT"), "WORLD_SIZE", "RANK"),
    ForeignLauncher("horovodrun", ("HOROVOD_RANK",), "HOROVOD_SIZE", "HOROVOD_RANK"),
)

_received: list[int] = []  # signals received so far


def _first_number(*names: str) -> int | None:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def foreign_launcher() -> ForeignLauncher | None:
    """Return the launcher of this process if it started several, and is not one of MPI."""
    for launcher in FOREIGN:
        if all(name in os.environ for name in launcher.mark):
            size = _first_number(launcher.size) or 1
            if size > 1:
                return launcher
            return None
    return None


def require_mpi_launcher() -> None:
    """Raise UsageError if this process has a `foreign_launcher`."""
    launcher = foreign_launcher()
    if launcher:
        size = launched_size()
        raise UsageError(
            f"{launcher.name} started {size} processes, and each would be a job of its own: the"
            f" ranks of a job are started by MPI, with mpirun -n {size} or srun"
        )


def under_mpirun() -> bool:
    """Whether mpirun, rather than srun, started this process."""
    return any(name in os.environ for name in UNDER_MPIRUN)


def launcher_name() -> str:
    """Return the launcher of this process, recognized by its environment variables.

    srun and Flux set variables of PALS too, for the MPI of Cray.
    """
    foreign = foreign_launcher()
    if foreign:
        return foreign.name
    names = (
        ("JSM_NAMESPACE_SIZE", "jsrun"),
        ("OMPI_COMM_WORLD_SIZE", "mpirun (Open MPI)"),
        ("PRTE_LAUNCHED", "prterun"),
        ("MV2_COMM_WORLD_SIZE", "mpirun_rsh (MVAPICH2)"),
        ("MPI_LOCALNRANKS", "mpiexec (Hydra)"),
        ("SLURM_STEP_ID", "srun"),
        ("FLUX_TASK_RANK", "flux run"),
        ("PALS_RANKID", "mpiexec (PALS)"),
        ("PMI_SIZE", "a PMI launcher"),
        ("SLURM_STEP_NUM_TASKS", "a PMI launcher"),
        ("ALPS_APP_PE", "aprun"),
        ("PMIX_RANK", "a PMIx launcher"),
    )
    return next((name for variable, name in names if variable in os.environ), "none")


def more_cores() -> str:
    """Return what to type for more cores per rank, with the launcher of this process."""
    options = {
        "mpirun (Open MPI)": "mpirun --bind-to none",
        "mpiexec (Hydra)": "mpiexec -bind-to none",
        "srun": "srun -c N",
        "flux run": "flux run -c N",
        "mpiexec (PALS)": "mpiexec --cpu-bind depth --depth N",
    }
    advice = options.get(launcher_name(), "ask for them, start without taskset")
    places = [name for name in PLACES if name in os.environ]
    return f"give ranks more: {', or unset '.join([advice, *places])}"


def gpu_files() -> list[str]:
    """Return the device files of the GPUs of this host: of NVIDIA's each, of AMD's one for all."""
    files = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    return sorted(map(str, files))


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its `parent` dies, even by SIGKILL (prctl(2))."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has died already
        os._exit(1)


def notice_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that are notices for this process."""
    if under_mpirun():
        return signal.SIGUSR2, signal.SIGUSR1
    return signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM


def catch_signals() -> None:
    """Install the handler of the notices, in the main thread only."""
    for number in notice_signals():
        signal.signal(number, lambda number, frame: _received.append(number))


@contextmanager
def signals_caught() -> Iterator[None]:
    """Catch the notices in a block of a user's own program, if this is the main thread."""
    notices: tuple[signal.Signals, ...] = ()
    if threading.current_thread() is threading.main_thread():
        notices = notice_signals()
    try:
        with signals_handled(notices, _received.append):
            yield
    finally:
        _received.clear()


@contextmanager
def signals_handled(
    numbers: Iterable[signal.Signals],
    handle: Callable[[signal.Signals], object],
) -> Iterator[None]:
    """Call `handle` with each of these signals in the block; then restore their handlers."""
    before = {
        number: signal.signal(number, lambda number, frame: handle(signal.Signals(number)))
        for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # of a program that embeds Python: it cannot be restored
                signal.signal(number, handler)


def received_signal() -> str | None:
    """Return the name of the first notice that was received, if any."""
    if not _received:
        return None
    return signal.Signals(_received[0]).name


def ignore_signals() -> None:
    """Ignore all notices: nothing is left to save, and the process exits with its own code.

    Launchers send SIGTERM to all other ranks once the first has exited with a nonzero code, and
    `srun` would then return 143 (128 + SIGTERM) instead of our 75.
    """
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def launched_size() -> int | None:
    """Return the number of processes that the launcher started.

    None without a launcher, or with one that does not tell (`launcher_name`: prterun, aprun).
    """
    foreign = foreign_launcher()
    if foreign:
        return _first_number(foreign.size)
    return _first_number(*SIZES)


def launched_rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher."""
    foreign = foreign_launcher()
    if foreign:
        return _first_number(foreign.rank) or 0
    return _first_number(*RANKS) or 0


def launched_local_rank() -> int:
    """Return the number of this process among the launch's on this host; 0 without a launcher."""
    return _first_number(*LOCAL_RANKS) or 0


def local_size() -> int:
    """Return the number of the launch's processes on this host; 1 without a launcher."""
    size = _first_number(*LOCAL_SIZES)
    if size:
        return size
    tasks = tasks_by_node(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _first_number("SLURM_NODEID")
    if node is not None and node < len(tasks):
        return tasks[node]
    nodes = _first_number("FLUX_JOB_NNODES")
    if nodes:
        size = _first_number("FLUX_JOB_SIZE") or 1
        return math.ceil(size / nodes)  # of an even launch, or the mean rounded up
    return 1


def tasks_by_node(text: str) -> list[int]:
    """Parse SLURM_TASKS_PER_NODE or SLURM_STEP_TASKS_PER_NODE: "2(x3),1" is [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in runs for _ in range(int(times or 1))]


def place_in_step(rank: int, size: int) -> tuple[int, int]:
    """Return the node of this step, and the task of that node, on which `rank` of `size` runs.

    (-1, -1) if srun did not start these ranks: under mpirun its variables describe a daemon.
    """
    node = _first_number("SLURM_NODEID")
    task = _first_number("SLURM_LOCALID")
    is_step = (
        _first_number("SLURM_PROCID") == rank and _first_number("SLURM_STEP_NUM_TASKS") == size
    )
    if is_step and node is not None and task is not None:
        return node, task
    return -1, -1


class Scheduler(NamedTuple):
    """How one scheduler describes a job and requeues it."""

    name: str
    variables: tuple[str, ...]  # any of them means that there is a job; the first is its ID
    requeue: tuple[str, ...] = ()  # command to which the ID is appended; none cannot requeue
    restarts: str = ""  # variable with the number of requeues so far


SCHEDULERS = (
    Scheduler("Slurm", ("SLURM_JOB_ID",), ("scontrol", "requeue"), "SLURM_RESTART_COUNT"),
    Scheduler("PBS", ("PBS_JOBID",), ("qrerun",)),
    Scheduler("Flux", ("FLUX_JOB_ID", "FLUX_URI")),
)


def find_job(env: Mapping[str, str]) -> tuple[Scheduler, str] | None:
    """Return the scheduler of the job of a process and its ID, which is empty if it is not known.

    A Flux instance may run in a job of another scheduler: that job ends and is requeued.
    """
    for scheduler in SCHEDULERS:
        if any(env.get(name) for name in scheduler.variables):
            return scheduler, env.get(scheduler.variables[0], "")
    return None


def srun_words() -> list[str]:
    """Return the beginning of a command by which srun inherits none of the job's `REQUESTS`."""
    inherited = [f"--unset={name}" for name in REQUESTS if name in os.environ]
    if inherited:
        return ["env", *inherited, "srun"]
    return ["srun"]


def scheduler_output(*command: str, within: float | None = None, **variables: str) -> str:
    """Return the output of a scheduler's command. Raises RunError if it fails or times out.

    It has `within` seconds (None: `ANSWER_WITHIN`), and `variables` in its environment.
    """
    within = within or ANSWER_WITHIN
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within,
            start_new_session=True,  # Ctrl-C is not for it
        )
    except OSError as error:
        raise RunError(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(f"{command[0]}: no answer in {within:.0f} s") from error
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise RunError(f"{command[0]}: {reason}")
    return done.stdout


def job_end() -> float | None:
    """Return the time at which this process's Slurm job ends, in seconds since 1970.

    None outside of Slurm, or for a job without a time limit. Slurm 22.05 does not set the variable:
    then squeue is run. Raises RunError if the time cannot be determined.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        return float(end)
    output = scheduler_output(
        "squeue",
        "--noheader",
        f"--jobs={job}",
        "--states=running",
        # %A distinguishes the tasks of an array; the last one has the ID of the whole array.
        "--format=%A %e",
        SLURM_TIME_FORMAT="%s",
    )
    ends = dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line)
    end = ends.get(job, "").strip()
    if end.isdigit():
        return float(end)
    if end in ("N/A", "Unknown", "NONE"):
        return None
    raise RunError(f"squeue: {end or 'no such job'}")
