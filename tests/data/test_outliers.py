"""Values that may mark missing data are proposed; ordinary images give no such line."""

import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import images_note
from tests.support.external import read, write
from tests.support.pictures import make_pack
from tests.support.ranks import command

RNG = np.random.default_rng(0)
FIELDS = RNG.normal(288, 8, (16, 24, 32, 1))  # kelvin
REFLECTANCES = RNG.integers(1, 12000, (16, 24, 32, 1))
WIND_AND_HEIGHT = np.concatenate([RNG.normal(0, 9, (16, 24, 32, 1)), 19 * FIELDS], axis=3)
GAP = RNG.random(FIELDS.shape) < 0.05


def with_gaps(images, value, dtype):
    images = images.copy()
    images[..., :1][GAP] = value
    return images.astype(dtype)


MARKED = {  # images, and the number that is proposed
    "float32": (with_gaps(FIELDS, -9999, "f4"), "-9999"),
    "float64": (with_gaps(FIELDS, 1e20, "f8"), "1e+20"),
    "float32 of netCDF": (with_gaps(FIELDS, 9.96921e36, "f4"), "9.96921e+36"),
    "float16": (with_gaps(FIELDS, -999, "f2"), "-999"),
    "zero kelvin": (with_gaps(FIELDS, 0, "f4"), "0"),
    "int16": (with_gaps(REFLECTANCES, -9999, "i2"), "-9999"),
    "the only negative value": (with_gaps(REFLECTANCES, -2000, "i2"), "-2000"),
    "uint16": (with_gaps(FIELDS * 10, 65535, "u2"), "65535"),
    "of one channel": (with_gaps(WIND_AND_HEIGHT, -999, "f4"), "-999"),
}
ORDINARY = {
    "temperatures": FIELDS.astype("f4"),
    "reflectances": REFLECTANCES.astype("i2"),
    "reflectances with zeros": with_gaps(REFLECTANCES + 1000, 0, "u2"),
    "standardized": RNG.standard_normal(FIELDS.shape).astype("f4"),
    "precipitation": np.where(GAP, RNG.gamma(0.2, 20, FIELDS.shape), 0).astype("f4"),
    "counts": RNG.poisson(0.3, FIELDS.shape).astype("i4"),
    "saturated": np.minimum(RNG.lognormal(8, 2, FIELDS.shape), 65535).astype("u2"),
    "rectified": np.maximum(RNG.standard_normal(FIELDS.shape), -0.5).astype("f4"),
    "masks": with_gaps(np.zeros(FIELDS.shape), 1, "i2"),
    "labels": RNG.integers(0, 5, FIELDS.shape).astype("i2"),
    "constant": np.full(FIELDS.shape, 7, "f4"),
    "a single hot pixel": np.where(np.arange(FIELDS.size).reshape(FIELDS.shape), FIELDS, 1e6),
    "slightly negative": with_gaps(REFLECTANCES, -1, "i2"),
    "bytes": with_gaps(RNG.integers(100, 120, FIELDS.shape), 0, "u1"),
}


def proposal(folder, images, nodata=None):
    """What the note on an HDF5 file of these images says of such a value, or ""."""
    path = write(folder / "a.h5", images, np.arange(len(images)) % 2)
    parts = images_note(read(path, nodata=nodata, layout="NHWC")).split("; ")
    return "".join(part for part in parts if "mark missing data" in part)


@pytest.mark.parametrize("case", MARKED)
def test_a_value_far_from_all_others_is_proposed(tmp_path, case):
    images, value = MARKED[case]
    text = proposal(tmp_path, images)
    share = f"{100 * GAP.mean():.2g} %"
    assert text.startswith(f"{share} of the values read are {value}, far from all others (")
    assert text.endswith(f"): if they mark missing data, give --nodata={value}")
    assert proposal(tmp_path, images, float(value)) == ""


@pytest.mark.parametrize("case", ORDINARY)
def test_ordinary_images_have_no_such_value(tmp_path, case):
    assert proposal(tmp_path, ORDINARY[case]) == ""


def test_the_next_one_is_proposed_when_the_first_is_named(tmp_path):
    images = with_gaps(FIELDS, -9999, "f4")
    images[0, :2] = 1e20
    assert proposal(tmp_path, images).endswith("give --nodata=1e+20")
    assert proposal(tmp_path, images, 1e20).endswith("give --nodata=-9999")
    images[0, :2] = np.nan
    assert proposal(tmp_path, images, np.nan).endswith("give --nodata=-9999")


def test_training_in_place_write_pack_and_pack_say_it(tmp_path, capfd):
    """Once: a value that the file itself names is proposed by that name alone."""
    images = MARKED["int16"][0]
    labels = np.arange(16) % 2
    path = write(tmp_path / "a.h5", images[..., 0], labels)
    proposal = "if they mark missing data, give --nodata=-9999"
    assert proposal in images_note(read(path))
    assert "give" not in images_note(read(path, nodata=-9999.0))
    hp.write_pack(tmp_path / "pack.h5", {"train": (images, labels)}, "01")
    assert "missing data, give nodata=-9999" in capfd.readouterr().err
    hp.write_pack(tmp_path / "named.h5", {"train": (images, labels)}, "01", nodata=-9999)
    assert "missing data" not in capfd.readouterr().err
    for row, image in enumerate(images):
        folder = tmp_path / "scenes" / str(labels[row])
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{row}.npy", image)
    ended = command(1, "pack", tmp_path / "scenes", "--split", "1", cwd=tmp_path)
    assert ended.code == 0
    assert proposal in ended.err


# Targets

AGES = np.float32([61.5, np.nan, 34, 3, 72, 55, 19, 80, 47, 23])
SIZES = np.float32([2, 3, 0, 5, 1, 0, 4, 2, 1, np.nan])


@pytest.mark.parametrize("mark", [-999, -1, 1e6])
def test_a_value_far_from_the_others_may_stand_for_unknown(tmp_path, capfd, mark):
    images = np.zeros((10, 8, 8), np.uint8)
    marked = AGES.copy()
    marked[[2, 5]] = mark
    said = f"age is {mark:g} in 22 % of its values (others 3 to 80): if this stands for unknown"
    for ages in (marked, AGES):
        splits = {"train": (images, np.stack([SIZES, ages], 1))}
        hp.write_pack(tmp_path / "a.h5", splits, columns=["size", "age"], overwrite=True)
        notes = capfd.readouterr().err
        assert (said in notes) == (ages is marked) and "size is" not in notes


def test_it_is_said_of_files_arrays_and_tables(tmp_path, capfd):
    marked = np.nan_to_num(AGES, nan=-999)
    marked[3] = -999
    images = np.zeros((10, 8, 8), np.uint8)
    images[:, 0, 0] = range(10)
    path = write(tmp_path / "a.h5", images, marked)
    said = "y is -999 in 20 % of its values (others 19 to 80): if this stands for unknown, "
    assert f"{said}write NaN in its place" in images_note(read(path, kind="values"))
    hp.write_pack(tmp_path / "pack.h5", {"train": (images, marked)}, columns=["y"])
    assert f"{said}give NaN in its place" in capfd.readouterr().err
    lines = ["path,y"]
    for row, image in enumerate(images):
        np.save(tmp_path / f"{row}.npy", image)
        lines.append(f"{row}.npy,{marked[row]}")
    (tmp_path / "a.csv").write_text("\n".join(lines))
    make_pack(tmp_path / "a.csv", tmp_path / "b.h5", split="1", targets="y")
    assert f"{said}leave its cells empty" in capfd.readouterr().err
