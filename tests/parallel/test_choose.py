"""A transport by its name, and the trial that may crash."""

from __future__ import annotations

import sys

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel import choose
from hpctrain.parallel.choose import (
    check_exchange,
    describe_rank,
    make_transport,
    try_device_memory,
)
from hpctrain.parallel.placement import Choice
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Pinned, Transport
from tests.launch import run

CPU = torch.device("cpu")


@pytest.mark.mpi
def test_made_by_name(comm):
    assert isinstance(make_transport(Choice("mpi", ""), comm, CPU), HostMemory)
    assert type(make_transport(Choice("none", ""), comm, CPU)) is Transport
    assert isinstance(make_transport(Choice("host", ""), comm, CPU), Pinned)
    assert isinstance(make_transport(Choice("mpi-gpu", ""), comm, CPU), DeviceMemory)


class Wrong(DeviceMemory):
    """Delivers something else on the last rank, in one of its calls."""

    def __init__(self, comm, call):
        super().__init__(comm)
        self.call = call

    def spoil(self, call, vector):
        if call == self.call and self.comm.rank == self.comm.size - 1:
            vector[-1] += 1

    def allreduce(self, vector):
        super().allreduce(vector)
        self.spoil("allreduce", vector)

    def alltoall(self, vector, received):
        super().alltoall(vector, received)
        self.spoil("alltoall", received)

    def allgather(self, vector):
        super().allgather(vector)
        self.spoil("allgather", vector)

    def exchange(self, sends, receives):
        super().exchange(sends, receives)
        self.spoil("exchange", receives[0][1][0])


@pytest.mark.mpi
@pytest.mark.parametrize("call", ["allreduce", "alltoall", "allgather", "exchange"])
def test_ranks_try_what_they_rely_on_with_each_other(comm, call, monkeypatch):
    """A MPI that moves device memory well within one process may not do so between two."""
    monkeypatch.setattr(choose, "DeviceMemory", lambda comm: Wrong(comm, call))
    with pytest.raises(UsageError, match="MPI was given device memory and delivered other numbers"):
        make_transport(Choice("mpi-gpu", ""), comm, CPU)


@pytest.mark.mpi
def test_sums_that_are_not_made_are_seen(comm):
    if comm.size == 1:
        pytest.skip("one rank sums nothing: needs several ranks")

    class Idle(DeviceMemory):
        def allreduce(self, vector):
            pass

    with pytest.raises(UsageError, match="delivered other numbers"):
        check_exchange(Idle(comm), CPU)


@pytest.mark.parametrize(
    ("end", "is_said"),
    [
        ("os.kill(os.getpid(), 11)", True),
        ("os.abort()", True),
        ("pass", False),
        ("raise SystemExit(3)", False),
        ("os._exit(3)", False),
        ("os.kill(os.getpid(), 15)", False),  # as a launcher ends healthy ranks
        ("os.kill(os.getpid(), 9)", False),
    ],
)
def test_a_crash_is_given_words_by_the_rank_that_crashed(end, is_said):
    code = "import os\nfrom hpctrain.parallel.choose import print_if_crashed\n"
    code += f"with print_if_crashed('rank 1: gone'):\n    {end}"
    assert ("rank 1: gone\n" in run([sys.executable, "-c", code]).stderr) == is_said


def test_later_crashes_leave_their_stack_in_the_file_of_the_watchdog(tmp_path):
    code = "import os\nfrom pathlib import Path\nfrom hpctrain.watchdog import Watchdog\n"
    code += "from hpctrain.parallel.choose import print_if_crashed\n"
    code += "with Watchdog(0, 1, 'a', 60.0, whole=True) as watchdog:\n"
    code += f"    watchdog.keep_in(Path({str(tmp_path)!r}))\n"
    code += "    with print_if_crashed('rank 0: gone'):\n        pass\n    os.kill(os.getpid(), 11)"
    said = run([sys.executable, "-c", code]).stderr
    assert "Fatal Python error" not in said and "rank 0: gone" not in said
    assert (tmp_path / "0.stack").read_text().startswith("Fatal Python error: Segmentation fault")


def test_an_exclusive_gpu_is_not_tried_by_another_process(monkeypatch):
    assert choose.exclusive_refusal(0) is None
    monkeypatch.setattr(choose, "is_exclusive", lambda gpu: True)
    monkeypatch.setattr(choose, "gpu_uuid", lambda device: "u")
    monkeypatch.setattr(choose, "try_device_memory", lambda gpu: pytest.fail("the GPU was tried"))
    refusal = describe_rank(torch.device("cuda", 2), "mpi-gpu").refusal
    assert refusal.startswith("GPU 2 is in compute mode EXCLUSIVE_PROCESS and serves one process")
    assert "nvidia-smi -i 2 -c DEFAULT" in refusal


def test_a_trial_crashes_alone(monkeypatch):
    assert try_device_memory(0, ("-c", "import os; assert 'OMPI_X' not in os.environ")) is None
    monkeypatch.setenv("OMPI_X", "of this job")
    assert try_device_memory(0, ("-c", "import os; assert 'OMPI_X' not in os.environ")) is None
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert "crashed (SIGSEGV): it is not GPU-aware" in try_device_memory(0, ("-c", crash))
    assert try_device_memory(0, ("-c", "raise SystemExit('no such GPU')")).endswith(
        "failed: no such GPU"
    )
    monkeypatch.setattr(choose, "TRIAL_SECONDS", 0.2)
    assert "did not return" in try_device_memory(0, ("-c", "import time; time.sleep(60)"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_real_trial_says_why_it_failed():
    assert "sees no GPU" in try_device_memory(0)


def test_a_rank_without_a_gpu_tells_its_host():
    place = describe_rank(torch.device("cpu"), "mpi-gpu")
    assert place.device == "cpu" and place.host and place.refusal is None
