"""Agreement between ranks: what one finds wrong, all raise alike."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.parallel import mpi, reduce
from hpctrain.parallel.mpi import (
    allgather,
    call_on_all,
    call_on_root,
    check_equal_on_all,
    first_of_all,
    minimum,
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
    last = comm.rank
    with pytest.raises(RunError, match="^disk full"):  # of all ranks, none is named
        call_on_all(comm, fail)


def test_the_first_of_several_failures_is_raised_everywhere(comm):
    def fail(ranks):
        if comm.rank in ranks:
            raise UsageError(f"{comm.rank} is bad")

    for ranks in (range(comm.size), range(1, comm.size), range(comm.size - 1)):
        if ranks:
            with pytest.raises(UsageError) as caught:
                call_on_all(comm, lambda ranks=ranks: fail(ranks))
            prefix = "" if len(ranks) == comm.size else f"rank {ranks[0]}: "
            assert str(caught.value) == f"{prefix}{ranks[0]} is bad"
            assert caught.value.agreed and caught.value.exit_code == 2


def test_only_the_value_of_the_lowest_rank_is_broadcast(comm):
    assert first_of_all(comm, None) is None
    for ranks in (range(comm.size), range(comm.size // 2, comm.size), [comm.size - 1]):
        found = first_of_all(comm, f"of {comm.rank}" if comm.rank in ranks else None)
        assert found == (ranks[0], f"of {ranks[0]}", len(ranks))
    assert first_of_all(comm, 0) == (0, 0, comm.size), "a value that is false is one"


def test_the_minimum_of_integers(comm):
    first = -(2**63) + comm.size - comm.rank
    assert minimum(comm, first, comm.rank, 2**63 - 1) == [-(2**63) + 1, 0, 2**63 - 1]


def test_the_first_difference_from_rank_0_is_named(comm):
    if comm.size < 3:
        return
    facts = {"a": "same", "b": str(comm.rank > 1), "c": str(comm.rank > 0)}
    with pytest.raises(UsageError, match="^c differs .*: False on rank 0, True on rank 1$"):
        check_equal_on_all(comm, facts)


@pytest.mark.parametrize("largest", [1, 100, 4096])
def test_values_larger_than_a_message_are_sent_in_pieces(comm, monkeypatch, largest):
    """With a small limit. MPI libraries fail with MPI_ERR_ARG above 2^31 - 1 bytes."""
    monkeypatch.setattr(mpi, "LARGEST", largest)
    monkeypatch.setattr(reduce, "LARGEST", largest)
    sent = Sent(comm)
    whole = np.arange(555)
    found = call_on_root(sent, lambda: {"a": whole, "b": None})
    assert np.array_equal(found["a"], whole) and found["b"] is None
    for size in (0, 1, 700):
        parts = allgather(sent, np.full(size, comm.rank))
        assert [part.tolist() for part in parts] == [[k] * size for k in range(comm.size)]
    tensor = torch.arange(777.0) if comm.rank == 0 else torch.zeros(777)
    reduce.broadcast(sent, tensor)
    assert torch.equal(tensor, torch.arange(777.0))
    assert max(sent.sizes) <= largest + 60, "what pickle adds to a message"
    assert all(size for size in sent.sizes)


class Sent:
    """A communicator that records the bytes of each message that this rank sends."""

    def __init__(self, comm):
        self.comm, self.rank, self.size, self.sizes = comm, comm.rank, comm.size, [1]

    def bcast(self, value, root=0):
        if self.rank == root:
            self.sizes.append(len(pickle.dumps(value)))
        return self.comm.bcast(value, root)

    def allgather(self, value):
        self.sizes.append(len(pickle.dumps(value)))
        return self.comm.allgather(value)

    def Bcast(self, message):
        self.sizes.append(message[0].nbytes)
        self.comm.Bcast(message)
