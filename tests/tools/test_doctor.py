"""doctor: its verdicts on made-up machines, its report, and whole runs of it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.api import command_line, doctor, mpi
from tests.support.doctor import GIB, LAPTOP, by_rank, job, laptop, report, with_gpus
from tests.support.launch import ROOT, run, run_cli
from tests.support.ranks import command

NONE = {name: LAPTOP["versions"][name] for name in ("hpctrain", "Python", "torch")}
OLD = {**LAPTOP["versions"], "torch": "2.9.0", "h5py": "3.12.0"}
CROWD = {"cores": {0, 1}, "host_cores": 2, "threads": 1}
BOUND = [{"cores": {0}, "threads": 1}, {"cores": {1}, "threads": 1}]
FULL = [{**own, "host_cores": 2} for own in BOUND]
WIDE = [{"cores": {0, 1}, "threads": 2}, {"cores": {2, 3}, "threads": 2}]
FAR = [{"host": "node1", "threads": 4}, {"host": "node2", "threads": 4}]
LOST = {"launcher": "srun", "started": 4, "problem": "each sees only itself"}
HALF = [with_gpus(2, 2)[0], job(2)[1]]
HIDDEN = {"gpu_nodes": ["nvidia0"]}
SINGLE = {"Allreduce": "note"}  # all that one rank of a laptop has to be told
CASES = [  # facts; what is not ok
    (laptop(), SINGLE),
    (job(2), {}),
    (job(4), {}),
    (laptop(problem="cannot load", versions=NONE), {"MPI": "fail", **SINGLE}),
    (job(2, bundled=True), {}),
    (job(2, in_job=True), {}),
    (job(2, bundled=True, in_job=True), {"MPI": "warn"}),
    (laptop(**LOST), {"launcher": "fail", **SINGLE}),
    (by_rank({}, {"versions": OLD}), {"torch differs": "fail", "h5py differs": "warn"}),
    (by_rank({}, {"key": "B"}), {"same bits on": "warn"}),
    (by_rank(*BOUND), {"binding": "warn"}),
    (by_rank(*FULL), {}),  # no core is left that could be given to them
    (by_rank(*WIDE), {}),
    (job(4, **CROWD), {"binding": "note"}),
    (job(4, cores={0, 1}, threads=1), {"binding": "warn"}),
    (job(2, variables={"OMP_NUM_THREADS": "2"}), {}),
    (job(2, variables={"OMP_NUM_THREADS": "4"}, threads=4), {"threads": "warn"}),
    (job(2, variables={"OMP_NUM_THREADS": "1"}, threads=1), {"threads": "note"}),
    (laptop(quota=2.5, threads=2), {"CPU quota": "note", **SINGLE}),
    (laptop(quota=2.5), {"CPU quota": "note", "threads": "warn", **SINGLE}),
    (job(2, quota=0.25, threads=1), {"CPU quota": "note"}),
    (laptop(variables={"OMP_PROC_BIND": "true"}), {"OMP_PROC_BIND": "note", **SINGLE}),
    (job(2, variables={"OMP_PLACES": "cores"}), {"OMP_PLACES": "warn"}),
    (by_rank(*WIDE, variables={"OMP_PLACES": "cores"}), {"OMP_PLACES": "note"}),
    (laptop(torch_error="ImportError: libc10"), {"torch": "fail", **SINGLE}),
    (by_rank({}, {"torch_error": "ImportError: libc10"}), {"torch": "fail"}),
    (laptop(**HIDDEN), {"GPUs": "warn", **SINGLE}),
    (laptop(**HIDDEN, built_for="ROCm", gpu_problem="old"), {"GPUs": "warn", **SINGLE}),
    (with_gpus(4, 4), {}),
    (with_gpus(4, 1), {"GPU of rank": "note"}),
    (with_gpus(1, 4), {"GPU of rank": "note", **SINGLE}),
    (with_gpus(2, 2, numbered=True), {}),
    (HALF, {"GPU of rank": "fail"}),
    (by_rank(*FAR), {"directory": "warn"}),
    (by_rank(*FAR, file_system="lustre"), {}),
    (laptop(free_disk=GIB // 2), {"directory": "warn", **SINGLE}),
]


@pytest.mark.parametrize(("ranks", "expected"), CASES)
def test_verdicts(ranks, expected):
    found = report(ranks)[0].items()
    assert {name: verdict for name, verdict in found if verdict != "ok"} == expected


@pytest.mark.parametrize(
    ("size", "name", "seconds", "verdict"),
    [
        (4, "Allreduce 4 B", 9e-4, "ok"),
        (4, "Allreduce 4 B", 8e-3, "warn"),
        (2**10, "Allreduce 1 KiB", 8e-3, "ok"),
        (2**26, "Allreduce 64 MiB", 0.6, "ok"),
        (2**26, "Allreduce 64 MiB", 0.7, "warn"),
    ],
)
def test_verdict_on_allreduce(size, name, seconds, verdict):
    assert report(job(2), [(size, seconds, True)])[0][name] == verdict
    assert report(job(2), [(size, seconds, False)])[0][name] == "fail"


def test_the_report(golden):
    ranks = with_gpus(4, 4)
    for rank in ranks[2:]:
        rank |= {"host": "node2", "versions": OLD, "file_system": "nfs4"}
    timings = [(4, 9e-4, True), (2**20, 0.7, True), (2**26, 0.6, False)]
    golden("doctor.txt", report(ranks, timings)[1])


def test_the_file_system_of_a_folder_is_that_of_its_last_mount():
    mounts = (
        "/dev/a / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n"
        "tmpfs /home/my\\040data tmpfs rw 0 0\nfs /work lustre rw 0 0\nfs2 /work gpfs rw 0 0\n"
    )
    kinds = {"/": "ext4", "/homes": "ext4", "/home": "nfs4", "/home/me": "nfs4"}
    kinds |= {"/home/my data/a": "tmpfs", "/work/x": "gpfs"}
    assert {place: doctor.file_system(place, mounts) for place in kinds} == kinds


def test_the_mpi_library_is_that_of_the_c_bindings():
    own = [f"/opt/my mpi/lib/{name}.so.40" for name in ("libmpi_cxx", "libmpi", "libmpi_mpifh")]
    maps = [f"7f00-7f10 r-xp 00000000 00:2f 42   {name}" for name in ["/lib/libc.so.6", *own]]
    assert doctor.library_path("\n".join([*maps, "[heap]"])) == own[1]
    assert doctor.library_path(maps[0]) == ""


# Whole runs


def test_all_ranks_are_examined_and_allreduce_is_timed(tmp_path):
    done = command(3, "doctor", cwd=tmp_path)
    assert done.err == "" and done.code == 0, done.out
    sizes = re.findall(r"^(?:ok|warn) +Allreduce (\d+ \w+) +[\d,.]+ us +\S+ GB/s", done.out, re.M)
    assert sizes == ["4 B", "1 KiB", "32 KiB", "1 MiB", "8 MiB", "64 MiB"]
    assert re.search(r"launcher +mp\S+ \(.*\) -n 3 *$", done.out, re.M)
    kind = run(["df", "--output=fstype", str(tmp_path)]).stdout.split()[-1]
    assert re.search(rf"ok +directory +{kind}, .* free: {tmp_path}$", done.out, re.M)
    one = command(1, "doctor")
    assert one.code == 0 and "not timed with one rank" in one.out
    path = run([sys.executable, "-m", "mpi4py", "--mpi-library"]).stdout.strip()
    assert Path(path).name in one.out


@pytest.mark.ranks(3)
def test_a_wrong_sum_on_one_rank_is_a_failure_on_all(comm, capfd, monkeypatch):
    class Wrong(type(comm)):
        def Allreduce(self, place, array, *operation):
            super().Allreduce(place, array, *operation)
            if isinstance(array, np.ndarray):
                array[-1] += self.rank == self.size - 1

    monkeypatch.setattr(mpi, "start_mpi", lambda: Wrong(comm))
    assert command_line(["doctor"]) == 1
    out, _ = capfd.readouterr()
    assert len(re.findall(r"^fail +Allreduce \d+ ", out, re.M)) == (6 if comm.rank == 0 else 0)


def broken_module(folder, name, error):
    """A folder for PYTHONPATH in which `import name` fails."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"raise {error}\n")
    return {"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}


@pytest.mark.parametrize(
    ("module", "error", "missing", "found"),
    [
        ("mpi4py", "RuntimeError('cannot load MPI library\\nlibmpi.so')", "MPI", "torch"),
        ("torch", "ImportError('libc10.so: cannot open')", "torch", "MPI"),
    ],
)
def test_without_a_library_all_else_is_shown(tmp_path, module, error, missing, found):
    """Without a launcher, too, and where the folder's name cannot be printed as it is."""
    (tmp_path / "m\xfcn\x1b[2J").mkdir()
    env = broken_module(tmp_path, module, error) | {"PYTHONIOENCODING": "ascii"}
    done = run_cli(["doctor"], env=env, cwd=tmp_path / "m\xfcn\x1b[2J")
    assert (done.returncode, done.stderr) == (1, "")
    assert "m\\xfcn\\x1b[2J" in done.stdout
    assert re.search(rf"fail +{missing} .*(libmpi|MPI library|libc10)", done.stdout)
    names = re.findall(r"^(?:ok|note|warn) +(\w+)  ", done.stdout, re.MULTILINE)
    assert {found, "hpctrain", "launcher", "binding", "threads", "directory"} <= {*names}
    assert re.search(r"ok +launcher +none", done.stdout) and "\x1b" not in done.stdout


def test_a_launcher_that_mpi_does_not_know(tmp_path):
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
    step |= broken_module(tmp_path, "torch", "ImportError('not needed')")
    done = run_cli(["doctor"], env={**step, "SLURM_PROCID": "0"})
    assert done.returncode == 1
    assert re.search(r"fail +launcher +srun -n 4, but MPI sees 1", done.stdout)
    other = run_cli(["doctor"], env={**step, "SLURM_PROCID": "3"})
    assert (other.returncode, other.stdout) == (1, "")


def test_a_reader_that_leaves(tmp_path):
    words = f"{sys.executable} -m hpctrain doctor | head -n 1; echo ${{PIPESTATUS[0]}}"
    env = broken_module(tmp_path, "torch", "ImportError('not needed')")
    done = run(["bash", "-c", words], env=env)
    assert (done.stdout.splitlines()[1:], done.stderr) == (["1"], "")
