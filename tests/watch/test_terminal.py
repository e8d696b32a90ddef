"""The display in a terminal, by its text: table, figures, plots, keys."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from importlib.resources import files

import pytest
from textual.pilot import WaitForScreenTimeout

from hpctrain.report.history import RunHistory
from hpctrain.watch import terminal
from hpctrain.watch.drawing import accuracy_axis, draw, loss_axis
from hpctrain.watch.runs import WatchedRuns
from hpctrain.watch.terminal import WatchApp
from tests.support.launch import run
from tests.support.records import (
    append,
    end_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_line,
)

LOSSES = [
    *((0.52, 0.9), (0, 3), (2.1, 2.3), (0.0003, 0.00045), (-1.2, 3.3), (1, 1), (1e7, 1.5e7)),
    *((0.9999, 1.0001), (1e-300, 1e-300), (0.31, 2.79), (1e100, 1.7e199)),
]


def text_of(app):
    """What the screen shows, row by row."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


def watch(targets, drive, size=(120, 40)):
    """Run the display of these runs without a terminal, driven by a coroutine."""

    async def go():
        app = WatchApp(WatchedRuns([str(target) for target in targets], "runs"))
        async with app.run_test(size=size, notifications=True) as pilot:
            await pilot.pause()
            await pilot.pause()
            return await drive(app, pilot)

    try:
        return asyncio.run(go())
    except WaitForScreenTimeout:  # the pilot misses a widget that is replaced while it waits
        return asyncio.run(go())


@pytest.fixture
def runs(tmp_path):
    steps = [step_line(n, time=time.time() - 2 + n / 10) for n in range(1, 21)]
    one = make_run(
        tmp_path / "one",
        run_line(),
        *steps,
        evaluation_line(20),
        line("note", text="so far [b]x[/b]"),
    )
    two = make_run(tmp_path / "two", run_line(), step_line(1), end_line("failed", "no room"))
    return one, two


async def look(app, pilot):
    return text_of(app)


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (200, 60)])
def test_table_figures_and_plots(runs, size):
    text = watch(runs, look, size)
    for part in ("run", "status", "one", "running", "two", "failed", "2/4", "50 %", "0.0500"):
        assert part in text, part
    for part in ("one: running", "epoch 2 of 4, step 20 of 40", "validation loss 0.2500"):
        assert part in text, part
    for part in ("so far [b]x[/b]", "slowest rank", "compute 60 %"):
        assert part in " ".join(text.split()), part
    for part in ("loss", "accuracy (%)", "⠒⠒ training", "● validation", "step", "20", "q Quit"):
        assert part in text, part


def test_keys_choose_a_run(runs):
    async def drive(app, pilot):
        shown = []
        for key in ("j", "k", "tab", "shift+tab", "down", "up", "k"):
            await pilot.press(key)
            await pilot.pause()
            shown.append("two: failed: no room" in text_of(app))
        return shown

    assert watch(runs, drive) == [True, False, True, False, True, False, True]


def test_s_asks_and_only_y_stops(runs):
    one, two = runs

    async def drive(app, pilot):
        await pilot.press("s")
        await pilot.pause()
        assert "Stop one after its next step?" in text_of(app)
        await pilot.press("n")
        await pilot.pause()
        assert not (one / "STOP").exists() and "Stop one after" not in text_of(app)
        await pilot.press("s", "y")
        await pilot.pause()
        await pilot.pause()
        return text_of(app)

    assert "asked to stop" in watch(runs, drive)
    assert (one / "STOP").exists() and not (two / "STOP").exists()


def test_s_does_nothing_to_a_run_that_has_ended(runs):
    async def drive(app, pilot):
        await pilot.press("j", "s")
        await pilot.pause()
        assert "Stop two" not in text_of(app)
        await pilot.press("y")
        await pilot.pause()

    watch(runs, drive)
    assert not (runs[1] / "STOP").exists() and not (runs[0] / "STOP").exists()


def test_what_is_appended_is_shown_and_q_ends(runs, monkeypatch):
    monkeypatch.setattr(terminal, "POLL_EVERY", 0.01)

    async def drive(app, pilot):
        append(runs[0], step_line(30, loss=0.125), end_line())
        text = ""
        while "one: done" not in text:  # the test's own clock ends it
            await pilot.pause(0.02)
            text = text_of(app)
        row = next(row.split() for row in text.splitlines() if row.startswith(" one "))
        assert row[1] == "done" and "0.1250" in row
        await pilot.press("q")
        return app

    assert not watch(runs, drive).is_running


def test_nothing_is_drawn_where_nothing_changed(runs, monkeypatch):
    drawn = []
    monkeypatch.setattr(terminal, "draw", lambda *a: drawn.append(a) or draw(*a))

    async def drive(app, pilot):
        before = len(drawn)
        for _ in range(3):
            app._due = 0.0
            app._tick()
        assert len(drawn) == before
        append(runs[0], step_line(21))
        app._due = time.monotonic() + 99
        app._tick()
        assert len(drawn) == before  # not so soon
        app._due = 0.0
        app._tick()
        assert len(drawn) == before + 2

    watch(runs, drive)


def test_a_table_that_was_scrolled_stays_where_it_is(tmp_path):
    names = [f"{number:02}-of-many-with-a-long-name" for number in range(30)]
    runs = [make_run(tmp_path / name, run_line(), step_line(1)) for name in names]

    async def drive(app, pilot):
        table = app._table()
        table.scroll_to(x=9, y=15, animate=False)
        await pilot.pause()
        append(runs[20], *map(step_line, range(2, 21)))
        app._tick()
        await pilot.pause()
        return table.scroll_offset, [str(cell) for cell in table.get_row_at(20)]

    offset, cells = watch(runs, drive, (60, 30))
    assert (offset.x, offset.y) == (9, 15)
    assert "50 %" in cells


def test_a_sweep_without_runs_and_the_first_that_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.watch.runs.FIND_RUNS_EVERY", -1)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.toml").touch()

    async def drive(app, pilot):
        assert "no run has begun yet" in text_of(app)
        await pilot.press("s", "j")
        make_run(tmp_path / "s" / "first", run_line(), step_line(1))
        app._tick()
        await pilot.pause()
        assert "first: running" in text_of(app)
        make_run(tmp_path / "s" / "another", run_line(), step_line(1))
        app._tick()
        await pilot.pause()
        return text_of(app)

    text = watch([tmp_path / "s"], drive)
    assert "first: running" in text  # still the chosen one
    assert [row.split()[0] for row in text.splitlines()[1:3]] == ["another", "first"]


def test_without_textual_one_line_says_what_to_install():
    program = (
        "import sys; sys.modules['textual.app'] = None\n"
        "from hpctrain.errors import UsageError\n"
        "try: import hpctrain.watch.terminal\n"
        "except UsageError as error: print(error)"
    )
    assert "pip install 'hpctrain[watch]'" in run([sys.executable, "-c", program]).stdout


def history(*values):
    made = RunHistory()
    for step, value in enumerate(values, start=1):
        made.add({"kind": "step", "step": step, "loss": value, "accuracy": value})
    return made


def test_a_plot_falls_where_the_values_fall():
    rows = draw(history(*(2 - n / 50 for n in range(100))), "loss", 50, 15).plain.splitlines()
    assert len(rows) == 15 and all(len(row) <= 50 for row in rows)
    marked = [[i for i, c in enumerate(row) if 0x2800 < ord(c) <= 0x28FF] for row in rows[1:13]]
    assert all(marked) and [row[0] for row in marked] == sorted(row[0] for row in marked)
    assert marked[0][0] < 10 and marked[-1][-1] == 49
    assert rows[-1].split() == ["1", "step", "100"] and "┤" in rows[1] + rows[2] + rows[3]


def test_values_are_joined_and_lie_at_their_labels():
    rows = draw(history(0.4, 0.4), "accuracy", 60, 14).plain.splitlines()
    full = [row for row in rows[1:12] if any(0x2800 < ord(c) <= 0x28FF for c in row)]
    assert len(full) == 1 and full[0].split()[0] == "40"
    assert " " not in full[0].partition("┤")[2]


@pytest.mark.parametrize("values", [(1.0,), (0.5, 0.5), (1e17, 3), (1e-9, 2e-9), (-3, -2), (0, 0)])
def test_plots_of_odd_values_have_labels(values):
    text = draw(history(*values), "loss", 60, 12).plain
    assert text.count("┤") >= 2 and max(map(len, text.splitlines())) <= 60


def test_no_room_and_nothing_to_plot():
    assert draw(history(1), "loss", 10, 3).plain == ""
    assert draw(RunHistory(), "loss", 60, 12).plain == "no loss yet"


def test_axes_begin_and_end_at_what_is_shown():
    assert [accuracy_axis(at).low for at in (12, 60, 95)] == [0, 50, 90]
    assert list(accuracy_axis(12).labels.values()) == ["0", "20", "40", "60", "80", "100"]
    assert list(loss_axis(0.1, 2.3).labels.values()) == ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]
    assert loss_axis(2.0, 2.3).low == 2.0
    for least, most in LOSSES:
        axis = loss_axis(least, most)
        first, *_, last = axis.labels
        assert (first, last) == (axis.low, axis.high) and 2 <= len(axis.labels) <= 8
        assert axis.low <= least * (1 + 1e-9 if least > 0 else 1) and most <= axis.high * (1 + 1e-9)
    assert (loss_axis(1, 3).share(-9), loss_axis(1, 3).share(9)) == (0, 1)


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in Node")
def test_the_axis_of_a_loss_ends_beyond_its_curve_and_what_is_shaded():
    cases = [[least, most, 0.9 * least] for least, most in LOSSES if least >= 0]
    script = (files("hpctrain.watch") / "page" / "plot.js").read_text()
    script += """
    const ends = (least, most, peak) => {
      const box = limits([{ points: [[1, most, most, 9 * most], [2, least, peak, least]] }], false);
      return [box.low, box.high, box.up.ticks[0], box.up.ticks.at(-1), box.up.ticks.length];
    };"""
    script += f"console.log(JSON.stringify({json.dumps(cases)}.map((case_) => ends(...case_))))"
    done = run(["node", "-e", script])
    assert done.returncode == 0, done.stderr
    for (_, most, peak), found in zip(cases, json.loads(done.stdout), strict=True):
        low, high, first, last, count = found
        assert (low, high) == (first, last) and 2 <= count <= 9
        assert low <= peak * (1 + 1e-9) and most <= high * (1 + 1e-9)
