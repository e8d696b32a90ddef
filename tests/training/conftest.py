"""A short run for the tests here: 7 steps an epoch, the last of them smaller."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.packs import make_pack
from tests.training.runs import short_run


@pytest.fixture
def settings(comm, shared_tmp):
    """Two epochs of 101 images; test modules change what they need changed."""
    if comm.rank == 0:
        make_pack(shared_tmp / "pack.h5", {"train": 101, "validation": 13, "test": 23})
    comm.Barrier()
    return short_run(
        shared_tmp,
        "pack.h5",
        run="a",
        epochs=2,
        batch_size=16,
        threads=1,
    )


@pytest.fixture
def small_settings(comm, shared_tmp, settings):
    """The same with images of 12x12, which take a fraction of the time."""
    if comm.rank == 0:
        make_pack(
            shared_tmp / "small.h5", {"train": 101, "validation": 13, "test": 23}, (12, 12, 1)
        )
    comm.Barrier()
    return dataclasses.replace(settings, data=str(shared_tmp / "small.h5"), model="digits")


@pytest.fixture
def one_rank(comm):
    """A communicator of this rank alone."""
    alone = comm.Split(comm.rank)
    yield alone
    alone.Free()
