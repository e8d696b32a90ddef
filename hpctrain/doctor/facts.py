"""The facts that each rank of doctor finds on its host, and the findings that are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VERDICTS = ("ok", "note", "warn", "fail")
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU that a rank sees."""

    name: str
    memory: int  # bytes
    uuid: str
    capability: tuple[int, int]  # of CUDA, (major, minor)


@dataclass(frozen=True)
class RankFacts:
    """What one rank found. An empty text stands for what is missing."""

    host: str
    versions: dict[str, str]  # of hpctrain, Python, MPI, torch, h5py, as far as installed
    # MPI
    size: int  # of the communicator
    mpi_error: str  # why no MPI library could be loaded
    mpi_path: str  # of the shared library
    mpi_bundled: bool  # it lies in this Python's own folder
    mpi_package: str  # a package of this environment that brings an MPI library
    own_mpirun: str  # the mpirun beside the library
    thread_level: str  # SINGLE, FUNNELED, SERIALIZED or MULTIPLE
    launcher: str
    launched_size: int | None  # processes, as the launcher says
    yields: bool  # Open MPI was told to give the core away while it waits
    # CPU
    cores: tuple[int, ...]  # that this rank may use
    host_cores: int
    omp_num_threads: str
    threads: int  # chosen for each rank
    # torch, None where it cannot be imported
    torch_error: str
    torch_threads: int  # as the launcher left them
    built_for: str  # such as "CUDA 12.8", "ROCm 7.0.51831"; empty: for CPUs
    cpu_capability: str
    cpu_bf16: tuple[str, ...]  # the instructions for bfloat16
    key: str  # what the bits of a deterministic run depend on, besides its plan
    # GPUs
    gpus: tuple[Gpu, ...]  # that torch sees
    gpu: int  # the one this rank uses, -1 for none
    gpu_devices: int  # that the host's drivers know, whether torch sees them or not
    gpu_problem: str  # what the runtime said while torch looked for GPUs
    memory: str  # whose memory messages lie in, and why
    memory_problem: str  # what went wrong with one number in it
    nccl: str  # such as "NCCL 2.29.7"
    # files
    hdf5: str  # versions of h5py and the HDF5 library
    h5py_error: str
    file_locking: str  # HDF5_USE_FILE_LOCKING
    directory: str
    file_system: str  # type, as in /proc/mounts
    free_disk: int  # bytes
    # job and limits
    slurm: dict[str, str]  # facts of the Slurm job, by name
    open_files: int  # -1: unlimited, here and below
    core_size: int  # bytes
    locked_memory: int  # bytes
    rdma: bool  # there is an InfiniBand or RoCE adapter

    @property
    def is_open_mpi(self) -> bool:
        """MPI is Open MPI."""
        return "Open MPI" in self.versions.get("MPI", "")


def hosts(ranks: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    groups: dict[str, list[RankFacts]] = {}
    for rank in ranks:
        groups.setdefault(rank.host, []).append(rank)
    return groups


def union(ranks: Sequence[RankFacts]) -> set[int]:
    """All cores that ranks of one host may use."""
    return {core for rank in ranks for core in rank.cores}


def sharing(rank: RankFacts, ranks: Sequence[RankFacts]) -> int:
    """Ranks of the same host that may use some of the same cores, this one included."""
    return sum(r.host == rank.host and bool(set(r.cores) & set(rank.cores)) for r in ranks)


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, the verdict, and what to do about it."""

    name: str
    found: str
    verdict: str = "ok"
    advice: str = ""


def row(name: str, found: str, verdict: str, advice: str, when: bool) -> Finding:
    """A finding with verdict and advice `when` it has any, else ok."""
    return Finding(name, found, verdict, advice) if when else Finding(name, found)


def bytes_text(size: float) -> str:
    """ "4 B", "64 MiB"; a limit of -1 is none."""
    for unit in ("B", "KiB", "MiB"):
        if size < KIB:
            return "unlimited" if size < 0 else f"{size:,.0f} {unit}"
        size /= KIB
    return f"{size:,.0f} GiB"
