"""A transport by its name, and an MPI that is not GPU-aware or sums wrongly."""

from __future__ import annotations

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel import choose, mpi
from hpctrain.parallel.choose import describe_rank, make_transport
from hpctrain.parallel.mpi import is_gpu_aware
from hpctrain.parallel.placement import RankDevice
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Pinned, Transport

CPU = torch.device("cpu")


@pytest.mark.mpi
def test_made_by_name(comm, monkeypatch):
    assert isinstance(make_transport("mpi", comm, CPU), HostMemory)
    assert type(make_transport("none", comm, CPU)) is Transport
    assert isinstance(make_transport("host", comm, CPU), Pinned)
    for answer in (True, None):
        monkeypatch.setattr(choose, "is_gpu_aware", lambda platform, answer=answer: answer)
        assert isinstance(make_transport("mpi-gpu", comm, CPU), DeviceMemory)


@pytest.mark.mpi
def test_an_mpi_that_says_it_is_not_gpu_aware_is_given_no_device_memory(comm, monkeypatch):
    monkeypatch.setattr(choose, "DeviceMemory", lambda comm: pytest.fail("MPI would crash"))
    monkeypatch.setattr(choose, "is_gpu_aware", lambda platform: comm.rank != comm.size - 1)
    with pytest.raises(UsageError, match="--reduce mpi-gpu: .*MPI.* is not GPU-aware; --reduce"):
        make_transport("mpi-gpu", comm, CPU)


class Wrong(DeviceMemory):
    """Delivers another sum on the last rank."""

    def allreduce(self, vector):
        super().allreduce(vector)
        vector[-1] += self.comm.rank == self.comm.size - 1


class Idle(DeviceMemory):
    """Sums nothing."""

    def allreduce(self, vector):
        pass


@pytest.mark.mpi
@pytest.mark.parametrize("broken", [Wrong, Idle])
def test_a_wrong_sum_of_device_memory_is_an_error_on_all_ranks(comm, monkeypatch, broken):
    if broken is Idle and comm.size == 1:
        pytest.skip("one rank sums nothing: needs several ranks")
    monkeypatch.setattr(choose, "is_gpu_aware", lambda platform: True)
    monkeypatch.setattr(choose, "DeviceMemory", broken)
    with pytest.raises(UsageError, match="returned a wrong sum"):
        make_transport("mpi-gpu", comm, CPU)


def test_mpi_is_asked_by_the_function_that_it_has(monkeypatch):
    def mpich(kind, answer):
        answer._obj.value = kind == 2
        return 0

    class Library:
        def __init__(self, **functions):
            self.__dict__ |= functions

    for library, cuda, rocm in (
        (Library(MPIX_Query_cuda_support=lambda: 1), True, None),
        (Library(MPIX_GPU_query_support=mpich), False, True),
        (Library(), None, None),
    ):
        monkeypatch.setattr(mpi.ctypes, "CDLL", lambda path, library=library: library)
        assert (is_gpu_aware("cuda"), is_gpu_aware("rocm")) == (cuda, rocm)


def test_the_mpi_of_the_tests_gives_an_answer():
    assert is_gpu_aware("cuda") in (True, False, None)


def test_a_rank_without_a_gpu_tells_its_host():
    assert describe_rank(CPU) == RankDevice(mpi.host_name())
