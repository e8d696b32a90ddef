"""Virtual and external data sets and links: equal to what h5py reads, or refused by the source."""

from __future__ import annotations

import os
import re

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support import ranks
from tests.support.api import make_order
from tests.support.external import contents, pixels, read, write

ROWS, SHAPE = 60, (7, 5, 3)
IMAGES, LABELS = pixels(ROWS, SHAPE, 3)
PARTS = 10


def virtual(file, name, sources, shape=(ROWS, *SHAPE), dtype="u1"):
    """A virtual data set of whole data sets "x" of these files, one after another."""
    layout, row = h5py.VirtualLayout(shape, dtype), 0
    for source, rows in sources:
        layout[row : row + rows] = h5py.VirtualSource(source, "x", (rows, *shape[1:]))
        row += rows
    file.create_virtual_dataset(name, layout)


def write_parts(folder):
    """Ten files, some contiguous, some of compressed chunks."""
    for number, images in enumerate(np.split(IMAGES, PARTS)):
        storage = {"chunks": (4, *SHAPE), "compression": "gzip"} if number % 2 else {}
        write(folder / f"part{number}.h5", images, LABELS[:6], **storage)
    return [(f"part{number}.h5", ROWS // PARTS) for number in range(PARTS)]


def ten_files(folder, file):
    virtual(file, "x", write_parts(folder))


def two_levels(folder, file):
    parts = write_parts(folder)
    for number, half in enumerate((parts[:5], parts[5:])):
        with h5py.File(folder / f"half{number}.h5", "w") as inner:
            virtual(inner, "x", half, (30, *SHAPE))
    virtual(file, "x", [("half0.h5", 30), ("half1.h5", 30)])


def raw_files(folder, file):
    """Two, the second from an offset on."""
    data = IMAGES.tobytes()
    (folder / "a.raw").write_bytes(data[:2000])
    (folder / "b.raw").write_bytes(b"abc" + data[2000:])
    external = [(str(folder / "a.raw"), 0, 2000), (str(folder / "b.raw"), 3, len(data) - 2000)]
    file.create_dataset("x", IMAGES.shape, "u1", external=external)


def virtual_of_raw(folder, file):
    with h5py.File(folder / "inner.h5", "w") as inner:
        raw_files(folder, inner)
    virtual(file, "x", [("inner.h5", ROWS)])


def linked(**storage):
    """To another file, and there to another group."""

    def make(folder, file):
        with h5py.File(write(folder / "other.h5", IMAGES, LABELS, **storage), "a") as other:
            other["g"] = h5py.SoftLink("/")
        file["x"] = h5py.ExternalLink("other.h5", "/g/x")

    return make


def compact(folder, file):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple(IMAGES.shape)
    data = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_U8LE, space, properties)
    data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(IMAGES))


MADE = {
    "ten files": ten_files,
    "two levels": two_levels,
    "raw files": raw_files,
    "virtual of raw": virtual_of_raw,
    "linked": linked(),
    "linked chunks": linked(chunks=(4, *SHAPE)),
    "compact": compact,
}


def make(folder, case):
    with h5py.File(folder / "a.h5", "w") as file:
        file["y"] = LABELS
        MADE[case](folder, file)
    return folder / "a.h5"


@pytest.mark.parametrize("case", MADE)
def test_what_is_read_is_what_h5py_reads(tmp_path, case):
    path = make(tmp_path, case)
    with h5py.File(path) as file:
        assert np.array_equal(file["x"][:], IMAGES)
    pack = read(path, split="1", block_rows=0)
    rows = pack.splits["train"].rows
    order = np.random.default_rng(0).permutation(len(rows))
    images, labels = contents(pack, order=order)
    assert sorted(rows) == list(range(ROWS))
    assert np.array_equal(images, IMAGES[rows[order]])
    assert np.array_equal(labels, LABELS[rows[order]])


def bytes_read(comm, path):
    pack = comm.bcast(read(path, split="1") if comm.rank == 0 else None)
    return [part.tobytes() for part in contents(pack)]


@pytest.mark.parametrize("case", ["ten files", "two levels", "raw files", "linked chunks"])
def test_all_ranks_read_what_rank_0_opened(tmp_path, case):
    first, *others = ranks.on_ranks(3, bytes_read, path=str(make(tmp_path, case)))
    assert others == [first, first] and len(first[0]) == IMAGES.nbytes


# Refused: HDF5 would return zeros


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def remake(name, images, **storage):
    return lambda folder: write(folder / name, images, LABELS[:6], **storage)


def unwritten(folder):
    with h5py.File(folder / "part3.h5", "w") as file:
        file.create_dataset("x", (6, *SHAPE), "u1")


def unwritten_chunk(folder):
    with h5py.File(folder / "part3.h5", "w") as file:
        file.create_dataset("x", (6, *SHAPE), "u1", chunks=(4, *SHAPE))[:4] = 1


def unmapped(folder):
    with h5py.File(folder / "a.h5", "r+") as file:
        del file["x"]
        virtual(file, "x", write_parts(folder)[:-1])


def overlapping(folder):
    """Two sources for the first rows, none for the last: as many values as there should be."""
    with h5py.File(folder / "a.h5", "r+") as file:
        del file["x"]
        parts, layout = write_parts(folder), h5py.VirtualLayout((ROWS, *SHAPE), "u1")
        for number, (source, rows) in enumerate(parts):
            row = max(0, number - 1) * rows
            layout[row : row + rows] = h5py.VirtualSource(source, "x", (rows, *SHAPE))
        file.create_virtual_dataset("x", layout)


def remove(name):
    return lambda folder: (folder / name).unlink()


REFUSED = {  # the file, what happens to it, what is named
    "a source is missing": ("ten files", remove("part3.h5"), "part3.h5"),
    "a source is too short": ("ten files", remake("part3.h5", IMAGES[:5]), "part3.h5"),
    "a source was never written": ("ten files", unwritten, "part3.h5"),
    "a chunk of one was never written": ("ten files", unwritten_chunk, "part3.h5"),
    "a source is cut short": ("ten files", cut("part3.h5", 2000), "part3.h5"),
    "a part is unmapped": ("ten files", unmapped, "/x"),
    "a part is unmapped, another mapped twice": ("ten files", overlapping, "/x"),
    "a source of a source is missing": ("two levels", remove("part3.h5"), "part3.h5"),
    "a raw file is short": ("raw files", cut("b.raw", 99), "b.raw"),
    "a raw file of a source is short": ("virtual of raw", cut("b.raw", 99), "b.raw"),
    "a linked file is missing": ("linked", remove("other.h5"), "x"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_hdf5_would_read_as_zeros_is_refused(tmp_path, case):
    made, change, named = REFUSED[case]
    path = make(tmp_path, made)
    assert read(path).uuid
    change(tmp_path)
    with pytest.raises(hp.UsageError) as caught:
        read(path)
    said = str(caught.value)
    assert named in said.replace(str(tmp_path), "") and str(tmp_path) in said and "\n" not in said


def test_a_variable_by_which_hdf5_finds_other_sources_is_refused(tmp_path, monkeypatch):
    path = make(tmp_path, "ten files")
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(tmp_path))
    with pytest.raises(hp.UsageError, match="HDF5_VDS_PREFIX"):
        read(path)


# Blocks


def test_blocks_are_those_of_the_file_in_random_order_a_short_one_last(tmp_path):
    """So what `--shuffle blocks` reads at once lies together in the file."""
    images = np.arange(103, dtype="f8").reshape(-1, 1, 1) / 103
    write(tmp_path / "a.h5", images, np.arange(103) % 3)
    pack = read(tmp_path / "a.h5", split="1", block_rows=6)
    rows = pack.splits["train"].rows
    assert sorted(rows) == list(range(103)) and rows[-1] == 102
    firsts = rows[:102].reshape(-1, 6)
    assert (firsts == firsts[:, :1] + np.arange(6)).all() and not (firsts[:, 0] % 6).any()
    assert np.count_nonzero(np.diff(firsts[:, 0]) == 6) < 5
    partition, seen = hp.cut_epoch(103, 12, 2), []
    order = make_order("blocks", partition, 0, block_rows=6, window_blocks=3)
    for shard in range(2):
        for number in range(order.count(shard)):
            own = rows[order.window(0, shard, number).samples]
            assert len(set(own // 6)) <= 4  # three blocks; a partition may divide one
            seen += own.tolist()
    assert sorted(seen) == list(range(103))
    other = read(tmp_path / "a.h5", split="1", block_rows=6, seed=1)
    assert not np.array_equal(other.splits["train"].rows, rows)


def test_where_a_broken_link_leads_is_named(tmp_path):
    path = write(tmp_path / "a.h5", IMAGES, LABELS)
    with h5py.File(path, "a") as file:
        file["train/x"] = h5py.ExternalLink("gone.nc", "t2m")
        file["train/y"] = h5py.SoftLink("/labels")
    with pytest.raises(hp.UsageError, match=r"train/x leads nowhere: .* to t2m in gone\.nc$"):
        read(path, "train/x", "y")
    with pytest.raises(hp.UsageError, match=r"train/y leads nowhere: .* to /labels$"):
        read(path, "x", "train/y")


OTHER_FORMATS = {  # first bytes, what the refusal says
    "netCDF-3": (b"CDF\x02\0\0\0\0", "it is netCDF-3: 'nccopy -k nc4 old.nc new.nc' makes it HDF5"),
    "HDF4": (b"\x0e\x03\x13\x01", "it is HDF4 or GRIB: write its values into an HDF5 file"),
    "GRIB": (b"GRIB\0\0\0\x02", "it is HDF4 or GRIB"),
    "MATLAB 5": (b"MATLAB 5.0 MAT-file", "it is arrays of NumPy or MATLAB"),
    "a damaged file": (b"\x89HDF\r\n\x1a\n", "truncated|signature|superblock|Unable"),
    "text": (b"x,y", "file signature not found"),
}


@pytest.mark.parametrize("case", OTHER_FORMATS)
def test_other_formats_are_named(tmp_path, case):
    start, said = OTHER_FORMATS[case]
    (tmp_path / "a.nc").write_bytes(start + bytes(200))
    with pytest.raises(hp.UsageError, match=r"a\.nc is not a readable HDF5 file: ") as caught:
        read(tmp_path / "a.nc")
    assert re.search(said, str(caught.value))
    assert "train on it" not in str(caught.value)
