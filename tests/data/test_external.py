"""HDF5 files of other programs: every image is found, with its label, in one split, or the file is
refused.
"""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as hp
from tests.numerics.test_orders import mix
from tests.support.api import images_note, make_order
from tests.support.external import CLASSES, ROWS, contents, pixels, read, write

IMAGES, LABELS = pixels()
NCHW = IMAGES.transpose(0, 3, 1, 2)
CHUNKS = {"chunks": (6, 7, 5, 3)}
SPLITS = ("train", "validation", "test")
STORED = {  # images as stored, how they are stored, layout
    "contiguous": (IMAGES, {}, None),
    "NCHW": (NCHW, {}, "NCHW"),
    "gray": (IMAGES[..., 0], {}, None),
    "chunks": (IMAGES, CHUNKS, None),
    "chunks of one": (IMAGES, {"chunks": (1, 7, 5, 3), "compression": "gzip"}, None),
    "cut chunks": (IMAGES, {"chunks": (4, 3, 2, 2), "compression": "lzf", "shuffle": True}, None),
    "chunks, NCHW": (NCHW, {"chunks": (5, 2, 7, 5), "fletcher32": True}, "NCHW"),
    "chunks, gray": (IMAGES[..., 1], {"chunks": (9, 4, 5), "compression": "gzip"}, "NHW"),
    "one chunk": (IMAGES, {"chunks": IMAGES.shape}, "NHWC"),
    "endless": (IMAGES, {"chunks": (300, 7, 5, 3), "maxshape": (None, 7, 5, 3)}, "NHWC"),
}


def everything(pack):
    """All images and labels."""
    parts = zip(*(contents(pack, name) for name in pack.splits), strict=True)
    return [np.concatenate(part) for part in parts]


def as_set(images, labels):
    return sorted((x.tobytes(), int(y)) for x, y in zip(images, labels, strict=True))


def rows_of(path, **settings):
    """The rows of the file in each split, in its order: the value of an image is its row."""
    with h5py.File(path, "r+") as file:
        count, storage = file["x"].shape[0], {"chunks": file["x"].chunks and (6, 1, 1)}
        del file["x"]
        file.create_dataset("x", data=np.arange(count, dtype="f8").reshape(-1, 1, 1), **storage)
    pack = read(path, "x", "y", max_value=1.0, **settings)
    return {name: contents(pack, name)[0].ravel().astype(int) for name in pack.splits}


# What is read


SIGNED = [f"{order}i{size}" for size in (1, 2, 4, 8) for order in "<>"]
UNSIGNED = [f"{order}u{size}" for size in (2, 4, 8) for order in "<>"]
REAL = [f"{order}f{size}" for size in (2, 4, 8) for order in "<>"]
EVERY_TYPE = ["u1", "?", *SIGNED, *UNSIGNED, *REAL]
READ_AS = {"bool": "uint8", "uint32": "int64", "uint64": "float64"}  # others: native order


def as_type(images, dtype):
    """The same images with values of the whole range of a type."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return images > 99
    if dtype.kind == "f":
        return ((images - 99.0) / 256).astype(dtype)
    low = np.iinfo(dtype).min
    values = images.astype(object) * (1 << 8 * dtype.itemsize - 8) + low
    values[0, 0, 0] = np.iinfo(dtype).max
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", EVERY_TYPE)
@pytest.mark.parametrize("case", ["contiguous", "chunks"])
def test_values_of_any_type_and_byte_order_are_read(tmp_path, case, dtype):
    images, storage, layout = STORED[case]
    images = as_type(images, dtype)
    pack = read(write(tmp_path / "a.h5", images, LABELS, **storage), layout=layout)
    expected = np.dtype(READ_AS.get(images.dtype.name, images.dtype.name))
    assert pack.dtype == expected and pack.dtype.isnative
    assert pack.scale.dtype == expected.name
    found = everything(pack)
    assert found[0].dtype == expected
    assert as_set(*found) == as_set(images.astype(expected), LABELS)


@pytest.mark.parametrize("dtype", ["uint8", ">i2", "bool", "float16", "float64"])
@pytest.mark.parametrize("case", STORED)
def test_every_image_is_in_one_split_with_its_label(tmp_path, case, dtype):
    images, storage, layout = STORED[case]
    images = as_type(images, dtype)
    path = write(tmp_path / "a.h5", images, LABELS, **storage)
    whole = storage.get("chunks", (0,))[0] > 200  # one chunk is not divided
    pack = read(path, "x", "y", layout, "1" if whole else None)
    if layout == "NCHW":
        images = images.transpose(0, 2, 3, 1)
    images = images.reshape(ROWS, *images.shape[1:3], -1)
    assert (pack.image_shape, pack.classes) == (images.shape[1:], ("0", "1", "2", "3"))
    found = everything(pack)
    read_type = "uint8" if dtype == "bool" else np.dtype(dtype).newbyteorder("=")
    assert found[0].dtype == read_type
    assert as_set(*found) == as_set(images.astype(read_type), LABELS)


@pytest.mark.parametrize("name", ["scale-offset", "Blosc", "Zstd", "Bitshuffle"])
def test_any_filter_that_hdf5_has_is_read(tmp_path, name):
    if name == "scale-offset":
        compression = {"scaleoffset": 0}
    else:
        compression = getattr(pytest.importorskip("hdf5plugin"), name)()
    path = write(tmp_path / "a.h5", IMAGES, LABELS, **CHUNKS, **compression)
    assert as_set(*everything(read(path, "x", "y"))) == as_set(IMAGES, LABELS)


@pytest.mark.parametrize("chunks", [None, True])
@pytest.mark.parametrize("gray", [False, True])
def test_files_of_matlab_are_recognized(tmp_path, gray, chunks):
    """Version 7.3: a block of text before HDF5, the axes turned round, labels 1 ... K as floats."""
    images = IMAGES[..., :1] if gray else IMAGES
    stored = images[..., 0].transpose(0, 2, 1) if gray else images.transpose(0, 3, 2, 1)
    with h5py.File(tmp_path / "a.mat", "w", userblock_size=512) as file:
        file.create_dataset("X", data=stored, chunks=chunks)
        file["y"] = (LABELS + 1.0).reshape(1, -1)
    with open(tmp_path / "a.mat", "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(128))
    pack = read(tmp_path / "a.mat", "X", "y", split="1")
    assert (pack.image_shape, pack.classes) == (images.shape[1:], tuple("1234"))
    assert as_set(*everything(pack)) == as_set(images, LABELS)


@pytest.mark.parametrize("chunks", [None, CHUNKS["chunks"]])
@pytest.mark.parametrize(
    ("stored", "max_value", "factor"),
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
def test_values_are_divided_by_the_largest_value(tmp_path, stored, max_value, factor, chunks):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=chunks)
    plain = read(path, "x", "y", split="1")
    assert plain.dtype == np.uint8
    path = write(tmp_path / "b.h5", stored, LABELS, chunks=chunks)
    found = read(path, "x", "y", split="1", max_value=max_value)
    with hp.Split(found, "train") as split, hp.Split(plain, "train") as of_bytes:
        assert split.dtype == stored.dtype
        values = hp.read_samples(split, range(50)).numpy()
        expected = hp.read_samples(of_bytes, range(50)).numpy() * factor
    tolerance = 2e-3 if stored.dtype == "f2" else 1e-6
    assert np.allclose(values, expected, rtol=tolerance)
    if max_value == 255:
        assert np.array_equal(values, expected)  # with the same bits as bytes


# Labels


LABEL_FORMS = {
    **{kind: LABELS.astype(kind) for kind in ("u1", *SIGNED, *UNSIGNED, *REAL)},
    "a column": LABELS[:, None],
    "one-hot floats": np.eye(CLASSES)[LABELS],
    "one-hot integers": np.eye(CLASSES)[LABELS].astype("i4"),
    "one-hot, big endian": np.eye(CLASSES)[LABELS].astype(">u2"),
    "texts of numbers": LABELS.astype("S2").astype(h5py.string_dtype()),
    "one-hot truth": np.eye(CLASSES, dtype=bool)[LABELS],
    "digits": LABELS.astype("S2"),
    "of PatchCamelyon": LABELS.reshape(-1, 1, 1, 1).astype("u1"),
    "of MATLAB": LABELS.reshape(1, -1).astype("f8"),
}


@pytest.mark.parametrize("form", LABEL_FORMS)
def test_labels_of_any_form_are_the_same(tmp_path, form):
    plain = read(write(tmp_path / "a.h5", IMAGES, LABELS), "x", "y")
    found = read(write(tmp_path / "b.h5", IMAGES, LABEL_FORMS[form]), "x", "y")
    assert (found.classes, found.uuid) == (plain.classes, plain.uuid)
    for one, other in zip(contents(found), contents(plain), strict=True):
        assert np.array_equal(one, other) and one.dtype == other.dtype


def test_truth_values_are_0_and_1(tmp_path):
    pack = read(write(tmp_path / "a.h5", IMAGES, LABELS > 1), "x", "y", split="1", block_rows=0)
    assert pack.classes == ("0", "1")
    assert as_set(*everything(pack)) == as_set(IMAGES, LABELS > 1)


@pytest.mark.parametrize("kind", ["S9", h5py.string_dtype(), h5py.string_dtype("utf-8", 9)])
def test_strings_are_names_of_classes_in_sorted_order(tmp_path, kind):
    names = np.array(["zoé".encode(), b"10", b"9", b"ant"])  # not all are numbers
    path = write(tmp_path / "a.h5", IMAGES, names[LABELS].astype(kind).reshape(-1, 1))
    pack = read(path, "x", "y", split="1", block_rows=0)
    assert pack.classes == ("10", "9", "ant", "zoé")
    assert as_set(*everything(pack)) == as_set(IMAGES, np.array([3, 0, 1, 2])[LABELS])


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", ["a.h5", "*.h5"])
def test_labels_of_another_axis_than_the_first_are_refused_with_what_moves_it(tmp_path, axis, name):
    """As climate fields (lat, lon, time)."""
    images = IMAGES[:90, ..., 0]
    path = write(tmp_path / "a.h5", np.moveaxis(images, 0, axis), LABELS[:90, None])
    shape = (7, 90, 5) if axis == 1 else (7, 5, 90)
    text = refusal(tmp_path / name)
    assert f"/y have shape (90, 1), and the images /x {shape}" in text
    assert f"but axis {axis} has 90; write them anew" in text
    with h5py.File(path, "a") as file:
        exec(text.partition("anew, ")[2], {"numpy": np, "file": file})
        for old, new in (("x", "old"), ("new", "x")):
            file.move(old, new)
    pack = read(path)
    assert as_set(*everything(pack)) == as_set(images[..., None], LABELS[:90])
    one_hot = write(tmp_path / "one.h5", IMAGES[:1], np.eye(7)[3])  # of as many classes as lines
    assert read(one_hot, split="1").image_shape == (7, 5, 3)


def test_labels_that_are_marked_as_missing_are_refused(tmp_path):
    """By an attribute of netCDF; they would be a class of their own."""
    for number, (values, missing) in enumerate({"i1": -127, "f4": -9999, "u1": 255}.items()):
        labels = LABELS.astype(values)
        labels[3::20] = missing
        path = write(tmp_path / f"{number}.h5", IMAGES, labels)
        assert len(read(path).classes) == CLASSES + 1
        with h5py.File(path, "a") as file:
            file["y"].attrs["_FillValue"] = np.array([missing], values)
        count = len(labels[3::20])
        text = f"labels /y hold {missing}, their _FillValue, {count} times, first in row 3: take"
        assert text in refusal(path)
        with h5py.File(path, "a") as file:
            file["y"][3::20] = 0
        assert len(read(path).classes) == CLASSES


@pytest.mark.parametrize("name", ["ant", "zoé"])
def test_characters_are_joined_to_names(tmp_path, name):
    """As netCDF-3, and netCDF-4 by programs that know no strings, hold them."""
    names = np.array([name.encode(), b"bee", b"c", b"locust"])
    characters = names[LABELS][:, None].view("S1")
    pack = read(write(tmp_path / "a.h5", IMAGES, characters), split="1", block_rows=0)
    assert set(pack.classes) == {name, "bee", "c", "locust"}
    order = np.array([pack.classes.index(text.decode()) for text in names])
    assert as_set(*everything(pack)) == as_set(IMAGES, order[LABELS])


def test_names_of_an_enumeration_are_names_of_classes(tmp_path):
    kind = h5py.enum_dtype({"dog": 0, "cat": 1, "ant": 7}, "i4")
    values = np.array([0, 1, 7, 5])[LABELS].astype(kind)  # 5 has no name
    pack = read(write(tmp_path / "a.h5", IMAGES, values), "x", "y", split="1", block_rows=0)
    assert pack.classes == ("5", "ant", "cat", "dog")
    assert as_set(*everything(pack)) == as_set(IMAGES, np.array([3, 2, 1, 0])[LABELS])


@given(st.lists(st.integers(-(2**40), 2**40), min_size=CLASSES, max_size=CLASSES, unique=True))
def test_labels_are_mapped_to_classes_in_ascending_order(tmp_path_factory, values):
    values = np.sort(values)
    path = write(tmp_path_factory.mktemp("labels") / "a.h5", IMAGES, values[LABELS])
    pack = read(path, "x", "y", split="1", block_rows=0)
    assert pack.classes == tuple(map(str, values))
    assert as_set(*everything(pack)) == as_set(IMAGES, LABELS)


# Splits that the file has


@pytest.mark.parametrize("names", [("train", "test"), ("training", "val", "testing")])
def test_splits_of_the_file_are_kept(tmp_path, names):
    parts = np.array_split(np.random.default_rng(0).permutation(ROWS), len(names))
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, rows in zip(names, parts, strict=True):
            file[f"{name}/x"], file[f"{name}/y"] = IMAGES[rows], LABELS[rows]
    pack = read(path, "{split}/x", "{split}/y")
    assert list(pack.splits) == (["train", "test"] if len(names) == 2 else list(SPLITS))
    for name, rows in zip(pack.splits, parts, strict=True):
        assert as_set(*contents(pack, name)) == as_set(IMAGES[rows], LABELS[rows])
    with pytest.raises(hp.UsageError, match=r"--split"):
        read(path, "{split}/x", "{split}/y", split="0.8,0.2")
    same, other = ("val", "valid") if "val" in names else ("train", "training")
    with h5py.File(path, "r+") as file:
        file[other] = file[same]
    with pytest.raises(hp.UsageError, match="are both"):
        read(path, "{split}/x", "{split}/y")
    with h5py.File(path, "r+") as file:
        del file[other]
        file[f"{names[-1]}/y"][2] = CLASSES
    with pytest.raises(hp.UsageError, match=f"class {CLASSES} has no image in train"):
        read(path, "{split}/x", "{split}/y")


def test_a_file_of_links_joins_images_and_labels_in_files_of_their_own(tmp_path):
    """As PatchCamelyon: six files, gzip, labels (N, 1, 1, 1)."""
    order = np.random.default_rng(1).permutation(ROWS)
    parts = dict(zip(("train", "valid", "test"), np.split(order, [150, 180]), strict=True))
    for name, rows in parts.items():
        with h5py.File(tmp_path / f"p_{name}_x.h5", "w") as file:
            storage = {"chunks": (4, 7, 5, 3), "compression": "gzip"}
            file.create_dataset("x", data=IMAGES[rows], **storage)
        with h5py.File(tmp_path / f"p_{name}_y.h5", "w") as file:
            file.create_dataset("y", data=LABELS[rows].reshape(-1, 1, 1, 1), compression="gzip")
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for name in parts:
            for part in "xy":
                file[f"{name}/{part}"] = h5py.ExternalLink(f"p_{name}_{part}.h5", part)
    pack = read(tmp_path / "p.h5", "{split}/x", "{split}/y")
    assert pack.path == str(tmp_path / "p.h5")  # that `evaluate` opens again
    for name, rows in zip(SPLITS, parts.values(), strict=True):
        assert as_set(*contents(pack, name)) == as_set(IMAGES[rows], LABELS[rows])
    with h5py.File(tmp_path / "p.h5", "r+") as file:
        del file["test"]
        file["test"] = h5py.ExternalLink("none.h5", "/")
    with pytest.raises(hp.UsageError, match=r"none\.h5"):
        read(tmp_path / "p.h5", "{split}/x", "{split}/y")


# Splits that are drawn: samples one by one, or blocks; tests/data/test_splits.py has the shares


def test_blocks_are_whole_chunks_in_random_splits(tmp_path):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, **CHUNKS)
    found = rows_of(path, split="0.7,0.1,0.2", block_rows=0)  # chunks are never divided
    assert sorted(np.concatenate(list(found.values()))) == list(range(ROWS))
    splits = np.empty(ROWS, int)
    for number, name in enumerate(SPLITS):
        splits[found[name]] = number
        assert abs(len(found[name]) - ROWS * (0.7, 0.1, 0.2)[number]) <= 12
    assert all(len(set(splits[first : first + 6])) == 1 for first in range(0, ROWS, 6))
    other = rows_of(path, split="0.7,0.1,0.2", block_rows=0, seed=1)
    assert set(found["test"]) != set(other["test"])


@pytest.mark.parametrize("ordered", [True, False])
def test_blocks_leave_each_split_its_share_of_every_class(tmp_path, ordered):
    images, labels = pixels(20_011, (2, 1, 1), 97, ordered=ordered)
    pack = read(write(tmp_path / "a.h5", images, labels), "x", "y")
    found = contents(pack, "test")[1]
    shares = np.bincount(found, minlength=97) / np.bincount(labels)
    assert 0.9 * 2001 < len(found) < 1.1 * 2001
    assert 0.01 < shares.min() < shares.max() < 0.25


@pytest.mark.parametrize("name", ["partition", "global", "blocks"])
@pytest.mark.parametrize("storage", [{}, {"chunks": (2, 4, 1)}], ids=["contiguous", "chunks"])
def test_a_file_ordered_by_class_gives_mixed_batches(tmp_path, name, storage):
    """With the order that training makes of it; without drawing its blocks it would not."""
    images, labels = pixels(20_011, (4, 1, 1), 10)
    path = write(tmp_path / "a.h5", images[..., 0], labels, **storage)
    pack = read(path, "x", "y", block_rows=None if name == "blocks" else 0)
    with hp.Split(pack, "train") as split:
        partition, blocks = hp.cut_epoch(len(split), 128, 2), pack.block_rows
        settings = {"block_rows": blocks or 1, "window_blocks": 5000}
        order = make_order(name, partition, 0, **settings)
        assert 1e-3 < mix(order, split.targets, 64) < 0.999
        plain = make_order("partition", partition, 0)
        assert mix(plain, np.sort(split.targets), 64) < 1e-9


# Identity


def test_the_identity_is_of_what_the_file_holds(tmp_path):
    def uuid(images=IMAGES, labels=LABELS, layout=None, at=("x", "y"), name="a.h5", **settings):
        storage = {"chunks": settings.pop("chunks", None)}
        path = write(tmp_path / name, images, labels, at, **storage)
        return read(path, *at, layout, **settings).uuid

    first = uuid()
    assert uuid(name="b.h5") == first == uuid(labels=LABELS.astype(">u2")[:, None])
    assert uuid(**CHUNKS) == first  # the same values, stored otherwise
    changed = IMAGES.copy()
    changed[ROWS - 1, 6, 4, 2] ^= 1
    others = [
        uuid(changed),
        uuid(labels=LABELS[::-1].copy()),
        uuid(NCHW, layout="NCHW"),
        uuid((IMAGES / 255).astype("f4")),
        uuid(nodata=3.0),
        uuid(nodata=4.0),
        uuid(max_value=99.0),
        uuid(at=("x", "z")),
        uuid(IMAGES[..., :1]),
        uuid(IMAGES[..., 0]),
    ]
    assert len({first, *others}) == 11
    wide = IMAGES.astype("i8") + 2**40
    assert uuid(wide) == uuid(wide.astype(">i8"))
    assert uuid(wide) != uuid(changed.astype("i8") + 2**40), "float32 would not tell them apart"
    assert uuid(wide, max_value=2.0) != uuid(wide, max_value=4.0)


# What cannot be used: one line, which names the file; more of it in tests/contract/test_refused.py


def created(kind, **settings):
    """A data set of a type or a storage that h5py does not make itself; nothing is written."""

    def make(file, name):
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for setting, value in settings.items():
            getattr(properties, setting)(*value)
        space = h5py.h5s.create_simple(IMAGES.shape)
        h5py.h5d.create(file.id, name.encode(), kind, space, properties)

    return make


def bfloat16():
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    return kind


def packed(bits):
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(bits)
    return kind


def truth():
    kind = h5py.h5t.enum_create(h5py.h5t.STD_I32LE)
    for value, name in enumerate((b"FALSE", b"TRUE")):
        kind.enum_insert(name, value)
    return kind


def half_written(file, name):
    file.create_dataset(name, (ROWS,), "u1", chunks=(20,))[:60] = 1


def changed(values, row, value):
    values = values.copy()
    values[row] = value
    return values


U8, EARLY = h5py.h5t.STD_U8LE, (h5py.h5d.ALLOC_TIME_EARLY,)
UNKNOWN = {"set_chunk": (CHUNKS["chunks"],), "set_filter": (32767, 1)}
FLOATS = IMAGES.astype("f4")
BAD = {  # a data set, its values or what makes it, and what is named beside the file
    "half the labels": ("y", half_written, "/y"),
    "unknown filter": ("x", created(U8, **UNKNOWN), "32767"),
    "bfloat16": ("x", created(bfloat16(), set_alloc_time=EARLY), "/x"),
    "12 of 16 bits": ("x", created(packed(12), set_alloc_time=EARLY), "/x"),
    "truth of 32 bits": ("x", created(truth(), set_alloc_time=EARLY), "bool of 4 bytes"),
    "long floats": ("x", IMAGES.astype("g"), "[:].astype('float64')"),
    "enumeration": ("x", IMAGES.astype(h5py.enum_dtype({"a": 0, "b": 1}, "u1")), "as uint8"),
    "complex": ("x", IMAGES * 1j, "hp.write_pack"),
    "fields": ("x", np.zeros((ROWS, 7, 5), [("r", "u1"), ("g", "u1")]), "hp.write_pack"),
    "text": ("x", np.array([b"abc"] * ROWS), "hp.write_pack"),
    "flat": ("x", IMAGES.reshape(ROWS, -1), "[:].reshape(N, H, W)"),
    "other layout": ("x", NCHW, "NHWC, NCHW or (of MATLAB) NCWH"),
    "five dimensions": ("x", IMAGES[None], "(1, 211, 7, 5, 3): write them anew"),
    "a number": ("x", np.uint8(3), "/x"),
    "no images": ("x", IMAGES[:0], "(0, 7, 5, 3): they hold nothing"),
    "one name in two forms": ("y", np.array(["e\u0301", "\xe9"], object)[LABELS % 2], r"\xe9"),
    "a name and a space": ("y", np.array([b"ant", b"ant "])[LABELS % 2], "'ant '"),
    "a null": ("x", h5py.Empty("u1"), "/x"),
    "half hot": ("y", changed(np.eye(CLASSES)[LABELS], 5, 0.5), "row 5 is [0.5, 0.5, 0.5, 0.5]"),
    "code page 1252": (
        "y",
        np.array([b"Ant", b"B\xe4r"])[LABELS % 2],
        "not UTF-8, such as b'B\\xe4r'",
    ),
    "NaN label": ("y", changed(LABELS.astype("f4"), 5, np.nan), "row 5"),
    "large label": ("y", changed(LABELS.astype("f8"), 5, 2.0**60), "row 5"),
    "complex labels": ("y", LABELS * 1j, "complex128"),
    "a label without a name": ("y", changed(np.array(["a"] * ROWS, "S"), 5, b""), "row 5"),
    "two hot": ("y", changed(np.eye(CLASSES, dtype=bool)[LABELS], 5, True), "row 5"),
    "labels beyond int64": ("y", LABELS.astype("u8") + np.uint64(2**63), "/y"),
    "NaN image": ("x", changed(FLOATS, -1, np.nan), "/x[210]"),
    "too large for float32": ("x", changed(FLOATS.astype("f8"), 0, 1e39), "/x[0]"),
    "class not trained on": ("y", np.repeat([0, 1], [210, 1]), "class 1"),
}


def refusal(path, **how):
    with pytest.raises(hp.UsageError) as caught:
        read(path, **how)
    assert "\n" not in str(caught.value) and str(path.parent) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path, case):
    name, value, named = BAD[case]
    path = write(tmp_path / "a.h5", IMAGES, LABELS)
    how = {"block_rows": 1, "split": "0.05,0.95"}
    assert read(path, **how).uuid
    with h5py.File(path, "a") as file:
        del file[name]
        if callable(value):
            value(file, name)
        else:
            file[name] = value
    assert named in refusal(path, **how)


def test_damaged_files_are_refused_in_one_line(tmp_path):
    path = write(tmp_path / "a.h5", IMAGES, LABELS)
    path.write_bytes(path.read_bytes()[:-1])
    assert "a.h5" in refusal(path)
    write(path, IMAGES, LABELS, **CHUNKS, fletcher32=True)
    with h5py.File(path) as file:
        place = file["x"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as file:
        file.seek(place + 3)
        file.write(b"\xff\x01")
    assert "row 0 of /x" in refusal(path)


def test_more_channels_than_usual_need_a_layout(tmp_path):
    """(N, C, H, W) of gray or RGB images looks like many channels; nothing is guessed."""
    path = write(tmp_path / "a.h5", NCHW, LABELS)
    assert "(211, 3, 7, 5)" in refusal(path) and "--layout" in refusal(path)
    swapped = read(path, layout="NHWC")
    assert swapped.image_shape == (3, 7, 5)
    assert "5 channels (NHWC)" in images_note(swapped)
    assert images_note(swapped).endswith(
        "if 5 is not the number of channels, give another --layout"
    )
    note = images_note(read(path, layout="NCHW"))
    assert "211 images of 7 rows x 5 columns x 3 channels (NCHW)" in note and "another" not in note


def test_a_note_says_what_would_make_the_largest_value_1(tmp_path):
    """Masks of 0 and 1, and 12 bits in 16, are dark; images that fill their type are not."""
    for images, maximum in ((IMAGES, None), (IMAGES > 99, 1), (IMAGES.astype("u2") * 16, 4095)):
        stored = images.astype("u1") if images.dtype == bool else images
        note = images_note(read(write(tmp_path / "a.h5", stored, LABELS), "x", "y"))
        assert ("--max-value" in note) == (maximum is not None)
        assert maximum is None or f"--max-value {maximum} makes that 1.0" in note


def test_a_note_says_the_range_of_values_that_are_not_bytes_or_in_0_to_1(tmp_path):
    """So that a fill value shows of which the file says nothing."""
    images = IMAGES.astype("i2")
    images[::2, 3] = -9999
    path = write(tmp_path / "a.h5", images, LABELS)
    assert "have int16 values from -9999 to " in images_note(read(path, max_value=255.0))
    note = images_note(read(path, nodata=-9999.0))
    assert "int16 values from 0 to " in note and "without nodata (-9999)" in note
    for plain in (IMAGES, IMAGES.astype("u2") * 257, (IMAGES / 255).astype("f4")):
        path = write(tmp_path / "a.h5", plain, LABELS)
        assert "values from" not in images_note(read(path))


@pytest.mark.parametrize(
    ("largest", "proposed"), [(250, 255), (300, 300), (5588.5, 5588.5), (40000, 65535), (1e6, 1e6)]
)
def test_what_is_proposed_for_floats_is_of_8_or_16_bits_or_their_largest_value(
    tmp_path, largest, proposed
):
    images = (IMAGES / IMAGES.max() * largest).astype("f4")
    path = str(write(tmp_path / "a.h5", images, LABELS))
    with pytest.raises(hp.UsageError, match=f"--max-value {proposed:.10g}, which divides"):
        hp.train(data=path, images="x", labels="y", runs_dir=str(tmp_path), dry_run=True)


@pytest.mark.parametrize("chunks", [None, CHUNKS["chunks"]])
@pytest.mark.parametrize(
    ("dtype", "max_value", "value"),
    [
        ("f2", 1.0, np.inf),
        ("f4", 1.0, np.nan),
        ("f4", 255.0, np.nan),
        ("f4", 0.5, 3e38),  # infinite once it is divided
        ("f8", 255.0, 1e300),  # infinite as float32
        ("u2", 1e-38, 65535),
    ],
)
def test_samples_that_are_not_finite_once_they_are_divided_are_described(
    tmp_path, dtype, max_value, value, chunks
):
    images = np.zeros((ROWS, 7, 5, 3), dtype)
    images[1, 2, 3, 1] = value  # not one of the images by which a file is recognised
    pack = read(write(tmp_path / "a.h5", images, LABELS, chunks=chunks), max_value=max_value)
    described = {}
    for name in pack.splits:
        with hp.Split(pack, name) as split:
            out = np.empty((len(split), *split.image_shape), split.dtype)
            first, again = {}, {}  # whenever it is read
            for texts in (first, again):
                split.gather(np.arange(len(split)), out, bad=texts)
            assert first == again
            described |= first
    (text,) = described.values()
    why = "too large for float32" if np.isfinite(value) else "NaN or infinite"
    assert "(/x[1])" in text and why in text


@pytest.mark.parametrize("chunks", [None, CHUNKS["chunks"]])
@pytest.mark.parametrize("max_value", [None, 1.0, 2.0, 255.0, 65535.0])
@pytest.mark.parametrize("dtype", ["u1", "u2", ">u2", "?", "i1", "i2", "u4", "f2", "f4", "f8"])
def test_one_divisor_for_each_type(tmp_path, dtype, max_value, chunks):
    """As the table of docs/data.md says; the result has no other scale than its network's file."""
    images = (IMAGES > 99).astype(dtype)
    pack = read(write(tmp_path / "a.h5", images, LABELS, chunks=chunks), max_value=max_value)
    divisor = max_value or {"u1": 255.0, "u2": 65535.0, ">u2": 65535.0}.get(dtype, 1.0)
    name = images.dtype.name
    assert pack.scale == (READ_AS.get(name, name), divisor, 0, 1, None, (0, 0, 0), (1, 1, 1))
    with hp.Split(pack, "train") as split:
        assert hp.read_samples(split, range(50)).max().item() == pytest.approx(1 / divisor)


def test_what_a_file_says_and_is_not_applied_is_noted(tmp_path):
    """Conventions of netCDF; a test split of another scale than train, such as masks of 0 and 1."""
    path = write(tmp_path / "a.h5", IMAGES, LABELS)
    with h5py.File(path, "a") as file:
        file["x"].attrs["scale_factor"] = 0.5
        for split, images in {"train": IMAGES, "test": (IMAGES > 99).astype("u1")}.items():
            file[f"{split}/x"] = images
            file[f"{split}/y"] = LABELS
    assert images_note(read(path)).endswith("; scale_factor of /x is not applied")
    note = images_note(read(path, "{split}/x", "{split}/y"))
    assert "test has uint8 values from 0 to 1, divided by 255, and train uint8 values" in note
    with h5py.File(path, "a") as file:
        file["test/x"].attrs["add_offset"] = 7
    text = refusal(path, images="{split}/x", labels="{split}/y")
    assert "/test/x are stored with add_offset 7, those of train with no scale_factor" in text


@pytest.mark.parametrize("chunks", [None, CHUNKS["chunks"]])
@pytest.mark.parametrize(("dtype", "nodata"), [("f4", np.nan), ("f8", -1e33), (">i2", -9999)])
def test_values_that_are_no_data_are_no_fault(tmp_path, dtype, nodata, chunks):
    """They have no part in the range of the images; an image of nothing else is named."""
    images = (IMAGES / 2).astype(dtype)
    images[::2, 3] = nodata
    path = write(tmp_path / "a.h5", images, LABELS, chunks=chunks)
    pack = read(path, nodata=nodata, split="1", block_rows=0)
    assert 0 <= pack.scale.low < pack.scale.high <= 128
    assert np.isnan(pack.scale.nodata) if np.isnan(nodata) else pack.scale.nodata == nodata
    assert as_set(*everything(pack)) == as_set(images.astype(pack.dtype), LABELS)
    with h5py.File(path, "r+") as file:
        file["x"][7] = nodata
    with hp.Split(pack, "train") as split:
        bad = {}
        out = np.empty((ROWS, *split.image_shape), split.dtype)
        split.gather(np.arange(ROWS), out, bad=bad)
    (text,) = bad.values()
    assert "(/x[7]) holds no data" in text
    with h5py.File(path, "r+") as file:
        file["x"][0] = nodata
    assert "/x[0] holds no data" in refusal(path, nodata=nodata)


def test_fill_values_of_netcdf_are_proposed(tmp_path):
    path = write(tmp_path / "a.h5", IMAGES.astype("f4"), LABELS)
    with h5py.File(path, "a") as file:
        file["x"].attrs["_FillValue"] = np.array([-9.96921e36], "f4")
        file["x"].attrs["missing_value"] = np.float32(np.nan)
    note = images_note(read(path))
    assert "_FillValue of /x is not applied: --nodata=-9.9692" in note
    assert "missing_value of /x is not applied: --nodata=nan" in note
    value = float(note.partition("--nodata=")[2].partition(";")[0])
    assert "_FillValue" not in images_note(read(path, nodata=value))
    assert "missing_value of" in images_note(read(path, nodata=value))
    assert "missing_value" not in images_note(read(path, nodata=np.nan))


def test_a_number_that_a_type_cannot_hold_is_never_no_data(tmp_path):
    for dtype, nodata in (("u1", -1.0), ("i2", np.nan), ("i4", 0.5), ("?", 2.0), ("f2", 1e30)):
        path = write(tmp_path / "a.h5", IMAGES.astype(dtype), LABELS)
        assert f"{np.dtype(dtype).name}, which has no such value" in refusal(path, nodata=nodata)


def test_chunks_that_cannot_be_divided_are_named(tmp_path):
    """Not "a larger share", which would not help."""
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=IMAGES.shape)
    assert "h5repack -l /x:CHUNK=1x7x5x3" in refusal(path) and "share" not in refusal(path)
    write(path, IMAGES, LABELS, chunks=(100, 7, 5, 3))  # of 1 or 2 classes each
    assert "its chunks of 100 images are read whole" in refusal(path)
