"""The same bits on more ranks than the other tests have, and on several threads."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpctrain as hp
from tests.support.api import train
from tests.support.packs import write_entries
from tests.support.short import records

pytestmark = pytest.mark.slow
BITS = {"shards": 8, "deterministic": True}


@pytest.mark.timeout(600)
@pytest.mark.ranks(8)
@pytest.mark.parametrize(("sizes", "threads"), [((1, 5, 7, 8), None), ((1, 3), 2)])
def test_many_ranks_learn_the_bits_of_one_with_as_many_threads(comm, short, sizes, threads):
    """Some of the ranks train, then more. Threads of OpenMP spin where ranks share cores."""
    digests = [train_on(comm, size, short | {"threads": threads}) for size in sizes]
    assert len(set(digests)) == 1


@pytest.mark.timeout(600)
@pytest.mark.ranks(8)
@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_many_ranks_learn_the_same_of_several_classes_and_of_values(comm, short, task):
    """Of the first 6 images nothing is known; figures of others are gathered on rank 0."""
    path = Path(short["data"]).with_name("entries.h5")
    if comm.rank == 0:
        write_entries(path, task, train=slice(100), validation=slice(94, 140))
    comm.Barrier()
    settings = short | {"data": str(path), "task": task, "clip_norm": 0.5, "batch_size": 24}
    digests = {size: train_on(comm, size, settings) for size in (1, 2, 3, 5, 8)}
    assert len({*digests.values()}) == 1, digests


def train_on(comm, size, settings):
    """Train on the first ranks; return the digest of the run."""
    settings = settings | BITS | {"run": f"on{size}"}
    some = comm.Split(comm.rank < size, comm.rank)
    if comm.rank < size:
        assert train(hp.Config(**settings), some).exit_code == 0
    comm.Barrier()
    some.Free()
    return records(settings)[-1]["digest"]
