"""hpctrain plot: which figures it writes, what they show, what it refuses."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from tests.support.launch import run
from tests.support.ranks import alone
from tests.support.records import (
    FILE,
    append,
    end_line,
    evaluation_line,
    make_other,
    make_run,
    make_trained,
    run_line,
    step_line,
)

pytest.importorskip("matplotlib")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of all runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


class Figure:
    """What stands in an SVG: its texts, lines and rows of dots, the last two as (n, 2) points."""

    def __init__(self, *words):
        done = alone("plot", *words, "--output", "x.svg")
        assert (done.code, done.err) == (0, "")
        self.printed = done.out
        with open("x.svg") as file:
            text = file.read()
        self.texts = [each.replace("- -", "--") for each in re.findall(r"<!-- (.*?) -->", text)]
        self.lines, self.dots = [], []
        for group in ET.fromstring(text).iter(f"{SVG}g"):
            for path in group.findall(f"{SVG}path"):
                words = re.sub("[MLz]", " ", path.get("d")).split()
                if re.fullmatch(r"[-\d.\sMLz]*", path.get("d")) and len(words) > 4:
                    self.lines.append(np.array(words, float).reshape(-1, 2))
            points = [(use.get("x"), use.get("y")) for use in group.findall(f".//{SVG}use")]
            if group.get("id", "").startswith("line2d") and len(points) > 1:
                self.dots.append(np.array(points, float))

    def place(self, values):
        """The line that shows these values: how it maps a value to its place; None if none does."""
        values = np.array(values, float)
        for line in self.lines:
            if len(line) == len(values) and (found := fitted(values, line)) is not None:
                return found
        return None


def fitted(values, points):
    """Factors and offsets of x and y that give the points to 0.1; None if there are none."""
    found = []
    for value, point in zip(values.T, points.T, strict=True):
        moves = np.ptp(value) > 0
        factor, offset = np.polyfit(value, point, 1) if moves else (0, point[0])
        if abs(factor * value + offset - point).max() > 0.1 or (np.ptp(point) > 1) != moves:
            return None
        found.append((factor, offset))
    return np.array(found)


def has_dots(figure, place, values):
    """Whether a row of dots lies at these values of the axes of a line."""
    expected = np.array(values, float) * place[:, 0] + place[:, 1]
    return any(d.shape == expected.shape and abs(d - expected).max() < 0.1 for d in figure.dots)


def test_one_run_gives_a_picture_beside_its_record(runs):
    make_trained(runs / "a")
    done = alone("plot", "a")
    assert (done.code, done.err) == (0, "") and done.out.startswith("runs/a/training.png: ")
    with Image.open(runs / "a" / "training.png") as image:
        colours = image.convert("RGB").getcolors(1 << 24)
    strong = [count for count, colour in colours if max(colour) - min(colour) > 100]
    assert sum(strong) > 500, "there is no curve"


def test_training_is_a_line_by_epoch_and_validation_dots_where_it_was(runs):
    figure = Figure(make_trained(runs / "a", factor=0.5))
    place = figure.place([(1, 1), (2, 0.5), (3, 0.25)])
    assert has_dots(figure, place, [(0.5, 2), (1.5, 1), (2.5, 0.5)])
    assert figure.place([(1, 60), (2, 60), (3, 60)]) is not None
    assert {"a", "test accuracy 60.00 %", "accuracy (%)", "loss", "epoch"} <= set(figure.texts)


STEPS = [(n / 4, 2 * 0.5 ** (n / 4)) for n in range(1, 6)]


def test_by_step_where_fewer_than_two_epochs_are_done(runs):
    assert Figure(make_trained(runs / "a", epochs=1)).place(STEPS[:4]) is not None
    assert Figure(make_trained(runs / "b", epochs=2)).place(STEPS[:4]) is None


def test_what_is_not_finite_is_not_drawn(runs):
    figure = Figure(make_trained(runs / "a", nan_from=6, status="failed", test=False))
    assert figure.place(STEPS) is not None
    assert "a: a reason" in figure.printed and "failed" in " ".join(figure.texts)


def test_a_network_without_classes_has_no_accuracy(runs):
    figure = Figure(make_trained(runs / "a", classify=False, loss=0.01))
    texts = " ".join(figure.texts)
    assert "loss" in figure.texts and "accuracy" not in texts and "test loss" in texts


def test_a_task_of_another_figure_has_a_panel_of_it_above_the_loss(runs):
    figure = Figure(make_other(runs / "a", 4.0, 2.0, 1.0))
    assert "mae, loss by epoch" in figure.printed
    assert {"mae", "loss", "test mae 1.0000"} <= set(figure.texts)
    assert "accuracy" not in " ".join(figure.texts)
    of_error = figure.place([(1, 4), (2, 2), (3, 1)])
    of_loss = figure.place([(1, 0.25), (2, 0.5), (3, 1)])
    assert of_error[1, 1] < of_loss[1, 1], "the panel is not above"
    assert has_dots(figure, of_error, [(1, 4), (2, 2), (3, 1)])


FURTHER = {  # figures of a run, and further ones of its validations
    "values": ({"relative_mae": "min", "loss": "min"}, {"r2": (-0.5, 0.5)}),
    "several classes": (
        {"mAP": "max", "loss": "min"},
        {"auroc": (0.6, 0.8), "f1_macro": (0.1, 0.3)},
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_figures_of_validations_are_drawn_and_shown(runs, name):
    figures, further = FURTHER[name]
    lines = [run_line(name="a", epochs=2, figures=figures)]
    for number in range(2):
        values = {key: pair[number] for key, pair in further.items()}
        values |= {next(iter(figures)): 0.1 + number / 2, "accuracy": None}
        lines.append(evaluation_line(10 * (number + 1), **values))
    run = make_run(runs / "a", *lines, end_line())
    drawn = Figure(run)
    for key, pair in further.items():
        assert key.replace("_", " ") in drawn.texts
        assert any(
            fitted(np.array([*enumerate(pair, start=1)], float), dots) is not None
            for dots in drawn.dots
        )
    shown = alone("watch", run, "--once").out
    for key, (_, last) in further.items():
        assert f"{key} {last:.4f}" in shown
    assert "accuracy" not in shown + " ".join(drawn.texts)


@pytest.mark.parametrize(("count", "words"), [(2, []), (2, ["--overlay"]), (6, []), (8, [])])
def test_runs_have_a_column_each_or_share_one_and_their_axes_are_alike(runs, count, words):
    factors = [0.5 + 0.05 * n for n in range(count)]
    made = [make_trained(runs / f"{n}-net", factor=each) for n, each in enumerate(factors)]
    figure = Figure(*made, *words)
    texts = " ".join(figure.texts)
    assert all(f"{n}-net" in texts for n in range(count))
    assert texts.count("test accuracy 60.00 %") == count
    ends = factors[0], factors[-1]
    places = [figure.place([(e, 2 * each**e) for e in (1, 2, 3)]) for each in ends]
    (factors, offsets), (others, shifted) = (place.T for place in places)
    assert factors == pytest.approx(others) and factors[1] < 0  # of a unit of loss, downwards
    assert offsets[1] == pytest.approx(shifted[1])
    assert (offsets[0] == pytest.approx(shifted[0])) == (count > 6 or bool(words))


def test_a_loss_that_explodes_takes_a_logarithmic_axis_and_zero_does_not_leave_it(runs):
    powers = r"10\^\{"
    run_ = make_trained(runs / "a", epochs=4, factor=30)
    assert any(re.search(powers, text) for text in Figure("a").texts)
    lines = (run_ / FILE).read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"kind": "epoch"' in line)
    lines[place] = json.dumps(json.loads(lines[place]) | {"loss": 0.0})
    (run_ / FILE).write_text("\n".join(lines) + "\n")
    figure = Figure("a")  # no warning of matplotlib
    assert all(abs(line).max() < 5000 for line in figure.lines)
    assert not any(re.search(powers, text) for text in Figure(make_trained(runs / "b")).texts)


def test_each_figure_of_a_metric_is_drawn(runs):
    run_ = make_trained(runs / "a$\\no$b", validation=False, status=None)  # no formula
    for epoch in (1, 2, 3):
        own = {"f1 of $x^": None if epoch == 1 else epoch / 8, "none": None}
        append(run_, evaluation_line(4 * epoch, metrics=own, balanced_accuracy=0.25))
    texts = " ".join(Figure(run_).texts)
    assert all(each in texts for each in ("$\\no$", "f1 of $x^", "balanced accuracy"))
    assert "none" not in texts


def test_runs_that_have_recorded_nothing_are_left_out_of_several(runs):
    for name in ("a", "b"):
        make_trained(runs / name)
    make_run(runs / "c", run_line())
    figure = Figure("a", "c", "b")
    assert "left out: c has" in figure.printed and "x.svg" in figure.printed.splitlines()[-1]
    assert alone("plot", "a", "b").code == 0 and (runs / "training.png").exists()
    assert alone("plot", "a", "--output", "x.pdf").code == 0
    with open("x.pdf", "rb") as file:
        assert file.read(5) == b"%PDF-"


def test_runs_of_a_sweep_are_plotted_in_its_folder_with_how_each_ended(runs):
    make_trained(runs / "s" / "01", status="failed", test=False)
    make_trained(runs / "s" / "02", status=None)
    (runs / "s" / "sweep.toml").touch()
    done = alone("plot", "s")
    first, second, last = done.out.splitlines()
    assert first == "01: a reason" and second.startswith("02: not finished")
    assert last.startswith("runs/s/training.png") and (runs / "s" / "training.png").exists()


def write_figures(folder, classes, counts, split="test"):
    figures = {"classes": classes, "confusion": counts}
    if len(classes) > 2048:
        figures["by_class"] = {}
    (folder / f"evaluation-{split}.json").write_text(json.dumps(figures))


def test_the_confusion_matrix_is_a_second_picture(runs):
    for name in ("a", "b"):
        make_trained(runs / name)
    write_figures(runs / "a", ["$\\no$", "y"], [[7, 3], [0, 0]])  # no formula
    write_figures(runs / "a", ["x", "y"], [[1, 0], [0, 1]], "validation")
    done = alone("plot", "a", "--confusion")
    path = runs / "a" / "training-confusion.png"
    assert done.code == 0 and "training-confusion.png" in done.out
    before = Image.open(path).convert("RGB")
    assert alone("plot", "a", "--confusion", "--split", "validation").code == 0
    assert Image.open(path).convert("RGB") != before
    done = alone("plot", "a", "b", "--confusion")
    assert done.code == 0 and (runs / "training-confusion.png").exists()
    assert "left out: b" in done.out and "hpctrain evaluate runs/b --split test" in done.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["new"], "new"),
        (["sweep"], "sweep"),
        (["nan"], "nan"),
        (["odd", "--confusion"], "evaluation-test.json"),
        (["many", "--confusion"], "21,000 classes"),
        (["den", "--confusion"], "den"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_writes_nothing(runs, words, named):
    write_figures(make_trained(runs / "odd"), ["x"], [[1, 0], [0, 1]])
    write_figures(make_trained(runs / "many"), [str(k) for k in range(21_000)], None)
    write_figures(make_trained(runs / "den", classify=False), ["x"], None)
    make_run(runs / "new")
    make_run(runs / "nan", run_line(), step_line(1, loss=None, accuracy=None))
    (runs / "sweep").mkdir()
    (runs / "sweep" / "sweep.toml").touch()
    done = alone("plot", *words)
    assert (done.code, done.err.count("\n")) == (2, 1) and named in done.err
    assert not list(runs.parent.rglob("*.png"))


NO_COUNTS = ["[[0.5, 1], [1, 1]]", "[[-1, 0], [0, 1]]", "[[NaN, 0], [0, 1]]", "[[1], [2, 3]]"]
NO_COUNTS += ["[[true, 0], [0, 1]]", f"[[{2**63}, 0], [0, 1]]", '"1234"', "3", "[]", "[3, 4]"]
NO_FIGURES = [f'{{"classes": ["x", "y"], "confusion": {counts}}}' for counts in NO_COUNTS]
NO_FIGURES += [f'{{"classes": {k}, "confusion": null}}' for k in ("3", '"xy"', "[1, 2]", "null")]
NO_FIGURES += ["", "[]", "null", "[" * 100_000, '{"classes": [], "confusion": []}']


def test_a_confusion_matrix_that_was_edited_is_refused_by_name(runs):
    make_trained(runs / "a")
    for text in NO_FIGURES:
        (runs / "a/evaluation-test.json").write_text(text)
        done = alone("plot", "a", "--confusion")
        assert (done.code, done.err.count("\n")) == (2, 1), text[:50]
        assert "a has no confusion matrix of the split test (" in done.err


def test_without_the_package_one_line_says_what_to_install(runs, monkeypatch):
    make_trained(runs / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = alone("plot", "a")
    assert done.code == 2 and "pip install matplotlib" in done.err


def test_neither_torch_nor_mpi_nor_a_display_is_asked_for(runs):
    make_trained(runs / "a")
    heavy = {"torch", "mpi4py", "h5py", "matplotlib.pyplot", "tkinter"}
    code = (
        "import sys; from hpctrain.cli import main; main(['plot', 'a']);"
        f" print({heavy} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code], cwd=runs.parent)
    assert done.stdout.splitlines()[1:] == ["set()"], done.stderr
