"""Agreement between ranks: what one finds wrong, all raise alike."""

from __future__ import annotations

import pytest

from hpctrain.errors import RunError, UsageError
from hpctrain.parallel.mpi import (
    call_on_all,
    call_on_root,
    check_equal_on_all,
    comm_of_host,
    local_ranks,
)

pytestmark = pytest.mark.mpi


def test_the_same_facts_pass_and_different_ones_are_named_on_all_ranks(comm):
    check_equal_on_all(comm, {"torch": "2.13", "the layout": "abc"})
    if comm.size == 1:
        return
    last = comm.size - 1
    facts = {"torch": "2.13", "the layout": "abc" if comm.rank < last else "xyz"}
    with pytest.raises(UsageError, match=f"the layout differs.* abc on rank 0, xyz on rank {last}"):
        check_equal_on_all(comm, facts)


def test_what_rank_0_finds_is_given_to_all_or_raised_on_all(comm):
    assert call_on_root(comm, lambda: comm.rank) == 0

    def refuse():
        raise UsageError("3 of 4")

    with pytest.raises(UsageError, match="3 of 4") as caught:
        call_on_root(comm, refuse)
    assert caught.value.agreed


def test_a_failure_on_one_rank_is_raised_on_all_with_its_number(comm):
    assert call_on_all(comm, lambda: comm.rank) == comm.rank
    last = comm.size - 1

    def fail():
        if comm.rank == last:
            raise RunError("disk full")

    with pytest.raises(RunError, match="disk full") as caught:
        call_on_all(comm, fail)
    assert caught.value.agreed
    assert (f"rank {last}" in str(caught.value)) == (comm.size > 1)


def test_under_srun_slurm_says_which_ranks_share_a_host(comm, monkeypatch):
    """Nodes of three ranks, whatever the host is called; where srun did not start these very ranks
    MPI says it.
    """
    hosts = local_ranks(comm)
    node, task = divmod(comm.rank, 3)
    for name, value in (
        ("SLURM_PROCID", comm.rank),
        ("SLURM_STEP_NUM_TASKS", comm.size),
        ("SLURM_NODEID", node),
        ("SLURM_LOCALID", task),
    ):
        monkeypatch.setenv(name, str(value))
    assert local_ranks(comm) == (task, min(3, comm.size - 3 * node))
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("SLURM_PROCID", str(comm.size))
    assert local_ranks(comm) == hosts
    host = comm_of_host(comm)
    assert host.size == hosts[1]
    host.Free()
