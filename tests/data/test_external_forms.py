"""External HDF5 files as people have them: what is in each is the same images and labels."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from hpctrain.data.external import labels_note, read_external, split_labels
from hpctrain.data.loader import read_samples
from hpctrain.data.packed import read_again
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from tests.external import CLASSES, ROWS, SHAPE, pixels, write

IMAGES, LABELS = pixels()
ONE_HOT = np.eye(CLASSES)[LABELS]
LABEL_FORMS = {
    "one-hot floats": ONE_HOT,
    "one-hot integers": ONE_HOT.astype("i4"),
    "floats": LABELS.astype("f8"),
    "big endian floats": LABELS.astype(">f4"),
    "of PatchCamelyon": LABELS.reshape(-1, 1, 1, 1).astype("u1"),
    "of MATLAB": LABELS.reshape(1, -1).astype("f8"),
}


def contents(pack, name="train"):
    """Images and labels of a split, in the order of its index."""
    with Split(pack, name) as split:
        shape = (len(split), *split.image_shape)
        return split.gather(np.arange(len(split)), np.empty(shape, split.dtype)), split.labels


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("form", LABEL_FORMS)
def test_labels_of_any_form(tmp_path, form, chunks):
    plain = read_external(write(tmp_path / "a.h5", IMAGES, LABELS), "x", "y")
    path = write(tmp_path / "b.h5", IMAGES, LABELS)
    with h5py.File(path, "r+") as file:
        del file["y"]
        file.create_dataset("y", data=LABEL_FORMS[form], chunks=chunks or None)
    found = read_external(path, "x", "y")
    assert found.classes == plain.classes and found.uuid == plain.uuid
    for one, other in zip(contents(found), contents(plain), strict=True):
        assert np.array_equal(one, other) and one.dtype == other.dtype


@pytest.mark.parametrize("chunks", [None, (6, 7, 5, 3)])
@pytest.mark.parametrize(
    ("stored", "scale", "factor"),
    [
        (IMAGES.astype("u2") * 257, None, 1),
        (IMAGES.astype("u2"), 255.0, 1),
        (IMAGES.astype("u2") * 16, 4095.0, 16 * 255 / 4095),
        (IMAGES.astype("f4"), 255.0, 1),
        (IMAGES.astype("f8"), 255.0, 1),
        (IMAGES.astype("f2"), 255.0, 1),
        (IMAGES, 255.0, 1),
        ((IMAGES / 255).astype("f4"), None, 1),
        (IMAGES.astype("f4"), 1.0, 255),
    ],
)
def test_values_are_divided_by_the_scale(tmp_path, stored, scale, factor, chunks):
    plain = read_external(write(tmp_path / "a.h5", IMAGES, LABELS), "x", "y")
    path = write(tmp_path / "b.h5", stored, LABELS, chunks=chunks)
    found = read_external(path, "x", "y", block_rows=plain.external.block_rows, scale=scale)
    with Split(found, "train") as split, Split(plain, "train") as bytes_of:
        assert split.dtype.kind == "f"
        same = np.arange(20)
        if chunks:  # other blocks: other samples
            places = {row: i for i, row in enumerate(bytes_of._index.tolist())}
            same = np.array([i for i, row in enumerate(split._index.tolist()) if row in places])
            others = np.array([places[split._index[i]] for i in same])
        else:
            others = same
        values = read_samples(split, same).numpy()
        expected = read_samples(bytes_of, others).numpy() * factor
        assert len(same) >= 20 and np.allclose(
            values, expected, rtol=2e-3 if stored.dtype == "f2" else 1e-6
        )
    if scale not in (None, 1):
        assert found.uuid != read_external(path, "x", "y", scale=scale * 2).uuid


def test_what_the_scale_would_do_is_not_done_to_bytes(tmp_path):
    pack = read_external(write(tmp_path / "a.h5", IMAGES, LABELS), "x", "y")
    assert pack.dtype == np.uint8 and pack.external.scale == 0


@pytest.mark.parametrize("offset", [1, -3])
@pytest.mark.parametrize("step", [1, 5])
def test_labels_are_mapped(tmp_path, offset, step):
    path = write(tmp_path / "a.h5", IMAGES, LABELS * step + offset)
    mapped = read_external(path, "x", "y")
    assert mapped.classes == tuple(str(k * step + offset) for k in range(CLASSES))
    with Split(mapped, "train") as split:
        assert np.array_equal(split.labels, LABELS[split._index])
    again = read_again(path, mapped.external_arguments)
    assert (again.uuid, again.classes, again.splits) == (mapped.uuid, mapped.classes, mapped.splits)
    labels = ", ".join(mapped.classes)
    assert labels_note(mapped) == (
        f"/y has 4 classes, with the labels {labels}: they are mapped to 0 ... 3"
    )


def test_labels_without_gaps_are_left_alone(tmp_path):
    pack = read_external(write(tmp_path / "a.h5", IMAGES, LABELS), "x", "y")
    assert not pack.external.label_values and labels_note(pack) is None


@pytest.mark.parametrize("names", [("train", "test"), ("training", "val", "testing")])
def test_splits_that_the_file_has(tmp_path, names):
    """train/x and test/x in one file; nothing of one is in another."""
    parts = np.array_split(np.random.default_rng(0).permutation(ROWS), len(names))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, rows in zip(names, parts, strict=True):
            file[f"{name}/x"], file[f"{name}/y"] = IMAGES[rows], LABELS[rows]
    pack = read_external(tmp_path / "a.h5", "{split}/x", "{split}/y")
    assert len(pack.splits) == len(names) and list(pack.splits)[:: len(names) - 1] == [
        "train",
        "test",
    ]
    for name, rows in zip(pack.splits, parts, strict=True):
        images, labels = contents(pack, name)
        assert sorted(i.tobytes() for i in images) == sorted(i.tobytes() for i in IMAGES[rows])
        for image, label in zip(images, labels, strict=True):
            assert LABELS[(image == IMAGES).all((1, 2, 3))][0] == label
        assert pack.splits[name].samples == len(rows) == len(labels)
        with Split(pack, name) as split:
            group = names[list(pack.splits).index(name)]
            assert f"row {split._index[3]} of /{group}/x" in split.describe(3)
    again = read_again(tmp_path / "a.h5", pack.external_arguments)
    assert (again.uuid, again.splits) == (pack.uuid, pack.splits)
    with pytest.raises(
        UsageError, match="--split 0.8,0.2 draws splits, but --images {split}/x has"
    ):
        read_external(tmp_path / "a.h5", "{split}/x", "{split}/y", split="0.8,0.2")
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file[f"{names[-1]}/y"][2] = CLASSES
    with pytest.raises(UsageError, match=f"class {CLASSES} has no image in train"):
        read_external(tmp_path / "a.h5", "{split}/x", "{split}/y")


def test_images_and_labels_in_files_of_their_own(tmp_path):
    """As PatchCamelyon: six files, gzip, labels (N, 1, 1, 1)."""
    for name, rows in (
        ("train", slice(150)),
        ("valid", slice(150, 180)),
        ("test", slice(180, None)),
    ):
        mixed = np.random.default_rng(0).permutation(np.arange(ROWS)[rows])
        order = np.random.default_rng(1).permutation(ROWS)
        images, labels = IMAGES[order][mixed], LABELS[order][mixed]
        with h5py.File(tmp_path / f"p_{name}_x.h5", "w") as file:
            file.create_dataset("x", data=images, chunks=(4, 7, 5, 3), compression="gzip")
        with h5py.File(tmp_path / f"p_{name}_y.h5", "w") as file:
            file.create_dataset("y", data=labels.reshape(-1, 1, 1, 1), compression="gzip")
    names = "p_{split}_x.h5:x", "p_{split}_y.h5:y"
    pack = read_external(tmp_path / "p_train_x.h5", *names)
    assert {n: s.samples for n, s in pack.splits.items()} == {
        "train": 150,
        "validation": 30,
        "test": 31,
    }
    for name in pack.splits:
        images, labels = contents(pack, name)
        for image, label in zip(images, labels, strict=True):
            assert LABELS[(image == IMAGES).all((1, 2, 3))][0] == label
    one = read_external(tmp_path / "p_train_x.h5", "x", "p_train_y.h5:y")
    assert list(one.splits) == ["train", "test"]
    with h5py.File(tmp_path / "p_valid_y.h5", "r+") as file:
        file["y"][3] = (file["y"][3] + 1) % CLASSES
    Split(pack, "train").close()
    split_labels.cache_clear()
    with pytest.raises(UsageError, match="p_valid_y.h5: its labels are not those"):
        Split(pack, "validation")


@pytest.mark.parametrize("chunks", [None, True])
@pytest.mark.parametrize("gray", [False, True])
def test_files_of_matlab(tmp_path, gray, chunks):
    """Version 7.3: a block of text before HDF5, the axes turned round, labels 1 ... K as floats."""
    images = IMAGES[..., :1] if gray else IMAGES
    stored = images[..., 0].transpose(0, 2, 1) if gray else images.transpose(0, 3, 2, 1)
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file.create_dataset("X", data=stored, chunks=chunks, compression="gzip" if chunks else None)
        file["y"] = (LABELS + 1.0).reshape(1, -1)
    with open(tmp_path / "a.mat", "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(128))
    pack = read_external(tmp_path / "a.mat", "X", "y", split="1")
    assert pack.image_shape == (*SHAPE[:2], 1 if gray else 3) and pack.classes == tuple("1234")
    assert pack.external.layout == ("NWH" if gray else "NCWH")
    with Split(pack, "train") as split:
        index = split._index
    found, labels = contents(pack)
    assert np.array_equal(found, images[index]) and np.array_equal(labels, LABELS[index])
