"""The same bits on more ranks than the other tests have, and on several threads."""

from __future__ import annotations

import pytest

import hpctrain as hp
from tests.support.api import train
from tests.support.short import records

pytestmark = pytest.mark.slow
BITS = {"shards": 8, "deterministic": True}


@pytest.mark.timeout(600)
@pytest.mark.ranks(8)
@pytest.mark.parametrize(("sizes", "threads"), [((1, 5, 7, 8), None), ((1, 3), 2)])
def test_many_ranks_learn_the_bits_of_one_with_as_many_threads(comm, short, sizes, threads):
    """Some of the ranks train, then more. Threads of OpenMP spin where ranks share cores."""
    found = []
    for size in sizes:
        some = comm.Split(comm.rank < size, comm.rank)
        settings = short | BITS | {"run": f"on{size}", "threads": threads}
        if comm.rank < size:
            assert train(hp.Config(**settings), some).exit_code == 0
        comm.Barrier()
        some.Free()
        found.append(records(settings)[-1]["digest"])
    assert len(set(found)) == 1
