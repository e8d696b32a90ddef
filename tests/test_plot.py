"""How hpctrain plot lays out its figures."""

from __future__ import annotations

import pytest

from hpctrain.plot import read_curves
from hpctrain.report.figures import shortened
from tests.support.records import make_trained as write_record

pytest.importorskip("matplotlib")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of all runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


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


def test_long_names_are_shortened_in_the_middle():
    assert shortened("short\nname", 30) == "short name"
    assert shortened("x" * 20 + "y" * 20, 10) == "xxxxx…yyyy"
    assert shortened("", 10) == ""
