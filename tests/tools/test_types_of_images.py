"""The scale of a network: images of every type, in every form that holds exactly their values.

A network is trained on an HDF5 file or a pack. The same pictures are then given as rows of it, as
arrays of all types, and as files. Each form has the answers of the rows, or is refused in one line
that says what can be given.
"""

from __future__ import annotations

import io
import os
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain as hp
from tests.support.api import command_line
from tests.support.external import write
from tests.support.odd_files import COLOUR, png16, saved, tiff, tiff_page
from tests.tools.test_one_answer import SIDE, export, predict, train

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


READ_AS = {"bool": "uint8", "uint32": "int64", "uint64": "float64"}


class Case(NamedTuple):
    """What a network is trained on, and the forms of its pictures that have a meaning."""

    stored: np.ndarray
    taken: str  # "arrays" stands for all types that hold the values, "floats" for those; "-" = not
    max_value: float | None = None
    divisor: float = 1.0
    normalize: str = "auto"
    nodata: float | None = None

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
    "halves": Case(spread("f2", 0, 1), "floats npy tiff-float32 shown8"),
    "floats": Case(spread("f4", 0, 1), "floats npy tiff-float32 shown8"),
    "doubles": Case(spread("f8", 0, 1), "floats npy shown8"),
    "signed floats": Case(spread("f4", -2, 12.5), "floats npy tiff-float32", max_value=1),
    "13 channels": Case(
        spread("u2", 0, 9945, 13),
        "arrays npy tiff tiff-float32",
        max_value=1e4,
        divisor=1e4,
    ),
    "8 bits, signed": Case(
        spread("i1", -100, 120), "arrays npy tiff tiff-float32", max_value=128, divisor=128
    ),
    "16 bits, signed": Case(
        spread("i2", -1024, 3071, 5), "arrays npy tiff tiff-float32", normalize="pack"
    ),
    "32 bits": Case(spread("i4", -70000, 90000), "arrays npy tiff-float32", normalize="pack"),
    "64 bits": Case(spread("i8", 2**33, 2**34, 2), "arrays npy tiff-float32", normalize="image"),
    "32 bits, unsigned": Case(
        spread("u4", 0, 1e9, 2), "arrays npy tiff-float32", max_value=1e9, divisor=1e9
    ),
    "64 bits, unsigned": Case(spread("u8", 0, 2**40), "arrays npy", normalize="pack"),
    "truth values": Case(spread("u1", 0, 1) == 1, "arrays -uint16 npy png8 tiff tiff-float32"),
    "each by itself": Case(spread("f4", 250, 310, 4), "floats npy tiff-float32", normalize="image"),
    "doubles, normalized": Case(spread("f8", 9e5, 9.1e5), "floats npy", normalize="pack"),
    "no data in 16 bits": Case(
        spread("i2", -1024, 3071), "arrays npy tiff tiff-float32", normalize="pack", nodata=-1024
    ),
    "no data in 8 bits": Case(
        spread("u1", 0, 255, 3), "uint8 npy png8 shown8", divisor=255, normalize="image", nodata=255
    ),
    "NaN": Case(
        np.where(spread("f4", 250, 310, 2) < 255, np.float32("nan"), spread("f4", 250, 310, 2)),
        "floats npy tiff-float32",
        normalize="pack",
        nodata=float("nan"),
    ),
}


def forms(case, stored, folder):
    """Pictures of a case in each form that holds all their values, by its name."""
    made = {}
    if case.divisor != 1:
        made["unit"] = (stored / case.divisor).astype("f8")
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
        how = {"max_value": case.max_value, "nodata": case.nodata, "normalize": case.normalize}
        return train(folder, data, **how, **HOW)
    data = write_pack(folder / "a.h5", case, max_value=case.max_value)
    return train(folder, data, batch_size=4, lr=HOW["lr"], normalize=case.normalize)


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
    how["nodata"] = case.nodata
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
    stored_type = case.stored.dtype.name
    assert network.scale.dtype == READ_AS.get(stored_type, stored_type)
    assert network.scale.divisor == case.divisor
    rows, expected = predict_rows(run)
    stored, labels = case.stored[rows], LABELS[rows]
    of_rows = network.predict(tmp_path / "a.h5").probabilities
    assert np.allclose(of_rows[rows], expected, rtol=0, atol=1e-6)
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
    images = stored.astype(network.scale.dtype)
    images = images.astype("f4") if images.dtype == np.float16 else images
    assert np.allclose(export(run)(images), expected, rtol=0, atol=1e-6)
    given = {"split": "train", "trust_code": True, "threads": 1}
    assert hp.evaluate(run, **given).loss == pytest.approx(mean_loss(expected, labels), rel=1e-5)
    if home == "file" and (name, "pack") in HOMES:
        other = write_pack(tmp_path / "other.h5", case)
        answers = network.predict([*case.stored]).probabilities
        assert np.allclose(network.predict(other).probabilities, answers, rtol=0, atol=1e-6)
        found = hp.evaluate(run, data=str(other), **given)
        assert found.loss == pytest.approx(mean_loss(answers, LABELS), rel=1e-5)


def test_what_a_network_takes_is_said_with_its_range(tmp_path):
    (tmp_path / "plain").mkdir()
    plain = train_on(CASES["16 bits, signed"], "file", tmp_path / "plain")
    with pytest.raises(
        hp.UsageError, match=r"give int16 values as stored \(from -1,024 to 3,071\)"
    ):
        hp.load(plain, trust_code=True).predict(CASES["16 bits, signed"].stored * np.float32(0.3))
    case = CASES["no data in 16 bits"]
    run = train_on(case, "pack", tmp_path)
    network = hp.load(run, trust_code=True)
    with pytest.raises(hp.UsageError, match=r"to 3,071, and -1,024 where there are no data\)$"):
        network.predict(case.stored * 16)
    with pytest.raises(hp.RunError, match="image 1 holds no data, only -1024"):
        network.predict([case.stored[0], np.full_like(case.stored[0], -1024)])
    floats = case.stored.astype("f4")
    floats[2, 3, 3] = np.nan
    with pytest.raises(hp.RunError, match="image 2 holds NaN"):
        network.predict(floats)
    for nodata, is_like in ((0, False), (-1024, True), (None, True)):
        other = write_pack(tmp_path / f"{nodata}.h5", case._replace(nodata=nodata))
        given = {"data": str(other), "split": "train", "trust_code": True, "threads": 1}
        if is_like:
            losses = mean_loss(network.predict(case.stored).probabilities, LABELS)
            assert hp.evaluate(run, **given).loss == pytest.approx(losses, rel=1e-5)
        else:
            with pytest.raises(hp.UsageError, match="give data with the same nodata value"):
                hp.evaluate(run, **given)


def scenes(dtype, high, channels=1, count=8):
    """Images (H, W, C) that `pack` must resize, with values from 0 to `high`."""
    rng = np.random.default_rng(2)
    images = rng.random((count, 13, 19, channels)) * high
    images[:, 0, :2] = [[0], [high]]
    return images.astype(dtype)


PACKED = {  # images of files, how they are written, and the words of pack
    "16 bits": (scenes("u2", 65535), "png", []),
    "12 bits": (scenes("u2", 4095), "png", ["--max-value", "4095"]),
    "16 bits in colour": (scenes("u2", 65535, 3), "png", []),
    "16 bits reduced": (scenes("u2", 65535, 3), "png", ["--dtype", "uint8"]),
    "cropped": (scenes("u2", 65535), "png", ["--crop"]),
    "five pages": (scenes("u2", 999, 5), "tiff", ["--pages", "channels", "--max-value", "999"]),
    "signed": (scenes("i2", 900) - 450, "tiff", ["--max-value", "450"]),
    "floats": (scenes("f4", 1), "tiff", []),
    "arrays": (scenes("f4", 1, 7), "npy", []),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_file_has_the_answer_of_its_sample_in_a_pack(tmp_path, name):
    images, form, words = PACKED[name]
    for number, image in enumerate(images):
        path = tmp_path / f"files/{number % 2}/{number}.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(form, image))
    run = train_on_files(tmp_path, ["--size", f"{SIDE}x{SIDE}", *words])
    _, expected = predict(run, "--split", "train")
    _, of_files = predict(run, tmp_path / "files")
    assert len(of_files) == len(images)
    for file, answer in of_files.items():
        source = os.path.relpath(file, tmp_path / "files")
        assert np.allclose(answer, expected[source], rtol=0, atol=1e-6), file


def train_on_files(folder, words):
    """A run on a pack of the files in a folder."""
    pack = folder / "pack.h5"
    command = ["pack", str(folder / "files"), "--split=1", "--jobs=1", f"--output={pack}"]
    assert command_line([*command, *words]) == 0
    return train(folder, pack, batch_size=4, lr=HOW["lr"])


def test_a_network_of_tiles_takes_files_of_their_size_alone(tmp_path, capfd):
    """Larger ones would be shrunk, in which nothing looks as in the training."""
    for number, image in enumerate(scenes("u1", 255)):
        path = tmp_path / f"files/{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode("png", image))
    run = train_on_files(tmp_path, ["--tiles", f"{SIDE}x{SIDE}"])
    tile = scenes("u1", 255)[0, :SIDE, :SIDE]
    (tmp_path / "tile.png").write_bytes(encode("png", tile))
    network = hp.load(run, trust_code=True)
    assert torch.equal(network.preprocess(tmp_path / "tile.png"), network.preprocess(tile))
    capfd.readouterr()
    code, answers = predict(run, tmp_path / "files", tmp_path / "tile.png")
    assert (code, len(answers)) == (1, 1)
    assert "19x13 pixels, not 8x8, and resizing would change values" in capfd.readouterr().err
    with pytest.raises(hp.RunError, match="19x13 pixels, not 8x8"):
        network.predict(scenes("u1", 255))
