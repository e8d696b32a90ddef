"""Many HDF5 files as one set: equal to one file that holds the same rows, or refused by name."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support import ranks
from tests.support.api import (
    images_note,
    make_order,
    open_few_files,
    opened_for_index,
    settle_at_once,
)
from tests.support.external import contents, open_files, pixels, read, write

SHAPE, CLASSES = (7, 5, 3), 4
ROWS = [5, 1, 17, 30, 8, 2, 64, 11]  # of the files
IMAGES, LABELS = pixels(sum(ROWS), SHAPE, CLASSES, ordered=False)
STORAGE = {
    "contiguous": [{}],
    "chunks": [{"chunks": True}],
    "mixed": [{}, {"chunks": (1, *SHAPE), "compression": "gzip"}, {"chunks": True}],
}


def write_set(folder, rows=ROWS, storage=({},), images=IMAGES, labels=LABELS):
    """Files of so many rows each, in two folders; the pattern of them all."""
    firsts = np.cumsum([0, *rows])
    for number, (first, count) in enumerate(zip(firsts, rows, strict=False)):
        path = folder / "scans" / "ab"[number * 2 // len(rows)] / f"{number:03}.h5"
        path.parent.mkdir(parents=True, exist_ok=True)
        part = slice(first, first + count)
        how = storage[number % len(storage)]
        if "chunks" in how and how["chunks"] is True:
            how = {"chunks": (min(4, count), *images.shape[1:])}
        write(path, images[part], labels[part], **how)
    return folder / "scans" / "*" / "*.h5"


def write_samples(folder, images, labels, **storage):
    """Files of one sample each; the pattern of them all."""
    folder.mkdir(exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        write(folder / f"{number:03}.h5", image, label, **storage)
    return folder / "*.h5"


def age(folder):
    """As if all files had been written an hour ago."""
    for path in folder.rglob("*.h5"):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 3600 * 10**9))


def is_equal(pack, other):
    """Whether both have the same samples in all splits, in the same order."""
    return pack.splits.keys() == other.splits.keys() and all(
        np.array_equal(*values)
        for name in pack.splits
        for values in zip(contents(pack, name), contents(other, name), strict=True)
    )


def rows_of(pack):
    """The rows of the set in its splits, in their order."""
    return np.concatenate([info.rows for info in pack.splits.values()])


# What is read


@pytest.mark.parametrize("storage", STORAGE)
def test_a_set_is_read_as_h5py_reads_its_files(tmp_path, storage):
    pattern = write_set(tmp_path, storage=STORAGE[storage])
    pack = read(pattern, split="0.6,0.2,0.2", block_rows=0)
    assert sorted(rows_of(pack)) == list(range(len(IMAGES)))
    for name, info in pack.splits.items():
        images, labels = contents(pack, name)
        assert np.array_equal(images, IMAGES[info.rows])
        assert np.array_equal(labels, LABELS[info.rows])
        order = np.random.default_rng(0).permutation(len(labels))
        assert np.array_equal(contents(pack, name, order)[0], images[order])
        assert len(contents(pack, name, order[:0])[0]) == 0


def test_a_set_has_the_splits_of_one_file_with_the_same_rows(tmp_path):
    one = write(tmp_path / "one.h5", IMAGES, LABELS)
    pattern = write_set(tmp_path)
    for seed in (0, 1):
        how = {"split": "0.6,0.2,0.2", "block_rows": 0, "seed": seed}
        assert is_equal(read(pattern, **how), read(one, **how))
    single = write_set(tmp_path / "single", [len(IMAGES)])
    how = {"split": "0.6,0.2,0.2", "block_rows": 0}
    assert is_equal(read(single, **how), read(one, **how))


def test_files_are_in_the_order_of_their_names(tmp_path):
    """Code points of the path below the folder without wildcards; `**` stands for any folders."""
    names = ["B.h5", "a/10.h5", "a/9.h5", "a-b/0.h5", "é.h5", "z/y/x.h5"]
    for number, name in enumerate(reversed(names)):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        value = np.full((2, 2, 2), len(names) - 1 - number, "u1")
        write(path, value, [0, 1])
    (tmp_path / "set/.hidden.h5").write_bytes(b"no HDF5")
    pack = read(tmp_path / "set" / "**" / "*.h5", block_rows=0, split="1")
    images = contents(pack)[0][np.argsort(pack.splits["train"].rows), 0, 0, 0]
    order = sorted(range(len(names)), key=lambda number: names[number])
    assert images.tolist() == np.repeat(order, 2).tolist()
    with hp.Split(pack, "train") as split:
        sources = {row: split.source_of(i) for i, row in enumerate(split.info.rows.tolist())}
    assert sources[3] == f"set/{sorted(names)[1]}:/x[1]"


def test_a_pattern_is_relative_to_the_working_directory_of_its_time(tmp_path, monkeypatch):
    """Brackets in names of folders are no wildcards there."""
    folder = tmp_path / "old [1]"
    folder.mkdir()
    write_set(folder)
    monkeypatch.chdir(folder)
    pack = read("scans/*/*.h5", block_rows=0)
    monkeypatch.chdir("/")
    assert is_equal(read(pack.path, block_rows=0), pack)
    assert read(pack.path, block_rows=0).uuid == pack.uuid
    assert pack.splits["train"].files.folder == str(folder / "scans")


@pytest.mark.parametrize("storage", [{}, {"chunks": True, "compression": "gzip"}])
@pytest.mark.parametrize("layout", ["HWC", "CHW", "HW"])
def test_a_file_may_be_one_sample(tmp_path, layout, storage):
    images = {"HWC": IMAGES, "CHW": IMAGES.transpose(0, 3, 1, 2), "HW": IMAGES[..., 0]}[layout]
    pattern = write_samples(tmp_path / "set", images[:40], LABELS[:40], **storage)
    pack = read(pattern, layout=layout, split="0.6,0.4", block_rows=0)
    expected = IMAGES[..., :1] if layout == "HW" else IMAGES
    assert sorted(rows_of(pack)) == list(range(40))
    for name, info in pack.splits.items():
        images, labels = contents(pack, name)
        assert np.array_equal(images, expected[info.rows])
        assert np.array_equal(labels, LABELS[info.rows])
    with hp.Split(pack, "train") as split:
        assert split.source_of(0) == f"set/{split.info.rows[0]:03}.h5:/x"
    again = read(
        pattern, **{k: v for k, v in pack.external.items() if k not in ("images", "labels")}
    )
    assert (again.uuid, is_equal(again, pack)) == (pack.uuid, True)  # as `evaluate` opens it


LABEL_FORMS = {
    "scalars": LABELS,
    "of one element": LABELS[:, None, None],
    "one-hot": np.eye(CLASSES)[LABELS],
    "one-hot truth, (1, K)": np.eye(CLASSES, dtype=bool)[LABELS][:, None],
    "strings of numbers": [str(label) for label in LABELS],
}


@pytest.mark.parametrize("form", LABEL_FORMS)
def test_labels_of_all_files_give_the_classes(tmp_path, form):
    """No file has them all."""
    pattern = write_samples(tmp_path / "set", IMAGES[:40], LABEL_FORMS[form][:40])
    pack = read(pattern, layout="HWC", split="1")
    assert pack.classes == tuple("0123")
    assert np.array_equal(contents(pack)[1], LABELS[pack.splits["train"].rows])


def test_strings_are_names_even_where_a_file_has_numbers_alone(tmp_path):
    names = np.array([b"7", b"10", b"ant", b"ox"])
    labels = np.sort(LABELS[:40])
    pack = read(write_set(tmp_path, [10, 10, 10, 10], labels=names[labels]), split="1")
    assert pack.classes == ("10", "7", "ant", "ox")
    expected = np.array([1, 0, 2, 3])[labels]
    assert np.array_equal(contents(pack)[1], expected[pack.splits["train"].rows])


def test_a_note_says_how_many_files_there_are(tmp_path):
    pattern = write_set(tmp_path)
    note = images_note(read(pattern, block_rows=0))
    assert note.startswith("/x of 8 files is read as 138 images of 7 rows x 5 columns x 3 channels")
    for number in (1, 5):
        with h5py.File(tmp_path / f"scans/{'ab'[number > 3]}/{number:03}.h5", "a") as file:
            file["x"].attrs["_FillValue"] = 255
            if number == 5:
                file["x"].attrs["missing_value"] = 254
    note = images_note(read(pattern, block_rows=0, nodata=0.0))
    assert "; _FillValue of /x is not applied: --nodata=255 (in 2 of 8 files)" in note
    assert "; missing_value of /x is not applied: --nodata=254 (in 1 of 8 files)" in note
    assert "_FillValue" not in images_note(read(pattern, block_rows=0, nodata=255.0))


def test_units_that_all_files_have_are_noted(tmp_path):
    pattern = write_set(tmp_path)
    for path in (tmp_path / "scans").glob("*/*.h5"):
        with h5py.File(path, "a") as file:
            file["x"].attrs["scale_factor"] = np.array([0.5], "f4")
            file["x"].attrs["add_offset"] = 280.0
    pack = read(pattern, block_rows=0)
    note = "; scale_factor, add_offset of /x are not applied (in 8 of 8 files)"
    assert images_note(pack).endswith(note)
    assert pack.provenance["scale_attributes"] == "scale_factor 0.5, add_offset 280.0"


# Reading: a few files are open at a time


@pytest.mark.parametrize("storage", [{}, {"chunks": True}])
def test_at_most_128_files_are_open_and_none_at_the_end(tmp_path, storage):
    images, labels = pixels(200, (2, 3, 1), 2)
    pack = read(write_samples(tmp_path / "set", images, labels, **storage), layout="HWC", split="1")
    with hp.Split(pack, "train") as split:
        out = np.empty((200, *split.image_shape), split.dtype)
        split.gather(np.arange(200), out)
        assert 100 < len(open_files(tmp_path)) <= 129  # and the first one
        path = tmp_path / "set/123.h5"
        path.unlink()
        with pytest.raises(hp.RunError, match="123.h5"):  # of a thread
            for _ in range(2):
                split.gather(np.arange(200), out.copy())
    assert not open_files(tmp_path)
    assert np.array_equal(out, images[pack.splits["train"].rows])


def test_threads_read_a_set_at_the_same_time(tmp_path, monkeypatch):
    """While files are closed for others to be opened: no thread reads another's descriptor."""
    open_few_files(monkeypatch, 2)
    pack = read(write_set(tmp_path, storage=STORAGE["mixed"]), split="1", block_rows=0)
    expected = IMAGES[pack.splits["train"].rows]
    with hp.Split(pack, "train") as split, ThreadPoolExecutor(8) as threads:
        barrier = threading.Barrier(8)

        def read_all(number):
            barrier.wait()
            order = np.random.default_rng(number).permutation(len(split))
            for rows in np.array_split(order, 30):
                out = np.empty((len(rows), *split.image_shape), split.dtype)
                assert np.array_equal(split.gather(rows, out), expected[rows])

        list(threads.map(read_all, range(8)))
        assert len(open_files(tmp_path / "scans")) <= 3


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def overwrite(path):
    with h5py.File(path, "r+") as file:
        file["x"][...] = 255 - file["x"][...]


@pytest.mark.parametrize("storage", [{}, {"chunks": True}])
@pytest.mark.parametrize("change", [cut, overwrite, os.unlink])
def test_a_file_that_changes_while_it_is_in_use_is_named(tmp_path, monkeypatch, change, storage):
    open_few_files(monkeypatch, 1)
    pack = read(write_set(tmp_path, storage=[storage]), split="1", block_rows=0)
    with hp.Split(pack, "train") as split:
        out = np.empty((len(split), *split.image_shape), split.dtype)
        split.gather(np.arange(len(split)), out)
        path = tmp_path / "scans/a/002.h5"
        change(path)
        with pytest.raises(hp.RunError, match=str(path)):
            split.gather(np.arange(len(split)), out)


def test_a_sample_that_is_not_finite_is_described_by_its_file(tmp_path):
    images = (IMAGES / 256).astype("f4")
    images[30, 1, 1, 1] = np.nan  # not one of those by which the set is recognized
    pack = read(write_set(tmp_path, images=images), split="1", block_rows=0)
    bad = {}
    with hp.Split(pack, "train") as split:
        out = np.empty((len(split), *split.image_shape), split.dtype)
        split.gather(np.arange(len(split)), out, bad=bad)
    (text,) = bad.values()
    assert "(scans/a/003.h5:/x[7])" in text
    images[-1] = np.nan
    with pytest.raises(hp.UsageError, match=r"h5: scans/b/007.h5:/x\[10\] holds NaN"):
        read(write_set(tmp_path, images=images), split="1", block_rows=0)


# Blocks


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("block_rows", [1, 4, 8, 1000])
def test_a_block_lies_in_one_file_and_every_sample_is_read_once(tmp_path, storage, block_rows):
    rows = [5, 1, 17, 30, 8, 2, 3, 11, 1, 1]
    count = sum(rows)
    pattern = write_set(tmp_path, rows, STORAGE[storage])
    pack = read(pattern, split="0.7,0.3", block_rows=block_rows)
    chunked = storage != "contiguous"
    assert pack.block_rows % (4 if chunked else 1) == 0
    assert sorted(rows_of(pack)) == list(range(count))
    firsts = np.cumsum([0, *rows])
    with hp.Split(pack, "train") as split:
        own = split.info.rows
        starts = split.block_starts
        blocks = np.split(own, starts[1:-1])
        for block in blocks:
            assert len(set(np.searchsorted(firsts, block, "right"))) == 1
            assert (np.diff(block) == 1).all() and 0 < len(block) <= pack.block_rows
            file = np.searchsorted(firsts, block[0], "right") - 1
            first = block[0] - firsts[file]
            assert first % pack.block_rows == 0  # whole chunks, counted in the file
            assert len(block) == min(pack.block_rows, rows[file] - first)
        assert not np.array_equal(own, np.sort(own))
        partition = hp.cut_epoch(len(own), 7, 3)
        settings = {"block_rows": pack.block_rows, "window_blocks": 2, "starts": starts}
        order = make_order("blocks", partition, 0, **settings)
        for epoch in range(2):
            seen = []
            for shard in range(3):
                size = partition.sizes[shard]
                read_in_turn = order.samples(epoch, shard, 0, size)
                windows = [
                    order.window(epoch, shard, number) for number in range(order.count(shard))
                ]
                assert sum(len(window.samples) for window in windows) == size
                for window in windows:
                    numbers = np.searchsorted(starts, window.samples, "right")
                    assert len(set(numbers)) <= 2
                seen += read_in_turn.tolist()
            assert sorted(seen) == list(range(len(own)))


def test_whole_files_are_drawn_with_group_file(tmp_path):
    rows = np.random.default_rng(0).integers(1, 12, 60).tolist()
    images, labels = pixels(sum(rows), (2, 2, 1), 3, ordered=False)
    pattern = write_set(tmp_path, rows, images=images, labels=labels)
    for how in ({"block_rows": 0}, {"block_rows": 2}):
        pack = read(pattern, split="0.6,0.2,0.2", group="file", **how)
        files = pack.splits["train"].files
        numbers = {name: {*files.files_of(info.rows)} for name, info in pack.splits.items()}
        assert sum(map(len, numbers.values())) == 60 == len(set.union(*numbers.values()))
        for info, share in zip(pack.splits.values(), (0.6, 0.2, 0.2), strict=True):
            counts = np.bincount(info.targets, minlength=3) / np.bincount(labels)
            assert np.abs(counts - share).max() < 0.05
        assert "group" in pack.external
        names = sorted(map(files.name, numbers["test"]))
        some = f"test has {len(names)} files ({', '.join(names[:3])} and {len(names) - 3} more)"
        assert some in images_note(pack) and "--group file, train has 3" in images_note(pack)
    plain = read(pattern, split="0.6,0.2,0.2", block_rows=0)
    assert "--group" not in images_note(plain)
    assert len({*files.files_of(plain.splits["test"].rows)}) > 30
    with pytest.raises(hp.UsageError, match="--group file: .*scans/a/000.h5 is one file"):
        read(tmp_path / "scans/a/000.h5", group="file")
    with pytest.raises(hp.UsageError, match="give more than 1 file, or leave out --group"):
        read(tmp_path / "scans/a/000.*", group="file")


# The index, which is kept


@pytest.fixture
def opened(monkeypatch):
    """The paths of the files that are read for an index."""
    return opened_for_index(monkeypatch)


def names_of(paths):
    """Their names, without the suffix, in this order."""
    return [os.path.basename(path).removesuffix(".h5") for path in paths]


def test_only_changed_files_are_read_again(tmp_path, opened, monkeypatch):
    pattern = write_set(tmp_path, labels=np.array([b"ant", b"bee", b"cow", b"dog"])[LABELS])
    settle_at_once(monkeypatch)
    how = {"block_rows": 0, "cache_dir": tmp_path / "cache"}
    first = read(pattern, **how)
    assert names_of(opened) == [f"{number:03}" for number in range(len(ROWS))]
    opened.clear()
    second = read(pattern, **how)
    assert opened == [] and second.uuid == first.uuid and is_equal(second, first)
    overwrite(tmp_path / "scans/a/001.h5")
    write(tmp_path / "scans/b/new.h5", IMAGES[:3], [b"ant"] * 3)
    (tmp_path / "scans/a/000.h5").unlink()
    third = read(pattern, **how)
    assert names_of(opened) == ["001", "new"]
    assert third.uuid == read(pattern, block_rows=0).uuid != first.uuid
    assert is_equal(third, read(pattern, block_rows=0))
    opened.clear()
    other = read(pattern, max_value=99.0, split="0.5,0.5", **how)
    assert opened == [] and other.uuid != third.uuid


def test_a_file_that_changes_without_another_size_or_time_is_read_again(
    tmp_path, opened, monkeypatch
):
    """As by `cp -p`: its labels would be those of before."""
    pattern = write_set(tmp_path)
    settle_at_once(monkeypatch)
    how = {"block_rows": 0, "cache_dir": tmp_path / "cache"}
    first = read(pattern, **how)
    path = tmp_path / "scans/a/001.h5"
    before = path.stat()
    relabel(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    opened.clear()
    assert read(pattern, **how).uuid != first.uuid
    assert names_of(opened) == ["001"]


@pytest.mark.parametrize("when", [lambda folder: None, age])
def test_a_file_written_a_moment_ago_is_read_again(tmp_path, opened, when):
    """Another one of the same size may have the same time, or get it."""
    pattern = write_set(tmp_path, [3, 4])
    when(tmp_path)
    for _ in range(2):
        read(pattern, split="1", cache_dir=tmp_path / "cache")
    assert names_of(opened) == ["000", "001"] * 2


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "folder"])
def test_an_index_that_is_damaged_is_made_anew(tmp_path, opened, damage, monkeypatch):
    pattern = write_set(tmp_path)
    settle_at_once(monkeypatch)
    how = {"block_rows": 0, "cache_dir": tmp_path / "cache"}
    first = read(pattern, **how)
    (index,) = (tmp_path / "cache").iterdir()
    content = bytearray(index.read_bytes())
    if damage == "flipped":
        content[content.index(b"labels.npy") + 200] ^= 1
    if damage == "cut":
        del content[-50:]
    if damage == "empty":
        content.clear()
    index.write_bytes(content)
    if damage == "folder":
        index.unlink()
        index.mkdir()
    opened.clear()
    pack = read(pattern, **how)
    assert len(opened) == len(ROWS) and pack.uuid == first.uuid
    opened.clear()
    note = images_note(read(pattern, **how))
    assert len(opened) == (len(ROWS) if damage == "folder" else 0)
    assert ("the index of 8 files cannot be kept" in note) == (damage == "folder")


def test_a_full_disk_keeps_no_index_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_FAULT", "index.written:full:1")
    pack = read(write_set(tmp_path), block_rows=0, cache_dir=tmp_path / "cache")
    assert "cannot be kept as" in images_note(pack) and "No space left" in images_note(pack)
    assert [*(tmp_path / "cache").iterdir()] == []


def test_the_identity_is_of_what_the_files_hold(tmp_path):
    pattern = write_set(tmp_path, storage=STORAGE["mixed"])
    first = read(pattern, block_rows=0)
    shutil.copytree(tmp_path / "scans", tmp_path / "copy")
    age(tmp_path / "copy")
    assert read(tmp_path / "copy/*/*.h5", block_rows=0).uuid == first.uuid
    os.rename(tmp_path / "copy/a/001.h5", tmp_path / "copy/a/001b.h5")
    assert read(tmp_path / "copy/*/*.h5", block_rows=0).uuid != first.uuid
    others = []
    for change in (overwrite, relabel):
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(tmp_path / "scans", tmp_path / "copy")
        change(tmp_path / "copy/a/001.h5")  # whose row is not one by which the set is recognized
        others.append(read(tmp_path / "copy/*/*.h5", block_rows=0).uuid)
    assert len({first.uuid, *others}) == 3
    shutil.rmtree(tmp_path / "copy")
    shutil.copytree(tmp_path / "scans", tmp_path / "copy")
    write(tmp_path / "copy/b/006.h5", IMAGES[63:127], LABELS[63:127], chunks=(8, *SHAPE))
    found = read(tmp_path / "copy/*/*.h5", block_rows=0)
    assert of_file(found, "b/006.h5") == of_file(first, "b/006.h5")
    assert found.uuid != first.uuid  # other blocks, and so other splits


def of_file(pack, name):
    return pack.splits["train"].files.table()[name][:2]


def relabel(path):
    with h5py.File(path, "r+") as file:
        file["y"][0] = (file["y"][0] + 1) % CLASSES


def test_all_ranks_read_what_rank_0_indexed(tmp_path):
    path = str(write_set(tmp_path, storage=STORAGE["mixed"]))
    first, *others = ranks.on_ranks(3, bytes_read, path=path)
    assert others == [first, first] and len(first[0]) == IMAGES.nbytes


def bytes_read(comm, path):
    pack = comm.bcast(read(path, split="1") if comm.rank == 0 else None)
    return [part.tobytes() for part in contents(pack)]


# What cannot be used: one line, which names the file


def other_shape(folder):
    for number in (2, 3):
        write(folder / f"scans/a/{number:03}.h5", IMAGES[:6, :6], LABELS[:6])


def other_type(folder):
    write(folder / "scans/a/002.h5", IMAGES[:6].astype("u2"), LABELS[:6])


def without(name):
    def remove(folder):
        with h5py.File(folder / "scans/a/002.h5", "r+") as file:
            del file[name]

    return remove


def two_without(folder):
    for number in (1, 2):
        with h5py.File(folder / f"scans/a/{number:03}.h5", "r+") as file:
            del file["y"]


def attribute(name, value):
    def change(folder):
        with h5py.File(folder / "scans/a/002.h5", "a") as file:
            file["x"].attrs[name] = value

    return change


def labels_of(values):
    def relabel(folder):
        write(folder / "scans/a/002.h5", IMAGES[: len(values)], values)

    return relabel


def a_folder(folder):
    (folder / "scans/a/009.h5").mkdir()


def a_link(folder):
    (folder / "scans/b/009.h5").symlink_to(folder / "scans/a/002.h5")


def a_broken_link(folder):
    (folder / "scans/b/009.h5").symlink_to(folder / "nowhere.h5")


def text(folder):
    (folder / "scans/a/002.h5").write_text("no HDF5")


def linked(folder):
    write(folder / "labels.h5", IMAGES[:17], LABELS[:17])
    with h5py.File(folder / "scans/a/002.h5", "r+") as file:
        del file["y"]
        file["y"] = h5py.ExternalLink("../../labels.h5", "y")


def empty(folder):
    write(folder / "scans/a/002.h5", IMAGES[:0], LABELS[:0])


@pytest.mark.parametrize("end", [".h5", ".nc"])
def test_what_stands_for_many_files_is_said(tmp_path, end):
    for name in ("1990", "1991"):
        write(tmp_path / f"{name}{end}", IMAGES[:20], LABELS[:20])
    words = ["--images", "x", "--labels", "y", "--runs-dir", tmp_path / "runs"]
    text = ranks.alone("--data", tmp_path, *words).err
    assert f"is a folder: name HDF5 files in it by a pattern, --data '{tmp_path}/*{end}'" in text
    text = ranks.alone("--data", f"{tmp_path}/199{{0,1}}{end}", *words).err
    assert "a pattern of files has *, ?, [...] and **, but no braces" in text


def test_files_of_one_image_are_said_to_need_a_layout(tmp_path):
    write(tmp_path / "a.h5", IMAGES[0, ..., 0], 3)
    with pytest.raises(hp.UsageError, match="say --layout HW if a file is one image, or write"):
        read(tmp_path / "*.h5")
    write(tmp_path / "a.h5", IMAGES[0], 3)
    with pytest.raises(hp.UsageError, match="if a file is one image, say --layout HWC, CHW or HW"):
        read(tmp_path / "*.h5")
    with pytest.raises(hp.UsageError, match="; hp.write_pack makes channels of several datasets"):
        read(tmp_path / "*.h5", images="x,y")


BAD = {  # what happens to the set, what is named
    "another shape": (
        other_shape,
        "a/002.h5 holds images of uint8 (6, 5, 3) in NHWC, and labels integers, but SCANS/a/000.h5"
        " images of uint8 (7, 5, 3) in NHWC, and labels integers: 2 of 8 files differ",
    ),
    "another type": (other_type, "a/002.h5 holds images of uint16 (7, 5, 3)"),
    "other units": (
        attribute("add_offset", 280.0),
        "a/002.h5 holds images of uint8 (7, 5, 3) in NHWC, add_offset 280.0, and labels integers,"
        " but SCANS/a/000.h5 images of uint8 (7, 5, 3) in NHWC, and labels integers: 1 of 8 files"
        " differ from the first; these attributes are not applied",
    ),
    "unsigned": (attribute("_Unsigned", "true"), "in NHWC, _Unsigned true, and labels"),
    "no images": (without("x"), "a/002.h5: there is no dataset 'x'; it holds y"),
    "no labels": (without("y"), "a/002.h5: there is no dataset 'y'; it holds x"),
    "no labels in two": (
        two_without,
        "a/001.h5: there is no dataset 'y'; it holds x (2 of 8 files",
    ),
    "strings": (labels_of([b"a", b"b"]), "and labels strings"),
    "one-hot": (labels_of(np.eye(4)), "and labels one-hot of 4"),
    "too few labels": (labels_of(np.arange(3)[:, None, None, None][:2].repeat(2, 3)), "a/002.h5"),
    "a folder": (a_folder, "a/009.h5, which is a folder"),
    "a link": (a_link, "b/009.h5, which is the same file as a/002.h5"),
    "a broken link": (a_broken_link, "b/009.h5 cannot be opened: No such file"),
    "no HDF5": (text, "a/002.h5 is not a readable HDF5 file"),
    "labels elsewhere": (linked, "a/002.h5: /x or /y is stored in another file"),
    "no rows": (empty, "a/002.h5: the images /x have shape (0, 7, 5, 3): they hold nothing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_set_that_cannot_be_used_is_refused_in_one_line(tmp_path, case):
    change, named = BAD[case]
    pattern = write_set(tmp_path)
    change(tmp_path)
    with pytest.raises(hp.UsageError) as caught:
        read(pattern, cache_dir=tmp_path / "cache")
    error = str(caught.value)
    assert named.replace("SCANS", str(tmp_path / "scans")) in error and "\n" not in error
    assert not (tmp_path / "cache").exists()


def test_a_pattern_without_files_is_refused(tmp_path):
    for pattern in ("none*.h5", "nowhere/*.h5"):
        with pytest.raises(
            hp.UsageError, match=r"none\*\.h5: no file|there is no folder .*nowhere"
        ):
            read(tmp_path / pattern)
    with pytest.raises(hp.UsageError, match="--images {split}/x has splits of its own"):
        read(write_set(tmp_path), images="{split}/x", labels="{split}/y")
    with pytest.raises(hp.UsageError, match=r"\(7, 5, 3\), which is not HW"):
        read(write_samples(tmp_path / "set", IMAGES[:3], LABELS[:3]), layout="HW")
