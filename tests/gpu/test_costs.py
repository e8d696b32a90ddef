"""What a step costs on an emulated GPU: copies, waits of the host, memory from the driver."""

from __future__ import annotations

import json
from statistics import median

import pytest

from tests.support.launch import run_mpi

pytestmark = pytest.mark.emulated_gpu


@pytest.mark.parametrize(("transport", "more"), [("nccl", 0), ("host", 1)])
def test_a_step_copies_and_waits_no_more_than_it_must(tmp_path, transport, more):
    """Up go images and labels, down what the step found; over MPI the message both ways too. The
    host waits for the step before, a thread for the buffer that it fills, and MPI for the message.
    """
    program = ["-m", "mpi4py", "-m", "tests.gpu.costs", str(tmp_path), transport]
    done = run_mpi(2, program, timeout=100, env={"HPCTRAIN_EMULATED_GPUS": "2"})
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(steps) == 27
    assert sum(step["allocations"] for step in steps[3:]) == 0
    names = "copies_up", "copies_down", "host_waits", "launches"
    # Of the first epoch, while batches are read: a thread does it, perhaps a step late.
    usual = {name: median(step[name] for step in steps[4:11]) for name in names}
    assert (usual["copies_up"], usual["copies_down"]) == (2 + more, 1 + more)
    assert usual["host_waits"] == 2 + more
    assert usual["launches"] < 80, "some 66 operators"
