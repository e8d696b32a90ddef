"""Tasks write whole pages of blocks; everything else of the file is the root's."""

import os
import threading

import numpy as np
import pytest

from hpctrain.data.pack import write_pack
from hpctrain.data.packing import decode, make
from hpctrain.data.packing.decode import PAGE, Span, channel_sums, write_span
from hpctrain.data.packing.workers import TaskRunner
from tests.data.pictures import class_folders, encode, pack, picture


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


def test_write_pack_takes_what_has_slices(tmp_path):
    class Rows:
        dtype, ndim, shape, size = np.dtype(np.uint8), 4, (1009, 31, 29, 3), 1009

        def __len__(self):
            return self.shape[0]

        def __getitem__(self, rows):
            return images[rows]

    images = np.random.default_rng(0).integers(0, 256, Rows.shape, np.uint8)
    labels = np.arange(1009) % 2
    for name, given in (("a", images), ("b", Rows())):
        write_pack(tmp_path / name, {"train": (given, labels)}, ["x", "y"], {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_results_come_in_the_order_of_the_tasks():
    from concurrent.futures import ThreadPoolExecutor

    from hpctrain.data.packing.workers import PackTask

    told = []
    with ThreadPoolExecutor(3) as threads:
        tasks = (PackTask((number,), number) for number in range(100))
        found = TaskRunner(3, threads).run(lambda number: number**2, tasks, told.append)
        assert list(found) == [number**2 for number in range(100)]
    assert told == list(range(100))
