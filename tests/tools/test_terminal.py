"""The live display of watch, in a process on a terminal: what is shown, and the keys."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from functools import partial

import pytest

from tests.support.launch import environment, run
from tests.support.records import (
    append,
    end_line,
    evaluation_line,
    line,
    make_other,
    make_run,
    run_line,
    step_line,
)
from tests.support.screen import on_terminal, open_terminal, without_escapes
from tests.support.wait import wait_for


class Watching:
    """A process of `hpctrain watch` on a terminal of its own."""

    def __init__(self, *targets, columns=120, rows=40):
        self.terminal, program = open_terminal(columns, rows)
        words = [sys.executable, "-m", "hpctrain", "watch", *map(str, targets)]
        self.process = subprocess.Popen(
            words, stdin=program, stdout=program, stderr=program, env=environment()
        )
        os.close(program)
        self.output = ""

    def read(self):
        """All that was shown so far, in the order of drawing."""
        while select.select([self.terminal], [], [], 0)[0]:
            try:
                self.output += os.read(self.terminal, 1 << 16).decode(errors="replace")
            except OSError:  # the program has closed it
                break
        return without_escapes(self.output)

    def press(self, keys):
        """Type, and forget what was shown before."""
        self.read()
        self.output = ""
        os.write(self.terminal, keys.encode())

    def wait_for(self, *texts):
        wait_for(lambda: all(text in self.read() for text in texts))

    def exit_code(self):
        wait_for(lambda: self.read() is not None and self.process.poll() is not None)
        return self.process.returncode

    def echoes(self):
        """Whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)


@pytest.fixture
def runs(tmp_path):
    steps = [step_line(n, time=time.time() - 2 + n / 10) for n in range(1, 21)]
    told = [evaluation_line(20, seconds=600), line("note", text="so far [b]x[/b]")]
    first, second = (run_line(settings={"lr": lr}) for lr in (0.1, 0.2))
    one = make_run(tmp_path / "one", first, *steps, *told)  # not silent in half an hour
    return one, make_run(tmp_path / "two", second, step_line(1), end_line("failed", "no room"))


@pytest.fixture
def watch():
    """Start it on runs; each is killed at the end."""
    started = []
    yield lambda *words, **size: started.append(Watching(*words, **size)) or started[-1]
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.terminal)


def test_runs_are_listed_chosen_sorted_and_stopped_by_keys(runs, watch):
    pytest.importorskip("plotext")
    (one, two), watching = runs, watch(*runs)
    watching.wait_for("one: running", "two", "failed", "50 %", "75.00 %", "80.0", "lr", "0.2")
    watching.wait_for("epoch 2 of 4, step 20 of 40", "validation loss", "so far [b]x[/b]")
    watching.wait_for("loss", "accuracy", "training", "validation", "compute 60 %")
    watching.press("j")
    watching.wait_for("two: failed: no room")
    for keys, name in {"\x1b[B": "one", "\x1b[A": "two", "\t": "one", "\x1b[Z": "two"}.items():
        watching.press(keys)
        watching.wait_for(f"{name}: ")
    watching.press("o" * 10)  # of 8 columns
    watching.wait_for("status ↓", "two: failed: no room")
    watching.press("S")  # what has ended is not asked to stop
    watching.wait_for("two: failed: no room", "1 of 2")
    watching.press("sk\x1bOS\x1b[1;2S")  # the last two are F4 and shift F4
    watching.wait_for("one: running", "q quit")
    assert not (one / "STOP").exists()
    watching.press("S")
    watching.wait_for("asked to stop")
    assert (one / "STOP").exists() and not (two / "STOP").exists()
    append(one, step_line(30, loss=0.125), end_line())
    watching.wait_for("one: done", "0.1250")
    os.write(watching.terminal, b"q")
    assert watching.exit_code() == 0


def test_a_task_of_another_figure_has_its_curves(tmp_path, watch):
    pytest.importorskip("plotext")
    watching = watch(make_other(tmp_path / "one", 4.0, 2.0))
    watching.wait_for("one: done", "validation loss 0.5000 mae 2.0000", "q quit")
    has_curves = partial(re.search, " {9}loss {9,}mae {9}")
    wait_for(lambda: has_curves(watching.read()))  # drawn once its figures are read
    watching.press("j")  # the displays before have the figures of a run that is not read yet
    wait_for(lambda: has_curves(watching.read()))
    assert "accuracy" not in watching.read()


def test_many_runs_and_long_names_fit_a_small_terminal(tmp_path, watch):
    pytest.importorskip("plotext")
    steps = [step_line(1), evaluation_line(1), end_line()]
    for number in range(40):
        settings = {"seed": number, "optimizer": "a-long-setting-of-it"}
        make_run(tmp_path / f"{number:02}-{'long' * 9}", run_line(settings=settings), *steps)
    (tmp_path / "sweep.toml").touch()
    watching = watch(tmp_path, columns=80, rows=24)
    watching.wait_for("1 of 40", "00-long", "validation", "75.00 %", "accuracy", "q quit")
    watching.press("k")
    watching.wait_for("40 of 40", "39-long")
    assert not watching.echoes()
    watching.process.terminate()
    assert watching.exit_code() == 0 and watching.echoes()  # as it was


def test_a_sweep_is_watched_from_before_its_first_run_until_one_is_removed(tmp_path, watch):
    (tmp_path / "sweep.toml").touch()
    watching = watch(tmp_path)
    watching.wait_for("no run has begun yet")
    watching.press("joS")
    for name in "ab":
        make_run(tmp_path / name, run_line(), end_line())
    watching.wait_for("1 of 2")
    watching.press("j")
    watching.wait_for("b: done")
    shutil.rmtree(tmp_path / "b")
    watching.wait_for("1 of 1", "a: done")
    os.write(watching.terminal, b"q")
    assert watching.exit_code() == 0


def test_once_on_a_terminal_is_a_table_in_its_width(runs):
    words = [sys.executable, "-m", "hpctrain", "watch", "--once", *map(str, runs)]
    head, first, second = without_escapes(on_terminal(words, 80)).splitlines()
    assert " ".join(head.split()) == "run status done validation best test images/s lr"
    texts = first.split()
    assert texts == ["one", "running", "50", "%", *["75.00", "%"] * 2, "80.0", "0.1"]
    assert second.split() == ["two", "failed", "2", "%", "80.0", "0.2"]
    for width, names in {32: "run status done validation", 5: "run"}.items():
        head, *_ = without_escapes(on_terminal(words, width)).splitlines()
        assert " ".join(head.split()) == names


def test_without_the_package_one_line_says_what_to_install():
    program = (
        "import sys; sys.modules['plotext'] = None\n"
        "from hpctrain.watch.terminal import draw\n"
        "print(draw({}, 80, 9))"
    )
    assert "pip install plotext" in run([sys.executable, "-c", program]).stdout
