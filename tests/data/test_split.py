import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpctrain.data import checks
from hpctrain.data.pack import write_pack
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from tests.data.pictures import needs_h5py

SHAPE = (7, 5, 3)
TRAIN, TEST = 101, 13


def arrays(rows, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, *SHAPE), np.uint8), rng.integers(0, 3, rows)


@pytest.fixture
def splits():
    return {"test": arrays(TEST, 1), "train": arrays(TRAIN, 0), "odd name": arrays(1, 2)}


@pytest.fixture
def path(tmp_path, splits):
    write_pack(tmp_path / "a.h5", splits, ("x", "yy", "æ€"), {"source": "numbers", "seed": 3})
    return tmp_path / "a.h5"


def test_what_is_written_is_read(path, splits):
    pack = read_pack(path)
    assert pack.classes == ("x", "yy", "æ€") and pack.provenance == {"source": "numbers", "seed": 3}
    assert list(pack.splits) == ["train", "test", "odd name"]
    assert (pack.path, pack.file_size) == (str(path), path.stat().st_size)
    assert pack.image_shape == SHAPE and pack.image_bytes == 105
    for name, (images, labels) in splits.items():
        with Split(pack, name) as rows:
            out = np.empty(images.shape, np.uint8)
            assert rows.gather(np.arange(len(rows)), out) is out
            assert (out == images).all() and (rows.labels == labels).all()
            assert rows.labels.dtype == np.int64 and len(rows) == len(images)
    values = splits["train"][0] / 255
    assert np.allclose(pack.mean, values.mean(axis=(0, 1, 2)), rtol=1e-13)
    assert np.allclose(pack.std, values.std(axis=(0, 1, 2)), rtol=1e-13)
    assert verify(pack) == []
    assert pickle.loads(pickle.dumps(pack)) == pack


def test_mean_and_std_are_exact_where_32_bits_would_not_do(tmp_path):
    images = np.full((70001, 1, 1, 1), 255, np.uint8)  # one block, squares sum to more than 2^32
    write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(70001, int))}, ("a",), {})
    pack = read_pack(tmp_path / "a.h5")
    assert (pack.mean, pack.std) == ((1.0,), (0.0,))


@pytest.mark.parametrize(
    "indices",
    [
        [0],
        [100, 0],
        [5, 6, 7, 8],
        [8, 7, 6, 5],
        [3, 3, 3],
        [7, 8, 7, 9, 8],
        [5, 7, 6, 8],
        [2, 4, 3, 5, 100, 99, 0, 1],
        [],
        list(range(101)),
    ],
)
def test_gather_is_numpy_indexing(path, splits, indices):
    with Split(read_pack(path), "train") as rows:
        indices = np.array(indices, np.int64)
        out = np.empty((len(indices), *SHAPE), np.uint8)
        rows.gather(indices, out)
        assert (out == splits["train"][0][indices]).all()


def test_gather_of_random_batches_from_several_threads(path, splits):
    images = splits["train"][0]
    with Split(read_pack(path), "train") as rows:

        def gathered(seed):
            indices = np.random.default_rng(seed).integers(0, TRAIN, 23)
            out = np.empty((23, *SHAPE), np.uint8)
            return (rows.gather(indices, out) == images[indices]).all()

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(gathered, range(100)))


def test_consecutive_rows_are_read_together(path, monkeypatch):
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(
        checks.os, "preadv", lambda *args: calls.append(len(args[1])) or preadv(*args)
    )
    with Split(read_pack(path), "train") as rows:
        for indices, buffers in (
            (range(40, 60), [1]),
            ([9, 8, 7], [3]),
            ([1, 2, 9, 10], [1, 1]),
            ([4, 2], [1, 1]),
        ):
            calls.clear()
            rows.gather(np.array(indices), np.empty((len(indices), *SHAPE), np.uint8))
            assert calls == buffers


def test_more_rows_than_one_call_takes(path, splits, monkeypatch):
    monkeypatch.setattr(checks, "IOV_MAX", 2)
    with Split(read_pack(path), "train") as rows:
        out = np.empty((TRAIN, *SHAPE), np.uint8)
        rows.gather(np.arange(TRAIN)[::-1], out)
        assert (out == splits["train"][0][::-1]).all()


def test_a_system_that_reads_a_few_bytes_at_a_time(path, splits, monkeypatch):
    def stutter(descriptor, buffers, offset):
        return os.readv(descriptor, [buffers[0][:11]]) if os.lseek(descriptor, offset, 0) else 0

    with Split(read_pack(path), "train") as rows:
        monkeypatch.setattr(checks.os, "preadv", stutter)
        out = np.empty((3, *SHAPE), np.uint8)
        rows.gather(np.array([5, 4, 77]), out)
        assert (out == splits["train"][0][[5, 4, 77]]).all()


def test_wrong_use_is_named(path):
    pack = read_pack(path)
    with Split(pack, "train") as rows:
        for indices in ([-1], [101], [0, 1000]):
            with pytest.raises(IndexError, match="that has 101"):
                rows.gather(np.array(indices), np.empty((len(indices), *SHAPE), np.uint8))
        two = np.array([0, 1])
        with pytest.raises(ValueError, match="C-contiguous"):
            rows.gather(two, np.empty((2, 7, 5, 1), np.uint8))
        with pytest.raises(ValueError, match="C-contiguous"):
            rows.gather(two, np.empty((2, *SHAPE), np.int8))
        with pytest.raises(ValueError, match="C-contiguous"):
            rows.gather(two, np.empty((4, *SHAPE), np.uint8)[::2])
    with pytest.raises(UsageError, match="has no split 'val'; it has train, test, odd name"):
        Split(pack, "val")


def test_a_file_cut_short_while_in_use_is_an_error_not_a_signal(path):
    pack = read_pack(path)
    with Split(pack, "train") as rows:
        os.truncate(path, pack.splits["train"].images_offset + 50 * 105 + 1)
        out = np.empty((1, *SHAPE), np.uint8)
        rows.gather(np.array([49]), out)  # still whole
        with pytest.raises(RunError, match="cut short while in use") as caught:
            rows.gather(np.array([50]), out)
        assert str(path) in str(caught.value)
    with pytest.raises(UsageError, match="bytes here, but .* when it was checked"):
        Split(pack, "train")
    path.unlink()
    with pytest.raises(UsageError, match="No such file"):
        Split(pack, "train")


def test_another_pack_of_the_same_size_in_its_place_is_noticed(path, splits):
    pack, size = read_pack(path), path.stat().st_size
    images, labels = splits["train"]
    write_pack(
        path,
        {**splits, "train": (images ^ 1, labels)},
        pack.classes,
        {"source": "numbers", "seed": 3},
        overwrite=True,
    )
    assert path.stat().st_size == size
    with pytest.raises(UsageError, match=f"is not the file that was checked .uuid {pack.uuid}"):
        Split(pack, "train")


def test_reading_needs_no_hdf5(path):
    assert not needs_h5py(read_pack(path))
