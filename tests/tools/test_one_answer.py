"""One answer for one picture, whatever it comes in, or a refusal that says why.

Files go through `pack`, `predict`, `hp.load` and an exported network; the pictures of networks
trained on HDF5 files come as rows of these, arrays, tensors, images of Pillow and files.
"""

from __future__ import annotations

import csv
import itertools
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain as hp
from tests.data import test_formats as formats
from tests.support.api import command_line
from tests.support.external import read, write
from tests.support.odd_files import saved, tiff, tiff_page
from tests.support.pictures import encode, picture

QUICK = {"epochs": 1, "lr": 0.5, "threads": 1, "progress": "none"}
SIDE = 8  # of the images of networks


def tiny(image_shape, classes):
    """Scores that depend on every value of an image."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(int(np.prod(image_shape)), classes)
    )


def train(folder, data, **settings):
    """Train a tiny network; its run."""
    given = QUICK | {"data": str(data), "model": tiny, "runs_dir": str(folder), "run": "run"}
    return hp.train(**given | settings).folder


def table(path):
    """The probabilities of a table of answers, by what stands in its first column but the row."""
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    names = lines[0].index("source" if "source" in lines[0] else "file")
    first = lines[0].index("probability") + 1
    return {line[names]: np.array(line[first:], float) for line in lines[1:]}


def predict(run, *words):
    """The exit code of `predict`, and its answers."""
    output = Path(run).parent / "answers.csv"
    given = ["predict", str(run), *map(str, words), "--trust-code", "--threads=1"]
    return command_line([*given, f"--output={output}"]), table(output)


def export(run):
    """A function of images that returns the probabilities of the exported network."""
    output = Path(run).parent / "network.pt2"
    words = ["export", str(run), "--preprocess", "--trust-code", f"--output={output}"]
    assert command_line(words) == 0
    module = torch.export.load(output).module()
    return lambda images: module(torch.from_numpy(images)).softmax(1).detach().numpy()


# Files


def scene(mode="RGB", width=19, height=13, number=0):
    """A picture of Pillow in this mode."""
    return Image.fromarray(picture(number, width, height)).convert(mode)


def oriented(kind, number, mode="RGB"):
    exif = Image.Exif()
    exif[0x0112] = number
    return saved(scene(mode), kind, exif=exif)


def deep(scale=65535):
    """16 bits: more values than 8 bits hold."""
    return np.linspace(0, scale, 19 * 13).reshape(13, 19).round().astype(np.uint16)


def transparent(mode):
    image = scene(mode)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def keyed(mode, kind, value, **options):
    """With one transparent value."""
    return saved(scene(mode), kind, transparency=value, **options)


def odd_files():
    """(name, bytes) of 130 files that pack can read."""
    modes = {"PNG": ("1", "L", "P", "RGB"), "TIFF": ("1", "L", "P", "RGB", "CMYK")}
    modes |= {"BMP": ("1", "L", "P", "RGB"), "JPEG": ("L", "RGB", "CMYK"), "GIF": ("L", "P", "RGB")}
    modes |= {"WEBP": ("L", "RGB"), "JPEG2000": ("L", "RGB"), "PPM": ("1", "L", "RGB")}
    for kind in modes:
        for number, mode in enumerate(modes[kind]):
            yield f"{kind}-{mode}.{kind.lower()}", saved(scene(mode, number=number), kind)
    for number in range(2, 9):
        yield f"turned{number}.jpg", oriented("JPEG", number)
    yield "turned.png", oriented("PNG", 6)
    yield "turned.tif", oriented("TIFF", 8, "L")
    yield "turned.webp", oriented("WEBP", 5)
    yield "turned-deep.png", saved(Image.fromarray(deep()), "PNG")
    yield "deep.tif", saved(Image.fromarray(deep()), "TIFF")
    yield "deep.pgm", b"P5 19 13 65535\n" + deep().astype(">u2").tobytes()
    for mode, kind in itertools.product(("RGBA", "LA"), ("PNG", "TIFF")):
        yield f"transparent-{mode}.{kind.lower()}", saved(transparent(mode), kind)
    yield "transparent.webp", saved(transparent("RGBA"), "WEBP", lossless=True)
    yield "opaque.png", saved(scene("RGBA"), "PNG")
    yield "keyed.png", keyed("RGB", "PNG", (128, 128, 128))
    yield "keyed-gray.png", keyed("L", "PNG", 128)
    yield "keyed.gif", keyed("P", "GIF", 3)
    yield "four-bits.png", saved(scene("L").quantize(16), "PNG", bits=4)
    yield "progressive.jpg", saved(scene(), "JPEG", progressive=True)
    yield "4-1-1.jpg", saved(scene(), "JPEG", subsampling="4:1:1", quality=30)
    yield "lzw.tif", saved(scene(), "TIFF", compression="tiff_lzw")
    yield "jpeg.tif", saved(scene(), "TIFF", compression="jpeg")
    yield "large.jpg", saved(scene(width=400, height=301), "JPEG")
    yield "thin.png", saved(scene(width=1, height=97), "PNG")
    yield "point.png", saved(scene("L", 1, 1), "PNG")
    yield "no suffix", saved(scene(number=7), "PNG")
    yield "of another kind.png", saved(scene(number=8), "JPEG")
    yield "UPPER.JPG", saved(scene(number=9), "JPEG")
    yield "æ€ 'x'.png", saved(scene(number=10), "PNG")
    for number in range(2, 9):
        yield f"turned{number}.tif", tiff(tiff_page(formats.DEEP, t274=number))
    for name, (data, _) in (formats.TRANSPARENT | formats.SAME | formats.CHANGED).items():
        yield f"of {name}", data
    for name, data in (formats.DEPTHS | formats.COLOURS).items():
        yield f"deep {name}", data


def damaged_files():
    """(name, bytes) of files that nothing can read."""
    yield "floats.tif", saved(Image.fromarray(deep() / np.float32(9)), "TIFF")
    yield "32 bits.tif", saved(Image.fromarray(deep().astype(np.int32) - 5), "TIFF")
    for name, (data, _) in (formats.DAMAGED | formats.REFUSED).items():
        yield f"no {name}", data


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of the files above, in two classes."""
    folder = tmp_path_factory.mktemp("odd") / "photos"
    for number, (name, data) in enumerate([*odd_files(), *damaged_files()]):
        (folder / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "ab"[number % 2] / name).write_bytes(data)
    return folder


OTHERWISE = {  # what Pillow itself reads otherwise, once opened: turned TIFF, small values of tRNS
    *("turned.tif", "turned5.tif", "turned6.tif", "turned7.tif", "turned8.tif"),
    *("of orientation 6, 16 bits", "of 2 bits", "of 4 bits", "of 16 bits, colour"),
    "of thumbnail before",  # is its first page
}


def open_image(path):
    """A file as a program opens it that knows Pillow."""
    with Image.open(path) as image:
        image.load()
    return image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("crop", "background"),
    [([], "white"), (["--crop", "--background", "black"], "black")],
    ids=["stretch", "crop"],
)
def test_files_have_one_answer(photos, tmp_path, capfd, channels, crop, background):
    """Equal pixels in the pack and in `hp.load`; equal answers of all four; equal refusals."""
    words = ["--size", f"{SIDE}x{SIDE}", "--channels", channels, "--split", "1", *crop]
    words += ["--dtype", "uint8"]
    pack = tmp_path / "odd.h5"
    given = ["pack", photos, *words, "--skip-bad", "--jobs", 1, "--output", pack]
    assert command_line([*map(str, given)]) == 0
    run = train(tmp_path, pack)
    names = {name for name, _ in odd_files()}
    packed = predict(run, "--split", "train")[1]
    assert {os.path.basename(name) for name in packed} == names

    capfd.readouterr()
    code, of_files = predict(run, photos)
    assert code == 1  # for those that cannot be read
    said = capfd.readouterr().err
    assert "reduced to 8 bits per channel" in said
    assert f"with transparency, laid over {background}" in said
    assert "another size" not in said  # the training had resized its files, too
    of_files = {os.path.relpath(name, photos): answer for name, answer in of_files.items()}
    assert of_files.keys() == packed.keys()
    network = hp.load(run, trust_code=True)
    answers = network.predict(photos, skip_bad=True)
    unusable = {os.path.basename(name) for name in answers.unusable}
    assert unusable == {name for name, _ in damaged_files()}
    (lost,) = (line for line in said.splitlines() if "reduced to 8 bits" in line)
    assert lost in capfd.readouterr().err.splitlines()
    loaded = dict(zip(answers["file"].tolist(), answers.probabilities, strict=True))
    loaded = {os.path.relpath(name, photos): answer for name, answer in loaded.items()}

    with h5py.File(pack) as file:
        pixels = file["train/images"][:]
        ends = file["train/name_offsets"][:]
        joined = file["train/names"][:].tobytes()
    rows = [joined[a:b].decode() for a, b in itertools.pairwise(ends.tolist())]
    exported = export(run)(pixels)
    inputs = network.preprocess([photos / name for name in rows])
    assert torch.equal(inputs, network.preprocess(pixels)), "files give the pixels of the pack"
    same = [name for name in rows if os.path.basename(name) not in OTHERWISE]
    images = network.preprocess([open_image(photos / name) for name in same])
    # A large JPEG file is decoded at a smaller scale.
    files = network.preprocess([photos / name for name in same])
    assert torch.allclose(files, images, rtol=0, atol=1.01 / 255)
    for name, answer in zip(rows, exported, strict=True):
        for other in (of_files[name], loaded[name], answer):
            assert np.allclose(other, packed[name], atol=2e-6), name


# Networks of HDF5 files


X = np.random.default_rng(0).integers(0, 256, (40, SIDE, SIDE))
X[:, 0, 0] = 255
X[:, 0, 1] = 0
LABELS = np.arange(len(X)) % 2
MASKS = (X > 99).astype(np.uint8)
HOUNSFIELD = (X * 12.0 - 1000).astype(np.float32)
NETWORKS = {  # stored images, --max-value, what 1.0 is, the forms that have a meaning
    "bytes": (X.astype("u1"), None, 255, "stored uint8 pillow png unit"),
    "bytes/255": (X.astype("u1"), 255.0, 255, "stored uint8 pillow png unit"),
    "masks": (MASKS, 1.0, 1, "stored uint8 floats doubles pillow png unit"),
    "dark bytes": (MASKS, None, 255, "stored uint8 pillow png"),
    "bytes/100": (X.astype("u1"), 100.0, 100, "stored uint8 floats doubles pillow png"),
    "16 bits": ((X * 257).astype("u2"), None, 65535, "stored pillow16 png16 uint8 png pillow unit"),
    "12 bits": ((X * 16).astype("u2"), 4095.0, 4095, "stored floats doubles pillow16 png16"),
    "dark 16 bits": ((X * 16).astype("u2"), None, 65535, "stored pillow16 png16"),
    "8 in 16 bits": (X.astype("u2"), 255.0, 255, "stored uint8 png pillow floats doubles"),
    "floats": ((X / 255).astype("f4"), None, 1, "stored unit doubles uint8 pillow png"),
    "halves": ((X / 256).astype("f2"), None, 1, "stored unit floats doubles"),
    "doubles as they are": (X / 255, 1.0, 1, "stored unit floats uint8 pillow png"),
    "dark floats": ((X / 4096).astype("f4"), None, 1, "stored unit doubles"),
    "raw floats": (X.astype("f4"), 1.0, 1, "stored doubles uint8 pillow png"),
    "raw floats/255": (X.astype("f4"), 255.0, 255, "stored doubles uint8 pillow png"),
    "raw 12 bits": ((X * 16).astype("f8"), 4095.0, 4095, "stored floats pillow16 png16"),
    "percent": ((X / 2.55).astype("f4"), 100.0, 100, "stored doubles"),
    "Hounsfield": (HOUNSFIELD, 1.0, 1, "stored doubles"),
}


def shown(stored, divisor, full):
    """The picture as files of 8 or 16 bits hold it: stored values if they need as many, else scaled
    to `full`, as programs do that show pictures.
    """
    is_whole = np.array_equal(stored, np.round(stored)) and stored.min() >= 0
    kind, least = ("u1", 0) if full == 255 else ("u2", 255)
    if stored.dtype == np.uint8:
        return stored.astype(kind) * (full // 255)
    if is_whole and least < stored.max() <= full:
        return stored.astype(kind)
    low, high = min(0.0, float(stored.min())), max(float(divisor), float(stored.max()))
    return ((stored.astype(float) - low) / (high - low) * full).round().astype(kind)


def forms(stored, divisor, folder):
    """The same pictures in each form, by its name."""
    eight, sixteen = (shown(stored, divisor, full) for full in (255, 65535))
    files = {"png": eight, "png16": sixteen}
    for name, values in files.items():
        for number, image in enumerate(values):
            (folder / f"{name}{number:02}").write_bytes(encode(image))
    return {
        "stored": stored,
        "uint8": eight,
        "floats": stored.astype("f4"),
        "doubles": torch.from_numpy(stored.astype("f8")),
        "pillow": [Image.fromarray(image) for image in eight],
        "pillow16": [Image.fromarray(image) for image in sixteen],
        "png": [folder / f"png{n:02}" for n in range(len(stored))],
        "png16": [folder / f"png16{n:02}" for n in range(len(stored))],
        "unit": (stored / divisor).astype("f8"),
    }


@pytest.mark.parametrize("case", NETWORKS)
def test_pictures_of_hdf5_files_have_one_answer(tmp_path, case):
    """What has no certain meaning is refused in one line that names the training's values."""
    stored, max_value, divisor, taken = NETWORKS[case]
    network = train_on(tmp_path, stored, max_value=max_value)
    run = network.path.parent
    rows = predict(run)[1]
    chosen = [int(name.removeprefix("/x[").removesuffix("]")) for name in rows]
    expected = np.stack([*rows.values()])
    values = stored[chosen].astype("f4") * np.float32(1 / divisor)
    most = np.abs(values).max()
    refused = {}
    for name, images in forms(stored[chosen], divisor, tmp_path).items():
        try:
            inputs = network.preprocess(images)[:, 0].numpy()
        except (hp.UsageError, hp.RunError) as error:
            refused[name] = str(error)
            continue
        assert np.allclose(inputs, values, rtol=0, atol=0.003 * most), name
        assert np.allclose(network.predict(images).probabilities, expected, atol=0.01), name
    assert not refused.keys() & {*taken.split()}
    images = stored[chosen][..., None]
    images = images.astype("f4") if stored.dtype == np.float16 else images
    assert np.allclose(export(run)(images), expected, atol=2e-6)
    assert all("give" in text for text in refused.values())


@pytest.mark.parametrize("case", ["16 bits", "12 bits", "raw 12 bits"])
def test_stored_values_have_the_bits_of_their_split_when_they_are_normalized(tmp_path, case):
    gray, max_value, _, _ = NETWORKS[case]
    stored = np.stack([gray, gray[:, ::-1], gray[..., ::-1]], axis=3)
    network = train_on(tmp_path, stored, max_value=max_value, normalize="imagenet")
    pack = read(tmp_path / "a.h5", "x", "y", split="0.5,0.5", max_value=max_value)
    with hp.Split(pack, "train") as split:
        rows = split.info.rows
        expected = hp.read_samples(split, range(len(split)), network.inference.pipeline)
    assert torch.equal(network.preprocess(stored[rows]), expected)


def train_on(folder, stored, **settings):
    """A network trained on these images in an HDF5 file."""
    path = write(folder / "a.h5", stored, LABELS)
    how = {"images": "x", "labels": "y", "split": "0.5,0.5", "batch_size": 10}
    return hp.load(train(folder, path, **how, **settings), trust_code=True)


def test_16_bit_files_of_any_kind_keep_their_values(tmp_path):
    """Those that say themselves what is white are stored values; 8 bits may leave too little."""
    size = len(LABELS), formats.HEIGHT, formats.WIDTH
    stored = np.random.default_rng(0).integers(0, 65536, size, np.uint16)
    network = train_on(tmp_path, stored)
    luma = formats.WIDE @ np.array([0.299, 0.587, 0.114])
    for name, data in (formats.DEPTHS | formats.COLOURS).items():
        (tmp_path / "deep").write_bytes(data)
        if "12-bit" in name or "32-bit" in name:
            reason = "which value is white: give|uint32 values from .*: convert it to uint16"
            with pytest.raises(hp.RunError, match=reason):
                network.preprocess(tmp_path / "deep")
        else:
            values = luma if name in formats.COLOURS else formats.DEEP
            found = network.preprocess(tmp_path / "deep")[0, 0].numpy() * 65535
            assert np.allclose(found, np.rint(values), rtol=0, atol=0.01), name
    (tmp_path / "12").mkdir()
    of_12_bits = train_on(tmp_path / "12", stored // 16, max_value=4095.0)
    for name in ("12-bit pgm", "12-bit tiff"):
        (tmp_path / "deep").write_bytes(formats.DEPTHS[name])
        found = of_12_bits.preprocess(tmp_path / "deep")[0, 0].numpy() * 4095
        assert np.allclose(found, formats.DEEP // 16, rtol=0, atol=0.01), name
    gray = Image.fromarray(X[0].astype("u2") * 16)
    gray.save(tmp_path / "dark.png")
    (tmp_path / "bytes").mkdir()
    of_bytes = train_on(tmp_path / "bytes", X.astype("u1"))
    for given in (gray, tmp_path / "dark.png"):
        with pytest.raises(hp.RunError, match="4,080 of 65,535; as 8 bits, 16 gray levels"):
            of_bytes.predict(given)
    assert of_bytes.preprocess(Image.fromarray(np.zeros((9, 9), "u2"))).max() == 0


def test_images_of_another_size_than_all_of_the_training_are_counted(tmp_path, capfd):
    network = train_on(tmp_path, X.astype("u1"))
    pictures = [Image.fromarray(image.astype("u1")) for image in X[:3]]
    larger = pictures[0].resize((2 * SIDE, 2 * SIDE))
    network.predict([*pictures, larger])
    line = "of 4 images: 1 resized, from another size than those of the training\n"
    assert capfd.readouterr().err.endswith(line)
    network.predict(pictures)
    assert not capfd.readouterr().err


def test_gray_files_are_counted_if_the_training_was_in_colour_alone(tmp_path, capfd):
    colours = np.stack([X, X[::-1], X], axis=-1).astype("u1")
    network = train_on(tmp_path, colours)
    gray = Image.fromarray(X[0].astype("u1"))
    network.predict([Image.fromarray(colours[0]), gray])
    assert capfd.readouterr().err.endswith("of 2 images: 1 gray, repeated in 3 channels\n")


def test_arrays_whose_channels_are_first_are_refused_with_what_moves_them(tmp_path):
    stored = np.stack([X, X, X], axis=-1).astype("u2")
    network = train_on(tmp_path, stored, max_value=4095.0)
    for images in (np.moveaxis(stored, -1, 1), np.moveaxis(stored[0], -1, 0)):
        with pytest.raises(
            hp.UsageError, match=r"channels first: numpy.moveaxis\(images, -3, -1\)"
        ):
            network.predict(images)
        network.predict(np.moveaxis(images, -3, -1))


@pytest.mark.parametrize("case", ["12 bits", "raw floats"])
def test_values_far_from_those_of_the_training_are_said(tmp_path, capfd, case):
    """A picture may be dark, black or bright; or its values are divided by something."""
    stored, max_value, _, _ = NETWORKS[case]
    network = train_on(tmp_path, stored, max_value=max_value)
    factors = {1: False, 1 / 3: False, 1 / 17: True, 0: False, 3: False, 5: True}
    for factor, is_noted in factors.items():
        images = (stored * factor).astype(stored.dtype)
        capfd.readouterr()
        network.predict(images)
        noted = capfd.readouterr().err
        assert bool(noted) == is_noted
        if is_noted:
            assert f"to {images.max():g}; the training was on {stored.dtype.name}" in noted


@pytest.mark.parametrize("kind", ["of one sign", "signed"])
def test_floats_as_they_are_are_compared_with_the_range_of_the_training(tmp_path, capfd, kind):
    """Those of all images that are given at once, of which one may be dark."""
    stored = (X / 5).astype("f4")
    if kind == "signed":
        stored = ((X - X.mean()) / X.std()).astype("f4")
    network = train_on(tmp_path, stored, max_value=1.0)
    capfd.readouterr()
    unit = (X[:3] / 255).astype("f4")
    given = np.concatenate([stored[:3], unit])
    assert np.array_equal(network.preprocess(given)[:, 0].numpy(), given)
    assert np.array_equal(network.preprocess([*given])[:, 0].numpy(), given)
    assert capfd.readouterr().err == ""
    if kind == "signed":
        network.preprocess(unit)
        assert "3 images with values from 0 to 1; the training" in capfd.readouterr().err
        with pytest.raises(hp.UsageError, match="values from 0 to 255, and the training was on"):
            network.preprocess(X.astype("f4"))
    else:
        with pytest.raises(hp.UsageError, match="values from 0 to 1, and the training was on"):
            network.preprocess(unit)


OTHERS = {  # of a network, what other files are: divided by this, or what the refusal names
    "bytes": {"pack": 255, "bytes": 255, "floats": 1, "16 bits": "uint16", "raw floats": "255"},
    "16 bits": {"pack": 255, "bytes": 255, "16 bits": 65535, "floats": 1, "raw floats": "255"},
    "bytes/255": {"pack": 255, "floats": 1, "raw floats": "from 0 to 255", "Hounsfield": "-1000"},
    "bytes/100": {"pack": 100, "bytes": 100, "floats": "0 to 1", "16 bits": "uint16"},
    "12 bits": {"pack": "4080", "bytes": "uint8", "12 bits": 4095, "16 bits": "from 0 to 65535"},
    "floats": {"pack": 255, "bytes": 255, "doubles as they are": 1, "16 bits": "uint16"},
    "raw floats": {"pack": 1, "bytes": 1, "floats": "from 0 to 1", "Hounsfield": "-1000"},
    "Hounsfield": {"pack": "-1000", "bytes": "uint8", "floats": "from 0 to 1", "Hounsfield": 1},
}


def test_a_network_of_a_pack_is_evaluated_on_packs(tmp_path):
    """And the refusal of another file says what makes a pack of arrays."""
    images = X.astype("u1")
    hp.write_pack(tmp_path / "pack.h5", {"train": (images, LABELS)}, "01")
    run = train(tmp_path, tmp_path / "pack.h5", batch_size=10)
    path = write(tmp_path / "b.h5", images, LABELS)
    with pytest.raises(hp.UsageError, match=r"b\.h5: it is not a pack: .* hp\.write_pack"):
        hp.evaluate(run, data=str(path), trust_code=True, threads=1)


def test_files_of_other_units_are_not_evaluated(tmp_path):
    """Attributes such as scale_factor are not applied: equal values would mean others."""
    network = train_on(tmp_path, X.astype("i2"), max_value=255.0)
    path = write(tmp_path / "b.h5", X.astype("i2"), LABELS)
    given = {"data": str(path), "split": "train", "trust_code": True, "threads": 1}
    assert hp.evaluate(network.path.parent, **given).rows == 20
    with h5py.File(path, "a") as file:
        file["x"].attrs["scale_factor"] = 0.25
    with pytest.raises(hp.UsageError, match=r"b\.h5 is stored with scale_factor 0\.25, the images"):
        hp.evaluate(network.path.parent, **given)


@pytest.mark.parametrize("case", OTHERS)
def test_other_files_are_evaluated_in_the_scale_of_the_training(tmp_path, case):
    """The loss is that of the network of torch on these values, or the file is refused."""
    stored, max_value, _, _ = NETWORKS[case]
    network = train_on(tmp_path, stored, max_value=max_value)
    run = network.path.parent
    hp.write_pack(tmp_path / "pack.h5", {"train": (X.astype("u1"), LABELS)}, "01")
    for other, outcome in OTHERS[case].items():
        path, images = tmp_path / "pack.h5", X.astype("u1")
        if other != "pack":
            images = NETWORKS[other][0]
            path = write(tmp_path / "b.h5", images, LABELS)
        given = {"data": str(path), "split": "train", "trust_code": True, "threads": 1}
        if isinstance(outcome, str):
            with pytest.raises(hp.UsageError, match=outcome) as caught:
                hp.evaluate(run, **given)
            assert path.name in str(caught.value) and "\n" not in str(caught.value)
            continue
        found = hp.evaluate(run, **given)
        scores = network.model(torch.from_numpy((images / outcome).astype("f4"))[:, None])
        losses = torch.nn.functional.cross_entropy(
            scores, torch.from_numpy(LABELS), reduction="none"
        )
        if other == "pack":
            expected = losses.mean().item()
        else:  # half of them, which the run has drawn from this file as from its own
            drawn = read(path, split="0.5,0.5", block_rows=0, max_value=1.0).splits["train"].rows
            expected = losses[drawn.astype(int)].mean().item()
        assert found.loss == pytest.approx(expected, rel=1e-4), other
