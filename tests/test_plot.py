"""hpctrain plot: which figures it writes, what they show, what it refuses."""

from __future__ import annotations

import json
import math
import sys
import xml.dom.minidom

import numpy as np
import pytest
from PIL import Image

from hpctrain.cli import main
from hpctrain.plot import loss_kind, read_curves
from hpctrain.report.figures import shortened
from hpctrain.report.find import distinct_names
from hpctrain.report.recorder import Recorder
from tests.report.records import write_record
from tests.support.launch import run

pytest.importorskip("matplotlib")

BLUE, ORANGE = (0, 114, 178), (213, 94, 0)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of all runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def colours(path):
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return [int((pixels == colour).all(1).sum()) for colour in (BLUE, ORANGE)]


def panels(*folders):
    """What stands in the panels of a figure: each axes' title, labels, limits and lines."""
    from hpctrain.plot import plot_training

    figure = plot_training([read_curves(folder, folder.name) for folder in folders])
    figure.draw_without_rendering()
    return figure.axes


def title(axes):
    return axes.get_title().splitlines()


def test_one_run_beside_its_record(runs, capsys):
    write_record(runs / "a")
    assert main(["plot", "a"]) == 0
    assert capsys.readouterr().out == "runs/a/training.png: accuracy and loss by epoch\n"
    line, dots = colours(runs / "a/training.png")
    assert line > 500
    assert dots > 50


def test_accuracy_above_loss(runs):
    above, below = panels(write_record(runs / "a"))
    assert title(above) == ["a", "test accuracy 60.00 %"]
    assert (above.get_ylabel(), above.get_ylim()) == ("accuracy (%)", (0, 100))
    assert (below.get_ylabel(), below.get_xlabel()) == ("loss (cross-entropy)", "epoch")
    for axes, values in ((above, [60, 60, 60]), (below, [1, 0.5, 0.25])):
        training, validation = axes.lines
        assert training.get_ydata().tolist() == values
        assert (training.get_linestyle(), training.get_marker()) == ("-", "None")
        assert (validation.get_linestyle(), validation.get_marker()) == ("None", "o")
        assert validation.get_xdata().tolist() == [0.5, 1.5, 2.5]
    assert above.get_window_extent().y0 > below.get_window_extent().y1
    numbered = [axes.xaxis.get_tick_params()["labelbottom"] for axes in (above, below)]
    assert numbered == [False, True]


def test_networks_share_their_axes(runs):
    axes = panels(write_record(runs / "a", loss=3), write_record(runs / "b", epochs=7))
    assert len(axes) == 4
    assert len({one.get_ylim() for one in axes[1::2]}) == len({o.get_xlim() for o in axes}) == 1
    assert axes[1].get_ylim() == (0, pytest.approx(3 * 1.05))  # validation's 2 * 3 / 2
    assert axes[0].get_xlim() == (0, pytest.approx(7 * 1.02))


def shown_texts(figure):
    """All that is written in a figure: titles, names and numbers of its axes, the legend."""
    yield from figure.legends[0].get_texts()
    for axes in figure.axes:
        yield from (axes.title, axes.xaxis.label, axes.yaxis.label)
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            yield from (t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high)


def overlapping(figure):
    """Pairs of texts, or of a text and a panel, that lie on each other, and texts that are cut."""
    texts = [text for text in shown_texts(figure) if text.get_text() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    whole = figure.bbox
    found = [(n, "cut") for n, b in boxes if not (whole.x0 <= b.x0 and b.x1 <= whole.x1)]
    found += [(n, "cut") for n, b in boxes if not (whole.y0 <= b.y0 and b.y1 <= whole.y1)]
    for i, (name, box) in enumerate(boxes):
        found += [(name, other) for other, its in boxes[:i] if box.overlaps(its)]
        for axes in figure.axes:
            inner = axes.get_window_extent().padded(-2)
            found += [(name, "panel")] if inner.overlaps(box) else []
    return found


@pytest.mark.parametrize("count", [1, 3, 6, 7, 30])
def test_nothing_overlaps_and_no_panel_is_empty(runs, count):
    from hpctrain.plot import plot_training

    long = "wide_network,optimizer=adamw,lr=0.0003,batch-size=512"
    made = [
        write_record(
            runs / f"{number:02d}-{long if number % 3 == 0 else 'digits'}",
            epochs=1 + number % 12,
            validation=number != 4,
            status="failed" if number == 5 else None if number == 6 else "done",
            classify=number != 7,
        )
        for number in range(count)
    ]
    figure = plot_training([read_curves(folder, folder.name) for folder in made])
    figure.draw_without_rendering()
    assert overlapping(figure) == []
    assert all(axes.lines for axes in figure.axes)
    width, height = figure.get_size_inches()
    assert 0.4 < width / height < 2.2


def test_more_than_six_runs_share_panels_and_the_legend_names_them(runs):
    from hpctrain.plot import plot_training

    made = [write_record(runs / name, validation=name == "b$\\no$") for name in "acdef"]
    made += [write_record(runs / "b$\\no$"), write_record(runs / "g", classify=False, loss=8)]
    figure = plot_training([read_curves(folder, folder.name) for folder in made])
    figure.draw_without_rendering()
    accuracy, loss = figure.axes
    assert (accuracy.get_ylabel(), loss.get_ylabel()) == ("accuracy (%)", "loss")
    assert (accuracy.get_ylim(), loss.get_ylim()) == ((0, 100), (0, pytest.approx(8 * 1.05)))
    assert len(accuracy.lines) == 7 and len(loss.lines) == 9  # two runs have been validated
    legend = figure.legends[0]
    colours = [line.get_color() for line in legend.get_lines()]
    assert len(set(colours)) == 7
    assert [line.get_color() for line in loss.lines] == [*colours[:6], colours[5], *colours[6:] * 2]
    names = [text.get_text() for text in legend.get_texts()]
    assert names[5:] == ["b$\\no$: test accuracy 60.00 %", "g: test loss 1"]


def test_a_denoising_run_has_one_panel_with_limits_of_its_own(runs):
    a, b = write_record(runs / "a"), write_record(runs / "b", classify=False, loss=0.01)
    above, below, alone = panels(a, b)
    assert title(alone) == ["b", "test loss 0.00125"]
    assert alone.get_ylabel() == "loss (mean squared error)"
    assert alone.get_ylim()[1] < 0.1 < below.get_ylim()[1]
    assert alone.get_window_extent().height > 2 * above.get_window_extent().height
    (only,) = panels(b)
    assert title(only) == title(alone)


def test_how_a_run_ended_is_named(runs, capsys):
    write_record(runs / "s/01", status="failed", nan_from=9, test=False)
    write_record(runs / "s/02", status=None, epochs=1, validation=False)
    (runs / "s/sweep.toml").touch()
    assert main(["plot", "s"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "01: a reason",
        "02: not finished, test accuracy 60.00 %",
        "runs/s/training.png: accuracy and loss by epoch",
    ]
    axes = panels(runs / "s/01", runs / "s/02")
    assert [title(one) for one in axes[::2]] == [
        ["01", "failed"],
        ["02", "not finished, test accuracy 60.00 %"],
    ]


def test_a_loss_that_explodes_takes_a_logarithmic_axis(runs):
    tame, wild = write_record(runs / "a"), write_record(runs / "b", factor=30)
    assert [one.get_yscale() for one in panels(tame, wild)[1::2]] == ["log", "log"]
    assert panels(tame)[1].get_yscale() == "linear"


def test_a_loss_of_zero_does_not_leave_a_logarithmic_panel(runs):
    record = write_record(runs / "a", epochs=4, factor=30) / "progress.jsonl"
    lines = record.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"kind": "epoch"' in line)
    lines[place] = json.dumps(json.loads(lines[place]) | {"loss": 0.0})
    record.write_text("\n".join(lines) + "\n")
    axes = panels(runs / "a")[1]
    assert axes.get_yscale() == "log" and 0 in axes.lines[0].get_ydata()
    assert axes.get_tightbbox().height < 1.5 * axes.get_window_extent().height
    assert main(["plot", "a"]) == 0  # no warning of matplotlib


def test_runs_that_have_recorded_nothing_are_left_out_of_several(runs, capsys):
    for name in ("a", "b"):
        write_record(runs / name)
    (runs / "c").mkdir()
    (runs / "c/progress.jsonl").touch()
    assert main(["plot", "a", "c", "b", "--output", "x.svg"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "c: left out, it has recorded nothing to plot yet",
        "x.svg: accuracy and loss by epoch",
    ]
    xml.dom.minidom.parse("x.svg")
    assert main(["plot", "a", "b"]) == 0
    assert colours(runs / "training.png")[0] > 500
    assert main(["plot", "a", "--output", "x.pdf"]) == 0
    with open("x.pdf", "rb") as file:
        assert file.read(5) == b"%PDF-"


def write_confusion(folder, classes, counts, split="test"):
    figures = {"classes": classes, "confusion": counts}
    (folder / f"evaluation-{split}.json").write_text(json.dumps(figures))


def test_the_confusion_matrix_is_a_second_figure(runs, capsys):
    no_formula = "$\\no$"  # matplotlib would refuse it as one
    write_confusion(write_record(runs / "a"), [no_formula, "y"], [[7, 3], [0, 0]])
    write_confusion(runs / "a", ["x", "y"], [[1, 0], [0, 1]], "validation")
    assert main(["plot", "a", "--confusion"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "runs/a/training-confusion.png: confusion matrix of the split test"
    )
    assert (runs / "a/training-confusion.png").stat().st_size > 1000
    assert main(["plot", "a", "--confusion", "--split", "validation"]) == 0
    write_record(runs / "b")
    capsys.readouterr()
    assert main(["plot", "a", "b", "--confusion"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "left out: b has no metrics of the split test; this makes them: hpctrain evaluate runs/b"
        " --split test --output runs/b/evaluation-test.json",
        "runs/training.png: accuracy and loss by epoch",
        "runs/training-confusion.png: confusion matrix of the split test",
    ]


def test_a_name_is_no_formula(runs):
    (above, _) = panels(write_record(runs / "a$\\no$b"))
    assert title(above)[0] == "a$\\no$b"


def test_each_figure_of_a_metric_has_a_panel(runs):
    folder = write_record(runs / "a", validation=False, status=None)
    with Recorder(folder, "none") as recorder:
        for epoch in (1, 2, 3):
            own = {"f1 of $x^": math.nan if epoch == 1 else epoch / 8, "none": math.nan}
            known = {"epoch": epoch, "step": 4 * epoch, "split": "validation", "loss": 1.0}
            recorder.evaluation(
                **known, accuracy=0.5, balanced_accuracy=0.25, metrics=own, rows=8, seconds=1.0
            )
    found = panels(folder)
    labels = ["accuracy (%)", "loss (cross-entropy)", "balanced accuracy", "f1 of $x^"]
    assert [axes.get_ylabel() for axes in found] == labels
    (dots,) = found[3].lines
    assert dots.get_xydata().tolist() == [[2, 0.25], [3, 0.375]]
    assert len(panels(write_record(runs / "b"), folder)) == 6


@pytest.mark.parametrize("classes", [2, 10, 30, 100])
def test_a_confusion_matrix_of_any_size(runs, classes):
    from hpctrain.report.figures import plot_confusion, read_confusion

    counts = np.eye(classes, dtype=int) * 30
    counts[0, 1] = 10
    names = [f"kind of image {k}" for k in range(classes)]
    write_confusion(write_record(runs / "a"), names, counts.tolist())
    network = read_confusion(runs / "a", "a", "test")
    figure = plot_confusion([network, network])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    assert axes.images[0].get_array()[0].tolist()[:2] == [75, 25]
    texts = [text.get_text() for text in axes.texts]
    assert texts == (["30", "10", *["30"] * (classes - 1)] if classes <= 10 else [])
    assert (axes.get_yticklabels()[0].get_text() == "kind of image 0") == (classes <= 40)
    right = 100 * 30 * classes / (30 * classes + 10)
    assert title(axes) == ["a", f"test: {right:.2f} % of {30 * classes + 10:,}"]


def test_a_matrix_of_too_many_classes_to_draw_is_refused(runs, capsys):
    cells = {"true": [0, 4], "predicted": [0, 1], "count": [3, 1]}
    write_confusion(write_record(runs / "a"), [str(k) for k in range(21_000)], cells)
    assert main(["plot", "a", "--confusion"]) == 2
    assert "a has 21,000 classes: at most 4,096 can be drawn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plot what? Name runs or a sweep"),
        (["ab"], "there is no run or sweep 'ab' in runs"),
        (["a", "--output", "x.bmp"], "--output x.bmp: give a name that ends in .png, .svg or .pdf"),
        (["a", "--output", "no/x.png"], "--output no/x.png: there is no folder no"),
        (["new"], "new has recorded nothing to plot yet"),
        (["sweep"], "sweep: none of its runs has begun yet"),
        (
            ["a", "--confusion"],
            "a has no metrics of the split test; this makes them: hpctrain eval",
        ),
        (["odd", "--confusion"], "evaluation-test.json is not what hpctrain evaluate --output"),
        (["den", "--confusion"], "den restores images: it has no confusion matrix"),
    ],
)
def test_mistakes_are_one_line(runs, capsys, arguments, message):
    write_record(runs / "a")
    write_confusion(write_record(runs / "odd"), ["x"], [[1, 0], [0, 1]])
    write_confusion(write_record(runs / "den", classify=False), ["x"], None)
    for name, file in (("new", "progress.jsonl"), ("sweep", "sweep.toml")):
        (runs / name).mkdir()
        (runs / name / file).touch()
    assert main(["plot", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(runs.rglob("*.png"))


def test_without_matplotlib_one_line(runs, capsys, monkeypatch):
    write_record(runs / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "a"]) == 2
    assert "pip install 'hpctrain[plot]'" in capsys.readouterr().err


def test_neither_torch_nor_mpi_nor_a_display_is_asked_for(runs):
    write_record(runs / "a")
    heavy = {"torch", "mpi4py", "h5py", "matplotlib.pyplot", "tkinter"}
    code = (
        "import sys; from hpctrain.cli import main; main(['plot', 'a']);"
        f" print({heavy} & set(sys.modules))"
    )
    done = run([sys.executable, "-c", code], cwd=runs.parent)
    assert done.stdout.splitlines()[1:] == ["set()"], done.stderr


def test_long_names_are_shortened_in_the_middle():
    assert shortened("short\nname", 30) == "short name"
    assert shortened("x" * 20 + "y" * 20, 10) == "xxxxx…yyyy"
    assert shortened("", 10) == ""


def test_runs_of_one_name_are_told_apart_by_the_folder_above(tmp_path):
    folders = [tmp_path / "s/01", tmp_path / "t/01", tmp_path / "t/02"]
    assert distinct_names(folders) == ["s/01", "t/01", "02"]


def test_the_loss_is_named_as_the_record_says():
    assert loss_kind({"loss": "mine:focal", "class_weights": "balanced"}, True) == "mine:focal"
    assert loss_kind({"class_weights": "balanced"}, True) == "weighted cross-entropy"
    assert loss_kind(None, True) == "cross-entropy"
    assert loss_kind({}, False) == "mean squared error"
