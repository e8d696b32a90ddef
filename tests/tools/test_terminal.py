"""The live display of watch, in a process on a terminal: what is shown, and the keys."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.support.launch import environment, run
from tests.support.records import (
    append,
    end_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_line,
)
from tests.support.screen import open_terminal, without_escapes
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


@pytest.fixture
def runs(tmp_path):
    steps = [step_line(n, time=time.time() - 2 + n / 10) for n in range(1, 21)]
    told = [evaluation_line(20, seconds=600), line("note", text="so far [b]x[/b]")]
    one = make_run(tmp_path / "one", run_line(), *steps, *told)  # not silent in half an hour
    return one, make_run(tmp_path / "two", run_line(), step_line(1), end_line("failed", "no room"))


@pytest.fixture
def watching(runs):
    made = Watching(*runs)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGKILL)
    made.process.wait()
    os.close(made.terminal)


def test_runs_are_listed_chosen_and_stopped_by_keys(runs, watching):
    pytest.importorskip("textual")
    one, two = runs
    watching.wait_for("one: running", "two", "failed", "2/4", "50 %", "0.0500", "80.0")
    watching.wait_for("epoch 2 of 4, step 20 of 40", "validation loss 0.2500", "so far [b]x[/b]")
    watching.wait_for("loss", "accuracy (%)", "training", "validation", "compute 60 %")
    watching.press("j")
    watching.wait_for("two: failed: no room")
    watching.press("k")
    watching.wait_for("one: running")
    watching.press("s")
    watching.wait_for("Stop one")
    watching.press("n")
    watching.wait_for("one: running")  # drawn where the question was
    watching.press("s")
    watching.wait_for("Stop one")
    assert not (one / "STOP").exists()
    watching.press("y")
    wait_for((one / "STOP").exists)
    assert not (two / "STOP").exists()
    append(one, step_line(30, loss=0.125), end_line())
    watching.wait_for("one: done", "0.1250")
    watching.press("q")
    wait_for(lambda: watching.read() is not None and watching.process.poll() is not None)
    assert watching.process.returncode == 0


def test_without_the_package_one_line_says_what_to_install(tmp_path):
    program = (
        "import sys; sys.modules['textual.app'] = None\n"
        "from hpctrain.errors import UsageError\n"
        "try: import hpctrain.watch.terminal\n"
        "except UsageError as error: print(error)"
    )
    assert "pip install 'hpctrain[watch]'" in run([sys.executable, "-c", program]).stdout
