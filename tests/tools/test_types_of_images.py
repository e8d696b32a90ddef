"""The scale of a network: images of every type, in every form that holds exactly their values.

A network is trained on an HDF5 file or a pack. The same pictures are then given as rows of it, as
arrays of all types, and as files. Each form has the answers of the rows, or is refused in one line
that says what can be given.
"""

from __future__ import annotations

import io
import re
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support.api import command_line
from tests.support.external import write
from tests.support.odd_files import COLOUR, png16, saved, tiff, tiff_page
from tests.tools.test_one_answer import SIDE, export, train

ROWS = 12
LABELS = np.arange(ROWS) % 2
INTEGERS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "float32", "float64"]


def spread(dtype, low, high, channels=1):
    """Images (N, H, W, C) with values from `low` to `high`; of integers, whole numbers."""
    steps = np.random.default_rng(1).integers(0, 256, (ROWS, SIDE, SIDE, channels))
    steps[:, 0, 0] = 0
    steps[:, 0, 1] = 255
    values = low + steps * ((high - low) / 255)
    return (values if np.dtype(dtype).kind == "f" else values.round()).astype(dtype)


HOW = {"images": "x", "labels": "y", "layout": "NHWC", "split": "0.5,0.5", "batch_size": 4}
HOW["lr"] = 1e-9  # the weights stay small


class Case(NamedTuple):
    """What a network is trained on, and the forms of its pictures that have a meaning."""

    stored: np.ndarray
    taken: str  # "arrays" stands for all types that hold the values, "floats" for those; "-" = not
    max_value: float | None = None
    divisor: float = 1.0

    def takes(self, made):
        """The names of the forms, of those that are made, that have a meaning."""
        groups = {"arrays": INTEGERS + FLOATS, "floats": FLOATS}
        words = self.taken.split()
        names = [name for word in words for name in groups.get(word, [word])]
        return {name for name in names if name in made and f"-{name}" not in words}


CASES = {
    "uint8": Case(
        spread("u1", 0, 255),
        "uint8 unit npy tiff png8 shown8 shown16",  # 8 bits hold all that is in the 16
        divisor=255,
    ),
    "uint16": Case(
        spread("u2", 0, 65535),
        "uint16 unit npy tiff png16 shown8 shown16",
        divisor=65535,
    ),
    "12 bits": Case(
        spread("u2", 0, 4080), "arrays npy tiff tiff-float32 png16", max_value=4095, divisor=4095
    ),
    "8 bits in colour": Case(
        spread("u1", 0, 250, 3), "arrays -uint16 npy png8", max_value=250, divisor=250
    ),
    "16 bits in colour": Case(
        spread("u2", 0, 65535, 3), "uint16 unit npy png16 shown8 shown16", divisor=65535
    ),
    "halves": Case(spread("f2", 0, 1), "floats unit npy tiff-float32 shown8"),
    "floats": Case(spread("f4", 0, 1), "floats unit npy tiff-float32 shown8"),
    "doubles": Case(spread("f8", 0, 1), "floats unit npy shown8"),
    "signed floats": Case(spread("f4", -2, 12.5), "floats unit npy tiff-float32", max_value=1),
    "13 channels": Case(
        spread("u2", 0, 9945, 13),
        "arrays npy tiff tiff-float32",
        max_value=1e4,
        divisor=1e4,
    ),
}


def forms(case, stored, folder):
    """Pictures of a case in each form that holds all their values, by its name."""
    made = {"unit": (stored / case.divisor).astype("f8")}
    for name in INTEGERS + FLOATS:
        with np.errstate(all="ignore"):
            values = stored.astype(name)
        if np.array_equal(values.astype("f8"), stored.astype("f8"), equal_nan=True):
            made[name] = values
    shown = stored.astype(float) / case.divisor
    files = {
        "npy": stored,
        "tiff": stored if stored.dtype.kind in "ui" and stored.dtype.itemsize < 4 else None,
        "tiff-float32": made.get("float32"),
    }
    if stored.shape[3] in (1, 3):
        files["png8"] = whole(stored, "u1")
        files["png16"] = whole(stored, "u2")
        files["shown8"] = whole(shown * 255, "u1")
        files["shown16"] = whole(shown * 65535, "u2")
    for name, images in files.items():
        if images is not None:
            made[name] = []
            for number, image in enumerate(images):
                made[name].append(folder / f"{name}-{number:02}")
                made[name][-1].write_bytes(encode(name, image))
    return made


def whole(values, dtype):
    """The values in a type of integers, if it has room for them."""
    values = values.astype(float)
    integers = values.round().clip(0, np.iinfo(dtype).max).astype(dtype)
    return integers if np.allclose(integers, values, rtol=0, atol=1e-9) else None


def encode(name, image):
    """The bytes of a file of an image (H, W, C)."""
    file = io.BytesIO()
    if name == "npy":
        np.save(file, image)
        return file.getvalue()
    if name.startswith("tiff"):
        return tiff(*(tiff_page(image[..., channel]) for channel in range(image.shape[2])))
    if image.shape[2] == 3 and image.dtype == np.uint16:
        return png16(image, COLOUR)
    return saved(Image.fromarray(image.squeeze()), "PNG")


def train_on(case, home, folder):
    """A run on the images of a case, in a file or a pack."""
    if home == "file":
        data = write(folder / "a.h5", case.stored, LABELS)
        return train(folder, data, max_value=case.max_value, **HOW)
    data = write_pack(folder / "a.h5", case, max_value=case.max_value)
    return train(folder, data, batch_size=4, lr=HOW["lr"])


def predict_rows(run):
    """The rows of the images of split train, and their probabilities."""
    output = run.parent / "answers.csv"
    words = ["predict", str(run), "--split=train", "--trust-code", "--threads=1"]
    assert command_line([*words, f"--output={output}"]) == 0
    names, *lines = output.read_text().splitlines()
    column = names.split(",").index("source" if "source" in names else "row")
    rows = [int(line.split(",")[column].strip("/x[]")) for line in lines]
    return rows, np.array([line.split(",")[-2:] for line in lines], float)


def write_pack(path, case, **how):
    """A pack of the images of a case."""
    hp.write_pack(path, {"train": (case.stored, LABELS)}, "01", layout="NHWC", **how)
    return path


def mean_loss(probabilities, labels):
    """The cross-entropy of answers (n, 2)."""
    return -np.log(probabilities[np.arange(len(labels)), labels]).mean()


HOMES = [
    (name, home)
    for name, case in CASES.items()
    for home in ("file", "pack")
    if home == "file" or case.stored.dtype.name in ("uint8", "uint16", "int16", "float32")
]


@pytest.mark.parametrize(("name", "home"), HOMES)
def test_a_picture_has_one_answer_whatever_holds_it(tmp_path, name, home):
    case = CASES[name]
    run = train_on(case, home, tmp_path)
    network = hp.load(run, trust_code=True)
    assert (network.scale.dtype, network.scale.divisor) == (case.stored.dtype, case.divisor)
    rows, expected = predict_rows(run)
    stored, labels = case.stored[rows], LABELS[rows]
    refused = {}
    made = forms(case, stored, tmp_path)
    for form, images in made.items():
        try:
            found = network.predict([*images]).probabilities
        except (hp.UsageError, hp.RunError) as error:
            refused[form] = str(error)
            continue
        assert np.allclose(found, expected, rtol=0, atol=1e-6), form
    assert made.keys() - refused.keys() == case.takes(made)
    assert all(re.search("give|convert|write", text) for text in refused.values())
    images = stored.astype("f4") if stored.dtype.kind == "f" else stored
    assert np.allclose(export(run)(images), expected, rtol=0, atol=1e-6)
    given = {"split": "train", "trust_code": True, "threads": 1}
    assert hp.evaluate(run, **given).loss == pytest.approx(mean_loss(expected, labels), rel=1e-5)
    if home == "file" and (name, "pack") in HOMES:
        other = write_pack(tmp_path / "other.h5", case)
        answers = network.predict([*case.stored]).probabilities
        found = hp.evaluate(run, data=str(other), **given)
        assert found.loss == pytest.approx(mean_loss(answers, LABELS), rel=1e-5)
