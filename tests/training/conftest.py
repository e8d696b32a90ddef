"""A short run for the tests here: 7 steps an epoch, the last of them smaller."""

from __future__ import annotations

import pytest

from hpctrain.config import Config
from tests.packs import make_pack


@pytest.fixture
def settings(comm, shared_tmp):
    """Two epochs of 101 images; test modules change what they need changed."""
    if comm.rank == 0:
        make_pack(shared_tmp / "pack.h5", {"train": 101, "validation": 13, "test": 23})
    comm.Barrier()
    return Config(
        data=str(shared_tmp / "pack.h5"),
        runs_dir=str(shared_tmp / "runs"),
        run="a",
        epochs=2,
        batch_size=16,
        threads=1,
        progress="none",
    )


@pytest.fixture
def one_rank(comm):
    """A communicator of this rank alone."""
    alone = comm.Split(comm.rank)
    yield alone
    alone.Free()
