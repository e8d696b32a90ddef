"""External HDF5 files that cannot be used: one line each, nothing else is opened."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from hpctrain.data.external import read_external
from hpctrain.errors import UsageError
from tests.external import CLASSES, ROWS, pixels, write

IMAGES, LABELS = pixels()


def linked(link):
    def change(path):
        with h5py.File(path, "a") as file:
            file["g/x"], file["g/y"] = IMAGES, LABELS
            link(file)

    return change


def rewritten(**stored):
    """x or y written otherwise; a function makes the dataset."""

    def change(path):
        with h5py.File(path, "a") as file:
            for name, made in stored.items():
                del file[name]
                if callable(made):
                    made(file, name)
                else:
                    file[name] = made

    return change


def virtual(file, name):
    layout = h5py.VirtualLayout(IMAGES.shape, "u1")
    layout[:] = h5py.VirtualSource("b.h5", "x", IMAGES.shape)
    file.create_virtual_dataset(name, layout)


def foreign_filter(file, name):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((6, 7, 5, 3))
    properties.set_filter(32767, h5py.h5z.FLAG_OPTIONAL)
    space = h5py.h5s.create_simple(IMAGES.shape)
    made = h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, properties)
    h5py.Dataset(made)[...] = IMAGES


def sparse(file, name):
    file.create_dataset(name, IMAGES.shape, "u1", chunks=(6, 7, 5, 3))[:60] = 1


def sparse_labels(file, name):
    file.create_dataset(name, ROWS, "u1", chunks=20)[3] = 1


def bomb(file, name):
    file.create_dataset(name, (10**12, 7, 5, 3), "u1", chunks=(6, 7, 5, 3))


def compact(file, name):
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((2, 7, 5, 3))
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, properties)


def external(file, name):
    file.create_dataset(name, IMAGES.shape, "u1", external=[("/etc/hostname", 0, IMAGES.size)])


def big_floats(file, name):
    file[name] = IMAGES.astype(">f4")


def bfloat16(file, name):
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    space = h5py.h5s.create_simple(IMAGES.shape)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    h5py.h5d.create(file.id, name.encode(), kind, space, properties)


def with_nan():
    labels = LABELS.astype("f4")
    labels[5] = np.nan
    return labels


def not_finite(value):
    images = IMAGES.astype("f4")
    images[-1, 2, 1, 0] = value
    return images


def virtual_labels(file, name):
    layout = h5py.VirtualLayout((ROWS,), "i8")
    layout[:] = h5py.VirtualSource("b.h5", "y", (ROWS,))
    file.create_virtual_dataset(name, layout)


def hot(row, value):
    labels = np.eye(CLASSES)[LABELS]
    labels[row] = 0, value, value, 0
    return labels


BAD = {  # what is done to the file, what is asked for, what is said
    "no such images": (None, {"images": "z"}, "there is no dataset z; / holds x, y"),
    "no such group": (None, {"images": "a/b/c"}, "there is no dataset a/b/c; / holds x, y"),
    "within a dataset": (None, {"images": "x/y"}, "no dataset x/y$"),
    "no name": (None, {"images": ""}, "'' is no dataset; / holds x, y"),
    "a group": (linked(lambda f: None), {"images": "g"}, "g is no dataset; /g holds x, y"),
    "external link": (
        linked(lambda f: f.__setitem__("e", h5py.ExternalLink("b.h5", "/y"))),
        {"labels": "e"},
        "e is a link to another file, .*b.h5: not followed",
    ),
    "external link on the way": (
        linked(lambda f: f.__setitem__("g/e", h5py.ExternalLink("b.h5", "/"))),
        {"labels": "g/e/y"},
        "g/e/y is a link to another file, .*b.h5: not followed",
    ),
    "a type": (
        linked(lambda f: f.__setitem__("t", np.dtype("f4"))),
        {"images": "t"},
        "t is no dataset$",
    ),
    "virtual": (rewritten(x=virtual), {}, "/x is a virtual dataset"),
    "external storage": (rewritten(x=external), {}, "/x is stored in other files"),
    "compact": (rewritten(x=compact), {}, "/x is stored within its header"),
    "never written": (
        rewritten(x=lambda f, n: f.create_dataset(n, IMAGES.shape, "u1")),
        {},
        "/x was never written",
    ),
    "half written": (rewritten(x=sparse), {}, "/x was not written to its end: 10 of 36 chunks"),
    "shape bomb": (rewritten(x=bomb), {}, "/x was not written to its end: 0 of 166,666,666,667"),
    "filter": (
        rewritten(x=foreign_filter),
        {},
        "/x is compressed by filter 32767 .* pip install hdf5plugin",
    ),
    "int16": (rewritten(x=IMAGES.astype("i2")), {}, "images /x are int16, which is not read"),
    "bfloat16": (rewritten(x=bfloat16), {}, "images /x are float32, or a type like it"),
    "int8": (rewritten(x=(IMAGES // 2).astype("i1")), {}, "images /x are int8"),
    "bool": (rewritten(x=IMAGES > 99), {}, "images /x are bool"),
    "complex": (rewritten(x=IMAGES.astype("c8")), {}, "images /x are complex64"),
    "big endian": (rewritten(x=big_floats), {}, "images /x are >f4, which is not"),
    "text": (rewritten(x=np.array([b"abc"] * ROWS)), {}, "images /x are .S3"),
    "two dimensions": (
        rewritten(x=IMAGES.reshape(ROWS, -1)),
        {},
        r"/x have shape \(211, 105\), which is not NHWC: ",
    ),
    "five dimensions": (rewritten(x=IMAGES[None]), {}, r"have shape \(1, 211, 7, 5, 3\), which is"),
    "a number": (rewritten(x=np.uint8(3)), {}, r"/x have shape \(\), which is not NHWC"),
    "nothing in it": (rewritten(x=IMAGES[:0]), {}, r"have shape \(0, 7, 5, 3\), which is not NHWC"),
    "a null": (rewritten(x=h5py.Empty("u1")), {}, r"/x have shape \(\), which is not NHWC"),
    "layout of three": (None, {"layout": "NHW"}, r"\(211, 7, 5, 3\), which is not NHW: "),
    "layout of four": (
        rewritten(x=IMAGES[..., 0]),
        {"layout": "NCHW"},
        r"\(211, 7, 5\), which is not NCHW: ",
    ),
    "probably NCHW": (
        rewritten(x=np.zeros((ROWS, 3, 7, 5), "u1")),
        {},
        r"shape \(211, 3, 7, 5\), which looks like \(N, C, H, W\): say which it is with --layout",
    ),
    "fewer labels": (
        rewritten(y=LABELS[1:]),
        {},
        r"/y have shape \(210,\), not \(211,\) or one-hot \(211, K\), as there are 211 images",
    ),
    "two hot": (rewritten(y=hot(5, 1)), {}, "labels /y are not one-hot: row 5 is not one 1 and"),
    "half hot": (rewritten(y=hot(5, 0.5)), {}, "labels /y are not one-hot: row 5 is not one 1 and"),
    "one-hot and more": (rewritten(y=np.zeros((ROWS, 2, 2), int)), {}, r"have shape \(211, 2, 2\)"),
    "NaN": (rewritten(y=with_nan()), {}, "labels /y are no whole numbers: row 5 is nan"),
    "halves": (rewritten(y=LABELS / 2), {}, r"labels /y are no whole numbers: row \d+ is 0\.5"),
    "floats too large": (rewritten(y=LABELS * 1e300), {}, "labels /y are no whole numbers: row"),
    "truth": (rewritten(y=LABELS > 0), {}, "labels /y are bool, not numbers"),
    "names": (rewritten(y=np.array([b"cat"] * ROWS)), {}, "labels /y are .S3, not numbers"),
    "virtual labels": (rewritten(y=virtual_labels), {}, "/y is a virtual dataset"),
    "labels elsewhere": (
        rewritten(y=lambda f, n: f.create_dataset(n, ROWS, "u1", external=[("b.h5", 0, ROWS)])),
        {},
        "/y is stored in other files",
    ),
    "half the labels": (
        rewritten(y=sparse_labels),
        {},
        "/y was not written to its end: 1 of 11 chunks",
    ),
    "NaN images": (
        rewritten(x=not_finite(np.nan)),
        {},
        "of /x holds NaN or infinite values",
    ),
    "infinite images": (
        rewritten(x=not_finite(np.inf)),
        {},
        "row 210 of /x holds NaN or infinite",
    ),
    "beyond int64": (
        rewritten(y=LABELS.astype("u8") + np.uint64(2**63)),
        {},
        "labels /y go up to 9223372036854775811, beyond 64 bits",
    ),
    "floats of bytes": (
        rewritten(x=IMAGES.astype("f4")),
        {},
        "/x go from 0 to 219, not from 0 to 1: --max-value 255 divides them by 255, --max-value 1",
    ),
    "floats of 16 bits": (
        rewritten(x=IMAGES * np.float32(200)),
        {},
        "--max-value 65535 divides them",
    ),
    "floats around 0": (
        rewritten(x=IMAGES - np.float32(99)),
        {},
        "not from 0 to 1: --max-value 1",
    ),
    "a file elsewhere": (None, {"images": "../b.h5:x"}, "there is no dataset ../b.h5:x"),
    "no such file": (None, {"labels": "c.h5:y"}, "c.h5 cannot be opened: No such file"),
    "no train": (
        None,
        {"images": "{split}/x"},
        "{split}/x: there is no such dataset of train",
    ),
    "no share": (None, {"split": "0.9,0.2"}, "--split 0.9,0.2: give shares that sum to 1"),
    "empty share": (None, {"split": "0.999,0.001"}, "--split .* leaves no image of .* for test"),
    "class not trained on": (
        rewritten(y=np.repeat([0, 1], [210, 1])),
        {"block_rows": 1, "split": "0.05,0.95"},
        "class 1 of .* has 1 images and none of them in train",
    ),
}


@pytest.fixture
def there(tmp_path):
    write(tmp_path / "b.h5", IMAGES, LABELS)
    return write(tmp_path / "a.h5", IMAGES, LABELS)


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_told_in_one_line(there, case):
    change, asked, said = BAD[case]
    assert read_external(there, "x", "y").uuid
    if change:
        change(there)
    with pytest.raises(UsageError, match=said) as caught:
        read_external(there, **{"images": "x", "labels": "y", **asked})
    assert "\n" not in str(caught.value)
    if "split" not in asked:
        assert str(there.parent) in str(caught.value)


def test_files_that_are_damaged_are_told_in_one_line(there, tmp_path):
    with pytest.raises(UsageError, match=r"no\.h5 cannot be opened: No such file"):
        read_external(tmp_path / "no.h5", "x", "y")
    (tmp_path / "text.h5").write_text("images")
    with pytest.raises(UsageError, match=r"text\.h5 is no HDF5 file"):
        read_external(tmp_path / "text.h5", "x", "y")
    whole = there.read_bytes()
    there.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=f"is cut short: it has .* of {len(whole):,} bytes"):
        read_external(there, "x", "y")
    write(there, IMAGES, LABELS, chunks=(6, 7, 5, 3), fletcher32=True)
    with h5py.File(there) as file:
        place = file["x"].id.get_chunk_info(0).byte_offset
    with there.open("r+b") as file:
        file.seek(place + 3)
        file.write(b"\xff\x01")
    with pytest.raises(UsageError, match="images 0 to 5 of /x cannot be read, the file is corr"):
        read_external(there, "x", "y")
