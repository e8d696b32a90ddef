"""Packs that are missing, foreign, cut short, damaged or made to read other files."""

import json
import shutil
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

from hpctrain.data import packed
from hpctrain.data.pack import check_pack, write_pack
from hpctrain.data.packed import read_pack, read_sums, verify
from hpctrain.errors import UsageError
from tests.data.pictures import picture, replaced

H, W, C = 11, 13, 3
ROWS = 101


def write(path):
    images = np.stack([picture(i) for i in range(ROWS)])
    labels = np.arange(ROWS) % 3
    splits = {"train": (images, labels), "test": (images[:7], labels[:7])}
    write_pack(path, splits, ("a", "b", "c"), {"source": "numbers"}, overwrite=True)


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "a.h5")
    return tmp_path / "a.h5"


def refusal(path):
    with pytest.raises(UsageError) as caught:
        read_pack(path)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text


def test_missing_foreign_and_empty_files(tmp_path):
    assert "cannot be opened: No such file" in refusal(tmp_path / "none.h5")
    assert "is a folder" in refusal(tmp_path)
    for content in (b"", b"\xff\xd8\xff\xe0 a picture", b"#!/bin/sh\n" * 1000):
        (tmp_path / "x.h5").write_bytes(content)
        assert "is no HDF5 file" in refusal(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["train/images"] = np.zeros((3, 2, 2, 1), np.uint8)
    assert "an HDF5 file but not a pack" in refusal(tmp_path / "x.h5")


def test_a_pack_cut_anywhere_is_refused(path):
    whole = path.read_bytes()
    for part in (len(whole) - 1, len(whole) // 2, 4096, 700):
        path.write_bytes(whole[:part])
        assert f"is cut short: it has {part:,} of {len(whole):,} bytes" in refusal(path)
    for part in (9, 30, 47):
        path.write_bytes(whole[:part])
        refusal(path)


def test_a_pack_that_is_still_being_written(path):
    half = path.with_name("half.h5")
    with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
        file.flush()
        shutil.copy(path, half)
    assert "was not written to its end" in refusal(half)


def test_any_flipped_byte_of_the_metadata_is_noticed(path):
    """Never a crash, never another exception; what stays unnoticed does no harm."""
    whole = path.read_bytes()
    pack = read_pack(path)
    data = [(s.images_offset, s.samples * H * W * C) for s in pack.splits.values()]
    data += [(s.labels_offset, s.samples * 8) for s in pack.splits.values()]
    metadata = [i for i in range(len(whole)) if not any(a <= i < a + n for a, n in data)]
    used = [i for i in metadata if whole[i]]
    noticed = 0
    for position in used[:: max(1, len(used) // 150)]:
        damaged = bytearray(whole)
        damaged[position] ^= 0x55
        path.write_bytes(damaged)
        try:
            noticed += bool(verify(read_pack(path)))
        except UsageError as error:
            assert "\n" not in str(error)
            noticed += 1
    assert noticed > 120


def test_damage_to_rows_is_found_and_named(path, capsys):
    pack = read_pack(path)
    assert check_pack(str(path)) == 0
    shown = capsys.readouterr().out
    assert "all checksums agree" in shown and "108" in shown and pack.uuid in shown
    for offset, where in (
        (pack.splits["train"].images_offset + 5, "train/images: rows 0 to 100 (block 0)"),
        (pack.splits["test"].images_offset, "test/images: rows 0 to 6 (block 0)"),
        (pack.splits["test"].labels_offset + 8, "test/labels: rows 0 to 6 (block 0)"),
    ):
        damaged = bytearray(path.read_bytes())
        damaged[offset] ^= 1 if "images" in where else 3
        spoiled = path.with_name("b.h5")
        spoiled.write_bytes(damaged)
        assert verify(read_pack(spoiled)) == [f"{where} are corrupt"]
        assert check_pack(str(spoiled)) == 1
        assert where in capsys.readouterr().err


def test_the_right_block_is_named(tmp_path):
    images = np.zeros((2500, 31, 33, 1), np.uint8)  # 1,025 rows a block
    write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(2500, int))}, ("a",), {})
    pack = read_pack(tmp_path / "a.h5")
    with (tmp_path / "a.h5").open("r+b") as file:
        for row in (1025, 2499):
            file.seek(pack.splits["train"].images_offset + row * 31 * 33)
            file.write(b"x")
    assert verify(pack) == [
        "train/images: rows 1025 to 2049 (block 1) are corrupt",
        "train/images: rows 2050 to 2499 (block 2) are corrupt",
    ]


def test_labels_out_of_range(path):
    for value in (3, -1, 2**40):
        write(path)
        with h5py.File(path, "r+", locking=False) as file:
            file["train/labels"][50] = value
        text = refusal(path)
        assert "labels of split 'train'" in text and str(value) in text and "3 classes" in text


def spoiled(path, change):
    """A fresh pack with `change` made to it by h5py."""
    write(path)
    with h5py.File(path, "r+", locking=False) as file:
        change(file)
    return refusal(path)


def test_packs_that_read_other_files_are_refused(path, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(ROWS * H * W * C))
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.zeros((ROWS, H, W, C), np.uint8)
        other["group/images"] = np.zeros((ROWS, H, W, C), np.uint8)
    shape = (ROWS, H, W, C)
    layout = h5py.VirtualLayout(shape, np.uint8)
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", shape)
    external = [(str(secret), 0, h5py.h5f.UNLIMITED)]
    changes = {
        "external storage": lambda f: f.create_dataset(
            "train/images", shape, "u1", external=external
        ),
        "virtual": lambda f: f.create_virtual_dataset("train/images", layout),
        "external link": lambda f: f["train"].__setitem__(
            "images", h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
        ),
    }
    for what, make in changes.items():
        text = spoiled(path, replaced("train/images", make))
        assert any(
            said in text for said in ("link to another file", "other files", "a virtual dataset")
        ), what
    link = h5py.ExternalLink(str(tmp_path / "other.h5"), "group")
    text = spoiled(path, replaced("train", lambda f: f.__setitem__("train", link)))
    assert "train/images is a link to another file" in text


def test_data_of_another_kind_is_refused(path):
    shape = (ROWS, H, W, C)
    for what, make, name in (
        (
            "is stored in chunks",
            lambda f: f.create_dataset("train/images", data=np.zeros(shape, "u1"), chunks=True),
            "images",
        ),
        ("float32", lambda f: f.create_dataset("train/images", shape, "f4"), "images"),
        (
            "shape (101, 143)",
            lambda f: f.create_dataset("train/images", (ROWS, 143), "u1"),
            "images",
        ),
        ("does not hold", lambda f: f.create_dataset("train/images", shape, "u1"), "images"),
        ("does not hold", lambda f: f.create_dataset("train/labels", (10**12,), "i8"), "labels"),
        ("int32", lambda f: f.create_dataset("train/labels", (ROWS,), "i4"), "labels"),
        (">i8", lambda f: f.create_dataset("train/labels", (ROWS,), ">i8"), "labels"),
        ("train/labels is no dataset", lambda f: f.create_group("train/labels"), "labels"),
        ("no dataset train/labels", lambda f: None, "labels"),
        (
            "101 images but 100 labels",
            lambda f: f.create_dataset("train/labels", data=np.zeros(100, np.int64)),
            "labels",
        ),
        (
            "differ in image shape",
            lambda f: f.create_dataset("train/images", data=np.zeros((ROWS, 1, 1, 1), np.uint8)),
            "images",
        ),
    ):
        assert what in spoiled(path, replaced(f"train/{name}", make))


def test_attributes_are_checked(path):
    def attribute(name, value):
        return lambda f: f.attrs.__setitem__(name, value)

    assert "format version 3, this hpctrain reads versions 1 and 2" in spoiled(
        path, attribute("version", 3)
    )
    assert "not a pack" in spoiled(path, attribute("format", np.bytes_("another")))
    for name in ("classes", "mean", "provenance"):
        assert "is corrupt" in spoiled(path, attribute(name, 3)), name
    for name, value in (
        ("mean", np.zeros(2)),
        ("std", np.full(3, np.nan)),
        ("provenance", np.bytes_(json.dumps([1]))),
    ):
        write(path)
        with h5py.File(path, "r+", locking=False) as file:
            file.attrs[name] = value
        with pytest.raises(UsageError, match="not those that its SHA-256 was made from"):
            read_sums(read_pack(path))
    for name in ("uuid", "provenance"):
        assert "corrupt" in spoiled(path, attribute(name, np.bytes_("{nonsense")))

    assert "attribute 'mean' is missing" in spoiled(path, lambda f: f.attrs.__delitem__("mean"))
    assert "holds no images" in spoiled(
        path, lambda f: [f.__delitem__(n) for n in ("train", "test")]
    )


def test_the_size_of_the_file_is_compared_whatever_hdf5_notices(path, monkeypatch):
    monkeypatch.setattr(packed.os.path, "getsize", lambda name: 20_000)
    assert "train/images says 43,329 bytes, which the file does not hold" in refusal(path)


def test_checksums_and_uuid_belong_together(path):
    def change(name, value):
        write(path)
        with h5py.File(path, "r+", locking=False) as file:
            file.attrs[name] = value
        return verify(read_pack(path))

    expected = ["shape, classes or checksums are not those that the uuid was made from"]
    assert change("uuid", np.bytes_("ac671e0f-c00b-5a4e-9398-b44f7739fafb")) == expected
    assert change("classes", np.array([b"a", b"c", b"b"])) == expected
    write(path)
    with h5py.File(path, "r+", locking=False) as file:
        del file["train/images_crc32"]
    with pytest.raises(UsageError, match="no dataset train/images_crc32"):
        verify(read_pack(path))


@pytest.mark.parametrize("name", ["mean", "std", "provenance"])
def test_what_the_uuid_does_not_cover_has_a_checksum_too(path, capsys, name):
    """Written by a tool that keeps HDF5's own checksums right."""
    with h5py.File(path, "r+", locking=False) as file:
        before = file.attrs[name]
        file.attrs[name] = (
            np.bytes_('{"source": "number5"}') if name == "provenance" else before / 2
        )
    expected = "mean, std or provenance are not those that its SHA-256 was made from"
    assert check_pack(str(path)) == 1
    assert f"{path}: {expected}" in capsys.readouterr().err
    with pytest.raises(UsageError, match=expected):
        read_sums(read_pack(path))  # which a run does whatever it compares


SLOW_WRITE = """
import sys, time
import numpy as np
from hpctrain.data.pack import write_pack
class Rows:
    dtype, ndim, shape, size = np.dtype(np.uint8), 4, (99999, 32, 32, 1), 99999
    def __len__(self):
        return 99999
    def __getitem__(self, rows):
        print("writing", flush=True)
        time.sleep(rows.start / 1000)  # the second block takes long
        return np.zeros((1024, 32, 32, 1), np.uint8)
write_pack(sys.argv[1], {"train": (Rows(), np.zeros(99999, int))}, "a", {})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_writer_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, number):
    path = tmp_path / "a.h5"
    writer = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITE, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    writer.stdout.readline()
    time.sleep(0.2)
    writer.send_signal(number)
    writer.stdout.close()
    assert writer.wait(30) != 0
    left = list(tmp_path.iterdir())
    assert not path.exists() and all(file.name.startswith(".") for file in left)
    if number == signal.SIGINT:
        assert left == []
    for file in left:
        with pytest.raises(UsageError):
            read_pack(file)
