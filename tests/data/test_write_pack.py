"""hp.write_pack: arrays, or data sets of h5py, as a pack."""

import tracemalloc

import h5py
import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.pictures import arrays, facts


def random_arrays(rows=1009, shape=(31, 29, 3), classes=3):
    images = np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)
    return images, np.arange(rows) % classes


@pytest.mark.parametrize("storage", [{}, {"chunks": (100, 31, 29, 3), "compression": "gzip"}])
def test_data_sets_of_h5py_give_the_bytes_of_their_arrays(tmp_path, storage):
    (images, labels), made = random_arrays(), {"made": "here"}
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file.create_dataset("x", data=images, **storage)
        file["y"] = labels
        splits = {"train": (file["x"], file["y"])}
        hp.write_pack(tmp_path / "a.h5", splits, ["x", "y", "æ€"], made)
    hp.write_pack(tmp_path / "b.h5", {"train": (images, labels.tolist())}, ("x", "y", "æ€"), made)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    with h5py.File(tmp_path / "a.h5") as file:  # and no time of day
        assert h5py.h5g.get_objinfo(file["train/images"].id).mtime == 0
    assert hp.read_pack(tmp_path / "a.h5").classes == ("x", "y", "æ€")
    assert facts(tmp_path / "a.h5")["provenance"]["made"] == "here"
    found = arrays(tmp_path / "a.h5")
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)


def test_images_are_read_in_slabs(tmp_path):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        images = file.create_dataset("x", (40_000, 64, 32), "u1", chunks=(1000, 64, 32))  # 78 MiB
        for first in range(0, 40_000, 1000):
            images[first] = 1
        tracemalloc.start()
        try:
            hp.write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(40_000, "i2"))}, ["a"])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 24 << 20
    assert hp.read_pack(tmp_path / "a.h5").image_shape == (64, 32, 1)


def test_mean_and_std_are_exact_where_32_bits_would_not_do(tmp_path):
    images = np.full((70001, 1, 1, 1), 255, np.uint8)  # the squares sum to more than 2^32
    hp.write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(70001, int))}, ("a",))
    assert (facts(tmp_path / "a.h5")["mean"], facts(tmp_path / "a.h5")["std"]) == ([1.0], [0.0])
    images = random_arrays(5003)[0]
    hp.write_pack(tmp_path / "b.h5", {"train": (images, np.zeros(5003, int))}, ("a",))
    mean, std = (facts(tmp_path / "b.h5")[name] for name in ("mean", "std"))
    wide = images.reshape(-1, 3).astype(object)
    sums, squares, count = wide.sum(axis=0), (wide**2).sum(axis=0), len(wide)
    assert mean.tolist() == [value / (255 * count) for value in sums]
    roots = np.sqrt((count * squares - sums**2).astype(float))
    assert np.allclose(std, roots / (255 * count), rtol=1e-15)


IMAGES, LABELS = random_arrays(7, (5, 4, 1))
WRONG = {  # splits, and what is named
    "no train": ({"test": (IMAGES, LABELS)}, "train"),
    "no splits": ({}, "train"),
    "shapes": ({"train": (IMAGES, LABELS), "test": (IMAGES[:, :3], LABELS)}, "(3, 4, 1)"),
    "fewer labels": ({"train": (IMAGES, LABELS[:-1])}, "(6,)"),
    "one-hot": ({"train": (IMAGES, np.eye(7))}, "(7, 7)"),
    "a column": ({"train": (IMAGES, LABELS.reshape(-1, 1))}, "labels.reshape(-1)"),
    "floats": ({"train": (IMAGES.astype(float), LABELS)}, "float64"),
    "list": ({"train": (IMAGES.tolist(), LABELS)}, "list"),
    "flat": ({"train": (IMAGES.reshape(7, -1), LABELS)}, "(7, 20)"),
    "nothing": ({"train": (IMAGES[:0], LABELS[:0])}, "(0, 5, 4, 1)"),
    "signed": ({"train": (IMAGES.astype("i2"), LABELS)}, "int16"),
    "16 bits": ({"train": (IMAGES.astype("u2"), LABELS)}, "--images"),
    "truth": ({"train": (IMAGES > 9, LABELS)}, "bool"),
    "floats in [0, 1]": ({"train": (IMAGES / 255, LABELS)}, "(255 * images).round()"),
    "objects": ({"train": (IMAGES.astype(object), LABELS)}, "object"),
    "tensors": ({"train": (torch.from_numpy(IMAGES), LABELS)}, "images.numpy()"),
    "channels first": ({"train": (np.zeros((7, 3, 9, 9), "u1"), LABELS)}, "transpose(0, 2, 3, 1)"),
    "masked images": ({"train": (np.ma.masked_less(IMAGES, 9), LABELS)}, "images of train"),
    "masked labels": ({"train": (IMAGES, np.ma.masked_equal(LABELS, 0))}, "labels of train"),
    "names": ({"train": (IMAGES, np.array([*"abcabca"]))}, "numpy.unique"),
    "float labels": ({"train": (IMAGES, LABELS / 1)}, "float64"),
    "ragged labels": ({"train": (IMAGES, [[0], [1, 2]])}, "labels of train"),
    "label 3": ({"train": (IMAGES, LABELS + 1)}, "1 to 3"),
    "label -1": ({"train": (IMAGES, LABELS - 1)}, "-1 to 1"),
    "name": ({"train": (IMAGES, LABELS), "a/b": (IMAGES, LABELS)}, "a/b"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_do_not_fit_are_refused(tmp_path, case):
    splits, named = WRONG[case]
    with pytest.raises(hp.UsageError) as caught:
        hp.write_pack(tmp_path / "a.h5", splits, "abc")
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_lie_otherwise_in_memory_give_the_same_pack(tmp_path):
    """In Fortran's order, backwards, mapped, labels of other types: the same values."""
    labels = LABELS % 2
    np.save(tmp_path / "x.npy", IMAGES)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    backwards = np.ascontiguousarray(IMAGES[::-1, ::-1])[::-1, ::-1]
    forms = [(IMAGES, labels), (np.asfortranarray(IMAGES), labels.astype(">i8")), (mapped, labels)]
    forms += [(backwards, labels > 0), (IMAGES[..., 0], torch.from_numpy(labels))]
    written = []
    for images, of_them in forms:
        hp.write_pack(tmp_path / "a.h5", {"train": (images, of_them)}, "ab", overwrite=True)
        written.append((tmp_path / "a.h5").read_bytes())
    assert written == [written[0]] * len(forms)
    patches = np.zeros((7, 3, 3, 60), "u1")  # of many channels, not channels first
    hp.write_pack(tmp_path / "b.h5", {"train": (patches, labels)}, "ab")
    assert hp.read_pack(tmp_path / "b.h5").image_shape == (3, 3, 60)


def test_what_hdf5_would_read_as_zeros_is_refused(tmp_path):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        images = file.create_dataset("x", (7, 5, 4), "u1", chunks=(2, 5, 4))
        images[:4] = 1
        with pytest.raises(hp.UsageError, match="images of train: /x is incomplete: 2 of 4 chunks"):
            hp.write_pack(tmp_path / "a.h5", {"train": (images, LABELS)}, "abc")


@pytest.mark.parametrize("classes", [[], [0, 1, 2], ["a", "", "c"], "aba"])
def test_classes_without_different_names_are_refused(tmp_path, classes):
    with pytest.raises(hp.UsageError, match="name"):
        hp.write_pack(tmp_path / "a.h5", {"train": (IMAGES, LABELS)}, classes)
    assert list(tmp_path.iterdir()) == []


def test_other_mistakes_are_refused_and_files_replaced_if_asked_only(tmp_path):
    splits, path = {"train": (IMAGES, LABELS)}, tmp_path / "a.h5"
    for made in ({"by": path}, {"mean": float("nan")}):
        with pytest.raises(hp.UsageError, match="JSON"):
            hp.write_pack(path, splits, "abc", made)
    with pytest.raises(hp.RunError, match=r"x\.h5"):
        hp.write_pack(tmp_path / "none" / "x.h5", splits, "abc")
    hp.write_pack(path, splits, "abc")
    before = path.read_bytes()
    with pytest.raises(hp.UsageError, match=r"a\.h5 exists"):
        hp.write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc")
    assert path.read_bytes() == before
    hp.write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc", overwrite=True)
    assert np.array_equal(arrays(path)[1], 2 - LABELS)
