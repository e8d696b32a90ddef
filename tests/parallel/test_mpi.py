"""Agreement between ranks: what one finds wrong, all raise alike."""

from __future__ import annotations

import pytest

from hpctrain.errors import RunError, UsageError
from hpctrain.parallel.mpi import everywhere, from_root, same_everywhere

pytestmark = pytest.mark.mpi


def test_the_same_facts_pass_and_different_ones_are_named_on_all_ranks(comm):
    same_everywhere(comm, {"torch": "2.13", "the layout": "abc"})
    if comm.size == 1:
        return
    last = comm.size - 1
    facts = {"torch": "2.13", "the layout": "abc" if comm.rank < last else "xyz"}
    with pytest.raises(UsageError, match=f"the layout differs.* abc on rank 0, xyz on rank {last}"):
        same_everywhere(comm, facts)


def test_what_rank_0_finds_is_given_to_all_or_raised_on_all(comm):
    assert from_root(comm, lambda: comm.rank) == 0

    def refuse():
        raise UsageError("3 of 4")

    with pytest.raises(UsageError, match="3 of 4") as caught:
        from_root(comm, refuse)
    assert caught.value.agreed


def test_a_failure_on_one_rank_is_raised_on_all_with_its_number(comm):
    assert everywhere(comm, lambda: comm.rank) == comm.rank
    last = comm.size - 1

    def fail():
        if comm.rank == last:
            raise RunError("disk full")

    with pytest.raises(RunError, match="disk full") as caught:
        everywhere(comm, fail)
    assert caught.value.agreed
    assert (f"rank {last}" in str(caught.value)) == (comm.size > 1)
