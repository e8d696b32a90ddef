"""External HDF5 files: every row found wherever it lies, dealt once, refused in one line."""

from __future__ import annotations

import os
import threading
import time

import h5py
import numpy as np
import pytest

from hpctrain.data import external, split
from hpctrain.data.external import read_external, reading_note
from hpctrain.data.hdf5_chunks import Chunks
from hpctrain.data.orders import make_order
from hpctrain.data.packed import read_again
from hpctrain.data.partition import cut_epoch
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from tests.external import ROWS, SHAPE, pixels, write
from tests.numerics.test_orders import chi_square_tail, epoch_of
from tests.support.packs import make_pack

IMAGES, LABELS = pixels()
NCHW = IMAGES.transpose(0, 3, 1, 2)
TYPES = ("uint8", "float16", "float32", "float64")
STORED = {  # images as stored, how they are stored, layout
    "one piece": (IMAGES, {}, None),
    "NCHW": (NCHW, {}, "NCHW"),
    "gray": (IMAGES[..., 0], {}, None),
    "chunks": (IMAGES, {"chunks": (6, 7, 5, 3)}, None),
    "chunks of one": (IMAGES, {"chunks": (1, 7, 5, 3), "compression": "gzip"}, None),
    "cut chunks": (IMAGES, {"chunks": (4, 3, 2, 2), "compression": "lzf", "shuffle": True}, None),
    "chunks, NCHW": (NCHW, {"chunks": (5, 2, 7, 5), "fletcher32": True}, "NCHW"),
    "chunks, gray": (IMAGES[..., 1], {"chunks": (9, 4, 5), "compression": "gzip"}, "NHW"),
    "one chunk": (IMAGES, {"chunks": IMAGES.shape}, "NHWC"),
    "endless": (IMAGES, {"chunks": (300, 7, 5, 3), "maxshape": (None, 7, 5, 3)}, "NHWC"),
}


def expected(images, layout):
    """The images as (N, H, W, C)."""
    if layout == "NCHW":
        return images.transpose(0, 2, 3, 1)
    return images[..., None] if images.ndim == 3 else images


def everything(pack):
    """All rows of all splits: images and labels."""
    found = {}
    for name in pack.splits:
        with Split(pack, name) as rows:
            out = np.empty((len(rows.labels), *rows.image_shape), rows.dtype)
            found[name] = rows.gather(np.arange(len(out)), out), rows.labels
    return found


def as_set(images, labels):
    return sorted((x.tobytes(), int(y)) for x, y in zip(images, labels, strict=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", STORED)
def test_every_row_is_in_one_split_with_its_label(tmp_path, case, dtype):
    images, storage, layout = STORED[case]
    images = images.astype(dtype) / (1 if dtype == "uint8" else 256)
    images = images.astype(dtype)
    path = write(tmp_path / "a.h5", images, LABELS, **storage)
    if storage.get("chunks", (0,))[0] > 200:
        with pytest.raises(UsageError, match="leaves no image of .* for test: there are 211"):
            read_external(path, "x", "y", layout)
        found = read_external(path, "x", "y", layout, "1")
    else:
        found = read_external(path, "x", "y", layout)
    wanted = expected(images, layout)
    assert (found.image_shape, found.classes) == (wanted.shape[1:], ("0", "1", "2", "3"))
    parts = everything(found)
    assert {name: len(labels) for name, (_, labels) in parts.items()} == {
        name: split.samples for name, split in found.splits.items()
    }
    got = [np.concatenate(part) for part in zip(*parts.values(), strict=True)]
    assert got[0].dtype == np.dtype(dtype)
    assert as_set(*got) == as_set(wanted, LABELS)
    assert as_set(*got) != as_set(wanted, np.roll(LABELS, 60))


@pytest.mark.parametrize("case", ["one piece", "NCHW", "chunks", "cut chunks", "chunks, NCHW"])
def test_any_rows_in_any_order_by_many_threads(tmp_path, case, monkeypatch):
    monkeypatch.setattr(split, "READ_BYTES", 1000)
    monkeypatch.setattr("hpctrain.data.hdf5_chunks.CACHE_BYTES", 2000)
    images, storage, layout = STORED[case]
    found = read_external(write(tmp_path / "a.h5", images, LABELS, **storage), "x", "y", layout)
    whole, _ = everything(found)["train"]
    wrong = []

    def ask(seed):
        rng = np.random.default_rng(seed)
        for count in (1, 2, 0, 50, 300):
            chosen = rng.integers(0, len(rows), count)
            out = np.empty((count, *SHAPE), np.uint8)
            if not np.array_equal(rows.gather(chosen, out), whole[chosen]):
                wrong.append((seed, count))

    with Split(found, "train") as rows:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert not np.array_equal(whole[:9], whole[1:10])
        with pytest.raises(IndexError):
            rows.gather(np.array([len(rows)]), np.empty((1, *SHAPE), np.uint8))
        with pytest.raises(ValueError):
            rows.gather(np.array([0]), np.empty((1, *SHAPE), np.float32))


def test_a_chunk_is_read_once_a_call_and_the_last_ones_are_kept(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=(6, 7, 5, 3), compression="gzip")
    loads = []

    class Counted:
        def __init__(self, data):
            self.data = data

        def __getitem__(self, rows):
            loads.append(rows.start // 6)
            return self.data[rows]

    monkeypatch.setattr("hpctrain.data.hdf5_chunks.CACHE_BYTES", 2 * 6 * 105)
    found = read_external(path, "x", "y", split="1")

    def asked(*rows):
        loads.clear()
        found = source.gather(np.array(rows), np.empty((len(rows), *SHAPE), np.uint8))
        assert np.array_equal(found, IMAGES[list(rows)])
        return list(loads)

    with Split(found, "train") as source:
        source._chunks._data = Counted(source._chunks._data)
        assert asked(*range(12)) == [0, 1]
        assert asked(8, 11, 6) == []  # kept
        assert asked(8, 12, 5, 60) == [2, 10]
        assert asked(13, 61) == []
        assert asked(1) == [0]  # no longer kept
        assert asked(61) == []  # used again, so the other one goes
        assert (asked(30), asked(61), asked(1)) == ([5], [], [0])
        assert asked(*np.random.default_rng(0).permutation(48)) == [1, 2, 3, 4, 5, 6, 7]
        assert asked(*range(ROWS - 30, ROWS)) == [30, 31, 32, 33, 34, 35]


def test_chunks_are_read_by_one_thread_at_a_time(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=(6, 7, 5, 3))
    inside, most, original = [], [], Chunks._read_slab

    def watched(self, slab):
        inside.append(slab)
        most.append(len(inside))
        time.sleep(0.002)
        inside.pop()
        return original(self, slab)

    monkeypatch.setattr(Chunks, "_read_slab", watched)
    with Split(read_external(path, "x", "y"), "train") as rows:
        out = np.empty((4, 20, *SHAPE), np.uint8)
        asked = [threading.Thread(target=rows.gather, args=(np.arange(20), o)) for o in out]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join()
    assert len(most) > 4 and max(most) == 1


def test_splits_are_dealt_class_by_class_or_in_runs(tmp_path):
    path = write(tmp_path / "a.h5", IMAGES, LABELS)
    by_class = read_external(path, "x", "y", None, "0.7,0.1,0.2", block_rows=0)
    assert list(by_class.splits) == ["train", "validation", "test"]
    with Split(by_class, "test") as rows:
        counts = np.bincount(LABELS) * 0.2
        assert np.abs(np.bincount(rows.labels) - counts).max() < 1
        assert np.count_nonzero(np.diff(rows._index) == 1) < 9
        first = rows._index
    with Split(read_external(path, "x", "y", None, "0.7,0.1,0.2", 1, 0), "test") as rows:
        assert not np.array_equal(first, rows._index)
    in_runs = read_external(path, "x", "y", None, "0.7,0.1,0.2", block_rows=10)
    assert {name: split.samples for name, split in in_runs.splits.items()} in (
        {"train": 151, "validation": 20, "test": 40},
        {"train": 160, "validation": 11, "test": 40},
        {"train": 160, "validation": 20, "test": 31},
    )
    with Split(in_runs, "train") as rows:
        assert (np.diff(rows._index) > 0).all()
        runs = np.split(rows._index, np.flatnonzero(np.diff(rows._index) != 1) + 1)
        assert all(run[0] % 10 == 0 and (len(run) % 10 == 0 or run[-1] == ROWS - 1) for run in runs)


def test_runs_of_an_ordered_file_are_dealt_evenly_over_its_classes(tmp_path):
    images, labels = pixels(20_011, (2, 1, 1), 97)
    path = write(tmp_path / "a.h5", images, labels)
    found = read_external(path, "x", "y")
    assert found.external.block_rows == 20_011 // (20 * 97)
    with Split(found, "test") as rows:
        shares = np.bincount(rows.labels, minlength=97) / np.bincount(labels)
    assert 0.9 * 2001 < found.splits["test"].samples < 1.1 * 2001
    assert 0.02 < shares.min() < shares.max() < 0.2
    mixed_up = np.random.default_rng(1).permutation(labels)
    with Split(read_external(write(path, images, mixed_up), "x", "y"), "test") as rows:
        shares = np.bincount(rows.labels, minlength=97) / np.bincount(labels)
    assert 0.01 < shares.min() < shares.max() < 0.25


def test_runs_are_whole_chunks_long_in_large_files_and_short_in_small_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "MIN_BLOCKS", 10)
    monkeypatch.setattr(external, "MIN_BLOCKS_OF_CLASS", 2)

    def run_of(wanted=None, **storage):
        path = write(tmp_path / "a.h5", IMAGES, LABELS, **storage)
        return read_external(path, "x", "y", block_rows=wanted).external.block_rows

    assert run_of() == 21
    assert run_of(chunks=(3, 7, 5, 3)) == 21  # 71 chunks, 7 a run
    assert run_of(chunks=(19, 7, 5, 3)) == 19
    monkeypatch.setattr(external, "READ_BYTES", 13 * 105)
    assert run_of() == 13
    assert run_of(chunks=(3, 7, 5, 3)) == 12
    assert run_of(chunks=(19, 7, 5, 3)) == 19
    assert run_of(0) == 0
    assert run_of(7) == 7
    assert run_of(0, chunks=(3, 7, 5, 3)) == 12  # never through a chunk
    assert run_of(7, chunks=(3, 7, 5, 3)) == 12
    assert run_of(6, chunks=(3, 7, 5, 3)) == 6
    assert run_of(10**15) == run_of(-1) == 13


def mixed(order, labels, batch):
    """How probable classes in mini-batches are that are at least as uneven, if drawn at random."""
    seen = labels[np.concatenate(epoch_of(order, 0))]
    full, classes = len(seen) // batch, labels.max() + 1
    counts = [
        np.bincount(seen[i * batch : (i + 1) * batch], minlength=classes) for i in range(full)
    ]
    even = batch * np.bincount(labels) / len(labels)
    value = ((np.array(counts) - even) ** 2 / even).sum() / (1 - batch / len(labels))
    return chi_square_tail(value, (classes - 1) * full)


@pytest.mark.parametrize("name", ["partition", "global", "blocks"])
@pytest.mark.parametrize("storage", [{}, {"chunks": (2, 4, 1)}], ids=["one piece", "chunks"])
def test_a_file_ordered_by_class_gives_mixed_batches(tmp_path, name, storage):
    """With the order that training makes of it; without scattering its runs it would not be."""
    images, labels = pixels(20_011, (4, 1, 1), 10)
    path = write(tmp_path / "a.h5", images[..., 0], labels, **storage)
    found = read_external(path, "x", "y", block_rows=None if name == "blocks" else 0)
    with Split(found, "train") as source:
        partition = cut_epoch(len(source), 128, 2)
        runs = found.external.block_rows
        order = make_order(name, partition, 0, runs or 1, 5000, scattered=runs > 0)
        assert 1e-3 < mixed(order, source.labels, 64) < 0.999
        assert mixed(make_order("partition", partition, 0), np.sort(source.labels), 64) < 1e-9
        if runs and name != "global":
            plain = make_order(name, partition, 0, runs, 5000)
            assert mixed(plain, source.labels, 64) < 1e-9


def test_an_epoch_of_runs_reads_every_chunk_about_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=(6, 7, 5, 3))
    found = read_external(path, "x", "y")
    rows = found.splits["train"].samples
    order = make_order("blocks", cut_epoch(rows, 16, 2), 0, found.external.block_rows, 4, True)
    with Split(found, "train") as source:
        chunks = [
            np.unique(source._index[order.window(0, shard, number).samples] // 6)
            for shard in range(2)
            for number in range(order.count(shard))
        ]
    assert len(np.concatenate(chunks)) <= len(np.unique(np.concatenate(chunks))) + 1  # the border


def test_the_identity_is_of_what_the_file_holds(tmp_path):
    def uuid(images=IMAGES, labels=LABELS, layout=None, at=("x", "y"), name="a.h5", **storage):
        path = write(tmp_path / name, images, labels, at, **storage)
        return read_external(path, *at, layout).uuid

    first = uuid()
    assert uuid(name="b.h5") == first == uuid(labels=LABELS.astype(">u2")[:, None])
    assert uuid(chunks=(6, 7, 5, 3)) == first  # the same values, stored otherwise
    changed = IMAGES.copy()
    changed[ROWS - 1, 6, 4, 2] ^= 1
    others = [
        uuid(changed),
        uuid(labels=LABELS[::-1].copy()),
        uuid(NCHW, layout="NCHW"),
        uuid((IMAGES / 255).astype("f4")),
        uuid(at=("x", "z")),
        uuid(IMAGES[..., :1]),
        uuid(IMAGES[..., 0]),
    ]
    assert len({first, *others}) == 8


def test_labels_of_any_width(tmp_path):
    for kind in ("u1", "i1", "<i2", ">u4", "<i8", ">u8"):
        for shape in ((ROWS,), (ROWS, 1)):
            path = write(tmp_path / "a.h5", IMAGES, LABELS.astype(kind).reshape(shape))
            with Split(read_external(path, "x", "y", None, "1"), "train") as rows:
                assert rows.labels.dtype == np.int64
                assert np.array_equal(rows.labels, LABELS[rows._index])


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("chunks", [None, (6, 7, 5, 3)])
def test_a_file_cut_short_while_in_use_is_an_error_not_a_crash(tmp_path, chunks, compression):
    if not chunks and compression:
        return
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=chunks, compression=compression)
    found = read_external(path, "x", "y")
    with Split(found, "train") as rows:
        out = np.empty((len(rows), *SHAPE), np.uint8)
        rows.gather(np.arange(len(rows)), out)
        os.truncate(path, 6000)
        with pytest.raises(RunError, match="it was cut short while in use") as caught:
            rows.gather(np.arange(len(rows)), out)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"cut short|6,000 bytes here"):
        Split(found, "test")


def test_a_chunk_that_is_changed_while_in_use_ends_the_run(tmp_path):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=(6, 7, 5, 3), compression="gzip")
    found = read_external(path, "x", "y")
    with h5py.File(path) as file:
        chunk = file["x"].id.get_chunk_info(3)
    with Split(found, "train") as rows:
        out = np.empty((len(rows), *SHAPE), np.uint8)
        rows.gather(np.arange(len(rows)), out)
        with path.open("r+b") as file:
            file.seek(chunk.byte_offset)
            file.write(bytes(4))
        os.utime(path, ns=(0, 0))
        with pytest.raises(RunError, match=r"a\.h5 was changed while in use$"):
            rows.gather(np.arange(len(rows)), out)
    message = "images 18 to 23 of /x cannot be read, the file is corrupt: "
    with Split(found, "train") as rows, pytest.raises(RunError, match=message) as caught:
        rows.gather(np.arange(len(rows)), out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["scale-offset", "Blosc", "Zstd", "Bitshuffle"])
def test_any_filter_that_hdf5_has_is_read(tmp_path, name):
    if name == "scale-offset":
        compression = {"scaleoffset": 0}
    else:
        compression = getattr(pytest.importorskip("hdf5plugin"), name)()
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=(6, 7, 5, 3), **compression)
    got = zip(*everything(read_external(path, "x", "y")).values(), strict=True)
    assert as_set(*map(np.concatenate, got)) == as_set(IMAGES, LABELS)


def test_links_within_the_file_are_followed(tmp_path):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, ("g/x", "g/y"))
    with h5py.File(path, "a") as file:
        file["s"] = h5py.SoftLink("/g")
    found = everything(read_external(path, "s/x", "s/y", split="1"))["train"]
    assert as_set(*found) == as_set(IMAGES, LABELS)


@pytest.mark.parametrize("chunks", [None, (6, 7, 5, 3)])
def test_another_file_in_its_place_is_noticed(tmp_path, chunks):
    path = write(tmp_path / "a.h5", IMAGES, LABELS, chunks=chunks)
    found = read_external(path, "x", "y")
    changes = {
        "it was replaced meanwhile": lambda: write(path, IMAGES, LABELS[::-1], chunks=chunks),
        "it is not the file that was checked": lambda: write(
            path, IMAGES.reshape(ROWS, 5, 7, 3), LABELS, chunks=chunks and (6, 5, 7, 3)
        ),
        "bytes here, but": lambda: write(path, IMAGES[1:], LABELS[1:], chunks=chunks),
        "no dataset /x": lambda: write(path, IMAGES, LABELS, ("a", "y"), chunks=chunks),
        "cannot be opened: No such file": path.unlink,
    }
    for said, change in changes.items():
        external.split_labels.cache_clear()
        Split(found, "train").close()
        external.split_labels.cache_clear()
        kept = path.read_bytes()
        change()
        with pytest.raises(UsageError, match=said):
            Split(found, "train")
        path.write_bytes(kept)


def test_rows_are_found_again_by_what_a_network_names(tmp_path):
    path = write(tmp_path / "a.h5", NCHW, LABELS)
    found = read_external(path, "x", "y", "NCHW", "0.8,0.2", 5, 3)
    path.rename(tmp_path / "b.h5")
    again = read_again(tmp_path / "b.h5", found.external_arguments)
    assert again.uuid == found.uuid and again.external.block_rows == 3
    with Split(again, "test") as rows:
        assert np.array_equal(rows.labels, LABELS[rows._index])
    pack = make_pack(tmp_path / "pack.h5", {"train": 7})
    assert read_again(pack, found.external_arguments).external is None
    assert read_again(pack, None).external is None
    with pytest.raises(UsageError, match="not a pack .* --images and --labels"):
        read_again(tmp_path / "b.h5", None)
    with pytest.raises(UsageError, match="has no split 'other'; it has train, test"):
        Split(again, "other")


def test_reading_chunks_row_by_row_is_worth_a_note(tmp_path):
    chunked = read_external(write(tmp_path / "a.h5", IMAGES, LABELS, chunks=(6, 7, 5, 3)), "x", "y")
    assert "reads a whole chunk for nearly every image" in reading_note(chunked, "global", 99)
    assert reading_note(chunked, "blocks", 32) is None
    assert "--shuffle blocks holds 31 blocks of 6 im" in reading_note(chunked, "blocks", 31)
    plain = read_external(write(tmp_path / "a.h5", IMAGES, LABELS), "x", "y")
    assert reading_note(plain, "global", 1) is None
