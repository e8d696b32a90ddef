"""hp.write_pack: arrays, data sets of h5py, or images that come one by one, as a pack."""

import json
import tracemalloc

import h5py
import numpy as np
import pytest
import torch

import hpctrain as hp
from hpctrain.data.pack import images_note
from tests.support.pictures import arrays, facts


def random_arrays(rows=1009, shape=(31, 29, 3), classes=3):
    images = np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)
    return images, np.arange(rows) % classes


@pytest.mark.parametrize("storage", [{}, {"chunks": (100, 31, 29, 3), "compression": "gzip"}])
def test_data_sets_of_h5py_give_the_bytes_of_their_arrays(tmp_path, storage):
    (images, labels), made = random_arrays(), {"made": "here"}
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file.create_dataset("x", data=images, **storage)
        file["y"] = labels
        splits = {"train": (file["x"], file["y"])}
        hp.write_pack(tmp_path / "a.h5", splits, ["x", "y", "æ€"], made)
    hp.write_pack(tmp_path / "b.h5", {"train": (images, labels.tolist())}, ("x", "y", "æ€"), made)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    with h5py.File(tmp_path / "a.h5") as file:  # and no time of day
        assert h5py.h5g.get_objinfo(file["train/images"].id).mtime == 0
    assert hp.read_pack(tmp_path / "a.h5").classes == ("x", "y", "æ€")
    assert facts(tmp_path / "a.h5")["provenance"]["made"] == "here"
    found = arrays(tmp_path / "a.h5")
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)


def test_images_are_read_in_slabs(tmp_path):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        images = file.create_dataset("x", (40_000, 64, 32), "u1", chunks=(1000, 64, 32))  # 78 MiB
        for first in range(0, 40_000, 1000):
            images[first] = 1
        tracemalloc.start()
        try:
            hp.write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(40_000, "i2"))}, ["a"])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 24 << 20
    assert hp.read_pack(tmp_path / "a.h5").image_shape == (64, 32, 1)


def test_mean_and_std_are_exact_where_32_bits_would_not_do(tmp_path):
    images = np.full((70001, 1, 1, 1), 255, np.uint8)  # the squares sum to more than 2^32
    hp.write_pack(tmp_path / "a.h5", {"train": (images, np.zeros(70001, int))}, ("a",))
    assert (facts(tmp_path / "a.h5")["mean"], facts(tmp_path / "a.h5")["std"]) == ([1.0], [0.0])
    images = random_arrays(5003)[0]
    hp.write_pack(tmp_path / "b.h5", {"train": (images, np.zeros(5003, int))}, ("a",))
    mean, std = (facts(tmp_path / "b.h5")[name] for name in ("mean", "std"))
    wide = images.reshape(-1, 3).astype(object)
    sums, squares, count = wide.sum(axis=0), (wide**2).sum(axis=0), len(wide)
    assert mean.tolist() == [value / (255 * count) for value in sums]
    roots = np.sqrt((count * squares - sums**2).astype(float))
    assert np.allclose(std, roots / (255 * count), rtol=1e-15)


IMAGES, LABELS = random_arrays(7, (5, 4, 1))
WRONG = {  # splits, and what is named
    "no train": ({"test": (IMAGES, LABELS)}, "train"),
    "no splits": ({}, "train"),
    "shapes": ({"train": (IMAGES, LABELS), "test": (IMAGES[:, :3], LABELS)}, "(3, 4, 1)"),
    "fewer labels": ({"train": (IMAGES, LABELS[:-1])}, "(6,)"),
    "one-hot": ({"train": (IMAGES, np.eye(7))}, "(7, 7)"),
    "a column": ({"train": (IMAGES, LABELS.reshape(-1, 1))}, "labels.reshape(-1)"),
    "floats": ({"train": (IMAGES.astype(float), LABELS)}, "float64"),
    "list": ({"train": (IMAGES.tolist(), LABELS)}, "list"),
    "flat": ({"train": (IMAGES.reshape(7, -1), LABELS)}, "(7, 20)"),
    "nothing": ({"train": (IMAGES[:0], LABELS[:0])}, "(0, 5, 4, 1)"),
    "32 bits": ({"train": (IMAGES.astype("i4"), LABELS)}, "astype('int16') of values from"),
    "unsigned": ({"train": (IMAGES.astype("u8"), LABELS)}, "astype('uint16') of values up to"),
    "float64": ({"train": (IMAGES / 255, LABELS)}, "astype('float32'), which keeps 24 bits"),
    "complex": ({"train": (IMAGES * 1j, LABELS)}, "complex128"),
    "types": ({"train": (IMAGES, LABELS), "test": (IMAGES.astype("u2"), LABELS)}, "uint16"),
    "objects": ({"train": (IMAGES.astype(object), LABELS)}, "object"),
    "tensors": ({"train": (torch.from_numpy(IMAGES), LABELS)}, "images.numpy()"),
    "channels first": ({"train": (np.zeros((7, 3, 9, 9), "u1"), LABELS)}, "layout='NHWC'"),
    "no images": ({"train": (iter([]), LABELS)}, "images of train are none"),
    "a number": ({"train": (3, LABELS)}, "int"),
    "fewer images": ({"train": (iter(IMAGES[:-1]), LABELS)}, "after 6, and there are 7 labels"),
    "more images": ({"train": ([*IMAGES, IMAGES[0]], LABELS)}, "more than its 7 labels"),
    "an odd one": ({"train": ([*IMAGES[:3], IMAGES[3, :4]], LABELS)}, "[3] is uint8 of shape (4,"),
    "an odd type": ({"train": ([*IMAGES[:3], IMAGES[3] / 2], LABELS)}, "[3] is float64"),
    "a masked one": (
        {"train": ([*IMAGES[:2], np.ma.masked_less(IMAGES[2], 9)], LABELS)},
        "[2] are",
    ),
    "rows of lists": ({"train": ([[1, 2], [3, 4]], LABELS)}, "numpy.asarray"),
    "masked images": ({"train": (np.ma.masked_less(IMAGES, 9), LABELS)}, "say by nodata=0"),
    "masked labels": ({"train": (IMAGES, np.ma.masked_equal(LABELS, 0))}, "labels of train"),
    "names": ({"train": (IMAGES, np.array([*"abcabca"]))}, "numpy.unique"),
    "float labels": ({"train": (IMAGES, LABELS / 1)}, "float64"),
    "ragged labels": ({"train": (IMAGES, [[0], [1, 2]])}, "labels of train"),
    "label 3": ({"train": (IMAGES, LABELS + 1)}, "1 to 3"),
    "label -1": ({"train": (IMAGES, LABELS - 1)}, "-1 to 1"),
    "name": ({"train": (IMAGES, LABELS), "a/b": (IMAGES, LABELS)}, "a/b"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_do_not_fit_are_refused(tmp_path, case):
    splits, named = WRONG[case]
    with pytest.raises(hp.UsageError) as caught:
        hp.write_pack(tmp_path / "a.h5", splits, "abc")
    assert named in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_lie_otherwise_in_memory_give_the_same_pack(tmp_path):
    """In Fortran's order, backwards, mapped, labels of other types: the same values."""
    labels = LABELS % 2
    np.save(tmp_path / "x.npy", IMAGES)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    backwards = np.ascontiguousarray(IMAGES[::-1, ::-1])[::-1, ::-1]
    forms = [(IMAGES, labels), (np.asfortranarray(IMAGES), labels.astype(">i8")), (mapped, labels)]
    forms += [(backwards, labels > 0), (IMAGES[..., 0], torch.from_numpy(labels))]
    written = []
    for images, of_them in forms:
        hp.write_pack(tmp_path / "a.h5", {"train": (images, of_them)}, "ab", overwrite=True)
        written.append((tmp_path / "a.h5").read_bytes())
    assert written == [written[0]] * len(forms)


def test_what_hdf5_would_read_as_zeros_is_refused_and_what_is_not_applied_is_said(tmp_path, capsys):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file["x"] = IMAGES
        file["x"].attrs.update(scale_factor=0.5, _FillValue=0)
        file["empty"] = h5py.Empty("u1")
        with pytest.raises(hp.UsageError, match=r"uint8 of shape \(\): expected"):
            write(tmp_path / "b.h5", file["empty"])
        write(tmp_path / "a.h5", file["x"])
        said = capsys.readouterr().err
        assert "images of train: scale_factor of /x is not applied" in said
        assert "images of train: _FillValue of /x is not applied: nodata=0" in said
        write(tmp_path / "c.h5", file["x"], nodata=0)
        assert "_FillValue" not in capsys.readouterr().err
        splits = {"train": (file["x"], LABELS), "test": (IMAGES, LABELS)}
        with pytest.raises(
            hp.UsageError, match="'train': 'scale_factor 0.5', 'test': 'none'}: the"
        ):
            hp.write_pack(tmp_path / "b.h5", splits, "abc")
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        images = file.create_dataset("x", (7, 5, 4), "u1", chunks=(2, 5, 4))
        images[:4] = 1
        with pytest.raises(hp.UsageError, match="images of train: /x is incomplete: 2 of 4 chunks"):
            write(tmp_path / "b.h5", images)


@pytest.mark.parametrize("classes", [[], [0, 1, 2], ["a", "", "c"], "aba"])
def test_classes_without_different_names_are_refused(tmp_path, classes):
    with pytest.raises(hp.UsageError, match="name"):
        hp.write_pack(tmp_path / "a.h5", {"train": (IMAGES, LABELS)}, classes)
    assert list(tmp_path.iterdir()) == []


def test_other_mistakes_are_refused_and_files_replaced_if_asked_only(tmp_path):
    splits, path = {"train": (IMAGES, LABELS)}, tmp_path / "a.h5"
    for made in ({"by": path}, {"mean": float("nan")}):
        with pytest.raises(hp.UsageError, match="JSON"):
            hp.write_pack(path, splits, "abc", made)
    with pytest.raises(hp.RunError, match=r"x\.h5"):
        hp.write_pack(tmp_path / "none" / "x.h5", splits, "abc")
    hp.write_pack(path, splits, "abc")
    before = path.read_bytes()
    with pytest.raises(hp.UsageError, match=r"a\.h5 exists"):
        hp.write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc")
    assert path.read_bytes() == before
    hp.write_pack(path, {"train": (IMAGES, 2 - LABELS)}, "abc", overwrite=True)
    assert np.array_equal(arrays(path)[1], 2 - LABELS)


# Other types than bytes

CLASSES = "abc"


def write(path, images, labels=LABELS, **how):
    hp.write_pack(path, {"train": (images, labels)}, CLASSES, overwrite=True, **how)
    return hp.read_pack(path)


def values_of(dtype, shape=(7, 5, 4, 3), seed=0):
    """Values of all that a type holds."""
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    images = np.frombuffer(raw, dtype).reshape(shape).copy()
    if images.dtype.kind == "f":
        images[~np.isfinite(images)] = -1.5
    return images


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "f4"])
def test_values_of_every_type_are_kept(tmp_path, dtype, order):
    images = values_of(f"{order}{dtype}")
    pack = write(tmp_path / "a.h5", images, max_value=3.0)
    stored, labels = arrays(tmp_path / "a.h5")
    assert stored.dtype == np.dtype(f"<{dtype}") and labels.tolist() == LABELS.tolist()
    assert np.array_equal(stored, images)
    with hp.Split(pack, "train") as split:
        out = np.empty(images.shape, pack.dtype)
        rows = np.array([3, 0, 6, 6, 1, 2, 5])
        assert np.array_equal(split.gather(rows, out), images[rows])
        assert out.dtype == np.dtype(dtype)
    assert (pack.scale.dtype, pack.scale.divisor) == (np.dtype(dtype).name, 3.0)
    assert (pack.scale.low, pack.scale.high) == (images.min(), images.max())
    wide = images.astype(np.float64) / 3
    assert np.allclose(pack.mean, wide.mean(axis=(0, 1, 2)), rtol=1e-12)
    assert np.allclose(pack.std, wide.std(axis=(0, 1, 2)), rtol=1e-12)


@pytest.mark.parametrize(("dtype", "wider"), [("?", "u1"), ("i1", "i2"), ("f2", "f4")])
def test_types_that_packs_do_not_have_are_widened_without_loss_and_said(
    tmp_path, dtype, wider, capsys
):
    images = IMAGES[..., 0].astype(dtype)
    pack = write(tmp_path / "a.h5", images)
    stored, _ = arrays(tmp_path / "a.h5")
    assert stored.dtype == wider and np.array_equal(stored[..., 0], images)
    said = capsys.readouterr().err.splitlines()[0]
    assert f"images are {np.dtype(dtype)}" in said and f"kept as {np.dtype(wider)}" in said
    assert pack.scale.divisor == 1.0 and pack.max_value == (1.0 if dtype == "?" else None)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NCWH"])
def test_axes_are_as_the_layout_says(tmp_path, layout):
    images = values_of("i2", (7, 5, 4, 13))
    axes = {"NHWC": (0, 1, 2, 3), "NCHW": (0, 3, 1, 2), "NCWH": (0, 3, 2, 1)}[layout]
    turned = images.transpose(axes)
    with pytest.raises(hp.UsageError, match="layout='NHWC'"):
        write(tmp_path / "a.h5", np.zeros((7, 3, 3, 60), "u1"))
    written = []
    for of in (turned, iter(turned), iter([turned[:3], *turned[3:]])):
        pack = write(tmp_path / "a.h5", of, layout=layout)
        assert pack.image_shape == (5, 4, 13)
        written.append((tmp_path / "a.h5").read_bytes())
    assert np.array_equal(arrays(tmp_path / "a.h5")[0], images)
    assert written == [written[0]] * 3
    with pytest.raises(hp.UsageError, match="which is not NHW"):
        write(tmp_path / "b.h5", turned, layout="NHW")
    with pytest.raises(hp.UsageError, match="not one of NHWC"):
        write(tmp_path / "b.h5", turned, layout="HWC")


def test_images_may_come_one_by_one_from_a_generator(tmp_path):
    """With the bytes of the array, also if they take more than a slab of 8 MiB."""
    large = values_of("i2", (7, 1300, 500, 1))
    for whole in (IMAGES, large):
        write(tmp_path / "a.h5", whole)
        assert np.array_equal(arrays(tmp_path / "a.h5")[0], whole)
        for images in ((image for image in whole), [*whole[..., 0]], [whole[:3], whole[3:]]):
            write(tmp_path / "b.h5", images)
            assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()

    def broken():
        yield IMAGES[0]
        raise FileNotFoundError(2, "No such file", "scan-2.nii")

    with pytest.raises(hp.RunError, match=r"images of train cannot be read: .*scan-2.nii"):
        write(tmp_path / "c.h5", broken())
    assert not (tmp_path / "c.h5").exists()


@pytest.mark.parametrize("nodata", [-9999.0, float("nan")])
def test_nodata_is_left_out_of_the_statistics_and_kept_in_the_file(tmp_path, nodata):
    images = values_of("f4") % 7
    images[2, 1, :, 1] = nodata
    pack = write(tmp_path / "a.h5", images, nodata=nodata)
    np.testing.assert_equal(arrays(tmp_path / "a.h5")[0], images)
    np.testing.assert_equal(pack.scale.nodata, nodata)
    assert pack.scale.low >= 0 and pack.scale.high <= 7
    assert pack.statistics.count.tolist() == [140, 136, 140]
    kept = np.delete(images[..., 1].reshape(35, 4), 2 * 5 + 1, axis=0).astype(np.float64)
    assert np.allclose((pack.mean[1], pack.std[1]), (kept.mean(), kept.std()), rtol=1e-12)
    with hp.Split(pack, "train") as split:
        out = np.empty(images.shape, "f4")
        np.testing.assert_equal(split.gather(np.arange(7), out), images)
    images[5] = nodata
    with pytest.raises(hp.UsageError, match=r"images of train\[5\] holds nothing but nodata"):
        write(tmp_path / "b.h5", images, nodata=nodata)
    assert not (tmp_path / "b.h5").exists()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("nodata", [None, -1.0])
def test_values_that_are_not_finite_are_refused_with_their_row(tmp_path, value, nodata):
    images = np.ones((7, 5, 4, 1), "f4")
    images[4, 3, 2:] = float(value)
    said = r"images of train\[4\] holds 2 values that are NaN or infinite: .*" + (
        "nodata" if value == "nan" else "write finite"
    )
    with pytest.raises(hp.UsageError, match=said):
        write(tmp_path / "a.h5", images, nodata=nodata)
    assert [*tmp_path.iterdir()] == []
    np.save(tmp_path / "x.npy", images)
    with pytest.raises(hp.UsageError, match=r"images of train, .*x\.npy\[4\] holds"):
        write(tmp_path / "a.h5", np.load(tmp_path / "x.npy", mmap_mode="r"), nodata=nodata)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["g/x"] = images
        with pytest.raises(hp.UsageError, match=r"images of train, .*x\.h5: /g/x\[4\] holds"):
            write(tmp_path / "a.h5", file["g/x"], nodata=nodata)


@pytest.mark.parametrize(
    ("dtype", "how", "named"),
    [
        ("u1", {"nodata": -1}, "nodata=-1 is no value of uint8"),
        ("u2", {"nodata": float("nan")}, "nodata=nan is no value of uint16"),
        ("f4", {"nodata": float("inf")}, "nodata=inf is no value of float32"),
        ("u2", {"max_value": 0}, "max_value=0: give a number in"),
        ("f4", {"max_value": 1e39}, r"max_value=1e\+39: give a number in"),
        ("u2", {"max_value": float("nan")}, "max_value=nan"),
    ],
)
def test_what_a_type_does_not_have_is_refused(tmp_path, dtype, how, named):
    with pytest.raises(hp.UsageError, match=named):
        write(tmp_path / "a.h5", values_of(dtype), **how)


def test_one_line_says_what_becomes_1_where_the_data_leave_no_doubt(tmp_path, capsys):
    """12 bits in 16, masks, counts; one channel far below others; values beyond max_value."""

    def said(images, **how):
        write(tmp_path / "a.h5", images, **how)
        return capsys.readouterr().err

    twelve = values_of("u2") % 4096
    twelve[0, 0, 0] = 4095
    assert (
        "the largest value is 4,095 of 65,535, as of 12 bits: max_value=4095 makes that 1.0\n"
        in said(twelve)
    )
    assert said(twelve, max_value=4095) == ""
    assert "1 of 255, as of 1 bit: max_value=1 makes that 1.0" in said(values_of("u1") % 2)
    assert said(values_of("u1")) == said(values_of("f4") % 1) == ""
    counts = values_of("u2")
    counts[..., 1] %= 30
    assert "below a half in channel 1 (29): --normalize pack" in said(counts)
    lines = said(values_of("i2") % 7 - 3)
    assert "values from -3 to 3 are kept as they are: training needs --max-value" in lines
    twelve[1, :2, 0, 0] = 5000, 6000
    twelve[3, 0, 0, 0] = 5000
    said_beyond = said(twelve, max_value=4095)
    assert "3 values in 2 images are beyond max_value=4095: they become more than 1" in said_beyond
    assert said_beyond.count("\n") == 1


def test_a_run_says_how_a_pack_is_understood_that_does_not_hold_bytes(tmp_path):
    images = values_of("i2") // 10
    images[0, 0, 0] = 3276
    said = images_note(write(tmp_path / "a.h5", images, max_value=4095, nodata=-7))
    assert "a.h5 holds images of 5 rows x 4 columns x 3 channels: int16 values from" in said
    assert "to 3276, divided by 4095, without nodata (-7)" in said
    said = images_note(write(tmp_path / "a.h5", values_of("u2") % 4096))
    assert said.endswith(" is 4,089 of 65,535, as of 12 bits: --max-value 4095 makes that 1.0")
    assert images_note(write(tmp_path / "a.h5", IMAGES)) is None


def test_a_pack_may_be_divided_by_another_value_with_the_bits_of_one_that_was_written_so(tmp_path):
    """Mean and deviation follow from exact sums, not from rounded ones."""
    for dtype in ("u1", "u2", "i2", "f4"):
        images = values_of(dtype, seed=5)
        pack = write(tmp_path / "a.h5", images)
        other = write(tmp_path / "b.h5", images, max_value=4095.5)
        again = pack.with_max_value(4095.5)
        assert (again.mean, again.std, again.scale) == (other.mean, other.std, other.scale)
        assert again.uuid == pack.uuid != other.uuid and again.max_value == 4095.5


def test_the_scale_is_in_one_attribute(tmp_path):
    images = values_of("i2")
    write(tmp_path / "a.h5", images, nodata=-7)
    scale = json.loads(facts(tmp_path / "a.h5")["scale"])
    assert (scale["dtype"], scale["max_value"], scale["nodata"]) == ("int16", None, -7)
    assert scale["high"] == images.max(axis=(0, 1, 2)).tolist()
    wide = images.reshape(-1, 3).astype(int)
    assert [int(text) for text in scale["sum"]] == wide.sum(axis=0).tolist()
    assert [int(text) for text in scale["sum_of_squares"]] == (wide**2).sum(axis=0).tolist()
    assert json.loads(facts(tmp_path / "a.h5")["targets"]) == {"kind": "class"}
