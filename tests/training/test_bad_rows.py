"""--verify in whole runs, and images that cannot be decoded."""

from __future__ import annotations

import dataclasses

import h5py
import pytest

from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.training import train as loop
from tests.data.pictures import class_folders, pack
from tests.support.packs import make_pack
from tests.training.runs import short_run

pytestmark = pytest.mark.mpi


def overwrite(path, offset, data=b"nothing at all"):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def settings(comm, shared_tmp):
    """A run over files, of which one in train is no image, after the first that rank 0 looks at."""
    if comm.rank == 0:
        counts = {"a": 43, "b": 31}
        folder = class_folders(shared_tmp / "images", counts, ".jpg", width=41, height=37)
        split = {"split": "0.7,0.3,0", "encoding": "jpeg"}
        packed = pack(folder, shared_tmp / "pack.h5", size="17x13", **split)
        with Split(packed, "train") as rows:
            start, _ = rows.byte_range(range(40, 41))
        overwrite(packed.path, packed.splits["train"].images_offset + start)
    comm.Barrier()
    return short_run(
        shared_tmp,
        "pack.h5",
        model="digits",
        epochs=2,
        batch_size=16,
        shards=4,
        deterministic=True,
        verify="never",
    )


@pytest.mark.parametrize("crop", [0.0, 0.3])
def test_an_image_that_cannot_be_decoded_ends_the_run_and_is_named(comm, settings, crop):
    alone = comm.Split(comm.rank)
    message = "sample 40 of split 'train' cannot be decoded .*: 'hpctrain pack --check' finds"
    if comm.rank == 0:
        with pytest.raises(RunError, match=message):
            loop.train(dataclasses.replace(settings, random_crop=crop), alone)
    alone.Free()


def test_a_corrupt_block_ends_the_run_and_is_named(comm, shared_tmp):
    if comm.rank == 0:
        path = make_pack(shared_tmp / "pack.h5", {"train": 12}, (28, 28, 1))
        overwrite(path, read_pack(path).splits["train"].images_offset)  # all are in one block
    comm.Barrier()
    config = short_run(
        shared_tmp,
        "pack.h5",
        model="digits",
        batch_size=12,
        verify="first-touch",
    )
    with pytest.raises(RunError, match="sample 0 of split 'train' cannot be used"):
        loop.train(config, comm)  # rank 0 looks at the first rows before all others
    with pytest.raises(UsageError, match=r"is corrupt: train/images: rows 0 to 11 \(block 0\)"):
        loop.train(dataclasses.replace(config, verify="start"), comm)
    with pytest.raises(UsageError, match="is corrupt: train/images"):  # a small pack
        loop.train(dataclasses.replace(config, verify="auto"), comm)
    assert loop.train(dataclasses.replace(config, verify="never"), comm) == 0


def test_a_large_pack_is_verified_as_it_is_read(comm, settings, monkeypatch):
    monkeypatch.setattr("hpctrain.training.reading.VERIFIED_BYTES", 0)
    config = dataclasses.replace(settings, verify="auto")
    with pytest.raises(RunError, match=r"split 'train' cannot be used \(train/bytes"):
        loop.train(config, comm)


def test_checksums_that_are_not_the_packs_are_refused_whatever_is_compared(comm, settings):
    if comm.rank == 0:
        with h5py.File(settings.data, "r+") as file:
            file["train/bytes_crc32"][0] ^= 1
    comm.Barrier()
    for verify in ("never", "first-touch"):
        with pytest.raises(UsageError, match="not those that the uuid was made from"):
            loop.train(dataclasses.replace(settings, verify=verify), comm)
