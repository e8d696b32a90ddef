"""Which ranks share a host, its cores and GPUs, on hosts simulated by Slurm's variables."""

from __future__ import annotations

import os

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel import choose, hosts
from hpctrain.parallel.hosts import comm_of_host, describe_hosts, fair_threads, local_ranks
from hpctrain.parallel.placement import RankDevice

pytestmark = pytest.mark.mpi


@pytest.fixture
def play(comm, monkeypatch):
    """Return a function that simulates hosts of `per_host` ranks and returns a communicator."""

    def played(per_host=2):
        node, task = divmod(comm.rank, per_host)
        for name, value in (
            ("SLURM_PROCID", comm.rank),
            ("SLURM_STEP_NUM_TASKS", comm.size),
            ("SLURM_NODEID", node),
            ("SLURM_LOCALID", task),
        ):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(hosts, "host_name", lambda: f"n{9 - node}")
        return comm.Dup()

    return played


def test_under_srun_hosts_are_those_of_slurms_variables(comm, play, monkeypatch):
    """Nodes of three ranks, whatever the host's name; if the variables are not those of these
    ranks, MPI decides.
    """
    hosts = local_ranks(comm)
    assert comm_of_host(comm) is comm_of_host(comm), "created once"
    played, (node, task) = play(3), divmod(comm.rank, 3)
    assert local_ranks(comm) == hosts, "an attribute of the communicator"
    assert local_ranks(played) == (task, min(3, comm.size - 3 * node))
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("SLURM_PROCID", str(comm.size))
    assert local_ranks(comm.Dup()) == hosts


def test_host_names_and_the_host_with_the_fewest_cores_per_rank(comm, play, monkeypatch):
    alone = [hosts.host_name()], comm.size, len(os.sched_getaffinity(0))
    assert describe_hosts(comm.Dup()) == alone
    played = play()
    mask = 0b1111 if comm.rank // 2 else 0b11100000000
    monkeypatch.setattr(hosts, "core_mask", lambda: mask)
    names = sorted(f"n{9 - node}" for node in range(-(-comm.size // 2)))
    assert describe_hosts(played) == (names, min(2, comm.size), 3)


def test_ranks_share_the_cores_of_a_host_and_all_use_the_smallest_number_of_threads(
    comm, play, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    played = play()
    monkeypatch.setattr(hosts, "core_mask", lambda: 0b111111)
    assert fair_threads(played) == (3 if comm.size > 1 else 6)
    own = 0b11 << 2 * comm.rank  # each bound to its own
    monkeypatch.setattr(hosts, "core_mask", lambda: own)
    assert fair_threads(played) == 2
    bound = 0b1 if comm.rank == comm.size - 1 else own | 0xFF00
    monkeypatch.setattr(hosts, "core_mask", lambda: bound)
    assert fair_threads(played) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert fair_threads(played) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert fair_threads(played) == 1


def open_with(comm, monkeypatch, device, wanted="auto"):
    monkeypatch.setattr(choose, "describe_rank", lambda _: device)
    return choose.open_transport(comm, torch.device("cpu"), wanted)[1:]


def test_the_transport_is_chosen_from_the_devices_of_all_ranks(comm, play, monkeypatch):
    if comm.size == 1:
        return
    played, last = play(), comm.size - 1
    node = comm.rank // 2
    own = RankDevice(f"n{node}", f"gpu{comm.rank % 2}", "NCCL 2")
    none = own._replace(nccl="") if comm.rank == last else own
    (name, reason), note = open_with(played, monkeypatch, none)
    where = f"rank {last} (n{last // 2})"
    assert (name, reason, note) == ("host", f"torch on {where} was built without NCCL", "")
    (name, reason), note = open_with(played, monkeypatch, own._replace(gpu="a"))
    assert (name, reason) == ("host", "ranks 0 and 1 share a GPU of n0")
    assert note == "2 ranks share 1 GPU of n0"
    cpu = RankDevice(f"n{node}")
    assert open_with(played, monkeypatch, cpu)[0].name == "mpi"
    some = own if comm.rank else cpu
    with pytest.raises(UsageError, match=rf"^1 of {comm.size} ranks see no GPU, such as rank 0 "):
        open_with(played, monkeypatch, some)
