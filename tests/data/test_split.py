"""Reading samples, however they are stored: any of them, in any order, by several threads."""

import io
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import hpctrain as hp
from tests.support import ranks
from tests.support.api import make_order
from tests.support.external import pixels, read, write
from tests.support.launch import run
from tests.support.pictures import class_folders, make_pack

ROWS, SHAPE = 101, (7, 5, 3)
IMAGES, LABELS = pixels(ROWS, SHAPE, 3)
CHUNKED = {"chunks": (6, 7, 5, 3), "compression": "gzip"}


def pack_of_pixels(folder, seed=0):
    images = IMAGES ^ np.uint8(seed)
    splits = {"test": (images[:13], LABELS[:13]), "train": (images, LABELS)}
    hp.write_pack(folder / "a.h5", splits, ("x", "yy", "æ€"), {"source": "here"})
    return hp.read_pack(folder / "a.h5")


def pack_of_jpegs(folder, seed=0):
    images = class_folders(folder / "images", {"a": 60, "b": 41}, ".jpg", width=41, height=37)
    words = {"size": "5x7", "encoding": "jpeg", "split": "1", "seed": seed}
    return hp.read_pack(make_pack(images, folder / "a.h5", **words))


def external(images, layout=None, **storage):
    def make(folder, seed=0):
        step = -1 if seed else 1
        path = write(folder / "a.h5", images[::step], LABELS[::step], **storage)
        return read(path, "x", "y", layout, "1", block_rows=0)

    return make


KINDS = {
    "pixels": pack_of_pixels,
    "jpeg": pack_of_jpegs,
    "external": external(IMAGES),
    "external, NCHW": external(IMAGES.transpose(0, 3, 1, 2), "NCHW"),
    "external, floats": external(IMAGES / np.float32(255)),
    "external, chunks": external(IMAGES, **CHUNKED),
}


@pytest.fixture(scope="module", params=KINDS)
def opened(request, tmp_path_factory):
    """What is known of a file, its training split, and all its images, read at once."""
    pack = KINDS[request.param](tmp_path_factory.mktemp("split"))
    with hp.Split(pack, "train", threads=3) as split:
        yield pack, split, gather(split, np.arange(ROWS))


def gather(split, rows, *more):
    out = np.empty((len(rows), *split.image_shape), split.dtype)
    assert split.gather(np.asarray(rows, np.int64), out, *more) is out
    return out


def test_all_samples_are_read_with_their_labels(opened):
    pack, split, images = opened
    assert (len(split), split.image_shape, split.dtype) == (ROWS, SHAPE, images.dtype)
    assert len(np.unique(images.reshape(ROWS, -1), axis=0)) == ROWS
    assert pack.splits.keys() >= {"train"} and pickle.loads(pickle.dumps(pack)).uuid == pack.uuid
    if len(pack.classes) == 3:
        scale = 255 if images.dtype.kind == "f" else 1
        stored = {image.tobytes(): label for image, label in zip(IMAGES, LABELS, strict=True)}
        found = [stored[np.rint(image * scale).astype(np.uint8).tobytes()] for image in images]
        assert split.targets.tolist() == found
    assert split.read_targets(np.array([3, 0, 3])).tolist() == split.targets[[3, 0, 3]].tolist()


@given(
    rows=st.one_of(
        st.lists(st.integers(0, ROWS - 1), max_size=150),
        st.builds(lambda a, b: list(range(min(a, b), max(a, b))), *[st.integers(0, ROWS)] * 2),
        st.permutations(range(ROWS)),
    )
)
def test_gather_is_numpy_indexing(opened, rows):
    _, split, images = opened
    assert np.array_equal(gather(split, rows), images[np.array(rows, np.int64)])


def test_several_threads_may_gather_at_once(opened):
    _, split, images = opened

    def is_right(seed):
        rows = np.random.default_rng(seed).integers(0, ROWS, 23)
        return np.array_equal(gather(split, rows), images[rows])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, range(40)))


def test_wrong_calls_are_errors(opened):
    pack, split, _ = opened
    for rows in ([-1], [ROWS], [0, 1000]):
        with pytest.raises(IndexError, match=str(ROWS)):
            gather(split, rows)
    for out in (
        np.empty((2, 7, 5, 1), split.dtype),
        np.empty((2, *SHAPE), np.int8),
        np.empty((4, *SHAPE), split.dtype)[::2],
    ):
        with pytest.raises(ValueError, match="C-contiguous"):
            split.gather(np.array([0, 1]), out)
    with pytest.raises(hp.UsageError, match=r"'val'.* train"):
        hp.Split(pack, "val")


def test_a_system_that_reads_a_few_bytes_at_a_time_is_asked_again(tmp_path, monkeypatch):
    def stutter(descriptor, buffers, offset):
        return os.readv(descriptor, [buffers[0][:11]]) if os.lseek(descriptor, offset, 0) else 0

    with hp.Split(pack_of_pixels(tmp_path), "train") as split:
        monkeypatch.setattr(os, "preadv", stutter)
        assert np.array_equal(gather(split, [5, 4, 77]), IMAGES[[5, 4, 77]])


def test_odd_metadata_of_a_jpeg_file_warns_while_packing_only(tmp_path):
    """Pillow's warnings would come from threads in mid-epoch; here they are errors."""
    for number in range(3):
        file = io.BytesIO()
        exif = b"Exif\0\0II*\0\x08\0\0\0\x09"
        Image.new("RGB", (5, 7), (number, 0, 0)).save(file, "JPEG", exif=exif)
        (tmp_path / "images/a").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"images/a/{number}.jpg").write_bytes(file.getvalue())
    path = make_pack(tmp_path / "images", tmp_path / "a.h5", encoding="jpeg", split="1")
    with hp.Split(hp.read_pack(path), "train") as split:
        assert len(gather(split, [0, 1, 2])) == 3


IMPORTS = """
import pickle, sys
import numpy as np
import hpctrain as hp
for pack in pickle.loads(eval(sys.argv[1])):
    split = hp.Split(pack, "train")
    split.gather(np.array([1]), np.empty((1, *split.image_shape), np.uint8))
sys.exit("h5py" in sys.modules)
"""


def test_ranks_that_are_sent_a_pack_read_it_without_hdf5(tmp_path):
    for kind in ("pixels", "jpeg"):
        (tmp_path / kind).mkdir()
    packs = [KINDS[kind](tmp_path / kind) for kind in ("pixels", "jpeg")]
    done = run([sys.executable, "-c", IMPORTS, repr(pickle.dumps(packs))], timeout=110)
    assert (done.returncode, done.stderr) == (0, "")


# Files that change while they are read


CHANGES = {
    "cut short": lambda path, other: os.truncate(path, 3000),
    "overwritten": lambda path, other: path.write_bytes(other.read_bytes()),
    "replaced": lambda path, other: os.replace(other, path),
    "removed": lambda path, other: path.unlink(),
    "longer": lambda path, other: os.truncate(path, path.stat().st_size + 1),
}


def refusal(comm, pack):
    with pytest.raises((hp.UsageError, hp.RunError)) as caught:
        hp.Split(pack, "train")
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_refuses_a_file_that_is_not_the_one_that_was_checked(tmp_path, kind, change):
    (tmp_path / "other").mkdir()
    pack, other = KINDS[kind](tmp_path), KINDS[kind](tmp_path / "other", 1)
    sizes = [*pack.sizes.values()], [*other.sizes.values()]
    assert sizes[0] == sizes[1] or kind == "external, chunks"  # compressed
    path = Path(pack.path)
    CHANGES[change](path, Path(other.path))
    (said,) = ranks.on_ranks(1, refusal, pack=pack)
    assert str(path) in said and "\n" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_short_in_use_is_an_error_and_no_crash(tmp_path, kind):
    pack = KINDS[kind](tmp_path)
    with hp.Split(pack, "train") as split:
        gather(split, np.arange(ROWS))
        os.truncate(pack.path, 3000)
        with pytest.raises(hp.RunError) as caught:
            gather(split, np.arange(ROWS))
    assert pack.path in str(caught.value) and "\n" not in str(caught.value)


def test_chunks_that_may_have_changed_in_use_are_an_error(tmp_path):
    pack = KINDS["external, chunks"](tmp_path)
    with hp.Split(pack, "train") as split:
        os.utime(pack.path, ns=(0, 0))
        with pytest.raises(hp.RunError, match=r"a\.h5 was changed"):
            gather(split, np.arange(ROWS))


# Checksums


def flip(pack, row):
    """Flip a bit of an image."""
    place = pack.splits["train"].images.offset + row * IMAGES[0].nbytes
    with open(pack.path, "r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ 1]))


def test_a_damaged_sample_is_named_whenever_it_is_read(tmp_path):
    """More damage is in tests/contract/test_pack.py."""
    pack = pack_of_pixels(tmp_path)
    flip(pack, 31)
    with hp.Split(pack, "train") as split:
        gather(split, np.arange(30))
        for _ in range(2):
            with pytest.raises(hp.RunError, match=r"sample 31 of split 'train' is corrupt") as said:
                gather(split, np.arange(ROWS))
            assert pack.path in str(said.value) and "\n" not in str(said.value)
            bad = {}
            split.gather(np.arange(ROWS), np.empty((ROWS, *SHAPE), np.uint8), bad=bad)
            assert bad.keys() == {31}
    with hp.Split(pack, "train", verify=False) as split:
        split.gather(np.array([31]), np.empty((1, *SHAPE), np.uint8))  # as it lies


@pytest.mark.parametrize("order", ["partition", "global"])
def test_each_sample_is_compared_when_it_is_first_read_and_not_again(tmp_path, order):
    """What changes after that in the file is not seen any more: no epoch but the first pays."""
    pack = pack_of_pixels(tmp_path)
    order = make_order(order, hp.cut_epoch(ROWS, 16, 1), 3)
    with hp.Split(pack, "train") as split:
        loader = hp.Loader(split, order, [0], options=hp.ReadOptions(0))
        assert len(list(loader.epoch(0))) == 7
        flip(pack, 31)
        assert len(list(loader.epoch(1))) == 7
        assert (gather(split, [31]) != IMAGES[31]).sum() == 1
        loader.close()
    with hp.Split(pack, "train") as split, pytest.raises(hp.RunError, match="sample 31 of"):
        list(hp.Loader(split, order, [0], options=hp.ReadOptions(0)).epoch(1))


@pytest.mark.parametrize("kind", ["pixels", "external"])
def test_the_kernel_is_asked_for_images_that_are_read_soon(tmp_path, monkeypatch, kind):
    """All of those of a range of a pack; of scattered rows, those of each call, the first time."""
    asked, pack = [], KINDS[kind](tmp_path)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, size, how: asked.append((start, size))
    )
    start, size = pack.splits["train"].images.offset, int(np.prod(SHAPE))
    with hp.Split(pack, "train") as split:
        for _ in range(2):
            split.hold(range(10, 50))
        assert asked == ([(start + 10 * size, 40 * size)] if kind == "pixels" else [])
        asked.clear()
        for _ in range(2):
            split.gather(np.array([40, 12, 20]), np.empty((3, *SHAPE), np.uint8))
    assert sum(each for _, each in asked) == (0 if kind == "pixels" else 3 * size)
