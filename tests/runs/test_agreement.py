"""Agreement between ranks: what one finds wrong, all raise alike; what one knows, all get."""

from __future__ import annotations

import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import mpi

pytestmark = pytest.mark.ranks


def fail_on(comm, ranks, kind=hp.UsageError):
    if comm.rank in ranks:
        raise kind(f"{comm.rank} is bad")


def test_what_rank_0_finds_is_given_to_all_or_raised_on_all(comm):
    assert mpi.call_on_root(comm, lambda: comm.rank) == 0
    with pytest.raises(hp.UsageError, match="0 is bad") as caught:
        mpi.call_on_root(comm, lambda: fail_on(comm, [0]))
    assert caught.value.agreed


@pytest.mark.parametrize("kind", [hp.UsageError, hp.RunError])
def test_the_first_of_some_failures_is_raised_on_all_ranks_with_its_number(comm, kind):
    assert mpi.call_on_all(comm, lambda: comm.rank) == comm.rank
    for ranks in (range(comm.size), range(1, comm.size), [comm.size - 1]):
        if ranks:
            with pytest.raises(kind) as caught:
                mpi.call_on_all(comm, lambda ranks=ranks: fail_on(comm, ranks, kind))
            of_all = len(ranks) == comm.size  # then none is named
            assert (
                str(caught.value) == ("" if of_all else f"rank {ranks[0]}: ") + f"{ranks[0]} is bad"
            )
            assert caught.value.agreed


def test_different_facts_are_named_on_all_ranks_with_their_values(comm):
    mpi.check_equal_on_all(comm, {"torch": "2.13", "the layout": "abc"})
    last = comm.size - 1
    if last:
        facts = {"torch": "2.13", "the layout": "xyz" if comm.rank == last else "abc"}
        with pytest.raises(hp.UsageError, match=f"layout .* abc on rank 0, xyz on rank {last}"):
            mpi.check_equal_on_all(comm, facts)


@pytest.mark.ranks(3)
def test_of_several_differences_the_first_rank_names_its_own(comm):
    facts = {"a": "same", "b": str(comm.rank > 1), "c": str(comm.rank > 0)}
    with pytest.raises(hp.UsageError, match="^c differs .*: False on rank 0, True on rank 1$"):
        mpi.check_equal_on_all(comm, facts)


def test_only_the_value_of_the_lowest_rank_is_broadcast(comm):
    assert mpi.first_of_all(comm, None) is None
    for ranks in (range(comm.size), range(comm.size // 2, comm.size), [comm.size - 1]):
        found = mpi.first_of_all(comm, f"of {comm.rank}" if comm.rank in ranks else None)
        assert found == (ranks[0], f"of {ranks[0]}", len(ranks))
    assert mpi.first_of_all(comm, 0) == (0, 0, comm.size), "a value that is false is one"


def test_the_minimum_of_integers_of_64_bits(comm):
    first = -(2**63) + comm.size - comm.rank
    assert mpi.minimum(comm, first, comm.rank, 2**63 - 1) == [-(2**63) + 1, 0, 2**63 - 1]


@pytest.mark.parametrize("largest", [16, 100, 4096])
def test_values_larger_than_a_message_arrive_in_pieces(comm, monkeypatch, largest):
    """With a small limit. MPI libraries fail above 2^31 - 1 bytes."""
    monkeypatch.setattr(mpi, "LARGEST", largest)
    found = mpi.call_on_root(comm, lambda: {"a": np.arange(55), "b": None})
    assert np.array_equal(found["a"], np.arange(55)) and found["b"] is None
    for size in (0, 1, 70):
        parts = mpi.allgather(comm, np.full(size, comm.rank))
        assert [part.tolist() for part in parts] == [[rank] * size for rank in range(comm.size)]
