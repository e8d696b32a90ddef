"""The same bits on any ranks whatever type and number of channels a pack has."""

from __future__ import annotations

import pytest

import hpctrain as hp
from tests.support.api import train
from tests.support.launches import check_same, launch
from tests.support.pictures import make_pack, write_npy
from tests.support.short import ROWS, digest, images, records, short_run

#: The type, the channels, what values are multiplied by, arguments of hp.write_pack, and settings.
PACKS = {
    "int16": ("int16", 5, 13.0, {"max_value": 4095}, {}),
    "float32": ("float32", 13, 1 / 300, {"max_value": 1}, {}),
    "uint16": ("uint16", 2, 256.0, {}, {}),
    "nodata": ("float32", 5, 13.0, {"nodata": -40 * 13}, {"normalize": "pack"}),
    "images by themselves": ("int16", 3, 13.0, {"nodata": -40 * 13}, {"normalize": "image"}),
}
AUGMENTED = {"flip": True, "flip_vertical": True, "rotate90": True, "shift": 2}
AUGMENTED |= {"random_crop": 0.3}


def write_tiles(folder):
    """Settings of a short run on a pack of overlapping tiles of 16 bits, cut from large files."""
    settings = short_run(folder) | {"shards": 8, "deterministic": True, "batch_size": 32}
    for label in range(3):
        (folder / f"slides/{label}").mkdir(parents=True)
        large, _ = images(5 + label, (24, 28, 1), 1, seed=label)
        for number, image in enumerate(large.astype("u2") * 16):
            path = folder / f"slides/{label}/{number}.npy"
            path.write_bytes(write_npy(image))
    make_pack(
        folder / "slides",
        folder / "tiles.h5",
        tiles="12x12",
        overlap=4,
        max_value=4095,
        split="0.6,0.2,0.2",
    )
    return settings | {"data": str(folder / "tiles.h5"), "flip": True, "normalize": "pack"}


def write(folder, case):
    """Settings of a short run on a pack of this type, with bits that depend on nothing else."""
    if case == "tiles":
        return write_tiles(folder)
    dtype, channels, factor, how, more = PACKS[case]
    settings = short_run(folder) | {"shards": 8, "deterministic": True, "batch_size": 32}
    below = 0 if dtype == "uint16" else 40
    splits = {}
    for name, rows in ROWS.items():
        stored, labels = images(rows, (12, 12, channels), 10)
        splits[name] = ((stored.astype("f8") - below) * factor).astype(dtype), labels
    names = [f"class{k}" for k in range(10)]
    hp.write_pack(settings["data"], splits, names, layout="NHWC", overwrite=True, **how)
    return settings | AUGMENTED | more


@pytest.fixture
def settings(comm, request, tmp_path):
    return write(tmp_path, request.param)


def on_some(comm, size, settings):
    """Train on the first `size` ranks; the digest of the run."""
    some = comm.Split(comm.rank < size, comm.rank)
    settings = settings | {"run": f"on{size}"}
    if comm.rank < size:
        assert train(hp.Config(**settings), some).exit_code == 0
    comm.Barrier()
    some.Free()
    return records(settings)[-1]["digest"]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("settings", [*PACKS, "tiles"], indirect=True)
def test_ranks_learn_the_bits_of_one(comm, settings):
    assert len({on_some(comm, size, settings) for size in (1, 2, 3)}) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.ranks(8)
@pytest.mark.parametrize("settings", [*PACKS, "tiles"], indirect=True)
def test_many_ranks_learn_the_bits_of_one(comm, settings):
    assert len({on_some(comm, size, settings) for size in (1, 5, 8)}) == 1


@pytest.mark.parametrize("case", ["int16", "nodata", "tiles"])
def test_a_run_that_is_interrupted_resumes_to_the_same_bits_on_other_ranks(tmp_path, case):
    """Twice, in the middle of an epoch."""
    settings = write(tmp_path, case)
    whole = settings | {"run": "whole"}
    assert launch(whole, 1).code == 0
    for size in (2, 3):
        ended = launch(settings, size, leave=1)
        assert (ended.code, ended.status) == (75, "preempted")
    assert launch(settings, 1).code == 0
    check_same(settings, whole)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", ["float32"], indirect=True)
def test_every_order_reads_the_values_that_were_written(comm, settings):
    """Whether all are kept, or read one by one and in windows, or from a copy."""
    found = set()
    for shuffle in ("partition", "global", "blocks"):
        how = settings | {"shuffle": shuffle, "run": shuffle}
        kept = digest(comm, how)
        assert digest(comm, how | {"read_buffer": "100K", "run": f"read {shuffle}"}) == kept
        found.add(kept)
    copied = settings | {"stage": f"{settings['runs_dir']}/disk", "run": "copied"}
    assert digest(comm, copied) in found
    assert len(found) == 3
