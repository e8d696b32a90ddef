"""HDF5 files of other programs that hold several classes an image, or values: read, or refused.

How splits are drawn by them is in test_strata.py.
"""

from __future__ import annotations

import pickle

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import images_note, open_few_files
from tests.support.external import open_files, pixels, read, write

ROWS = 211
IMAGES, LABELS = pixels(ROWS)
FEW, MANY = 5, 30  # columns: held in memory, or read on demand
STORAGE = {
    "contiguous": {},
    "chunks": {"chunks": (8, 2)},
    "compressed": {"chunks": (50, 2), "compression": "gzip"},
}


def draw_classes(columns, unknown=False):
    """Classes (N, K) as a pack stores them."""
    random = np.random.default_rng(columns)
    targets = (random.random((ROWS, columns)) < 0.3).astype(np.uint8)
    if unknown:
        targets[random.random(targets.shape) < 0.2] = 255
    return targets


def marked(targets, mark, dtype):
    return np.where(targets == 255, mark, targets.astype("f8")).astype(dtype)


def write_targets(path, targets, images=IMAGES, fill=None, **storage):
    """A file of images and of targets "y", or of one data set for each of these by name."""
    named = targets if isinstance(targets, dict) else {"y": targets}
    with h5py.File(path, "w") as file:
        file["x"] = images
        for name, values in named.items():
            file.create_dataset(name, data=values, **storage)
            if fill is not None:
                file[name].attrs["_FillValue"] = values.dtype.type(fill)
    return path


def changed(values, place, value):
    values = values.copy()
    values[place] = value
    return values


def check_targets(pack, expected):
    """Each split has the rows of `expected` (N, K) that it draws, and all are in one split."""
    drawn = []
    for name, info in pack.splits.items():
        with hp.Split(pack, name) as split:
            assert np.array_equal(split.targets, expected[info.rows], equal_nan=True)
            some = np.arange(len(split))[::-3]
            found = split.read_targets(some)
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected[info.rows][some], equal_nan=True)
        drawn += info.rows.tolist()
    assert sorted(drawn) == list(range(len(expected)))


# What is read


@pytest.mark.parametrize("columns", [FEW, MANY])
@pytest.mark.parametrize(
    ("mark", "dtype", "fill"),
    [
        (0, "?", None),
        (255, "u1", None),
        (-1, "i1", None),
        (-1, ">i8", None),
        (np.nan, ">f4", None),
        (np.nan, "f2", None),
        (-9999, "f8", -9999),
    ],
)
def test_classes_of_any_form_are_the_same(tmp_path, columns, mark, dtype, fill):
    expected = draw_classes(columns, unknown=mark != 0)
    uuids = set()
    for storage in STORAGE.values():
        path = tmp_path / "a.h5"
        write_targets(path, marked(expected, mark, dtype), fill=fill, **storage)
        pack = read(path, kind="classes", block_rows=0)
        assert pack.targets == ("classes", tuple(f"y[{k}]" for k in range(columns)))
        check_targets(pack, expected)
        uuids.add(pack.uuid)
    plain = write_targets(tmp_path / "b.h5", expected)
    assert uuids == {read(plain, kind="classes", block_rows=0).uuid}


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", ["f4", ">f8", "f2", "i4", "u1"])
@pytest.mark.parametrize("columns", [2, MANY])
def test_values_of_any_form_are_float32(tmp_path, storage, dtype, columns):
    values = np.random.default_rng(0).integers(0, 200, (ROWS, columns)).astype(dtype)
    expected = values.astype("f4")
    if np.dtype(dtype).kind == "f":
        values[::5, 1] = np.nan
        expected[::5, 1] = np.nan
    path = write_targets(tmp_path / "a.h5", values, **STORAGE[storage])
    pack = read(path, kind="values", block_rows=0)
    assert pack.targets.columns == tuple(f"y[{k}]" for k in range(columns)) and not pack.classes
    check_targets(pack, expected)


def test_fill_values_are_unknown(tmp_path):
    expected = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("f4")
    expected[::4, 1] = np.nan
    stored = np.where(np.isnan(expected), np.float32(-99), expected)
    path = write_targets(tmp_path / "a.h5", stored, fill=-99)
    check_targets(read(path, kind="values", block_rows=0), expected)


def test_several_datasets_are_columns_with_their_names(tmp_path):
    random = np.random.default_rng(0)
    age = random.integers(20, 90, ROWS)
    mass = random.normal(70, 9, ROWS).astype("f4")
    sizes = random.normal(size=(ROWS, 3))
    path = write_targets(tmp_path / "a.h5", {"m/age": age, "mass": mass, "sizes": sizes})
    pack = read(path, labels="m/age,mass", kind="values", block_rows=0)
    assert pack.targets.columns == ("age", "mass")
    check_targets(pack, np.stack([age, mass], 1).astype("f4"))
    pack = read(path, labels="mass, sizes,m/age", kind="values", block_rows=0)
    assert pack.targets.columns == ("mass", "sizes[0]", "sizes[1]", "sizes[2]", "age")
    check_targets(pack, np.column_stack([mass, sizes, age]).astype("f4"))


@pytest.mark.parametrize("columns", [3, MANY])
@pytest.mark.parametrize("storage", STORAGE)
def test_targets_may_be_in_another_file_or_made_of_other_datasets(tmp_path, columns, storage):
    targets = draw_classes(columns)
    write_targets(tmp_path / "b.h5", targets, **STORAGE[storage])
    layout = h5py.VirtualLayout(targets.shape, "u1")
    layout[...] = h5py.VirtualSource(tmp_path / "b.h5", "y", targets.shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = IMAGES
        file["linked"] = h5py.ExternalLink("b.h5", "y")
        file.create_virtual_dataset("virtual", layout)
    for name in ("linked", "virtual"):
        check_targets(read(tmp_path / "a.h5", labels=name, kind="classes", block_rows=0), targets)


@pytest.mark.parametrize("kind", ["classes", "values"])
@pytest.mark.parametrize("columns", [3, MANY])
def test_splits_of_the_file_have_targets_of_their_own(tmp_path, kind, columns):
    targets = draw_classes(columns)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, part in {"train": slice(0, 150), "val": slice(150, ROWS)}.items():
            file[f"{name}/x"] = IMAGES[part]
            file[f"{name}/y"] = targets[part]
    pack = read(path, "{split}/x", "{split}/y", kind=kind)
    for name, part in {"train": targets[:150], "validation": targets[150:]}.items():
        with hp.Split(pack, name) as split:
            assert np.array_equal(split.targets, part[split.info.rows])


@pytest.mark.parametrize("columns", [3, MANY])
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_a_set_of_files_is_as_one_file(tmp_path, kind, columns):
    """Also from its index, which is kept for the next launch."""
    targets = draw_classes(columns, unknown=kind == "classes")
    expected = targets if kind == "classes" else targets.astype("f4")
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 7)):
        storage = [{}, {"chunks": (4, 2)}][number % 2]
        write_targets(tmp_path / f"{number}.h5", targets[rows], IMAGES[rows], **storage)
    one = read(write_targets(tmp_path / "one", targets), kind=kind, block_rows=0)
    for _ in range(2):
        pack = read(tmp_path / "*.h5", kind=kind, block_rows=0, cache_dir=tmp_path / "cache")
        assert pack.targets == one.targets
        check_targets(pack, expected)
        for name, info in one.splits.items():
            assert np.array_equal(pack.splits[name].rows, info.rows)


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_a_file_of_a_set_with_other_targets_is_another(tmp_path, kind):
    def probes(targets):
        for number, rows in enumerate(np.array_split(np.arange(ROWS), 7)):
            write_targets(tmp_path / f"{number}.h5", targets[rows], IMAGES[rows])
        return read(tmp_path / "*.h5", kind=kind, block_rows=0).splits["train"].files.crc32

    targets = draw_classes(3)
    changed_files = probes(targets) != probes(changed(targets, (-1, 2), 1 - targets[-1, 2]))
    assert changed_files.tolist() == [False] * 6 + [True]


def test_few_files_of_a_set_are_open_for_long_targets(tmp_path, monkeypatch):
    open_few_files(monkeypatch, 8)
    targets = draw_classes(MANY)
    for row in range(60):
        named = {"y": targets[row : row + 1], "z": targets[row : row + 1]}
        write_targets(tmp_path / f"{row:02}.h5", named, IMAGES[row : row + 1])
    pack = read(tmp_path / "*.h5", labels="y,z", kind="classes", block_rows=0)
    with hp.Split(pack, "train") as split:
        assert len(split.targets) == len(split)
        assert len(open_files(tmp_path)) <= 1 + 8 + 8  # the first, images, targets
    assert not open_files(tmp_path)


@pytest.mark.parametrize("columns", [1, 3, MANY])
def test_a_file_may_be_one_image_with_its_targets(tmp_path, columns):
    targets = draw_classes(columns)[:40]
    for number, target in enumerate(targets):
        values = target[0] if columns == 1 else target
        write(tmp_path / f"{number:02}.h5", IMAGES[number], values)
    pack = read(tmp_path / "*.h5", layout="HWC", kind="classes", block_rows=0)
    check_targets(pack, targets)


def test_long_targets_are_neither_sent_nor_held(tmp_path):
    """Those of 10,000 classes: what rank 0 sends to all is a hundredth of them."""
    targets = (np.random.default_rng(0).random((ROWS, 10_000)) < 0.01).astype("u1")
    path = write_targets(tmp_path / "a.h5", targets)
    pack = read(path, kind="classes", block_rows=0)
    names = len(pickle.dumps(pack.targets))
    assert len(pickle.dumps(pack)) - names < targets.nbytes // 100
    with hp.Split(pack, "train") as split:
        split.hold(range(len(split)))
        assert "targets" not in split._held.arrays
        assert np.array_equal(split.read_targets(np.array([3])), targets[split.info.rows[[3]]])


def test_targets_that_were_replaced_are_another_file(tmp_path):
    targets = draw_classes(MANY)
    path = write_targets(tmp_path / "a.h5", targets)
    pack = read(path, kind="classes", block_rows=0)
    with h5py.File(path, "r+") as file:
        file["y"][...] = 1 - targets
    with pytest.raises(hp.UsageError, match="was replaced or overwritten"):
        hp.Split(pack, "train")
    assert read(path, kind="classes", block_rows=0).uuid != pack.uuid


def test_each_split_of_blocks_and_of_whole_files_has_all_classes(tmp_path):
    targets = draw_classes(8)
    targets[:, 0] = 0
    targets[::9, 0] = 1
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=IMAGES, chunks=(4, *IMAGES.shape[1:]))
        file["y"] = targets
    for number, rows in enumerate(np.array_split(np.arange(ROWS), 30)):
        write_targets(tmp_path / f"{number:02}.hdf", targets[rows], IMAGES[rows])
    chunks = read(path, kind="classes", split="0.6,0.2,0.2")
    assert chunks.block_rows == 4
    files = read(
        tmp_path / "*.hdf", kind="classes", split="0.6,0.2,0.2", group="file", block_rows=0
    )
    for pack in (chunks, files):
        check_targets(pack, targets)
        for name, share in {"train": 0.6, "validation": 0.2, "test": 0.2}.items():
            with hp.Split(pack, name) as split:
                assert abs(len(split) - share * ROWS) < 8
                counts = split.count_classes()
                assert (np.abs(counts / targets.sum(0) - share) < 0.13).all()


# What is said


def test_unknown_and_constant_entries_are_said(tmp_path):
    targets = draw_classes(4).astype("f4")
    targets[:, 3] = 0
    targets[5:9, 1] = np.nan
    targets[7:9, 0] = -1
    targets[0, 2] = 7
    note = images_note(read(write_targets(tmp_path / "a.h5", targets, fill=7), kind="classes"))
    assert "of 4 classes, any number an image: y[0], y[1], y[2], y[3]" in note
    assert "-1, 7 stand for unknown in /y" in note
    assert "7 of 844 entries are unknown (y[0] 2, y[1] 4, y[2] 1)" in note
    assert "1 of 4 classes are 1 in no image: y[3]" in note
    values = {"t": 1.6e9 + np.arange(ROWS, dtype="f8"), "u": np.arange(ROWS, dtype="f8")}
    path = write_targets(tmp_path / "b.h5", values)
    note = images_note(read(path, labels="t,u", kind="values"))
    assert "values of /t are rounded to float32" in note and "/u" not in note


def test_numbers_that_are_likely_values_are_said(tmp_path):
    path = write_targets(tmp_path / "a.h5", np.arange(ROWS) // 2)
    said = "106 different labels are taken for classes: --task regress learns values"
    assert said in images_note(read(path, split="1", block_rows=0))
    with pytest.raises(hp.UsageError, match=said):
        read(path, split="0.9,0.1", block_rows=0)


def test_a_rare_class_that_a_split_lacks_is_named(tmp_path):
    targets = draw_classes(3)
    targets[:, 2] = 0
    targets[7, 2] = 1
    note = images_note(
        read(write_targets(tmp_path / "a.h5", targets), kind="classes", block_rows=0)
    )
    assert "test has no image of 1 of 3 classes: y[2] (1 image)" in note


# What is refused: one line, with the numbers


HOT = np.eye(4)[LABELS]
CLASSES = draw_classes(3)
VALUES = np.random.default_rng(0).normal(size=(ROWS, 2))
REFUSED = {  # kind, targets, and what the line says
    "several classes without --task": ("class", CLASSES, "give --task multilabel"),
    "with unknown ones": ("class", changed(HOT, (3, 1), np.nan), "give --task multilabel"),
    "values without --task": ("class", VALUES, "give --task regress"),
    "a column without --task": ("class", VALUES[:, 0], "if these are values, give --task regress"),
    "2": ("classes", changed(CLASSES, (6, 2), 2), "hold 2 in row 6, column 2"),
    "a half": ("classes", changed(HOT, (6, 2), 0.5), "hold 0.5 in row 6, column 2"),
    "numbers of classes": ("classes", LABELS, "fill values; --task classify learns other numbers"),
    "a column of values": ("classes", VALUES[:, 0], "fill values; --task regress learns other"),
    "text for classes": (
        "classes",
        np.array([b"a"] * ROWS),
        "/y are strings, and --task multilabel",
    ),
    "text for values": ("values", np.array([b"7"] * ROWS), "--task regress learns numbers"),
    "enumeration": (
        "values",
        LABELS.astype(h5py.enum_dtype({"a": 0, "b": 1}, "u1")),
        "are an enumeration",
    ),
    "complex values": ("values", VALUES * 1j, "are complex128"),
    "complex classes": ("classes", CLASSES * 1j, "are complex128"),
    "infinity": ("values", changed(VALUES, (6, 1), -np.inf), "hold -inf in row 6, column 1, not"),
    "beyond float32": ("values", changed(VALUES, (6, 1), 1e300), "too large for float32"),
    "all unknown": (
        "classes",
        changed(CLASSES, (slice(None), 1), 255),
        "y[1] is unknown in all 211 training images: leave it out",
    ),
    "no value": (
        "values",
        changed(VALUES, slice(None), np.nan),
        "y[0], y[1] is unknown in all 211",
    ),
    "transposed": ("values", VALUES.T, "file['/y'][:].T"),
    "too few": ("classes", CLASSES[:-1], "(210, 3), and 211 images need (211,) or (211, K)"),
    "three axes": ("values", VALUES[:, None], "(211, 1, 2)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_targets_that_cannot_be_learned_are_refused_in_one_line(tmp_path, case):
    kind, targets, said = REFUSED[case]
    path = write_targets(tmp_path / "a.h5", targets)
    with pytest.raises(hp.UsageError) as refused:
        read(path, kind=kind)
    line = str(refused.value)
    assert str(path) in line and said in line and "\n" not in line
    assert len(line) < 400


def test_what_files_of_a_set_have_in_common_is_compared(tmp_path):
    write_targets(tmp_path / "a.h5", CLASSES)
    for targets in (draw_classes(4), CLASSES.astype("f4")):
        write_targets(tmp_path / "b.h5", targets)
        with pytest.raises(hp.UsageError, match=r"b\.h5 holds .*a\.h5 images .*3 of uint8"):
            read(tmp_path / "*.h5", kind="classes")
    with pytest.raises(hp.UsageError, match="names a dataset twice"):
        read(tmp_path / "a.h5", labels="y,y", kind="classes")
    with pytest.raises(hp.UsageError, match="there is no dataset 'z'"):
        read(tmp_path / "a.h5", labels="y,z", kind="classes")


def test_targets_larger_than_rank_0_reads_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = IMAGES
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space = h5py.h5s.create_simple((ROWS, 10**8))
        properties.set_chunk((ROWS, 10**6))
        h5py.h5d.create(file.id, b"y", h5py.h5t.STD_U8LE, space, properties)
    with pytest.raises(hp.UsageError, match=r"19\.7 GiB, .* at most 8 GiB: name fewer columns"):
        read(tmp_path / "a.h5", kind="classes")
