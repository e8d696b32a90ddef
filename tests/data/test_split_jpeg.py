"""Reading packs of JPEG files: what is decoded, by how many threads, and damage of any kind."""

import io
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from hpctrain.data import jpeg, split
from hpctrain.data.images import BadImage
from hpctrain.data.jpeg import draw_crops
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from tests.data.pictures import class_folders, needs_h5py, pack, replaced

SHAPE, ROWS = (13, 17, 3), 59


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    folder = class_folders(root / "images", {"a": 37, "b": 29}, ".jpg", width=41, height=37)
    return pack(folder, root / "a.h5", size="17x13", encoding="jpeg")


@pytest.fixture
def copy(made, tmp_path):
    """The pack in a file that may be spoiled."""
    (tmp_path / "a.h5").write_bytes(Path(made.path).read_bytes())
    return tmp_path / "a.h5"


def out_of(count, fill=0):
    return np.full((count, *SHAPE), fill, np.uint8)


def by_pillow(packed, split="train"):
    """Every image as Pillow makes it without any shortcut but the same filter."""
    with h5py.File(packed.path) as file:
        data, ends = file[f"{split}/bytes"][:].tobytes(), file[f"{split}/offsets"][:].tolist()
    images = [
        Image.open(io.BytesIO(data[a:b])).resize((17, 13), Image.Resampling.BILINEAR)
        for a, b in pairwise(ends)
    ]
    return np.stack([np.asarray(image) for image in images])


def test_rows_are_what_pillow_decodes(made):
    expected = by_pillow(made)
    with Split(made, "train") as rows:
        assert rows.image_shape == SHAPE and rows.dtype == np.uint8
        assert rows.labels.dtype == np.int64 and len(rows) == ROWS == len(rows.labels)
        out = out_of(ROWS)
        assert rows.gather(np.arange(ROWS), out) is out
        assert (out == expected).all()
        assert len(np.unique(out.reshape(ROWS, -1), axis=0)) == ROWS  # all differ


@pytest.mark.parametrize(
    "indices", [[0], [58, 0], [5, 6, 7, 8], [8, 7, 6, 5], [3, 3, 3], [], [7, 8, 7, 9, 8], range(59)]
)
def test_gather_is_numpy_indexing(made, indices):
    indices = np.array(indices, np.int64)
    with Split(made, "train", threads=3) as rows:
        assert (rows.gather(indices, out_of(len(indices))) == by_pillow(made)[indices]).all()
        files = rows.gather(indices, np.empty(len(indices), object))
        assert all(isinstance(data, bytes) for data in files)
        assert all(Image.open(io.BytesIO(data)).size == (41, 37) for data in files)


def test_any_number_of_threads_gives_the_same_bits(made, monkeypatch):
    seen = set()
    inner = jpeg.decode_file

    def told(*args):
        seen.add(threading.current_thread().name)
        return inner(*args)

    monkeypatch.setattr(jpeg, "decode_file", told)
    indices = np.random.default_rng(0).integers(0, ROWS, 101)
    found, crops = [], []
    for threads in (1, 2, 5):
        with Split(made, "train", threads) as rows:
            found.append(rows.gather(indices, out_of(101)))
            files = rows.gather(indices, np.empty(101, object))
            crops.append(rows.gather(indices, out_of(101), draw_crops(0.08, 101, 7), files))
            assert 1 <= len(seen) <= threads
            assert threads == 1 or len(seen) > 1
            seen.clear()
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    assert (crops[0] == crops[1]).all() and (crops[0] == crops[2]).all()
    assert (found[0] != crops[0]).any()


def test_threads_are_those_of_the_cores_but_at_most_8(made, monkeypatch):
    for cores, threads in ((1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        with Split(made, "train") as rows:
            assert rows._threads._max_workers == threads
    with Split(made, "train", threads=11) as rows:
        assert rows._threads._max_workers == 11


def test_several_threads_may_gather_at_once(made):
    expected = by_pillow(made)
    with Split(made, "train", 2) as rows:

        def gathered(seed):
            indices = np.random.default_rng(seed).integers(0, ROWS, 23)
            return (rows.gather(indices, out_of(23)) == expected[indices]).all()

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(gathered, range(40)))


def test_long_runs_are_read_in_pieces_few_and_bounded(made, monkeypatch):
    calls, preadv = [], os.preadv

    def counted(descriptor, buffers, offset):
        calls.append(sum(len(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    with Split(made, "train") as rows:
        rows.hold(range(ROWS))
        monkeypatch.setattr(os, "preadv", counted)
        rows.gather(np.arange(ROWS)[::-1].copy(), np.empty(ROWS, object))
        assert len(calls) == 1
        rows.gather(np.random.default_rng(0).permutation(ROWS), out_of(ROWS))
        assert len(calls) == 1 + 8  # tasks of 8 rows, each a run of the file
        del calls[1:]
        monkeypatch.setattr(split, "READ_BYTES", 4000)
        whole = rows.gather(np.arange(ROWS), np.empty(ROWS, object))
        assert max(calls[1:]) < 4000 + max(len(data) for data in whole)
        assert sum(calls[1:]) == made.splits["train"].files_bytes == calls[0]


def test_what_is_asked_wrongly_is_an_error_of_the_programmer(made):
    with Split(made, "train") as rows:
        for wrong in (np.empty((2, 17, 13, 3), np.uint8), np.empty((2, *SHAPE), np.float32)):
            with pytest.raises(ValueError, match="not C-contiguous uint8"):
                rows.gather(np.array([0, 1]), wrong)
        for index in (-1, ROWS):
            with pytest.raises(IndexError, match="that has 59"):
                rows.gather(np.array([index]), out_of(1))
            with pytest.raises(IndexError):
                rows.gather(np.array([index]), np.empty(1, object))


@pytest.mark.parametrize("crop", [False, True])
def test_a_row_that_cannot_be_decoded_is_named(copy, crop):
    packed = read_pack(copy)
    with Split(packed, "train") as rows:
        first, second = rows.byte_range(range(31, 47))
    with open(copy, "r+b") as file:
        for start in (first, second):
            file.seek(packed.splits["train"].images_offset + start)
            file.write(b"no JPEG file")
    with Split(read_pack(copy), "train", threads=4) as rows:

        def read(indices):
            if not crop:
                return rows.gather(indices, out_of(len(indices)))
            files = rows.gather(indices, np.empty(len(indices), object))
            crops = draw_crops(0.5, len(indices), 1)
            return rows.gather(indices, out_of(len(indices)), crops, files)

        read(np.arange(31))
        for _ in range(5):
            with pytest.raises(RunError, match="sample 31 of split 'train' cannot be de") as caught:
                read(np.arange(ROWS))
            assert str(copy) in str(caught.value) and "\n" not in str(caught.value)
            assert caught.value.exit_code == 1
        read(np.arange(48, ROWS))
    assert len(verify(read_pack(copy))) == 1


def test_no_thread_writes_any_longer_when_an_error_is_raised(made, monkeypatch):
    running = []

    def slow(data, fit, crop=None):
        running.append(1)
        if len(running) == 1:
            raise BadImage("for once")
        time.sleep(0.01)
        running.append(-1)
        return bytes(13 * 17 * 3)

    monkeypatch.setattr(jpeg, "decode_file", slow)
    with Split(made, "train", 3) as rows:
        with pytest.raises(RunError, match="for once"):
            rows.gather(np.arange(ROWS), out_of(ROWS))
        assert sum(running) == 1 and len(running) > 3


def test_files_of_other_kinds_are_not_decoded(copy):
    """A pack holds gray and YCbCr alone: no other of Pillow's readers is ever started."""
    packed = read_pack(copy)
    with Split(packed, "train") as rows:
        start, stop = rows.byte_range(range(3, 4))
    image = Image.new("RGB", (3, 3))
    for kind, mode in (("PNG", "RGB"), ("JPEG", "CMYK")):
        other = io.BytesIO()
        image.convert(mode).save(other, kind)
        assert len(other.getvalue()) <= stop - start
        with open(copy, "r+b") as file:
            file.seek(packed.splits["train"].images_offset + start)
            file.write(other.getvalue())
        with (
            Split(packed, "train") as rows,
            pytest.raises(RunError, match="sample 3 of split 'train' cannot be decoded"),
        ):
            rows.gather(np.array([3]), out_of(1))


def test_a_pack_cut_short_while_in_use(copy):
    packed = read_pack(copy)
    with Split(packed, "train") as rows:
        rows.hold(range(ROWS))
        end = rows.byte_range(range(30))[1]
        os.truncate(copy, packed.splits["train"].images_offset + end + 1)
        rows.gather(np.arange(30), out_of(30))
        with pytest.raises(RunError, match="cut short while in use"):
            rows.gather(np.array([30]), out_of(1))
    with pytest.raises(UsageError, match="bytes here, but .* when it was checked"):
        Split(packed, "train")


def refusal(path, change):
    with h5py.File(path, "r+", locking=False) as file:
        change(file)
    with pytest.raises(UsageError) as caught:
        read_pack(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "place, value",
    [(0, 1), (0, -1), (5, 2**62), (5, -(2**63)), (5, 0), (ROWS, 10**6), (ROWS, 5), (6, None)],
)
def test_offsets_out_of_order_or_out_of_the_data_are_refused(copy, place, value):
    packed = read_pack(copy)

    def change(file):
        offsets = file["train/offsets"]
        offsets[place] = offsets[place - 1] if value is None else value

    assert "offsets of split 'train' do not divide its" in refusal(copy, change)
    wrong = pytest.raises(UsageError, match="offsets of split 'train'")
    with Split(packed, "train") as rows, wrong:  # on the other ranks
        rows.gather(np.arange(ROWS), out_of(ROWS))


def test_links_and_data_of_another_kind_are_refused(copy, tmp_path):
    whole = copy.read_bytes()
    size = read_pack(copy).splits["train"].files_bytes
    (tmp_path / "secret").write_bytes(bytes(size))
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.zeros(size, np.uint8)
    link = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
    outside = [(str(tmp_path / "secret"), 0, h5py.h5f.UNLIMITED)]
    layout = h5py.VirtualLayout((size,), np.uint8)
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (size,))
    for name, text, make in (
        ("bytes", "link to another file", lambda f: f["train"].__setitem__("bytes", link)),
        (
            "bytes",
            "stored in",
            lambda f: f.create_dataset("train/bytes", (size,), "u1", external=outside),
        ),
        ("bytes", "virtual", lambda f: f.create_virtual_dataset("train/bytes", layout)),
        (
            "bytes",
            "stored in",
            lambda f: f.create_dataset("train/bytes", data=np.zeros(size, "u1"), chunks=True),
        ),
        ("bytes", "does not hold", lambda f: f.create_dataset("train/bytes", (10**13,), "u1")),
        ("bytes", "no dataset train/bytes", lambda f: None),
        ("offsets", "does not hold", lambda f: f.create_dataset("train/offsets", (10**12,), "i8")),
        (
            "offsets",
            "59 labels but 59 offsets, not 60",
            lambda f: f.create_dataset("train/offsets", data=np.arange(59)),
        ),
        ("offsets", "int32", lambda f: f.create_dataset("train/offsets", data=np.zeros(60, "i4"))),
        ("labels", "58 labels", lambda f: f.create_dataset("train/labels", data=np.arange(58))),
    ):
        copy.write_bytes(whole)
        assert text in refusal(copy, replaced(f"train/{name}", make)), (name, text)


def test_attributes_are_checked(copy):
    whole = copy.read_bytes()
    for name, value, text in (
        ("fit", 3, "is corrupt"),
        ("image_shape", np.array([13, 17]), "is corrupt"),
        ("image_shape", None, "attribute 'image_shape' is missing"),
        ("version", 1, "no dataset train/images"),
    ):
        copy.write_bytes(whole)

        def change(file, name=name, value=value):
            if value is None:
                del file.attrs[name]
            else:
                file.attrs[name] = value

        assert text in refusal(copy, change), name


def test_fit_and_shape_belong_to_the_uuid(copy):
    for name, value in (("fit", np.bytes_("crop")), ("image_shape", np.array([17, 13, 3]))):
        with h5py.File(copy, "r+", locking=False) as file:
            before = file.attrs[name]
            file.attrs[name] = value
        assert verify(read_pack(copy)) == [
            "shape, classes or checksums are not those that the uuid was made from"
        ]
        with h5py.File(copy, "r+", locking=False) as file:
            file.attrs[name] = before
    assert verify(read_pack(copy)) == []


def test_reading_needs_no_hdf5_and_packs_can_be_sent(made):
    assert pickle.loads(pickle.dumps(made)) == made
    assert not needs_h5py(made)


def test_odd_metadata_says_nothing_while_training(made, tmp_path):
    """Pillow's remarks would come from the threads, in mid-epoch and once per rank."""
    (tmp_path / "images/a").mkdir(parents=True)
    for number in range(3):
        file = io.BytesIO()
        Image.new("RGB", (41, 37), (number, 0, 0)).save(
            file, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x09"
        )
        (tmp_path / f"images/a/{number}.jpg").write_bytes(file.getvalue())
    packed = pack(tmp_path / "images", tmp_path / "a.h5", encoding="jpeg", split="0.5,0.5")
    assert packed.provenance["encoding"]["kept"] == 3
    with Split(packed, "train") as rows:
        rows.gather(np.array([0]), np.empty((1, 37, 41, 3), np.uint8))
