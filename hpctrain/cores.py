"""The cores that this process may use: its affinity mask, and the CPU quotas of its cgroups.

Sources: sched_setaffinity(2), cgroups(7), proc_pid_mountinfo(5), the kernel's documents cgroup-v2
("cpu.max") and sched-bwc ("cpu.cfs_quota_us"), and chapter 18 of OpenMP 5.2, whose runtime binds
the main thread to its first place when torch is imported, if a variable of `BINDING` is set. The
mask of that thread is then not the mask of the process.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

#: Variables by which OpenMP binds threads to cores.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
#: With fewer threads than it was promised, oneDNN waits in a barrier for ever.
FEWER = ("OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS", "OMP_THREAD_LIMIT")
OPENMP = re.compile(r"/\S.*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*")


class Quota(NamedTuple):
    """The CPU time that all processes of a cgroup may use together."""

    group: tuple[int, int]  # device and inode of its folder: equal in all processes of a host
    cores: float  # seconds of CPU time per second


def allowed_cores() -> set[int]:
    """Return the cores on which threads of this process may run, with those of OpenMP's places."""
    cores = os.sched_getaffinity(0)
    if not any(name in os.environ for name in BINDING):
        return cores
    for openmp in _openmp_libraries():
        for place in range(openmp.omp_get_num_places()):
            numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
            openmp.omp_get_place_proc_ids(place, numbers)
            cores.update(numbers)
    return cores


def check_threads(threads: int) -> None:
    """Let OpenMP give this thread as many threads as it asks for, up to `threads`.

    Raises UsageError if its limit is lower.
    """
    if not any(name in os.environ for name in FEWER):
        return
    for openmp in _openmp_libraries():
        openmp.omp_set_dynamic(0)
        openmp.omp_set_max_active_levels(max(1, openmp.omp_get_max_active_levels()))
        limit = openmp.omp_get_thread_limit()
        if limit < threads:
            raise UsageError(
                f"OMP_THREAD_LIMIT={limit} allows fewer than the {threads} threads of a rank:"
                " unset it"
            )


def thread_limit() -> int | None:
    """Return OMP_THREAD_LIMIT, None if it is no number above 0."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "").strip()
    if limit.isdecimal():
        return int(limit) or None
    return None


def _openmp_libraries() -> list[ctypes.CDLL]:
    """Return the OpenMP runtimes that this process has loaded."""
    maps = Path("/proc/self/maps").read_text(errors="replace")
    return [ctypes.CDLL(path) for path in sorted(set(OPENMP.findall(maps)))]


def make_pool(
    threads: int,
    name: str,
    begin: Callable[[], object] | None = None,
) -> ThreadPoolExecutor:
    """Return a pool of threads that run on all allowed cores; each calls `begin` first."""
    from concurrent.futures import ThreadPoolExecutor  # not for --help

    return ThreadPoolExecutor(threads, name, initializer=_begin_thread, initargs=(begin,))


def _begin_thread(begin: Callable[[], object] | None) -> None:
    """Let this thread, which has the mask of the thread that made it, run on all allowed cores."""
    cores = allowed_cores()
    if cores != os.sched_getaffinity(0):
        with suppress(OSError):  # some are offline now
            os.sched_setaffinity(0, cores)
    if begin:
        begin()


def cpu_quotas(proc: Path = Path("/proc/self")) -> list[Quota]:
    """Return the CPU quotas of the cgroups of this process, version 1 and 2, and of those above.

    `proc` is its folder in /proc.
    """
    quotas = {}
    for folders in cgroup_folders("cpu", proc):
        for folder in folders:
            cores = _read_quota(folder)
            if cores:
                status = folder.stat()
                quotas[status.st_dev, status.st_ino] = cores
    return [Quota(group, cores) for group, cores in quotas.items()]


def cgroup_folders(controller: str, proc: Path = Path("/proc/self")) -> Iterator[Iterator[Path]]:
    """Yield the folders of the cgroups of a process, for each place where they are mounted.

    They are those of version 2, and those of version 1 with the controller; first its own cgroup,
    then those above. `proc` is the folder of the process in /proc.
    """
    groups: dict[str, str] = {}  # of the process, by controller; "" for version 2
    mounts: list[Sequence[str]] = []
    with suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path)
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
    for fields in mounts:
        kind, _, options = fields[fields.index("-") + 1 :]
        if kind == "cgroup2":
            group = groups.get("")
        elif kind == "cgroup" and controller in options.split(","):
            group = groups.get(controller)
        else:
            continue
        if group is not None:
            yield _upwards(group, root=fields[3], mounted=Path(fields[4]))


def _upwards(path: str, root: str, mounted: Path) -> Iterator[Path]:
    """Yield the folder of the cgroup `path` and those above, where the cgroup `root` is mounted."""
    folder = mounted
    inside = os.path.relpath(path, root)
    if not inside.startswith(".."):  # else it is of another namespace
        folder = mounted / inside
    yield folder
    while folder != mounted:
        folder = folder.parent
        yield folder


def _read_quota(folder: Path) -> float | None:
    """Return the quota of a cgroup in cores; None if it has none, or no controller "cpu"."""
    with suppress(OSError, ValueError):  # ValueError: "max"
        if (folder / "cpu.max").exists():
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        else:
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            period = int((folder / "cpu.cfs_period_us").read_text())
        if quota > 0 < period:
            return quota / period
    return None


def core_count() -> int:
    """Return how many cores this process may use, at least 1: a quota of 1.5 cores is 1."""
    return whole_cores(len(allowed_cores()), *(quota.cores for quota in cpu_quotas()))


def whole_cores(*numbers: float) -> int:
    """Return the smallest of these numbers of cores, rounded down, at least 1."""
    return max(1, int(min(numbers)))
