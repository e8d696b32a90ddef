"""Staging a part of the training split: which blocks are copied, and that no others are read."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import staging
from hpctrain.data.packed import read_pack, read_sums
from hpctrain.data.split import Split
from hpctrain.errors import RunError
from tests.data.pictures import class_folders, pack
from tests.support.packs import make_pack, part_of
from tests.training.test_bad_rows import overwrite

ROWS, BLOCK, SHAPE = 59, 7, (9, 11, 3)


@pytest.fixture(scope="module", params=["pixels", "jpeg"])
def made(request, tmp_path_factory):
    """A pack with blocks of few rows."""
    folder = tmp_path_factory.mktemp("pack")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hpctrain.data.packing.write.rows_per_block", lambda size: BLOCK if size > 1 else 397
        )
        if request.param == "pixels":
            return read_pack(make_pack(folder / "a.h5", {"train": ROWS, "test": 14}, SHAPE))
        counts = {"a": 37, "b": 36}
        images = class_folders(folder / "images", counts, ".jpg", width=41, height=37)
        return pack(images, folder / "a.h5", size="11x9", encoding="jpeg", split="0.8,0,0.2")


def copied(packed, part, folder):
    target = staging.begin(folder, packed, staging.staged_name(packed, part))
    share = staging.pieces(packed, read_sums(packed), part)
    staging.copy(packed, target, share)
    return dataclasses.replace(packed, path=str(target), part=part), share


@pytest.mark.parametrize("start", [0, 6, 7, 8, 41])
@pytest.mark.parametrize("stop", [42, 48, 49, 50, ROWS])
def test_a_copy_has_the_rows_of_its_samples_and_no_block_more(made, tmp_path, start, stop):
    assert made.splits["train"].samples == ROWS
    part = part_of(made, range(start, stop))
    here, share = copied(made, part, tmp_path)
    whole, there = Path(made.path).read_bytes(), Path(here.path).read_bytes()
    for kind, column in made.columns("train").items():
        size = 397 if kind == "bytes" else BLOCK * column.row_bytes
        first, last = (r * column.row_bytes for r in (part.rows(kind)[0], part.rows(kind)[-1]))
        low, end = first // size * size, column.rows * column.row_bytes
        high = min(end, (last // size + 1) * size)
        at = column.offset
        assert there[at + low : at + high] == whole[at + low : at + high]
        assert not any(there[at : at + low]) and not any(there[at + high : at + end])
        assert sum(f"train/{kind}" in p.name for p in share) == -(-(high - low) // size)
    for before, after in pairwise(share):
        assert before.stop <= after.start
    with Split(made, "train", threads=1) as one, Split(here, "train", threads=1) as other:
        rows = np.arange(start, stop)
        assert (one.read_labels(rows) == other.read_labels(rows)).all()
        images = [np.empty((len(rows), *SHAPE), np.uint8) for _ in range(2)]
        assert (one.gather(rows, images[0]) == other.gather(rows, images[1])).all()


@pytest.mark.parametrize("row", [12, 30])
def test_rows_that_a_copy_lacks_are_an_error_and_not_zeros(made, tmp_path, row):
    part = part_of(made, range(13, 30))
    here, _ = copied(made, part, tmp_path)
    out = np.empty((2, *SHAPE), np.uint8)
    with Split(here, "train", threads=1) as split:
        split.gather(np.array([13, 29]), out)
        with pytest.raises(RuntimeError, match="of train's labels, not all of"):
            split.read_labels(np.array([20, row]))
        with pytest.raises(RuntimeError, match="of train's (images|offsets), not all of"):
            split.gather(np.array([20, row]), out)
        with pytest.raises(RuntimeError, match="not all of"):
            split.hold(range(min(row, 13), 30 + (row == 30)))
        with pytest.raises(RuntimeError, match="of train's labels"):
            split.count_classes()
        assert (split.read_labels(np.array([13, 29])) >= 0).all()
    with Split(here, "test", threads=1) as split:  # other splits are whole
        split.read_labels(np.arange(14))
        split.gather(np.arange(14), np.empty((14, *SHAPE), np.uint8))
    wider = dataclasses.replace(here, part=None)
    with Split(wider, "train", threads=1) as split:  # what would be read without the check
        assert not split.read_labels(np.arange(42, ROWS)).any()


def test_a_corrupt_block_is_an_error_only_for_those_who_need_it(made, tmp_path):
    before, least, last = (part_of(made, range(*ends)) for ends in ((7, 14), (7, 15), (21, 30)))
    for kind in made.columns("train").keys() & {"labels", "offsets"}:
        (tmp_path / "a.h5").write_bytes(Path(made.path).read_bytes())
        spoilt = dataclasses.replace(made, path=str(tmp_path / "a.h5"))
        column = made.columns("train")[kind].offset
        overwrite(spoilt.path, column + 2 * BLOCK * 8)
        for part in (before, least)[kind == "labels" :]:  # sample 13 ends at offset 14
            with pytest.raises(RunError, match=f"train/{kind}: block 2 is corrupt"):
                copied(spoilt, part, tmp_path)
        here, share = copied(spoilt, last, tmp_path)
        assert staging.compare(made, Path(here.path), share)
        overwrite(here.path, column + 3 * BLOCK * 8)
        assert not staging.compare(made, Path(here.path), share)
