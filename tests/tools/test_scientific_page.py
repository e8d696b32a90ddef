"""The commands of docs/scientific.md, with small networks, on images like those of instruments.

What packs hold, what networks learn, and that files have the answers of rows.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.launch import ROOT
from tests.support.programs import run_program
from tests.support.ranks import Ended, command, job, on_ranks
from tests.tools.test_pages import commands, forget, words_of, write_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = ROOT / "docs/scientific.md"
SHORT = {
    r"mpirun -n \d+ ": "",
    r"hpctrain pack ": "hpctrain pack --jobs 1 ",
    r"--model resnet18": "--model page_net:small --optimizer adam --lr 0.01 --batch-size 16",
    r"--epochs \d+": "--epochs 8 --schedule cosine --progress none",
    r"hpctrain (evaluate|predict)": r"hpctrain \1 --trust-code",
}
NETWORK = """
from torch import nn

def small(image_shape, classes):
    layers = []
    for before, after in ((image_shape[2], 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, 2), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))
"""
MARGIN = 0.25  # of accuracy, above that of chance


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a user, without any data."""
    yield from user_folder(tmp_path, monkeypatch, PAGE)


def user_folder(folder, monkeypatch, page):
    """Yield a folder with a small network and the files that a page shows; forget its modules."""
    (folder / "page_net.py").write_text(NETWORK)
    job().ready()  # before it can start in this folder, which goes if the test passes
    monkeypatch.chdir(folder)
    write_files(page)
    yield folder
    on_ranks(1, forget_all, folder=folder)


def forget_all(comm, folder):
    import sys

    forget(comm, folder)
    sys.modules.pop("dicom", None)


def lines_of(section, page=PAGE):
    """The commands of a section of a page, with small networks."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    part = Path("section.md")
    part.write_text(text)
    for line in commands(part):
        for pattern, short in SHORT.items():
            line = re.sub(pattern, short, line)
        yield line


def run_section(section, page=PAGE) -> list[Ended]:
    """Run the commands of a section; all must end well."""
    ended = []
    for line in lines_of(section, page):
        words = shlex.split(line)
        if words_of(line):
            ended.append(command(1, *words_of(line)[0], cwd=Path.cwd()))
            assert ended[-1].code == 0, f"{line}\n{ended[-1].err}"
        else:
            (printed,) = run_program(1, Path.cwd() / words[1])
            ended.append(Ended(0, printed, ""))
    assert ended, section
    return ended


def check_learned(run, classes=2):
    accuracy = json.loads(Path(f"runs/{run}/evaluation-test.json").read_text())["accuracy"]
    assert accuracy > 1 / classes + MARGIN, f"{run}: {accuracy}"


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def check_equal(path, rows, classes):
    """The answers to files are those to the rows of the training's data."""
    answers = rows_of(path)
    assert len(answers) == len(rows) > 0
    for answer, row in zip(answers, rows, strict=True):
        for name in classes:
            assert float(answer[name]) == pytest.approx(float(row[name]), abs=2e-6)


def spots(rng, count, width, size=48):
    """A picture (size, size) of so many spots."""
    y, x = np.mgrid[:size, :size]
    picture = np.zeros((size, size))
    for row, column in rng.uniform(6, size - 6, (count, 2)):
        picture += np.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * width**2))
    return picture


def cell(rng, infected, channels=5):
    """A field of view (C, H, W) of 12 bits: large spots, or many small ones."""
    shape = (14, 1.5) if infected else (3, 6)
    pictures = [300 + 500 * spots(rng, *shape) for _ in range(channels)]
    return (np.stack(pictures) + rng.normal(0, 20, (channels, 48, 48))).clip(0, 4095).astype("u2")


def test_microscopy_stacks(folder):
    tifffile = pytest.importorskip("tifffile")
    rng = np.random.default_rng(0)

    def write(path, image):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, image, photometric="minisblack")

    for infected, name in enumerate(("healthy", "infected")):
        for number in range(40):
            write(f"stacks/{name}/{number}.tif", cell(rng, infected))
        for number in range(3):
            write(f"new_stacks/{name}{number}.tif", cell(rng, infected))
        for number in range(6):
            for channel, plane in enumerate(cell(rng, infected, 2)):
                slices = np.stack([plane - 9, plane, plane - 5])
                write(f"plate/{name}/B02_f{number}_w{channel + 1}.tif", slices)
            parts = [[cell(rng, infected, 1)[0] for _ in range(4)] for _ in range(3)]
            write(f"slides/{name}/{number}.tif", np.block(parts))
            write("new_slide.tif", np.block(parts))

    ended = run_section("Microscopy stacks")
    packed, _, _, predicted, _, joined, tiled, _, _, slide = ended
    assert "48 x 48 pixels, 2 channels, uint16" in joined.out
    field = tifffile.imread("joined/healthy/B02_f3.tif")
    planes = [tifffile.imread(f"plate/healthy/B02_f3_w{number}.tif")[1] for number in (1, 2)]
    assert np.array_equal(field, planes)
    assert "5 channels, uint16 values from" in packed.out and "divided by 4095" in packed.out
    assert "64 x 64 pixels, 1 channel" in tiled.out
    check_learned("cells")
    check_learned("tiles")
    assert [row["prediction"] for row in rows_of("cells.csv")] == ["healthy"] * 3 + ["infected"] * 3
    assert Path("cells.png").is_file() and "6 images" in predicted.err + predicted.out
    assert len(slide.out.splitlines()) == 3  # 144 x 192 pixels
    assert slide.out.count("'") == 2 * 3 * 3
    assert slide.out.count("infected") >= 8
    held_out = {re.sub(r"\[.*", "", row["source"]) for row in rows_of("tiles.csv")}
    assert len(held_out) == 2, held_out

    assert predict("cells", "--output", "rows.csv").code == 0
    rows = rows_of("rows.csv")
    files = [f"stacks/{row['source']}" for row in rows]
    assert predict("cells", *files, "--output", "files.csv").code == 0
    check_equal("files.csv", rows, ("healthy", "infected"))
    with h5py.File("stacks.h5") as file:
        stored = file["test/images"][0]
    assert np.array_equal(stored, tifffile.imread(files[0]).transpose(1, 2, 0))
    whole = predict("tiles", "new_slide.tif", "--output", "whole.csv")
    assert whole.code == 1 and "192x144 pixels, not 64x64" in whole.err
    refused = command(1, "pack", "stacks", "--overwrite", cwd=folder)
    assert refused.code == 2 and "5 pages in one TIFF" in refused.err


def predict(*words):
    return command(1, "predict", "--trust-code", *words, cwd=Path.cwd())


def test_satellite_images_and_predicting(folder):
    rng = np.random.default_rng(0)
    names = np.array(["crops", "forest", "water"], dtype=object)
    spectra = rng.uniform(200, 4000, (3, 13))
    Path("scenes").mkdir()
    for number in range(10):
        classes = np.arange(18) % 3
        images = spectra[classes][:, :, None, None] + rng.normal(0, 400, (18, 13, 32, 32))
        images[rng.random(18) < 0.3, :, :, :8] = -9999
        with h5py.File(f"scenes/scene{number}.h5", "w") as file:
            file.create_dataset("x", data=images.astype("i2"), chunks=(3, 13, 32, 32))
            file["y"] = names[classes]
        if number < 2:
            Path("new_scenes").mkdir(exist_ok=True)
            with h5py.File(f"new_scenes/{number}.h5", "w") as file:
                file["x"] = images.astype("i2")
    run_section("Satellite images")
    check_learned("land", 3)
    assert Path("land.png").is_file()
    answers = rows_of("new_land.csv")
    assert [row["row"] for row in answers] == [*map(str, range(18))] * 2
    right = [row["prediction"] == names[int(row["row"]) % 3] for row in answers]
    assert np.mean(right) > 1 / 3 + MARGIN
    rows = rows_of("land.csv")[:8]
    for number, row in enumerate(rows):
        path, sample = re.fullmatch(r"(.*\.h5):/x\[(\d+)\]", row["source"]).groups()
        with h5py.File(path) as file:
            np.save(f"{number}.npy", file["x"][int(sample)].transpose(1, 2, 0))
    assert predict("land", *[f"{n}.npy" for n in range(8)], "--output", "files.csv").code == 0
    check_equal("files.csv", rows, names)
    for path in Path("scenes").iterdir():  # captions name the file of a sample
        Path("other").mkdir(exist_ok=True)
        Path("other", path.name.replace("scene", "other")).symlink_to(path.resolve())
    other = ["--data", "other/*.h5", "--output", "other.csv", "--figure", "6"]
    assert predict("land", *other).code == 0
    assert Path("other.png").read_bytes() != Path("land.png").read_bytes()
    np.save("bands.npy", np.zeros((32, 32, 12), "i2"))
    np.save("small.npy", np.zeros((20, 20, 13), "i2"))
    np.save("none.npy", np.full((32, 32, 13), -9999, "i2"))
    refused = predict("land", "bands.npy", "small.npy", "none.npy", "--output", "none.csv")
    assert refused.code == 1, refused
    for part in ("12 channels, not 13", "20x20 pixels, not 32x32", "no data"):
        assert part in refused.err

    pytest.importorskip("pydicom")
    write_dicom(folder)
    run_section("DICOM")
    (printed, _) = run_section("Predicting")
    of_arrays, of_rows, of_file, of_scans = [
        line for line in printed.out.splitlines() if "[" in line
    ]
    assert of_rows == of_arrays
    assert of_file.strip("[]'") == of_arrays.strip("[]").split()[0].strip("'")
    assert re.findall("[A-Z]+", of_scans) == ["CT", "MR"]
    assert rows_of("patch.csv")[0]["prediction"] in of_file


def test_climate_fields(folder):
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:32, :48]
    Path("years").mkdir()
    for year in range(1990, 2000):
        events = np.arange(24) % 2
        rows, columns = rng.uniform(10, 22, (2, 24, 1, 1))
        warm = 12 * np.exp(-((y - rows) ** 2 + (x - columns) ** 2) / 40)
        fields = 280 + events[:, None, None] * warm + rng.normal(0, 1, (24, 32, 48))
        fields[:, 24:, :10] = np.nan
        with h5py.File(f"years/{year}.nc", "w") as file:
            file["t2m"] = fields.astype("f4")
            file["z500"] = (5000 + 3 * fields).astype("f4")
            file["heatwave"] = events
    with h5py.File("this_year.nc", "w") as file:
        file["t2m"] = fields.astype("f4")
    run_section("Climate fields")
    assert len(rows_of("days.csv")) == 24
    check_learned("heat")
    check_learned("fields")
    with h5py.File("fields.h5") as file, h5py.File("years/1998.nc") as year:
        assert file["test/images"].shape == (48, 32, 48, 2)
        assert np.array_equal(file["test/images"][:24, ..., 1], year["z500"], equal_nan=True)
    line = "train --images t2m --labels heatwave --normalize pack --dry-run --data"
    refused = command(1, *line.split(), "years/*.nc", "--model", "page_net:small", cwd=folder)
    assert refused.code == 2 and "--nodata nan" in refused.err

    with h5py.File("filled.nc", "w") as file:
        file["t2m"] = np.nan_to_num(fields, nan=9e36).astype("f4")
        file["t2m"].attrs["_FillValue"] = np.float32(9e36)
        file["heatwave"] = events
    line = "train --images t2m --labels heatwave --model page_net:small --dry-run --data filled.nc"
    refused = command(1, *line.split(), cwd=folder)
    assert refused.code == 2
    (value,) = re.findall(r"_FillValue of /t2m is not applied: (--nodata=\S+)", refused.err)
    applied = command(1, *line.split(), value, "--normalize", "pack", cwd=folder)
    assert applied.code == 0 and "_FillValue" not in applied.out + applied.err


def write_dicom(folder):
    """Test files of pydicom as if of several patients, in folders by modality."""
    from pydicom import dcmread
    from pydicom.data import get_testdata_file
    from pydicom.misc import is_dicom

    root = Path(get_testdata_file("CT_small.dcm", download=False)).parent / "dicomdirtests"
    numbers = {"CR": 0, "CT": 0, "MR": 0}
    for path in sorted(root.rglob("*")):
        if not path.is_file() or not is_dicom(path):
            continue
        for _ in range(4):
            file = dcmread(path)
            if "PixelData" not in file:  # a directory
                continue
            number = numbers[file.Modality]
            numbers[file.Modality] += 1
            file.PatientID = f"{number}"
            place = folder / f"dicom/{file.Modality}"
            place.mkdir(parents=True, exist_ok=True)
            file.save_as(place / f"{number}.dcm")
    (folder / "new_scans").mkdir()
    for number, modality in enumerate(("CT", "MR")):
        (folder / f"dicom/{modality}/0.dcm").rename(folder / f"new_scans/{number}.dcm")


def test_dicom(folder):
    pydicom = pytest.importorskip("pydicom")
    write_dicom(folder)
    run_section("DICOM")
    check_learned("dicom", 3)
    with h5py.File("dicom.h5") as file:
        for split in ("train", "test"):
            pixels = file[f"{split}/images"][..., 0]
            targets = file[f"{split}/targets"][:]
            assert pixels.dtype == "f4" and pixels[targets == 1].min() < -500, "Hounsfield units"
            assert len({*targets}) == 3
        inverted = file["train/images"][0, ..., 0]
    first = next(p for p in sorted(Path("dicom/CR").iterdir()) if is_train(pydicom.dcmread(p)))
    scan = pydicom.dcmread(first)
    assert scan.PhotometricInterpretation == "MONOCHROME1"
    stored = np.frombuffer(scan.PixelData, "<u2").reshape(16, 16)
    values = (4095 - stored) * float(scan.RescaleSlope) + float(scan.RescaleIntercept)
    assert np.allclose(inverted, values, rtol=1e-6)


def files_of_classes(folder, names, suffix):
    """Yield (number, path) of 60 files, in turn in the folders of two classes, which are made."""
    for number in range(60):
        path = Path(folder, names[number % 2], f"{number:02}{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield number, path


def test_fits(folder):
    fits = pytest.importorskip("astropy.io.fits")
    rng = np.random.default_rng(0)
    for number, path in files_of_classes("fits", ("cluster", "galaxy"), ".fits"):
        shape = (1, 7) if number % 2 else (15, 1.5)
        values = 30_000 + 20_000 * spots(rng, *shape, size=32) + rng.normal(0, 300, (32, 32))
        picture = values.clip(0, 65535).astype("u2")
        fits.writeto(path, picture)
        assert fits.getheader(path)["BZERO"] == 32768
    run_section("FITS")
    check_learned("stars")
    with h5py.File("fits.h5") as file:
        assert np.array_equal(file["test/images"][-1, ..., 0], picture)


def test_nifti(folder):
    nibabel = pytest.importorskip("nibabel")
    rng = np.random.default_rng(0)
    for number, path in files_of_classes("nifti", ("control", "patient"), ".nii.gz"):
        shape = (12, 1.5) if number % 2 else (3, 6)
        volume = np.stack([spots(rng, *shape, size=32)[:, :28] for _ in range(5)], axis=-1)
        image = nibabel.Nifti1Image(volume * rng.uniform(50, 200), np.diag([-1.0, 1, 2, 1]))
        image.set_data_dtype(np.int16)  # with scl_slope
        image.to_filename(path)
    slope = nibabel.load(path).dataobj.slope
    run_section("NIfTI")
    check_learned("brains")
    with h5py.File("nifti.h5") as file:
        stored = file["test/images"][-1]
    expected = image.get_fdata()[::-1, :, 1:4].transpose(1, 0, 2)  # from right to left
    assert slope != 1 and stored.shape == (28, 32, 3)
    assert np.allclose(stored, expected, atol=slope)


def is_train(scan):
    from zlib import crc32

    return crc32(scan.PatientID.encode()) % 4 != 0
