"""The same bits on more ranks than the other tests have, and on several threads."""

from __future__ import annotations

import pytest

import hpctrain as hp
from tests.support.api import train
from tests.support.short import digest, records

pytestmark = pytest.mark.slow
BITS = {"shards": 8, "deterministic": True, "threads": None}


@pytest.mark.timeout(600)
@pytest.mark.ranks(8)
def test_five_seven_and_eight_ranks_learn_the_bits_of_one(comm, short):
    """Some of the ranks train, then more of them."""
    found = []
    for size in (1, 5, 7, 8):
        some = comm.Split(comm.rank < size, comm.rank)
        settings = short | BITS | {"run": f"on{size}"}
        if comm.rank < size:
            assert train(hp.Config(**settings), some).exit_code == 0
        comm.Barrier()
        some.Free()
        found.append(records(settings)[-1]["digest"])
    assert len(set(found)) == 1


@pytest.mark.timeout(600)
@pytest.mark.ranks(3)
def test_two_threads_on_three_ranks_learn_the_bits_of_two_threads_on_one(comm, short):
    """Threads of OpenMP spin where ranks share cores."""
    settings = short | BITS | {"threads": 2}
    together = digest(comm, settings)
    alone = comm.Split(comm.rank)
    if comm.rank == 0:
        train(hp.Config(**settings | {"run": "alone"}), alone)
        assert records(settings | {"run": "alone"})[-1]["digest"] == together
    alone.Free()
