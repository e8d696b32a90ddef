"""Processes that tests start end in time, with all that they have started."""

import sys

import pytest

from tests.support.launch import Job, mpirun, run
from tests.support.wait import wait_for

HANG = """
import time
from hpctrain.parallel.mpi import start_mpi
comm = start_mpi()
print(comm.allreduce(comm.rank), "here", flush=True)
time.sleep(600)
"""


def test_a_command_that_takes_too_long_fails_the_test():
    with pytest.raises(AssertionError, match=r"still running after 1 s: "):
        run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=1)


def test_a_job_is_ended_with_all_its_ranks():
    job = Job([mpirun(), "-n", "3", sys.executable, "-c", HANG])
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(3)] == ["3 here\n"] * 3
    assert len(job.members()) >= 4
    job.end()
    assert wait_for(lambda: job.members() == [])
