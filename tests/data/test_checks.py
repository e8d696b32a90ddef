"""Checksums that are compared when a block is first read."""

import numpy as np
import pytest

from hpctrain.data import checks as module
from hpctrain.data.checks import Checks
from hpctrain.data.packed import read_pack, read_sums, verify
from hpctrain.data.split import Split
from hpctrain.errors import RunError
from tests.data.pictures import class_folders, pack
from tests.support.packs import make_pack

ROWS = 97


@pytest.fixture
def pixels(tmp_path, monkeypatch):
    """A pack of 10 blocks of 10 rows."""
    monkeypatch.setattr("hpctrain.data.packing.write.rows_per_block", lambda row_bytes: 10)
    return read_pack(make_pack(tmp_path / "a.h5", {"train": ROWS, "test": 21}, (9, 7, 1)))


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 4]))


def gather(source, rows):
    out = np.empty((len(rows), *source.image_shape), np.uint8)
    return source.gather(np.array(rows), out)


def test_a_damaged_block_is_met_when_one_of_its_rows_is_first_read(pixels):
    flip(pixels.path, pixels.splits["train"].images_offset + 23 * 63 + 5)
    checks = Checks(read_sums(pixels))
    with Split(pixels, "train", checks=checks) as rows:
        gather(rows, [0, 19, 30, 96])
        for row in (20, 23, 29):
            found = rf"a.h5: sample {row} of split 'train' .*rows 20 to 29 \(block 2\) are corrupt"
            with pytest.raises(RunError, match=found):
                gather(rows, [3, row])
    with Split(pixels, "test", checks=checks) as rows:
        gather(rows, range(21))
    with Split(pixels, "train") as rows:  # where nothing is compared
        gather(rows, [23])


@pytest.mark.parametrize(("first", "stop"), [(15, 25), (25, 35), (5, 45), (23, 24)])
def test_a_piece_is_damaged_by_any_of_its_blocks(pixels, first, stop):
    flip(pixels.path, pixels.splits["train"].images_offset + 23 * 63 + 5)
    checks, column = Checks(read_sums(pixels)), pixels.columns("train")["images"]
    checksums = checks.checksums("train", "images", column)
    with Split(pixels, "train") as rows:
        found = checksums.find_corrupt(np.array([first * 63]), np.array([stop * 63]), rows._read)
    assert found.tolist() == [2]


def test_every_block_is_compared_once(pixels, monkeypatch):
    compared = []
    crc32 = module.zlib.crc32
    counting = type("zlib", (), {"crc32": lambda data: compared.append(len(data)) or crc32(data)})
    monkeypatch.setattr(module, "zlib", counting)
    checks = Checks(read_sums(pixels))
    for _ in range(2):  # opened twice, as in every validation
        compared.clear()
        with Split(pixels, "train", checks=checks) as rows:
            rows.hold(range(ROWS))
            labels, compared[:] = len(compared), []
            gather(rows, [0, 1, 9, 25])
            first, compared[:] = len(compared), []
            gather(rows, range(30))
            assert (labels, first, len(compared)) in ((10, 2, 1), (0, 0, 0))
    gathered = len(compared)
    with Split(pixels, "train", checks=checks) as rows:
        gather(rows, range(ROWS))
    assert len(compared) - gathered == 7


@pytest.mark.parametrize("kind", ["labels", "offsets"])
def test_corrupt_labels_and_offsets_are_errors(pixels, tmp_path, kind):
    if kind == "labels":
        packed, at = pixels, pixels.splits["train"].labels_offset + 8 * 3
    else:
        source = class_folders(tmp_path / "images", {"a": 9, "b": 9}, ".jpg")
        packed = pack(source, tmp_path / "b.h5", size="8x8", encoding="jpeg")
        at = packed.splits["train"].offsets_offset + 8 * 3
    sums = read_sums(packed)
    flip(packed.path, at)
    corrupt = rf"train/{kind}: rows 0 to \d+ \(block 0\) are corrupt"
    with Split(packed, "train", checks=Checks(sums)) as rows:
        with pytest.raises(RunError, match=corrupt):
            rows.hold(range(2, 7))
        with pytest.raises(RunError, match=corrupt):
            gather(rows, [2]), rows.read_labels(np.array([2]))
    assert any(kind in line for line in verify(packed))


def test_files_that_reach_over_blocks(tmp_path, monkeypatch):
    """JPEG files of some hundred bytes in blocks of 97: a file is bad for any of its blocks."""
    monkeypatch.setattr("hpctrain.data.packing.write.rows_per_block", lambda row_bytes: 97)
    source = class_folders(tmp_path / "images", {"a": 19, "b": 19}, ".jpg", width=41, height=37)
    packed = pack(source, tmp_path / "b.h5", size="16x16", encoding="jpeg", split="1")
    with Split(packed, "train") as rows:
        offsets = rows._offsets.take(np.arange(39)).tolist()
    middle = (offsets[7] + offsets[8]) // 2
    assert offsets[8] - offsets[7] > 4 * 97
    flip(packed.path, packed.splits["train"].images_offset + middle)
    block = range(middle // 97 * 97, middle // 97 * 97 + 97)
    expected = [not (offsets[i] < block.stop and block.start < offsets[i + 1]) for i in range(38)]
    with Split(packed, "train", checks=Checks(read_sums(packed))) as rows:
        for row, is_sound in enumerate(expected):
            if is_sound:
                gather(rows, [row])
                continue
            with pytest.raises(RunError, match=f"sample {row} of split 'train' cannot be used"):
                gather(rows, [row])
    assert not expected[7]
