"""Sums and rows of a pack, and packs of arrays."""

import contextlib
import os
import tracemalloc

import h5py
import numpy as np
import pytest

from hpctrain.data.pack import write_pack
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.packing import make, report
from hpctrain.data.packing.decode import channel_sums
from hpctrain.data.packing.workers import PackTask, start_workers
from hpctrain.errors import RunError, UsageError
from tests.data.pictures import class_folders, contents, encode, pack, picture


def test_sums_are_exact():
    pixels = np.random.default_rng(0).integers(0, 256, (301, 3), np.uint8)
    wide = pixels.astype(object)
    for channels in (1, 3, 7):
        expected = [(wide.reshape(-1, channels) ** power).sum(axis=0).tolist() for power in (1, 2)]
        assert channel_sums(pixels.tobytes(), channels).tolist() == expected


def test_equal_files_are_known_before_anything_is_decoded(tmp_path, monkeypatch):
    """So that their rows need not be moved."""
    root = class_folders(tmp_path / "images", {"a": 43, "b": 37})
    for number in (3, 5, 60):
        (root / "b" / f"twin{number}.png").write_bytes(encode(picture(number)))
    monkeypatch.delattr(make, "copy_rows")
    made = pack(root, tmp_path / "a.h5", split="0.5,0.5")
    assert made.provenance["duplicates"]["groups"] == 3
    os.rename(root, tmp_path / "moved")
    made_again = pack(tmp_path / "moved", tmp_path / "b.h5", jobs=3, split="0.5,0.5")
    assert made_again.uuid == made.uuid


def arrays(rows=1009, shape=(31, 29, 3), classes=3):
    images = np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)
    return images, np.arange(rows) % classes


@pytest.mark.parametrize("storage", [{}, {"chunks": (100, 31, 29, 3), "compression": "gzip"}])
def test_write_pack_takes_data_sets_of_h5py(tmp_path, storage):
    images, labels = arrays()
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file.create_dataset("x", data=images, **storage)
        file["y"] = labels
        write_pack(tmp_path / "a.h5", {"train": (file["x"], file["y"])}, ["x", "y", "z"])
    write_pack(tmp_path / "b.h5", {"train": (images, labels.tolist())}, ("x", "y", "z"))
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    made = read_pack(tmp_path / "a.h5")
    assert verify(made) == [] and (made.classes, made.provenance) == (("x", "y", "z"), {})
    found = contents(made, "train")
    assert (found[0] == images).all() and (found[1] == labels).all()


def test_write_pack_reads_images_in_slabs(tmp_path):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        images = file.create_dataset("x", (40_000, 64, 32), "u1", chunks=(1000, 64, 32))  # 78 MiB
        tracemalloc.start()
        try:
            write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(40_000, "i2"))}, ["a"])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 24 << 20
    made = read_pack(tmp_path / "a.h5")
    assert made.image_shape == (64, 32, 1) and verify(made) == []


IMAGES, LABELS = arrays(7, (5, 4, 1))
WRONG = {
    "no train": ({"test": (IMAGES, LABELS)}, "the splits are ['test']: one must be named train"),
    "no splits": ({}, "the splits are []"),
    "shapes": (
        {"train": (IMAGES, LABELS), "test": (IMAGES[:, :3], LABELS)},
        "differ in image shape: {'train': (5, 4, 1), 'test': (3, 4, 1)}",
    ),
    "fewer labels": (
        {"train": (IMAGES, LABELS[:-1])},
        "labels of train are int64 of shape (6,): expected 7 integers, one per image",
    ),
    "one-hot": ({"train": (IMAGES, np.eye(7))}, "labels of train are float64 of shape (7, 7)"),
    "floats": (
        {"train": (IMAGES.astype(float), LABELS)},
        "images of train are float64 of shape (7, 5, 4, 1): expected uint8, (N, H, W, C) or",
    ),
    "list": ({"train": (IMAGES.tolist(), LABELS)}, "images of train are list of shape ()"),
    "flat": ({"train": (IMAGES.reshape(7, -1), LABELS)}, "are uint8 of shape (7, 20)"),
    "nothing": ({"train": (IMAGES[:0], LABELS[:0])}, "are uint8 of shape (0, 5, 4, 1)"),
    "label 3": (
        {"train": (IMAGES, LABELS + 1)},
        "labels of train are 1 to 3, but 3 classes are numbered 0 to 2",
    ),
    "label -1": ({"train": (IMAGES, LABELS - 1)}, "labels of train are -1 to 1"),
    "name": ({"train": (IMAGES, LABELS), "a/b": (IMAGES, LABELS)}, "cannot have the name 'a/b'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_write_pack_refuses_arrays_that_do_not_fit(tmp_path, case):
    splits, words = WRONG[case]
    with pytest.raises(UsageError) as caught:
        write_pack(tmp_path / "a.h5", splits, "abc")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_write_pack_refuses_other_mistakes(tmp_path):
    splits, path = {"train": (IMAGES, LABELS)}, tmp_path / "a.h5"
    for classes, words in (
        ([], "give the name of each class"),
        ([0, 1, 2], "classes [0, 1, 2]: give the name of each class"),
        (["a", "", "c"], "give the name of each class"),
        ("aba", "two classes have the name 'a'"),
    ):
        with pytest.raises(UsageError) as caught:
            write_pack(path, splits, classes)
        assert words in str(caught.value)
    for made_by in ({"by": path}, {"mean": float("nan")}):
        with pytest.raises(UsageError, match="provenance cannot be written as JSON"):
            write_pack(path, splits, "abc", made_by)
    with pytest.raises(RunError, match=r"writing .*x.h5 failed: No such file"):
        write_pack(tmp_path / "none" / "x.h5", splits, "abc")
    write_pack(path, splits, "abc")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="a.h5 exists: give another path"):
        write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc")
    assert path.read_bytes() == before
    write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc", overwrite=True)
    assert (contents(read_pack(path), "train")[1] == 2 - LABELS).all()


def test_write_pack_leaves_nothing_if_images_cannot_be_read(tmp_path):
    class Rows:
        dtype, shape = np.dtype(np.uint8), (7, 5, 4, 1)

        def __getitem__(self, rows):
            return IMAGES[rows][1:]

    with pytest.raises(ValueError, match="cannot reshape"):
        write_pack(tmp_path / "a.h5", {"train": (Rows(), LABELS)}, "abc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_the_order_of_the_tasks(monkeypatch, jobs):
    told = []
    monkeypatch.setattr(report, "progress", lambda *of: contextlib.nullcontext(told.append))
    with start_workers(jobs) as run:
        tasks = (PackTask((number, 2), number) for number in range(100))
        assert list(run("squaring", pow, tasks, 100)) == [number**2 for number in range(100)]
    assert told == list(range(100))
