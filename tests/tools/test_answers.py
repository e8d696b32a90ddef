"""Answers of `predict` and `evaluate` of networks that find several classes, and that measure."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support.api import (
    Curves,
    command_line,
    plot_curves,
    plot_values,
    save_model,
    tallied,
)
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


#: What a file of each task holds of its own, otherwise than it should.
OTHERWISE = {
    "multilabel": {"thresholds": [None, 3, [], [0.5] * 2, ["x"] * 3], "class_weights": [[1]]},
    "regress": {
        "target_scaling": [None, [], [[0, 0]], [[0], [1]], [[0, 0], [1, "x"]]],
        "target_scale": [None, "mean"],
    },
}


@pytest.mark.parametrize("task", OTHERWISE)
def test_a_file_that_describes_its_task_otherwise_is_refused_by_name(runs, tmp_path, task):
    path = tmp_path / "odd.safetensors"
    saved = hp.load(runs[task], trust_code=True)
    for name, values in OTHERWISE[task].items():
        for value in values:
            save_model(path, saved.model, saved.metadata | {name: value})
            refused = pytest.raises(hp.UsageError, match=f"^{path} holds weights but not .*[^\n]*$")
            with refused:
                hp.load(path, trust_code=True)


def test_outputs_of_first_weights_with_another_meaning_are_named(runs, tmp_path, capfd):
    """Another task, or other classes; not those of the same classes."""
    data = write(tmp_path / "multilabel.h5", "multilabel")
    for task, is_named in (("classify", True), ("multilabel", False)):
        train(tmp_path, data, task="multilabel", init=runs[task], run=task, progress="plain")
        text = "were those of --task classify for dust, crack, row; here they are for dust, crack,"
        assert (text in " ".join(capfd.readouterr().out.split())) == is_named


def test_first_weights_of_values_in_other_units_are_named(runs, tmp_path, capfd):
    """Of the same columns: of other images, and of the same."""
    for seed, scale, text in (
        (5, "std", "were standardized by mean 1"),
        (0, "std", ""),
        (0, "none", "; here they are in the units of the data"),
    ):
        data = write(tmp_path / f"{seed}{scale}.h5", "regress", seed=seed)
        settings = {"init": runs["regress"], "run": f"{seed}{scale}", "progress": "plain"}
        train(tmp_path, data, task="regress", target_scale=scale, **settings)
        said = " ".join(capfd.readouterr().out.split())
        assert ("outputs, which are kept" in said) == bool(text) and text in said


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


# evaluate


def evaluate(run, tmp_path, *words, ranks=1):
    """What `evaluate` prints, and its JSON."""
    output = tmp_path / f"{ranks}.json"
    given = ["evaluate", run, "--trust-code", "--threads=1", "--batch-size=4", *words]
    ended = command(ranks, *given, f"--output={output}")
    assert ended.code == 0, ended.err
    return ended.out, json.loads(output.read_text())


@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_figures_and_pictures_are_the_same_on_any_ranks(runs, tmp_path, task):
    results = []
    for ranks in (1, 3):
        plot = tmp_path / f"{ranks}.svg"
        printed, figures = evaluate(
            runs[task], tmp_path, "--mistakes=5", f"--plot={plot}", ranks=ranks
        )
        lines = [line for line in printed.splitlines() if line.startswith("row ")]
        picture = np.asarray(Image.open(tmp_path / f"{ranks}.png"))
        results.append((figures, lines, picture.tolist()))
        assert f"{plot}: " in printed and "<svg" in plot.read_text()
    assert results[0] == results[1] and len(results[0][1]) == 5
    names = COLUMNS if task == "regress" else CLASSES
    table = results[0][0]["per_column" if task == "regress" else "per_class"]
    assert [row.get("column", row.get("class")) for row in table] == [*names]


def test_mistakes_are_the_most_confident_wrong_entries(runs, tmp_path):
    """Unknown ones are neither right nor wrong."""
    printed, _ = evaluate(runs["multilabel"], tmp_path, "--mistakes=1000")
    assert command_line(["predict", str(runs["multilabel"]), "--trust-code", "--threads=1",
                         f"--output={tmp_path / 'a.h5'}"]) == 0  # fmt: skip
    with h5py.File(tmp_path / "a.h5") as file:
        answers = file["probabilities"][:].astype(float)
        targets = file["targets"][:]
    present = answers >= 0.5
    wrong = np.argwhere((present != targets) & (targets != 255))
    confidence = np.where(present, answers, 1 - answers)[tuple(wrong.T)]
    expected = []
    for place in np.argsort(-confidence, kind="stable"):
        row, number = wrong[place]
        name = CLASSES[number]
        truth, answer = (f"not {name}", name) if present[row, number] else (name, f"not {name}")
        share = 100 * confidence[place]
        expected.append(f"row {row}, true: {truth}, answer: {answer}, {share:.1f} %")
    lines = [line for line in printed.splitlines() if line.startswith("row ")]
    assert lines == expected and len(lines) > 10
    assert f"the {len(lines)} most confident of {len(lines)} wrong entries" in printed


def test_the_worst_values_are_those_of_the_largest_errors_in_deviations(runs, tmp_path):
    printed, _ = evaluate(runs["regress"], tmp_path, "--mistakes=4")
    given = ["predict", str(runs["regress"]), "--trust-code", "--threads=1"]
    assert command_line([*given, f"--output={tmp_path / 'a.h5'}"]) == 0
    with h5py.File(tmp_path / "a.h5") as file:
        answers = file["values"][:].astype(float)
        true = file["targets"][:].astype(float)
    with hp.Split(hp.read_pack(runs["regress"].parent / "regress.h5"), "train") as split:
        deviations = np.nanstd(split.read_targets(np.arange(80)).astype(float), axis=0)
    errors = np.abs(answers - true) / deviations
    rows = np.argsort(-np.nanmean(errors, axis=1))[:4].tolist()
    lines = [line for line in printed.splitlines() if line.startswith("row ")]
    assert [int(line.split(",")[0][4:]) for line in lines] == rows
    worst = int(np.nanargmax(errors[rows[0]]))
    value = f"{COLUMNS[worst]}: {answers[rows[0], worst]:.4g}, true: {true[rows[0], worst]:.4g}"
    assert lines[0].startswith(f"row {rows[0]}, {value}")
    assert "the 4 images of the largest errors" in printed
    for task, number in (("regress", 4), ("multilabel", 3)):
        picture = str(tmp_path / "b.json")
        result = hp.evaluate(
            runs[task], trust_code=True, threads=1, mistakes=number, output=picture
        )
        assert len(result.mistakes) == number
        if task == "regress":
            assert [estimate.row for estimate in result.mistakes] == rows


@pytest.mark.ranks
@pytest.mark.parametrize("rows", [200, 5000])
def test_curves_are_those_of_scikit_learn(comm, rows):
    """Of many points, some are left out; with scores that occur several times."""
    metrics = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(0)
    targets = generator.integers(0, 2, (rows, 2)).astype("u1")
    scores = (targets + generator.normal(0, 1, (rows, 2))).round(3).astype("f4")
    targets[::5, 0] = 255
    targets[:, 1] = 1  # a class without others has no curve
    tally = tallied(
        comm, Curves("ab"), rows, lambda chosen: (targets[chosen], {"scores": scores[chosen]})
    )
    if comm.rank:
        return
    (curve,) = tally.curves
    known = targets[:, 0] != 255
    given = targets[known, 0], scores[known, 0]
    false, true, _ = metrics.roc_curve(*given, drop_intermediate=False)
    precision, recall, _ = metrics.precision_recall_curve(*given)
    of_all = {
        "roc": np.stack([false, true], axis=1),
        "precision": np.stack([recall, precision], axis=1)[::-1][1:],
    }
    for name, points in of_all.items():
        drawn = getattr(curve, name)
        assert np.allclose(drawn[-1], points[-1]) and drawn[0, 0] == 0
        distances = np.abs(drawn[1:, None] - points).sum(2).min(1)
        assert distances.max() < 1e-12
        assert len(drawn) <= 500 and (rows > 500 or len(drawn) >= len(points))
    assert curve.auroc == pytest.approx(metrics.roc_auc_score(*given), abs=1e-12)


def test_pictures_of_many_columns_and_classes():
    generator = np.random.default_rng(0)
    values = [
        SimpleNamespace(name=f"c{n}", true=true, predicted=true + 1, mae=1.0, r2=0.1)
        for n, true in enumerate(generator.normal(size=(14, 9)))
    ]
    values[0].true = np.empty(0)
    values[0].predicted = np.empty(0)
    values[1].predicted[3] = np.nan
    figure = plot_values(values, "run")
    assert sum(axes.get_visible() for axes in figure.axes) == 12
    assert "12 of 14 columns" in figure.get_suptitle()
    line = np.array([[0.0, 0.0], [1.0, 1.0]])
    curves = [
        SimpleNamespace(name=f"k{n}", auroc=0.5, average_precision=n / 20, roc=line, precision=line)
        for n in range(14)
    ]
    (legend,) = plot_curves(curves, "run").legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[0].startswith("k0:") and texts[-1] == "4 others, of larger AP"


def test_a_plot_that_cannot_be_made_is_refused(runs, tmp_path, capfd):
    for name, text in (("a.txt", "give a name that ends in"), ("no/a.png", "there is no folder")):
        given = ["evaluate", str(runs["regress"]), "--trust-code", f"--plot={tmp_path / name}"]
        assert command_line(given) == 2
        assert text in capfd.readouterr().err
    given = ["evaluate", str(runs["regress"]), "--trust-code", f"--plot={tmp_path / 'a.png'}"]
    assert command_line([*given, "--mistakes=3", f"--output={tmp_path / 'a.json'}"]) == 2
    assert "a.png is the picture of --mistakes: name another" in capfd.readouterr().err
    assert not [*tmp_path.iterdir()]
