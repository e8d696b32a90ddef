"""The test harness itself: subprocesses end in time, and ranks under pytest fail together."""

import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, Job, mpirun, run_mpi

START = "from hpctrain.parallel.mpi import start_mpi; comm = start_mpi()\n"
SUITE = """
import time
import pytest

pytestmark = pytest.mark.mpi

def test_passes(comm):
    assert comm.allreduce(1) == comm.size

def test_fails_on_one_rank(comm):
    assert comm.rank != 1
    comm.Barrier()

@pytest.mark.timeout(1)
def test_hangs_on_one_rank(comm):
    while comm.rank == 1:
        time.sleep(0.1)
    comm.Barrier()
"""


def test_ranks_of_a_subprocess_see_each_other() -> None:
    done = run_mpi(3, ["-c", START + "print(comm.allreduce(comm.rank))"])
    assert (done.returncode, done.stdout.split()) == (0, ["3", "3", "3"])


def test_a_hanging_job_is_ended_with_all_its_ranks() -> None:
    hang = START + "print('here', flush=True); comm.rank or comm.Barrier(); import time\n"
    command = [mpirun(), "-n", "2", sys.executable, "-c", hang + "time.sleep(60)"]
    with pytest.raises(AssertionError, match=r"still running after 3 s: .*") as caught:
        run_mpi(2, command[4:], timeout=3)
    assert str(caught.value).count("here\n") == 2
    job = Job(command)
    assert job.stdout is not None and "here" in job.stdout.readline()
    assert len(job.members()) >= 3
    job.end()
    assert job.members() == []


@pytest.mark.parametrize(
    ("test", "code", "closing"),
    [
        ("passes", 0, "1 passed, 2 deselected"),
        ("fails_on_one_rank", 1, "test_fails_on_one_rank (rank 1 of 2) ==="),
        ("hangs_on_one_rank", 1, "test_hangs_on_one_rank (rank 1 of 2) ==="),
    ],
)
def test_ranks_under_pytest_end_together(
    tmp_path: Path, test: str, code: int, closing: str
) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--color=no"]
    config = ["-c", str(ROOT / "pyproject.toml")]
    done = run_mpi(2, ["-m", "pytest", *config, *plugins, str(suite), "-k", test])
    assert done.returncode == code
    assert closing in done.stdout
    assert ("1 failed in" in done.stdout) == (code == 1)
