"""Chunks of others' files, decoded here: as HDF5 decodes them, and never by a crash."""

from __future__ import annotations

import signal
import struct
import sys
import tracemalloc
import zlib

import h5py
import numpy as np
import pytest

from hpctrain.data import external_file, hdf5_chunks
from hpctrain.data.external import read_external
from hpctrain.data.hdf5 import CorruptChunk
from hpctrain.data.hdf5_chunks import Filters, decode, expand_lzf_here
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from tests.external import pixels, write
from tests.launch import run

STORED = {
    "plain": {},
    "fletcher32": {"fletcher32": True},
    "gzip": {"compression": "gzip"},
    "lzf": {"compression": "lzf", "fletcher32": True},
    "all": {"compression": "gzip", "shuffle": True, "fletcher32": True},
}


def stored(path, values, chunks, **storage):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=chunks, **storage)
    return h5py.File(path, "r")


@pytest.mark.parametrize("here", [False, True], ids=["", "lzf in Python"])
@pytest.mark.parametrize("dtype", ["u1", ">i8", "f2", "f8"])
@pytest.mark.parametrize("storage", STORED)
def test_values_are_those_that_hdf5_reads(tmp_path, monkeypatch, storage, dtype, here):
    if here:
        monkeypatch.setattr(hdf5_chunks, "_lzf_of_h5py", lambda: None)
    rng = np.random.default_rng(0)
    values = np.repeat(rng.integers(0, 250, (53, 7, 5, 1)), 3, 3).astype(dtype)
    for chunks in ((11, 7, 5, 3), (5, 3, 2, 2), (1, 7, 5, 3)):
        with stored(tmp_path / "a", values, chunks, **STORED[storage]) as file:
            size = (tmp_path / "a").stat().st_size
            for start, stop in ((0, 53), (chunks[0], min(53, 4 * chunks[0])), (0, 1)):
                found = hdf5_chunks.StoredChunks(file["x"]).read(start, stop, size)
                assert found.dtype == values.dtype
                assert np.array_equal(found, values[start:stop])


def test_rows_of_one_chunk_are_not_copied_and_labels_do_not_keep_their_chunk(tmp_path):
    values = np.arange(53 * 5).reshape(53, 5)
    with stored(tmp_path / "a", values, (11, 5)) as file:
        for start, stop in ((0, 11), (22, 30), (44, 53)):
            found = hdf5_chunks.StoredChunks(file["x"]).read(start, stop, 10**6)
            assert np.array_equal(found, values[start:stop])
            assert not found.flags.writeable  # the bytes that HDF5 read
    with h5py.File(tmp_path / "b", "w") as file:
        file["x"] = np.zeros((9, 4, 4, 3), "u1")
        file.create_dataset("y", data=np.arange(9) % 3, chunks=(1000,), maxshape=(None,))
    source = read_external(tmp_path / "b", "x", "y").external
    labels = external_file.read_labels(source)
    assert labels.flags.owndata
    assert labels.flags.writeable


def test_a_filter_that_a_chunk_was_stored_without_is_left_out(tmp_path):
    values = np.arange(11, dtype="u1")
    with stored(tmp_path / "a", np.zeros(33, "u1"), (11,), **STORED["all"]) as file:
        file.close()
    with h5py.File(tmp_path / "a", "r+") as file:
        file["x"].id.write_direct_chunk((11,), values.tobytes(), 0b111)
        size = 10**6
        assert (hdf5_chunks.StoredChunks(file["x"]).read(11, 22, size) == values).all()
        assert not hdf5_chunks.StoredChunks(file["x"]).read(0, 11, size).any()


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_chunk_shorter_than_its_checksum_is_refused_where_hdf5_crashes(tmp_path, name):
    images, labels = pixels()
    path = write(tmp_path / "a.h5", images, labels, chunks=(11, 7, 5, 3), fletcher32=True)
    with h5py.File(path, "r+") as file:
        del file["y"]
        file.create_dataset("y", data=labels, chunks=(11,), fletcher32=True)
        size = file[name].id.get_chunk_info(0).size
    pack = read_external(path, "x", "y")  # the control
    with Split(pack, "train") as rows:
        rows.gather(np.arange(len(rows)), np.empty((len(rows), 7, 5, 3), np.uint8))
    with h5py.File(path, "r+") as file:
        corner = (11, 0, 0, 0) if name == "x" else (11,)
        file[name].id.write_direct_chunk(corner, b"\1\2", 0)
        assert file[name].id.get_chunk_info(1).size == 2 < size
    crash = run([sys.executable, "-c", f"import h5py; h5py.File({str(path)!r})[{name!r}][:]"])
    assert crash.returncode == -signal.SIGSEGV
    with pytest.raises(UsageError, match=r"a\.h5.* is corrupt: the chunk at .* is stored as 2 b"):
        pack = read_external(path, "x", "y", seed=1)
        Split(pack, "train").gather(np.arange(50), np.empty((50, 7, 5, 3), np.uint8))


def test_a_chunk_without_filters_of_another_size_is_refused_where_hdf5_overflows(tmp_path):
    """HDF5 reserves the bytes of a whole chunk and reads as many as the index says."""
    with stored(tmp_path / "a", np.ones((8, 8, 8, 1), "u1"), (4, 8, 8, 1)) as file:
        file.close()
    content = (tmp_path / "a").read_bytes()
    key = struct.pack("<II", 256, 0)  # in the B-tree: bytes, skipped filters; then 5 offsets
    place = content.index(key + bytes(40))
    for size in (255, 257, 400):
        odd = content[:place] + struct.pack("<I", size) + content[place + 4 :]
        (tmp_path / "b").write_bytes(odd)
        with h5py.File(tmp_path / "b", "r") as file:
            chunks = hdf5_chunks.StoredChunks(file["x"])
            with pytest.raises(CorruptChunk, match=f"is stored as {size:,} bytes and holds 256"):
                chunks.read(0, 4, len(content))


def test_a_chunk_that_changes_while_in_use_is_an_error_of_the_run(tmp_path):
    images, labels = pixels()
    path = write(tmp_path / "a.h5", images, labels, chunks=(11, 7, 5, 3), fletcher32=True)
    with h5py.File(path) as file:
        info = file["x"].id.get_chunk_info(3)
    with Split(read_external(path, "x", "y"), "train") as rows:
        with open(path, "r+b") as file:
            file.seek(info.byte_offset + 1)
            file.write(b"\xff")
        with pytest.raises(RunError, match="corrupt: the chunk at .* Fletcher-32 .* not agree"):
            rows.gather(np.arange(len(rows)), np.empty((len(rows), 7, 5, 3), np.uint8))


@pytest.mark.parametrize("count", [0, 1, 7, 385, 100_003])
def test_every_flipped_bit_of_a_checksummed_chunk_is_found(tmp_path, count):
    content = np.random.default_rng(count).integers(0, 256, max(1, count), dtype=np.uint8)
    with stored(tmp_path / "a", content, content.shape, fletcher32=True) as file:
        _, raw = file["x"].id.read_direct_chunk((0,))
    assert hdf5_chunks.check_fletcher32(raw) == content.tobytes()
    zeros = bytes(6) + bytes(4)
    assert hdf5_chunks.check_fletcher32(zeros) == bytes(6)
    for bit in range(0, 8 * len(raw), 1 + len(raw) // 50):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptChunk, match="does not agree"):
            hdf5_chunks.check_fletcher32(bytes(flipped))


BOMBS = {
    "gzip": (h5py.h5z.FILTER_DEFLATE, zlib.compress(bytes(50_000_000))),
    "lzf": (h5py.h5z.FILTER_LZF, b"\0\0" + b"\xe0\xff\0" * 200_000),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_no_filter_gives_more_than_a_chunk_has(kind, monkeypatch):
    code, raw = BOMBS[kind]
    for expand in (hdf5_chunks._lzf_of_h5py, lambda: None):
        monkeypatch.setattr(hdf5_chunks, "_lzf_of_h5py", expand)
        tracemalloc.start()
        with pytest.raises(CorruptChunk, match="longer than a chunk"):
            decode(raw, Filters((code,), 1, 1009))
        assert tracemalloc.get_traced_memory()[1] < 100_000
        tracemalloc.stop()


def test_mutated_streams_are_decoded_or_damaged_as_h5py_says():
    rng = np.random.default_rng(0)
    raw = b"\x04abcde\x20\x02\x60\x01\x03wxyz" * 7
    whole = expand_lzf_here(raw, 10_000)
    assert hdf5_chunks.expand_lzf(raw, 10_000) == whole
    for _ in range(2000):
        mutated = bytearray(raw[: rng.integers(1, len(raw))])
        mutated[rng.integers(len(mutated))] = rng.integers(256)
        outcomes = []
        for expand in (hdf5_chunks.expand_lzf, expand_lzf_here):
            try:
                outcomes.append(expand(bytes(mutated), 200))
            except CorruptChunk:
                outcomes.append(b"corrupt")
        assert outcomes[0] == outcomes[1], bytes(mutated)
