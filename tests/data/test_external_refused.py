"""HDF5 files of other programs that cannot be used: one line each, which names the file.

More of them are in tests/contract/test_refused.py.
"""

from __future__ import annotations

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support.external import CLASSES, ROWS, pixels, read, write

IMAGES, LABELS = pixels()


def stored(**made):
    """x or y stored otherwise: these values, or what a function makes."""

    def change(path):
        with h5py.File(path, "a") as file:
            for name, value in made.items():
                del file[name]
                if callable(value):
                    value(file, name)
                else:
                    file[name] = value

    return change


def added(name, value):
    def change(path):
        with h5py.File(path, "a") as file:
            file[name] = value

    return change


def virtual(source, name, shape):
    """A virtual data set, made of one that does not exist: HDF5 would read zeros."""

    def make(file, at):
        layout = h5py.VirtualLayout(shape, "u1")
        layout[:] = h5py.VirtualSource(source, name, shape)
        file.create_virtual_dataset(at, layout)

    return make


def created(kind, shape, **settings):
    """A data set of a type or a storage that h5py does not make itself; nothing is written."""

    def make(file, name):
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        for setting, value in settings.items():
            getattr(properties, setting)(*value)
        h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), properties)

    return make


def bfloat16():
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    return kind


def half_written(file, name):
    file.create_dataset(name, (ROWS,), "u1", chunks=(20,))[:60] = 1


def changed(values, row, value):
    values = values.copy()
    values[row] = value
    return values


U8, EARLY = h5py.h5t.STD_U8LE, (h5py.h5d.ALLOC_TIME_EARLY,)
FLOATS = IMAGES.astype("f4")
BAD = {  # what is done to the file, the arguments, what is named beside the file
    "a type": (added("t", np.dtype("f4")), {"images": "t"}, "t"),
    "virtual, no source": (stored(x=virtual("none.h5", "x", IMAGES.shape)), {}, "/x"),
    "virtual labels, no source": (stored(y=virtual("none.h5", "y", (ROWS,))), {}, "/y"),
    "half the labels": (stored(y=half_written), {}, "/y"),
    "unknown filter": (
        stored(x=created(U8, IMAGES.shape, set_chunk=((6, 7, 5, 3),), set_filter=(32767, 1))),
        {},
        "32767",
    ),
    "bfloat16": (stored(x=created(bfloat16(), IMAGES.shape, set_alloc_time=EARLY)), {}, "/x"),
    "int8": (stored(x=(IMAGES // 2).astype("i1")), {}, "int8"),
    "bool": (stored(x=IMAGES > 99), {}, "bool"),
    "complex": (stored(x=IMAGES.astype("c8")), {}, "complex64"),
    "text": (stored(x=np.array([b"abc"] * ROWS)), {}, "/x"),
    "five dimensions": (stored(x=IMAGES[None]), {}, "(1, 211, 7, 5, 3)"),
    "a number": (stored(x=np.uint8(3)), {}, "/x"),
    "no images": (stored(x=IMAGES[:0]), {}, "(0, 7, 5, 3)"),
    "a null": (stored(x=h5py.Empty("u1")), {}, "/x"),
    "half hot": (stored(y=changed(np.eye(CLASSES)[LABELS], 5, 0.5)), {}, "row 5"),
    "NaN label": (stored(y=changed(LABELS.astype("f4"), 5, np.nan)), {}, "row 5"),
    "fractional label": (stored(y=changed(LABELS.astype("f4"), 5, 0.5)), {}, "row 5"),
    "large label": (stored(y=changed(LABELS.astype("f8"), 5, 2.0**60)), {}, "row 5"),
    "labels of truth": (stored(y=LABELS > 0), {}, "/y"),
    "labels beyond int64": (stored(y=LABELS.astype("u8") + np.uint64(2**63)), {}, "/y"),
    "NaN image": (stored(x=changed(FLOATS, -1, np.nan)), {}, "/x[210]"),
    "floats of 16 bits": (stored(x=FLOATS * 200), {}, "--max-value 65535"),
    "floats around 0": (stored(x=FLOATS - 99), {}, "--max-value 1"),
    "no such file": (stored(y=h5py.ExternalLink("c.h5", "y")), {}, "y"),
    "class not trained on": (
        stored(y=np.repeat([0, 1], [210, 1])),
        {"block_rows": 1, "split": "0.05,0.95"},
        "class 1",
    ),
}


@pytest.fixture
def there(tmp_path):
    return write(tmp_path / "a.h5", IMAGES, LABELS)


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(there, case):
    change, arguments, named = BAD[case]
    assert read(there, "x", "y").uuid
    if change:
        change(there)
    with pytest.raises(hp.UsageError) as caught:
        read(there, **{"images": "x", "labels": "y", **arguments})
    said = str(caught.value)
    assert "\n" not in said and str(there.parent) in said and named in said


def test_damaged_files_are_refused_in_one_line(there, tmp_path):
    def refusal(path):
        with pytest.raises(hp.UsageError) as caught:
            read(path, "x", "y")
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "none.h5" in refusal(tmp_path / "none.h5")
    (tmp_path / "text.h5").write_text("images")
    assert "text.h5" in refusal(tmp_path / "text.h5")
    whole = there.read_bytes()
    there.write_bytes(whole[:-1])
    assert "a.h5" in refusal(there)
    write(there, IMAGES, LABELS, chunks=(6, 7, 5, 3), fletcher32=True)
    with h5py.File(there) as file:
        place = file["x"].id.get_chunk_info(0).byte_offset
    with there.open("r+b") as file:
        file.seek(place + 3)
        file.write(b"\xff\x01")
    assert "row 0 of /x" in refusal(there)
