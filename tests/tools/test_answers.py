"""Answers of `predict` and `evaluate` of networks that find several classes, and that measure."""

from __future__ import annotations

import csv
from pathlib import Path

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import command_line
from tests.support.ranks import command
from tests.tools.test_one_answer import SIDE, train

CLASSES = ("dust", "crack", "row")  # the last is the name of another column, too
COLUMNS = ("age", "mass")
TEST = 23


def images_of(rows, seed):
    return np.random.default_rng(seed).integers(0, 256, (rows, SIDE, SIDE, 3)).astype("u1")


def classes_of(images):
    """Several classes of each image (N, K), some of them unknown."""
    classes = (images.reshape(len(images), -1)[:, :3] > 127).astype("u1")
    classes[::7, 1] = 255
    return classes


def values_of(images):
    """Two values of each image (N, T) in units of their own, some of them unknown."""
    means = images.mean(axis=(1, 2))[:, :2] * (1, 1e-3) + (1000, 0)
    means[::5, 0] = np.nan
    return means.astype("f4")


def write(path, task, rows=(80, TEST), seed=0):
    """A pack for a task, with the splits train and test."""
    splits = {}
    for number, split in enumerate(("train", "test")):
        images = images_of(rows[number], seed + number)
        targets = images[:, 0, 0, 0] % 3
        if task == "multilabel":
            targets = classes_of(images)
        elif task == "regress":
            targets = values_of(images)
        splits[split] = (images, targets)
    names = {"columns": COLUMNS} if task == "regress" else {"classes": CLASSES}
    hp.write_pack(path, splits, **names)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each task that answers with numbers."""
    folder = tmp_path_factory.mktemp("answers")
    return {
        task: train(folder, write(folder / f"{task}.h5", task), task=task, lr=0.01, run=task)
        for task in ("classify", "multilabel", "regress")
    }


def as_table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("task", ["classify", "multilabel", "regress"])
def test_an_hdf5_file_of_answers_has_the_rows_of_the_images(runs, tmp_path, task):
    images = images_of(11, 5)
    for name, part in (("a", images[:4]), ("b", images[4:])):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = part
    given = ["predict", runs[task], tmp_path / "a.h5", tmp_path / "b.h5", "--images", "x"]
    words = [*given, "--trust-code", "--threads=1", "--batch-size=3"]
    files = []
    for ranks in (1, 3):
        output = tmp_path / f"{ranks}.h5"
        ended = command(ranks, *words, f"--output={output}")
        assert ended.code == 0, ended.err
        files.append(output.read_bytes())
    assert files[0] == files[1]
    expected = hp.load(runs[task], trust_code=True).predict(images)
    answer = "values" if task == "regress" else "probabilities"
    with h5py.File(tmp_path / "1.h5") as file:
        assert np.allclose(file[answer], expected.probabilities, rtol=1e-6)
        names = COLUMNS if task == "regress" else CLASSES
        assert file["names"].asstr()[:].tolist() == [*names]
        places = [*zip(file["file"].asstr(), file["row"][:].tolist(), strict=True)]
        assert places[3:5] == [(str(tmp_path / "a.h5"), 3), (str(tmp_path / "b.h5"), 0)]
        assert "targets" not in file
        if task == "classify":
            assert np.array_equal(file["prediction"], expected["label"])
        elif task == "multilabel":
            assert file["prediction"].dtype == np.uint8
            chosen = [";".join(np.array(CLASSES)[row == 1]) for row in file["prediction"][:]]
            assert chosen == [*expected["prediction"]]
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("task", ["classify", "multilabel", "regress"])
def test_an_hdf5_file_of_answers_to_a_split_has_its_targets(runs, tmp_path, task):
    given = ["predict", str(runs[task]), "--trust-code", "--threads=1"]
    for suffix in ("h5", "csv"):
        assert command_line([*given, f"--output={tmp_path / 'answers'}.{suffix}"]) == 0
    pack = hp.read_pack(runs[task].parent / f"{task}.h5")
    with hp.Split(pack, "test") as split, h5py.File(tmp_path / "answers.h5") as file:
        targets = split.read_targets(np.arange(TEST))
        assert file["targets"].dtype == targets.dtype
        assert np.array_equal(file["targets"], targets, equal_nan=task == "regress")
        assert file["row"][:].tolist() == [*range(TEST)]
        answers = file["values" if task == "regress" else "probabilities"][:]
    table = as_table(tmp_path / "answers.csv")
    header = [*table[0]][-answers.shape[1] :]
    texts = np.array([[row[name] for name in header] for row in table], float)
    assert np.allclose(texts, answers, atol=1e-6)


@pytest.mark.parametrize("task", ["classify", "multilabel", "regress"])
def test_a_row_without_an_answer_is_nan(runs, tmp_path, capfd, task):
    """So that rows are those of the images."""
    images = images_of(9, 5).astype("f4") / 255
    images[[0, 1, 2, 7], 3, 3, 1] = np.nan
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file["x"] = images
    output = tmp_path / "answers.h5"
    given = ["predict", str(runs[task]), str(tmp_path / "new.h5"), "--images=x", "--trust-code"]
    given += ["--threads=1", "--batch-size=3", f"--output={output}"]
    assert command_line(given) == 1
    assert f"{output} holds the answers to the others" in capfd.readouterr().err
    assert command_line([*given, "--skip-bad"]) == 0
    usable = ~np.isin(np.arange(9), [0, 1, 2, 7])
    expected = hp.load(runs[task], trust_code=True).predict(images[usable])
    with h5py.File(output) as file:
        answers = file["values" if task == "regress" else "probabilities"][:]
        assert np.isnan(answers[~usable]).all()
        assert np.allclose(answers[usable], expected.probabilities, rtol=1e-6)
        if task != "regress":
            missing = -1 if task == "classify" else 255
            assert (file["prediction"][:][~usable] == missing).all()
            assert not (file["prediction"][:][usable] == missing).any()
        assert file["row"][:].tolist() == [*range(9)]


def test_answers_that_cannot_be_written_leave_no_file(runs, tmp_path, capfd):
    given = ["predict", str(runs["regress"]), "--trust-code", "--threads=1"]
    assert command_line([*given, f"--output={tmp_path / 'no' / 'answers.h5'}"]) == 1
    assert "answers.h5 cannot be written: No such file" in capfd.readouterr().err
    assert not [*Path(tmp_path).iterdir()]
