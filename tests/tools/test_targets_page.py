"""The commands of docs/targets.md, with small networks, on images with something to be learnt."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from tests.support.launch import ROOT
from tests.tools.test_scientific_page import rows_of, run_section, spots, user_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PAGE = ROOT / "docs/targets.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a user, without any data."""
    yield from user_folder(tmp_path, monkeypatch, PAGE)


def figures_of(run):
    return json.loads(Path(f"runs/{run}/evaluation-test.json").read_text())


def test_the_shapes(folder):
    run_section("Trying it", PAGE)
    assert figures_of("kinds")["mAP"] > 0.6
    assert figures_of("counts")["relative_mae"] < 1
    for name in ("kinds.png", "counts.png"):
        with Image.open(name) as picture:
            assert picture.width > picture.height > 300


def write_table(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def test_several_classes_of_a_table(folder):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(120):
        has_edema, has_effusion = rng.random(2) < (0.5, 0.3)
        picture = 60 + rng.normal(0, 8, (48, 48))
        picture[:24] += 80 * has_edema
        picture[:, 30:] += 50 * has_effusion
        classes = ["edema"] * int(has_edema) + ["effusion"] * int(has_effusion)
        if number % 10 == 9:
            classes = [name for name in classes if name != "effusion"] + ["?effusion"]
        path = Path("scans" if number < 114 else "new_scans", f"{number:04}.png")
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture.clip(0, 255).astype("u1")).save(path)
        if number < 114:
            rows.append([path, ";".join(classes), f"patient {number // 2}"])
    write_table("xrays.csv", ["path", "labels", "group"], rows)
    packed, _, evaluated, _ = run_section("Several classes: findings of X-rays", PAGE)
    assert "unknown" in packed.out
    assert "effusion" in evaluated.out and figures_of("findings")["mAP"] > 0.8
    assert Path("findings.png").is_file() and Path("runs/findings/mistakes.png").is_file()
    answers = rows_of("findings.csv")
    assert len(answers) == 6 and {"prediction", "edema", "effusion"} <= {*answers[0]}


def test_columns_of_0_and_1_become_classes(folder):
    rows = [["a.png", 3, "1.0", "-1"], ["b.png", 3, "0", ""], ["c.png", 4, "0.0", "1"]]
    write_table("findings.csv", ["path", "patient", "edema", "effusion"], rows)
    exec(Path("labels.py").read_text(), {})
    written = Path("xrays.csv").read_text().split()
    expected = ["path,labels,group", "a.png,edema;?effusion,3", "b.png,?effusion,3"]
    assert written == [*expected, "c.png,effusion,4"]


def test_values_of_a_table(folder):
    tifffile = pytest.importorskip("tifffile")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(120):
        age, diameter = rng.uniform((1, 4), (20, 12))
        picture = 300 + 100 * age + 500 * spots(rng, 3, diameter / 3)
        path = Path("cells" if number < 114 else "new_cells", f"{number:04}.tif")
        path.parent.mkdir(exist_ok=True)
        picture += rng.normal(0, 20, picture.shape)
        tifffile.imwrite(path, picture.astype("u2"))
        if number < 114:
            rows.append([path, f"{age:.2f}", "NA" if number % 7 == 3 else f"{diameter:.2f}"])
    write_table("cells.csv", ["path", "age", "diameter"], rows)
    packed, *_ = run_section("Values: ages of cells", PAGE)
    assert "diameter" in packed.out and "unknown" in packed.out
    assert figures_of("ages")["relative_mae"] < 0.75
    ages = [float(row["age"]) for row in rows_of("ages.csv")]
    assert len(ages) == 6 and 0 < np.mean(ages) < 21, "in the units of the data"
    assert Path("ages.png").is_file() and Path("runs/ages/mistakes.png").is_file()


def test_hdf5_files_and_python(folder):
    rng = np.random.default_rng(0)
    Path("survey").mkdir()
    for number in range(4):
        targets = rng.random((30, 3)) < 0.4
        images = rng.normal(0, 0.1, (30, 32, 32, 1)) + 0.2
        for k in range(3):
            images[:, 10 * k : 10 * k + 10] += 0.3 * targets[:, k, None, None, None]
        with h5py.File(f"survey/{number}.h5", "w") as file:
            file["x"] = images.clip(0, 1).astype("f4")
            file["y"] = targets
    age, mass = rng.uniform((20, 50), (80, 100), (100, 2)).T
    people = rng.normal(0, 0.05, (100, 32, 32, 1)) + (age / 100)[:, None, None, None]
    people[:, :16] *= (mass / 100)[:, None, None, None]
    age[::9] = np.nan
    with h5py.File("people.h5", "w") as file:
        file["x"] = people.clip(0, 1).astype("f4")
        file["age"] = age
        file["mass"] = mass
    with h5py.File("new_people.h5", "w") as file:
        file["x"] = people[:7].clip(0, 1).astype("f4")
    run_section("HDF5 files", PAGE)
    assert figures_of("survey")["mAP"] > 0.6
    with h5py.File("answers.h5") as file:
        values = file["values"][:]
    assert values.shape == (7, 2) and 20 < values[:, 0].mean() < 90
    (printed,) = run_section("Python", PAGE)
    assert printed.out.count("[") == 2
