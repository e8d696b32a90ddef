"""doctor: what it reads of GPUs, and how it times Allreduce."""

from types import SimpleNamespace

import pytest

from hpctrain import doctor
from hpctrain.doctor import machine
from hpctrain.doctor.findings import GIB, KIB, MIB
from hpctrain.doctor.machine import Gpu
from hpctrain.parallel import nccl


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
