"""The kinds of targets of packs: what is kept, checked and read of classes and of values."""

import json
import os
import pickle
import zlib

import h5py
import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.api import make_order
from tests.support.packs import sign_pack
from tests.support.ranks import command

ROWS, SHAPE = 101, (3, 4, 1)
IMAGES = np.random.default_rng(5).integers(0, 256, (ROWS, *SHAPE), np.uint8)
IMAGES[:, 0, 0, 0] = range(ROWS)  # which one an image is


def draw_classes(count):
    """Several classes an image, (N, K) uint8, of which an eighth of the entries are unknown."""
    rng = np.random.default_rng(count)
    labels = rng.integers(0, 2, (ROWS, count), np.uint8)
    return np.where(rng.random(labels.shape) < 1 / 8, np.uint8(255), labels)


def draw_values(count):
    """Values (N, T) float32, of which an eighth are unknown."""
    rng = np.random.default_rng(count)
    values = rng.normal(1e3, 1e4, (ROWS, count)).astype(np.float32)
    return np.where(rng.random(values.shape) < 1 / 8, np.float32("nan"), values)


def names(count):
    return [f"name {number}" for number in range(count)]


KINDS = {  # labels, and the arguments that name their classes or columns
    "class": (np.arange(ROWS) % 3, {"classes": names(3)}),
    "classes": (draw_classes(3), {"classes": names(3)}),
    "many classes": (draw_classes(20), {"classes": names(20)}),
    "values": (draw_values(2), {"columns": names(2)}),
    "many values": (draw_values(5), {"columns": names(5)}),
}
SHORT = ("class", "classes", "values")  # up to 16 bytes a sample: held in memory
kinds = pytest.mark.parametrize("kind", KINDS)
all_but_class = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "class"])


def write(path, kind, rows=slice(None)):
    labels, named = KINDS[kind]
    splits = {"train": (IMAGES[rows], labels[rows]), "validation": (IMAGES[:7], labels[:7])}
    hp.write_pack(path, splits, **named, overwrite=True)
    return hp.read_pack(path)


def gather(split, rows, bad=None):
    rows = np.asarray(rows)
    return split.gather(rows, np.empty((len(rows), *SHAPE), np.uint8), bad=bad)


# What is kept


@kinds
def test_targets_of_every_kind_are_read_as_they_were_written(tmp_path, kind):
    labels, named = KINDS[kind]
    pack = pickle.loads(pickle.dumps(write(tmp_path / "a.h5", kind)))
    ((name, expected),) = named.items()
    assert pack.targets.names == tuple(expected)
    assert pack.classes == (tuple(expected) if name == "classes" else ())
    with hp.Split(pack, "train") as split:
        rows = np.array([5, 0, 100, 5])
        assert split.targets.dtype == {"i": "i8", "u": "u1", "f": "f4"}[labels.dtype.kind]
        np.testing.assert_array_equal(split.targets, labels)
        np.testing.assert_array_equal(split.read_targets(rows), labels[rows])
        assert split.read_targets(rows[:0]).shape == (0, *labels.shape[1:])


@kinds
def test_the_file_of_every_kind_is_as_its_format_says(tmp_path, kind):
    """By plain h5py: type, shape, attributes and checksums."""
    labels, named = KINDS[kind]
    write(tmp_path / "a.h5", kind)
    with h5py.File(tmp_path / "a.h5") as file:
        stored = file["train/targets"]
        assert stored.dtype.str == {"i": "<i4", "u": "|u1", "f": "<f4"}[labels.dtype.kind]
        assert stored.shape == labels.shape
        attribute = {"kind": {"i": "class", "u": "classes", "f": "values"}[labels.dtype.kind]}
        if "columns" in named:
            attribute["columns"] = named["columns"]
        assert json.loads(file.attrs["targets"]) == attribute
        assert [name.decode() for name in file.attrs["classes"]] == named.get("classes", [])
        seeds = [zlib.crc32(row.tobytes()) for row in stored[:]]
        if kind == "class":
            seeds = labels.tolist()
        expected = [zlib.crc32(image, seed) for image, seed in zip(IMAGES, seeds, strict=True)]
        assert file["train/crc32"][:].tolist() == expected


def test_names_may_be_long_many_and_of_any_characters(tmp_path):
    """Escape sequences of a terminal are not printed as they are."""
    labels = np.zeros((ROWS, 9000), np.uint8)
    for name in ("classes", "columns"):
        odd = ["a\x1b[31m\nb", "\udcff", "é" * 300, *names(8997)]
        hp.write_pack(tmp_path / "a.h5", {"train": (IMAGES, labels)}, **{name: odd}, overwrite=True)
        targets = hp.read_pack(tmp_path / "a.h5").targets
        assert targets.names[2:] == tuple(odd[2:])
        assert targets.names[:2] == (r"a\x1b[31m\nb", r"\udcff")


def test_equal_labels_give_equal_bytes_whatever_their_type(tmp_path):
    classes = draw_classes(4)
    unknown = np.where(classes == 255, np.nan, classes)
    values = draw_values(1)
    other_nan = values.copy().view(np.uint32)
    other_nan[np.isnan(values)] |= 1
    forms = {
        "classes": [
            classes,
            classes.tolist(),
            unknown,
            unknown.astype(np.float16),
            np.asfortranarray(classes.astype(">i4")),
            torch.from_numpy(classes),
        ],
        "columns": [
            values,
            values[:, 0],
            values.astype(np.float64),
            values.astype(np.longdouble),
            other_nan.view(np.float32),
        ],
    }
    for name, labels_of in forms.items():
        written = set()
        for labels in labels_of:
            named = {name: names(4 if name == "classes" else 1)}
            hp.write_pack(tmp_path / "a.h5", {"train": (IMAGES, labels)}, **named, overwrite=True)
            written.add((tmp_path / "a.h5").read_bytes())
        assert len(written) == 1


def test_lines_say_what_is_unknown_rounded_or_may_not_be_meant(tmp_path, capsys):
    def lines(labels, others=None, **named):
        splits = {"train": (IMAGES, labels)}
        if others is not None:
            splits["test"] = (IMAGES[: len(others)], others)
        hp.write_pack(tmp_path / "a.h5", splits, **named, overwrite=True)
        return capsys.readouterr().err.replace(f"{tmp_path / 'a.h5'}: ", "").splitlines()

    labels = np.arange(ROWS * 2).reshape(ROWS, 2) % 3 % 2
    assert lines(labels, classes="ab") == []
    labels[3] = labels[5, 1] = 255
    assert lines(labels, labels[:4], classes="ab") == [
        "3 of 202 labels of train are unknown, among them all of 1 image: a 1, b 2",
        "2 of 8 labels of test are unknown, among them all of 1 image: a 1, b 1",
    ]
    one_hot = np.eye(3, dtype=int)[np.arange(ROWS) % 3]
    (line,) = lines(one_hot, classes="abc")
    assert "each row of labels has a single 1" in line and "labels.argmax(1)" in line
    assert lines(one_hot, np.ones((2, 3)), classes="abc") == []
    values = np.linspace(0, 1, ROWS)
    (line,) = lines(values, columns=["age"])
    rounded = int((values.astype(np.float32) != values).sum())
    assert line == (
        f"{rounded} of 101 labels of train are rounded to float32, by at most 5e-08 of their size"
    )
    (line,) = lines(np.where(np.arange(ROWS), 2**24 + 1, 5), columns=["count"])
    assert line.startswith("100 of 101 labels of train are rounded")
    assert lines(np.arange(ROWS) > 3, columns=["is large"]) == []


FLOATS = draw_values(2)
BITS = draw_classes(3)


def changed(labels, row, column, value):
    labels = np.array(labels, dtype=np.float64)
    labels[row, column] = value
    return labels


WRONG = {  # labels, the names, and what is named
    "2": (changed(BITS, 4, 1, 2), {"classes": "abc"}, "hold 2 in row 4 for b (1 such label)"),
    "-1": (changed(BITS, [4, 8], 0, -1), {"classes": "abc"}, "row 4 for a (2 such labels)"),
    "a half": (changed(BITS, 4, 2, 0.5), {"classes": "abc"}, "hold 0.5 in row 4 for c"),
    "infinite class": (changed(BITS, 4, 2, np.inf), {"classes": "abc"}, "hold inf in row 4"),
    "unknown class": (
        changed(BITS, slice(None), 1, 255),
        {"classes": "abc"},
        "class b is unknown",
    ),
    "K": (BITS, {"classes": "abcd"}, "several classes, (101, 4) of 0 and 1"),
    "text": (BITS.astype(str), {"classes": "abc"}, "<U3 of shape (101, 3): expected 101 rows of 3"),
    "rows of classes": (BITS[1:], {"classes": "abc"}, "(100, 3): expected 101 rows of 3"),
    "masked": (np.ma.masked_equal(BITS, 1), {"classes": "abc"}, ".filled(255)"),
    "values of classes": (FLOATS[:, 0], {"classes": "abc"}, "give columns=['name'] and no classes"),
    "no names": (FLOATS, {}, "columns=['age']"),
    "both": (FLOATS, {"classes": "ab", "columns": "ab"}, "give either"),
    "one text": (FLOATS[:, 0], {"columns": "age"}, "as in ['age']"),
    "equal columns": (FLOATS, {"columns": ["age", "age"]}, "give each column a name of its own"),
    "empty column": (FLOATS, {"columns": ["age", ""]}, "give each column a name of its own"),
    "no columns": (FLOATS[:, :0], {"columns": []}, "columns []"),
    "T": (FLOATS, {"columns": names(3)}, "(101, 2): expected 101 rows of 3"),
    "one column": (FLOATS[:, 0], {"columns": names(2)}, "(101,): expected 101 rows of 2"),
    "infinite": (changed(FLOATS, 7, 1, -np.inf), {"columns": names(2)}, "hold -inf in row 7"),
    "large": (changed(FLOATS, 7, 0, 1e39), {"columns": names(2)}, "1e+39 in row 7 for name 0"),
    "unknown": (
        changed(FLOATS, slice(None), 0, np.nan),
        {"columns": names(2)},
        "all 101 images",
    ),
    "texts": (np.array([["1", "x"]] * ROWS), {"columns": names(2)}, "numbers, and NaN where"),
    "dates": (np.zeros((ROWS, 1), "M8[s]"), {"columns": ["day"]}, "datetime64[s]"),
    "masked values": (np.ma.masked_less(FLOATS, 0), {"columns": names(2)}, ".filled(numpy.nan)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_labels_that_are_not_of_their_kind_are_refused(tmp_path, case):
    labels, named, text = WRONG[case]
    with pytest.raises(hp.UsageError) as caught:
        hp.write_pack(tmp_path / "a.h5", {"train": (IMAGES, labels)}, **named)
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_data_sets_are_labels_but_for_values_that_they_call_missing(tmp_path, capsys):
    values = FLOATS.astype(np.float64)
    values[8, 1] = -99
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        for name, labels in (("values", values), ("classes", BITS), ("class", BITS[:, 0] % 3)):
            file[name] = labels
        incomplete = file.create_dataset("incomplete", (ROWS, 2), "f4", chunks=(50, 2))
        incomplete[:50] = 1

        def write(name, fill=None, **named):
            if fill is not None:
                file[name].attrs["_FillValue"] = fill
            splits = {"train": (IMAGES, file[name])}
            hp.write_pack(tmp_path / "a.h5", splits, **named, overwrite=True)

        with pytest.raises(hp.UsageError, match="labels of train: /incomplete is incomplete: 1 of"):
            write("incomplete", columns=names(2))
        with pytest.raises(hp.UsageError, match=r"-99.0, its _FillValue, 1 time, first in row 8:"):
            write("values", -99.0, columns=names(2))
        with pytest.raises(hp.UsageError, match=r"/class holds 1, its _FillValue"):
            write("class", 1, classes="abc")
        write("values", np.nan, columns=names(2))
        write("values", columns=names(2))
        write("classes", 255, classes="abc")  # unknown
        file["values"].attrs["add_offset"] = 273.15
        capsys.readouterr()
        write("values", columns=names(2))
        assert "add_offset 273.15 of /values is not applied" in capsys.readouterr().err


def test_all_splits_have_the_kind_of_train(tmp_path):
    for labels, others in ((BITS, BITS[:9, 0]), (BITS[:, 0] % 3, BITS[:9])):
        splits = {"test": (IMAGES[:9], others), "train": (IMAGES, labels)}
        with pytest.raises(hp.UsageError, match="labels of test are"):
            hp.write_pack(tmp_path / "a.h5", splits, "abc")
    only_there = np.full((ROWS, 3), 255)
    splits = {"test": (IMAGES, only_there), "train": (IMAGES, BITS)}
    hp.write_pack(tmp_path / "a.h5", splits, "abc")  # unknown in another split: it is said


# How they are read


@kinds
def test_short_targets_are_held_and_longer_ones_read_on_demand(tmp_path, monkeypatch, kind):
    labels, _ = KINDS[kind]
    read = []
    plain = os.preadv

    def preadv(descriptor, buffers, offset):
        read.append(sum(map(len, buffers)))
        return plain(descriptor, buffers, offset)

    with hp.Split(write(tmp_path / "a.h5", kind), "train") as split:
        split.hold(range(10, 50))
        monkeypatch.setattr(os, "preadv", preadv)
        rows = np.array([49, 12, 10])
        np.testing.assert_array_equal(split.read_targets(rows), labels[rows])
        assert read == ([] if kind in SHORT else [labels[0].nbytes] * 3)
        np.testing.assert_array_equal(
            split.read_targets(rows + 1), labels[rows + 1]
        )  # 50: not held
        assert len(read) == (3 if kind in SHORT else 6)


@kinds
@pytest.mark.parametrize("read_buffer", [0, 1 << 20])
@pytest.mark.parametrize("order", ["partition", "global", "blocks"])
def test_batches_have_the_targets_of_their_images(tmp_path, kind, order, read_buffer):
    labels, _ = KINDS[kind]
    blocks = {"block_rows": 5, "window_blocks": 2} if order == "blocks" else {}
    order = make_order(order, hp.cut_epoch(ROWS, 16, 3), 3, **blocks)
    with hp.Split(write(tmp_path / "a.h5", kind), "train") as split:
        loader = hp.Loader(split, order, [1, 2], options=hp.ReadOptions(read_buffer), epochs=2)
        read = 0
        for epoch in range(2):
            for batch in (batch for step in loader.epoch(epoch) for batch in step):
                rows = np.rint(batch.images[:, 0, 0, 0].numpy() * 255).astype(int)
                np.testing.assert_array_equal(batch.targets.numpy(), labels[rows])
                assert batch.targets.dtype == torch.from_numpy(split.read_targets(rows)).dtype
                read += len(rows)
        assert read == 2 * sum(order.partition.sizes[shard] for shard in (1, 2))
        loader.close()


@pytest.mark.parametrize("read_buffer", [ROWS * (12 + 20) - 1, ROWS * (12 + 20)])
def test_long_targets_are_kept_with_the_images_of_a_window_or_of_all(
    tmp_path, monkeypatch, read_buffer
):
    """Else each batch of 16 samples would read them at random places of a slow disk."""
    pack = write(tmp_path / "a.h5", "many classes")
    order = make_order("blocks", hp.cut_epoch(ROWS, 16, 1), 3, block_rows=10, window_blocks=5)
    place = pack.splits["train"].targets.byte_range(0, ROWS)
    read = []
    plain = os.preadv

    def preadv(descriptor, buffers, offset):
        if offset in place:
            read.append(sum(map(len, buffers)) // 20)
        return plain(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with hp.Split(pack, "train", verify=False) as split:
        loader = hp.Loader(split, order, [0], options=hp.ReadOptions(read_buffer), epochs=2)
        assert sum(len(list(loader.epoch(epoch))) for epoch in range(2)) == 14
        loader.close()
    if read_buffer % ROWS:  # one byte is missing: 10 blocks and a short one in each epoch
        assert sum(read) == 2 * ROWS and len(read) <= 22
    else:
        assert read == [ROWS]


def test_classes_are_counted_where_they_are_known_to_be(tmp_path):
    with hp.Split(write(tmp_path / "a.h5", "classes"), "train") as split:
        assert split.count_classes().tolist() == (KINDS["classes"][0] == 1).sum(axis=0).tolist()


def test_a_pack_is_described_by_its_classes_or_the_ranges_of_its_columns(tmp_path):
    def table(labels, others, **named):
        splits = {"train": (IMAGES, labels), "test": (IMAGES[: len(others)], others)}
        hp.write_pack(tmp_path / "a.h5", splits, **named, overwrite=True)
        said = command(1, "pack", "--check", tmp_path / "a.h5")
        assert said.code == 0 and said.out.splitlines()[-1] == "all checksums agree"
        lines = [line.strip("┃│") for line in said.out.splitlines() if line[0] in "┃│"]
        return [[cell.strip() for cell in line.replace("┃", "│").split("│")] for line in lines]

    labels = np.zeros((ROWS, 2))
    labels[:40, 0] = labels[30:, 1] = 1
    others = labels[:9].copy()
    assert table(labels, others, classes="ab") == [
        ["class", "train", "test", "all"],
        ["a", "40", "9", "49"],
        ["b", "71", "0", "71"],
        ["images", "101", "9", "110"],
    ]
    others[:, 0] = np.nan
    assert table(labels, others, classes="ab")[:2] == [
        ["class", "train", "test", "all", "unknown"],
        ["a", "40", "0", "40", "9"],
    ]
    labels *= [1.5, 3]
    assert table(labels, others, columns=["age", "mass"]) == [
        ["column", "train", "test", "all", "mean", "unknown"],
        ["age", "0 to 1.5", "unknown", "0 to 1.5", "0.594059", "9"],
        ["mass", "0 to 3", "0 to 0", "0 to 3", "1.93636", "0"],
        ["images", "101", "9", "110", "", ""],
    ]
    assert len(table(np.ones((ROWS, 40)), np.ones((9, 40)), classes=names(40))) == 2


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_sampling_by_class_is_refused_where_an_image_has_no_single_class(tmp_path, kind):
    path = write(tmp_path / "a.h5", kind).path
    words = ["train", "--data", path, "--task", "denoise", "--model", "autoencoder"]
    assert command(1, *words, "--dry-run").code == 0
    refused = command(1, *words, "--dry-run", "--balanced-sampling")
    (line,) = refused.err.splitlines()[1:]  # the first one says that it starts
    assert refused.code == 2 and "draws images by their one class" in line and path in line


# Damage


def flip(pack, name, row, value, byte=0):
    """Flip bits of a byte of a row."""
    stored = getattr(pack.splits["train"], name)
    place = stored.byte_range(row, row + 1).start + byte
    with open(pack.path, "r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ value]))


@all_but_class
def test_a_flipped_bit_of_a_target_is_seen_where_its_image_is_read(tmp_path, kind):
    """Also the last one, and that of an entry that is as valid as before."""
    labels, _ = KINDS[kind]
    size = labels[0].nbytes
    for byte in (0, size - 1):
        pack = write(tmp_path / "a.h5", kind)
        flip(pack, "targets", 31, 1, byte)
        for held in (range(0), range(ROWS)):
            with hp.Split(pack, "train") as split:
                split.hold(held)
                with pytest.raises(hp.RunError, match=r"sample 31 of split 'train' is corrupt"):
                    gather(split, np.arange(ROWS))
                bad = {}
                gather(split, np.arange(ROWS), bad)
                assert bad.keys() == {31}
        checked = command(1, "pack", "--check", pack.path)
        assert checked.code == 1 and "sample 31 of split 'train' is corrupt" in checked.err


def test_entries_that_a_kind_does_not_have_are_described_and_unknown(tmp_path):
    pack = write(tmp_path / "a.h5", "classes", rows=slice(9, 60))
    labels = KINDS["classes"][0][9:60]
    flip(pack, "targets", 4, 64, byte=1)
    wrong = int(labels[4, 1]) ^ 64
    with hp.Split(pack, "train", verify=False) as split:
        bad = {}
        targets = split.read_targets(np.array([3, 4, 5]), bad)
        assert targets[1].tolist() == [labels[4, 0], 255, labels[4, 2]]
        assert np.array_equal(targets[[0, 2]], labels[[3, 5]])
        assert bad.keys() == {4} and f"its target is {wrong} for name 1, not 0, 1" in bad[4]
        with pytest.raises(hp.RunError, match=r"sample 4 of split 'train' is corrupt: its target"):
            split.read_targets(np.arange(9))
    pack = write(tmp_path / "a.h5", "values")
    with h5py.File(pack.path, "r+") as file:
        file["train/targets"][7, 0] = -np.inf
    with hp.Split(pack, "train", verify=False) as split:
        bad = {}
        assert np.isnan(split.read_targets(np.array([7]), bad)[0, 0])
        assert "its value of name 0 is -inf" in bad[7]


HOSTILE = {  # what another program, or a later version, may have written
    "kind": {"kind": "mask"},
    "no kind": {"columns": ["a"]},
    "number": {"kind": 3},
    "list": ["classes"],
    "more": {"kind": "classes", "ignored": 255},
    "columns of classes": {"kind": "classes", "columns": ["a", "b", "c"]},
    "no columns": {"kind": "values"},
    "empty columns": {"kind": "values", "columns": []},
    "columns no list": {"kind": "values", "columns": "abc"},
    "column of a number": {"kind": "values", "columns": ["a", "b", 3]},
    "class": {"kind": "class"},  # of (N, 3) uint8
    "values": {"kind": "values", "columns": ["a", "b", "c"]},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_pack_with_other_targets_than_its_attribute_says_is_refused(tmp_path, case):
    """Though its identity is right."""
    path = write(tmp_path / "a.h5", "classes").path
    with h5py.File(path, "r+", locking=False) as file:
        file.attrs["targets"] = np.bytes_(json.dumps(HOSTILE[case]))
    sign_pack(path)
    with pytest.raises(hp.UsageError) as caught:
        hp.read_pack(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_a_pack_with_another_number_of_classes_than_its_targets_is_refused(tmp_path):
    path = write(tmp_path / "a.h5", "classes").path
    with h5py.File(path, "r+", locking=False) as file:
        identity = file["identity"][:]
    sign_pack(path)
    with h5py.File(path, "r+", locking=False) as file:
        assert np.array_equal(file["identity"], identity)
        file.attrs["classes"] = file.attrs["classes"][:2]
    sign_pack(path)
    with pytest.raises(hp.UsageError, match=r"targets is .* \(101, 3\), not .* \(101, 2\)"):
        hp.read_pack(path)
