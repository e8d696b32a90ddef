"""Tasks write whole pages of blocks; everything else of the file is the root's."""

import os
import threading
import tracemalloc

import h5py
import numpy as np
import pytest

from hpctrain.data.pack import write_pack
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.packing import decode, make
from hpctrain.data.packing.decode import PAGE, Span, channel_sums, write_span
from hpctrain.data.packing.workers import TaskRunner
from hpctrain.errors import RunError, UsageError
from tests.data.pictures import class_folders, contents, encode, pack, picture


@pytest.mark.parametrize("offset", [0, 4096, 2056, 4095, 10_000])
@pytest.mark.parametrize("length", [1, 31, 4096, 4097, 8192, 100_003])
def test_whole_pages_are_written_and_the_rest_is_given_back(tmp_path, offset, length):
    data = np.random.default_rng(length).integers(1, 256, length, np.uint8).tobytes()
    path = tmp_path / "file"
    path.write_bytes(bytes(offset + length))
    written = write_span(memoryview(data), Span(str(path), "", 0, 1, offset, 997, 0))
    whole = bytearray(path.read_bytes())
    touched = [byte for byte, value in enumerate(whole) if value]
    pages = {byte // PAGE for byte in touched}
    assert len(touched) == len(pages) * PAGE  # nothing but whole pages
    assert sum(len(piece) for _, piece in written.rest) == length - len(touched) < 2 * PAGE
    for at, piece in written.rest:
        assert whole[at : at + len(piece)] == bytes(len(piece))
        whole[at : at + len(piece)] = piece
    assert whole == bytes(offset) + data
    assert len(written.checksums) == -(-length // 997)


def test_sums_are_exact():
    pixels = np.random.default_rng(0).integers(0, 256, (301, 3), np.uint8)
    wide = pixels.astype(object)
    for channels in (1, 3, 7):
        expected = [(wide.reshape(-1, channels) ** power).sum(axis=0).tolist() for power in (1, 2)]
        assert channel_sums(pixels.tobytes(), channels).tolist() == expected


def written_pages(monkeypatch):
    """Which tasks write which pages of which file; task 0 is the root, which is the main thread."""
    pages, task = {}, [0]

    def recording(function):
        def run(*arguments):
            task[0] += 1
            return function(*arguments)

        return run

    def write_at(descriptor, data, offset):
        if len(data):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            root = threading.current_thread() is threading.main_thread()
            for page in range(offset // PAGE, -(-(offset + len(data)) // PAGE)):
                pages.setdefault((path, page), []).append(0 if root else task[0])
        real(descriptor, data, offset)

    real = decode.write_at
    monkeypatch.setattr(decode, "write_at", write_at)
    monkeypatch.setattr("hpctrain.data.packing.write.write_at", write_at)
    for name in ("decode_rows", "copy_rows", "write_files"):
        monkeypatch.setattr(make, name, recording(getattr(decode, name)))
    return pages


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
@pytest.mark.parametrize("twins", [False, True])
def test_no_page_is_written_by_two_tasks(tmp_path, monkeypatch, encoding, twins):
    monkeypatch.setattr("hpctrain.data.packing.write.rows_per_block", lambda size: 9001 // size)
    root = class_folders(tmp_path / "images", {"a": 43, "b": 37}, width=31)
    if twins:  # of equal pixels in other files: known after decoding only
        for number in (3, 5, 60):
            (root / "a" / f"{number}.bmp").write_bytes(encode(picture(number, 31), "BMP"))
    pages = written_pages(monkeypatch)
    pack(root, tmp_path / "a.h5", encoding=encoding, size="31x11", split="0.5,0.5")
    files = {path for path, _ in pages}
    assert len(files) == (2 if twins and encoding == "raw" else 1)
    tasks = [{task for task in found if task} for found in pages.values()]
    assert {len(found) for found in tasks} == {0, 1} and len(set().union(*tasks)) > 5
    assert all(len(found) == 1 for found in pages.values() if found[0])  # each pixel once


def test_equal_files_are_known_before_anything_is_decoded(tmp_path, monkeypatch):
    """So that their rows need not be moved."""
    root = class_folders(tmp_path / "images", {"a": 43, "b": 37})
    for number in (3, 5, 60):
        (root / "b" / f"twin{number}.png").write_bytes(encode(picture(number)))
    monkeypatch.delattr(make, "copy_rows")
    made = pack(root, tmp_path / "a.h5", split="0.5,0.5")
    assert made.provenance["duplicates"]["groups"] == 3
    os.rename(root, tmp_path / "moved")
    made_again = pack(tmp_path / "moved", tmp_path / "b.h5", jobs=3, split="0.5,0.5")
    assert made_again.uuid == made.uuid


def arrays(rows=1009, shape=(31, 29, 3), classes=3):
    images = np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)
    return images, np.arange(rows) % classes


@pytest.mark.parametrize("storage", [{}, {"chunks": (100, 31, 29, 3), "compression": "gzip"}])
def test_write_pack_takes_data_sets_of_h5py(tmp_path, storage):
    images, labels = arrays()
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file.create_dataset("x", data=images, **storage)
        file["y"] = labels
        write_pack(tmp_path / "a.h5", {"train": (file["x"], file["y"])}, ["x", "y", "z"])
    write_pack(tmp_path / "b.h5", {"train": (images, labels.tolist())}, ("x", "y", "z"))
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    made = read_pack(tmp_path / "a.h5")
    assert verify(made) == [] and (made.classes, made.provenance) == (("x", "y", "z"), {})
    found = contents(made, "train")
    assert (found[0] == images).all() and (found[1] == labels).all()


def test_write_pack_reads_images_in_slabs(tmp_path):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        images = file.create_dataset("x", (40_000, 64, 32), "u1", chunks=(1000, 64, 32))  # 78 MiB
        tracemalloc.start()
        try:
            write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(40_000, "i2"))}, ["a"])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 24 << 20
    made = read_pack(tmp_path / "a.h5")
    assert made.image_shape == (64, 32, 1) and verify(made) == []


IMAGES, LABELS = arrays(7, (5, 4, 1))
WRONG = {
    "no train": ({"test": (IMAGES, LABELS)}, "the splits are ['test']: one must be named train"),
    "no splits": ({}, "the splits are []"),
    "shapes": (
        {"train": (IMAGES, LABELS), "test": (IMAGES[:, :3], LABELS)},
        "differ in image shape: {'train': (5, 4, 1), 'test': (3, 4, 1)}",
    ),
    "fewer labels": (
        {"train": (IMAGES, LABELS[:-1])},
        "labels of train are int64 of shape (6,): expected 7 integers, one per image",
    ),
    "one-hot": ({"train": (IMAGES, np.eye(7))}, "labels of train are float64 of shape (7, 7)"),
    "floats": (
        {"train": (IMAGES.astype(float), LABELS)},
        "images of train are float64 of shape (7, 5, 4, 1): expected uint8, (N, H, W, C) or",
    ),
    "list": ({"train": (IMAGES.tolist(), LABELS)}, "images of train are list of shape ()"),
    "flat": ({"train": (IMAGES.reshape(7, -1), LABELS)}, "are uint8 of shape (7, 20)"),
    "nothing": ({"train": (IMAGES[:0], LABELS[:0])}, "are uint8 of shape (0, 5, 4, 1)"),
    "label 3": (
        {"train": (IMAGES, LABELS + 1)},
        "labels of train are 1 to 3, but 3 classes are numbered 0 to 2",
    ),
    "label -1": ({"train": (IMAGES, LABELS - 1)}, "labels of train are -1 to 1"),
    "name": ({"train": (IMAGES, LABELS), "a/b": (IMAGES, LABELS)}, "cannot have the name 'a/b'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_write_pack_refuses_arrays_that_do_not_fit(tmp_path, case):
    splits, words = WRONG[case]
    with pytest.raises(UsageError) as caught:
        write_pack(tmp_path / "a.h5", splits, "abc")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_write_pack_refuses_other_mistakes(tmp_path):
    splits, path = {"train": (IMAGES, LABELS)}, tmp_path / "a.h5"
    for classes, words in (
        ([], "give the name of each class"),
        ([0, 1, 2], "classes [0, 1, 2]: give the name of each class"),
        (["a", "", "c"], "give the name of each class"),
        ("aba", "two classes have the name 'a'"),
    ):
        with pytest.raises(UsageError) as caught:
            write_pack(path, splits, classes)
        assert words in str(caught.value)
    for made_by in ({"by": path}, {"mean": float("nan")}):
        with pytest.raises(UsageError, match="provenance cannot be written as JSON"):
            write_pack(path, splits, "abc", made_by)
    with pytest.raises(RunError, match=r"writing .*x.h5 failed: No such file"):
        write_pack(tmp_path / "none" / "x.h5", splits, "abc")
    write_pack(path, splits, "abc")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="a.h5 exists: give another path"):
        write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc")
    assert path.read_bytes() == before
    write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc", overwrite=True)
    assert (contents(read_pack(path), "train")[1] == 2 - LABELS).all()


def test_write_pack_leaves_nothing_if_images_cannot_be_read(tmp_path):
    class Rows:
        dtype, shape = np.dtype(np.uint8), (7, 5, 4, 1)

        def __getitem__(self, rows):
            return IMAGES[rows][1:]

    with pytest.raises(ValueError, match="cannot reshape"):
        write_pack(tmp_path / "a.h5", {"train": (Rows(), LABELS)}, "abc")
    assert list(tmp_path.iterdir()) == []


def test_results_come_in_the_order_of_the_tasks():
    from concurrent.futures import ThreadPoolExecutor

    from hpctrain.data.packing.workers import PackTask

    told = []
    with ThreadPoolExecutor(3) as threads:
        tasks = (PackTask((number,), number) for number in range(100))
        found = TaskRunner(3, threads).run(lambda number: number**2, tasks, told.append)
        assert list(found) == [number**2 for number in range(100)]
    assert told == list(range(100))
