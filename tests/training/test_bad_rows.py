"""--verify and --skip-bad in whole runs."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.data.pack_format import content_uuid, facts_sha256
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.parallel.placement import assign_shards
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from tests.data.pictures import class_folders, pack
from tests.packs import make_pack
from tests.training.runs import short_run

pytestmark = pytest.mark.mpi


def overwrite(path, offset, data=b"nothing at all"):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.fixture
def settings(comm, shared_tmp):
    """A run of two epochs over files, of which one in train and one in validation is no image."""
    if comm.rank == 0:
        counts = {"a": 43, "b": 31}
        folder = class_folders(shared_tmp / "images", counts, ".jpg", width=41, height=37)
        split = {"split": "0.7,0.3,0", "encoding": "jpeg"}
        packed = pack(folder, shared_tmp / "pack.h5", size="17x13", **split)
        for name, row in (("train", 20), ("validation", 4)):
            with Split(packed, name) as rows:
                start, _ = rows.byte_range(range(row, row + 1))
            overwrite(packed.path, packed.splits[name].images_offset + start)
    comm.Barrier()
    return short_run(
        shared_tmp,
        "pack.h5",
        model="digits",
        epochs=2,
        batch_size=16,
        shards=4,
        deterministic=True,
        skip_bad=True,
        verify="never",
    )


def figures(config, name):
    folder = Path(config.runs_dir) / name
    return [r for r in read_records(folder) if r["kind"] in ("note", "digest", "evaluation", "end")]


@pytest.mark.parametrize("crop", [0.0, 0.3])
def test_images_that_cannot_be_decoded_have_no_weight_on_any_number_of_ranks(
    comm, settings, crop, capfd
):
    config = dataclasses.replace(settings, random_crop=crop, checkpoint_every="2")
    assert loop.train(dataclasses.replace(config, run="all"), comm) == 0
    told = comm.allreduce(capfd.readouterr().err)
    owner = next(rank for rank, run in enumerate(assign_shards(4, comm.size)) if 1 in run)
    readers = {0, owner}  # rank 0 looks at the first rows of all
    assert told.count("sample 20 of split 'train' cannot be decoded") == len(readers)
    assert told.count("sample 4 of split 'validation' cannot be decoded") == 1
    assert told.count(": skipped") == len(readers) + 1
    alone = comm.Split(comm.rank)
    assert loop.train(dataclasses.replace(config, run=f"alone{comm.rank}"), alone) == 0
    alone.Free()
    if comm.rank == 0:
        found, expected = figures(config, "all"), figures(config, "alone0")
        for one, other in zip(found, expected, strict=True):
            for key in ("digest", "loss", "accuracy", "rows", "text", "status"):
                assert one.get(key) == other.get(key)
        rows = read_pack(config.data).splits["validation"].samples
        assert {r["rows"] for r in found if r["kind"] == "evaluation"} == {rows - 1}
        notes = [r["text"] for r in found if r["kind"] == "note"]
        assert [f"epoch {n}: 1 rows could not be used" for n in (1, 2)] == [
            text for text in notes if "used" in text
        ]


def test_a_step_of_bad_rows_alone_ends_the_run(comm, shared_tmp):
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
    with pytest.raises(RunError, match=r"step 1 \(epoch 1\): none of its 12 rows can be used"):
        loop.train(dataclasses.replace(config, skip_bad=True), comm)
    with pytest.raises(RunError, match="sample 0 of split 'train' cannot be used"):
        loop.train(config, comm)  # rank 0 looks at the first rows before all others
    with pytest.raises(UsageError, match=r"is corrupt: train/images: rows 0 to 11 \(block 0\)"):
        loop.train(dataclasses.replace(config, verify="start"), comm)
    with pytest.raises(UsageError, match="is corrupt: train/images"):  # a small pack
        loop.train(dataclasses.replace(config, verify="auto"), comm)
    assert loop.train(dataclasses.replace(config, verify="never"), comm) == 0


def test_a_large_pack_is_verified_as_it_is_read(comm, settings, monkeypatch):
    monkeypatch.setattr("hpctrain.training.reading.VERIFIED_BYTES", 0)
    config = dataclasses.replace(settings, verify="auto", skip_bad=False)
    with pytest.raises(RunError, match=r"split 'train' cannot be used \(train/bytes"):
        loop.train(config, comm)


def test_images_that_cannot_be_decoded_are_left_out_of_a_copy_too(comm, settings, shared_tmp):
    config = dataclasses.replace(settings, run="a", stage=str(shared_tmp / "local"))
    if (
        comm.rank == 0
    ):  # checksums that fit what was overwritten, as of a pack that was made with it
        reseal(config.data)
    comm.Barrier()
    assert loop.train(config, comm) == 0
    if comm.rank == 0:
        assert "epoch 1: 1 rows could not be used" in [r.get("text") for r in figures(config, "a")]


def reseal(path):
    """Write the checksums that a pack should have, and the uuid made of them."""
    packed = read_pack(path)
    with h5py.File(path, "r+") as file, open(path, "rb") as stored:
        splits = {}
        for name, split in packed.splits.items():
            sums = []
            for kind, column in packed.columns(name).items():
                crc32 = file[name][f"{kind}_crc32"]
                step = int(crc32.attrs["rows_per_block"])
                for block in range(len(crc32)):
                    rows = min(step, column.rows - block * step)
                    stored.seek(column.offset + block * step * column.row_bytes)
                    crc32[block] = zlib.crc32(stored.read(rows * column.row_bytes))
                sums.append(crc32[:])
            splits[name] = split.samples, sums
        uuid = content_uuid(packed.image_shape, packed.classes, splits, packed.fit)
        file.attrs.modify("uuid", np.bytes_(uuid))
        facts = packed.mean, packed.std, packed.provenance
        file.attrs.modify("sha256", np.bytes_(facts_sha256(uuid, *facts)))


def test_checksums_that_are_not_the_packs_are_refused_whatever_is_compared(comm, settings):
    if comm.rank == 0:
        with h5py.File(settings.data, "r+") as file:
            file["train/bytes_crc32"][0] ^= 1
    comm.Barrier()
    for verify in ("never", "first-touch"):
        with pytest.raises(UsageError, match="not those that the uuid was made from"):
            loop.train(dataclasses.replace(settings, verify=verify), comm)


def test_a_small_pack_is_not_refused_where_corrupt_rows_are_left_out(comm, shared_tmp):
    if comm.rank == 0:
        path = make_pack(shared_tmp / "pack.h5", {"train": 900}, (32, 32, 3))  # 341 rows a block
        overwrite(path, read_pack(path).splits["train"].images_offset + 400 * 3072)
    comm.Barrier()
    config = short_run(
        shared_tmp,
        "pack.h5",
        run="a",
        model="digits",
        batch_size=450,
        skip_bad=True,
    )
    assert loop.train(config, comm) == 0
    if comm.rank == 0:
        assert [r["text"] for r in figures(config, "a") if r["kind"] == "note"] == [
            "epoch 1: 341 rows could not be used"
        ]
    with pytest.raises(UsageError, match=r"is corrupt: train/images: rows 341 to 681"):
        loop.train(dataclasses.replace(config, verify="start", run="b"), comm)
