"""What a run shows: the same lines with a bar and without, wherever its output goes."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path

import pytest

from tests.support.api import FIELDS, open_recorder, read_records
from tests.support.launch import run, run_mpi
from tests.support.records import OTHER, recording, tell
from tests.support.screen import on_terminal, screen


def tell_two_epochs(recorder, clock, look=lambda: None):
    """Two of ten epochs, a second a step; `look` in the middle."""
    tell(recorder, "run")
    for step in range(1, 7):
        epoch = (step + 2) // 3
        clock.skip(1.0)
        own = {"images_per_second": 4812.3, "slowest_rank": 1}
        own["seconds"] = {"data": 0.5, "compute": 1.25, "reduce": 0.125, "total": 2.0, "idle": 0.25}
        tell(recorder, "step", epoch=epoch, step=step, loss=1.5, accuracy=0.25, **own)
        if step == 4:
            look()
        if step % 3 == 0:
            own = {"images_per_second": 4812.3, "seconds": 6.0}
            tell(recorder, "epoch", epoch=epoch, loss=1.5, accuracy=0.25, **own)
            own = {"split": "validation", "rows": 1000, "seconds": 0.5}
            own |= {"loss": 0.0123, "accuracy": 0.9971}
            tell(recorder, "evaluation", epoch=epoch, step=step, **own)
            tell(recorder, "note", text="a note")
    tell(recorder, "evaluation", epoch=2, step=6, loss=0.00001, rows=10, seconds=1.0)
    tell(recorder, "end", status="done", seconds=3723.0)


def test_plain_is_a_line_per_epoch_and_evaluation(tmp_path, capsys, clock, golden):
    with open_recorder(tmp_path, "plain") as recorder:
        tell_two_epochs(recorder, clock)
    shown = capsys.readouterr().out
    assert all(len(line) < 80 for line in shown.splitlines()[:-1])
    golden("progress.txt", shown.replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("columns", [80, 100])
def test_the_bar_stands_below_the_same_lines_and_goes(
    tmp_path, capsys, monkeypatch, clock, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    with open_recorder(tmp_path, "plain") as recorder:
        tell_two_epochs(recorder, clock)
    plain, seen, output = capsys.readouterr().out.splitlines(), [], ""

    def look():
        nonlocal output
        print("printed by a model")
        output += capsys.readouterr().out
        seen[:] = screen(output)

    with open_recorder(tmp_path, "bar") as recorder:
        tell_two_epochs(recorder, clock, look)
    output += capsys.readouterr().out

    *above, first, second = seen
    assert above == [*plain[:7], "printed by a model"]
    for part in ("Epoch  2 of 10", "13 %", "step 4 of 30", "0:26 left", "4 ranks"):
        assert part in first
    assert columns - 25 < len(first) <= columns
    assert "loss   1.5000" in second and "4,812 images/s" in second
    assert screen(output) == [*above, *plain[7:]]
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")


def test_the_bar_ends_at_100_per_cent_and_names_the_evaluation(
    tmp_path, capsys, monkeypatch, clock
):
    """The clock stands still, so that no step but the last is due to be drawn."""
    monkeypatch.setenv("COLUMNS", "100")
    output = ""

    def first_line():
        nonlocal output
        output += capsys.readouterr().out
        return screen(output)[-2]

    with open_recorder(tmp_path, "bar") as recorder:
        tell(recorder, "run", epochs=1, steps_per_epoch=97, ranks=2)
        for step in range(1, 98):
            tell(recorder, "step", step=step)
            if step == 96:
                assert "step 0 of 97" in first_line()
        assert "100 %  step 97 of 97  0:00 left" in first_line()
        recorder.phase("evaluating test")
        assert "100 %  step 97 of 97  evaluating test" in first_line()
        assert "\x1b[?25h" in output[output.rfind("\x1b[?25l") :], "a killed run hides the cursor"


def test_a_slow_terminal_takes_little_of_the_time(tmp_path, monkeypatch, clock):
    class Slow(io.StringIO):
        spent, encoding = 0.0, "utf-8"

        def write(self, text):
            self.spent += 0.05
            clock.skip(0.05)
            return len(text)

    monkeypatch.setattr(sys, "stdout", slow := Slow())
    begin = clock.now
    with open_recorder(tmp_path, "bar") as recorder:
        tell(recorder, "run", epochs=1, steps_per_epoch=10**6)
        for step in range(1, 2001):
            clock.skip(0.01)
            tell(recorder, "step", step=step)
        assert 0.25 < slow.spent < 0.2 * (clock.now - begin)


@pytest.mark.parametrize("columns", [23, 40])
def test_too_narrow_a_terminal_keeps_two_lines(tmp_path, capsys, monkeypatch, clock, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with open_recorder(tmp_path, "bar") as recorder:
        tell(recorder, "run", epochs=20, steps_per_epoch=100)
        for step in range(1, 4):
            clock.skip(10.0)
            tell(recorder, "step", step=step)
        *above, first, second = screen(capsys.readouterr().out)
    assert first.startswith("Epoch  1 of 20") and second.startswith("  loss")
    assert max(len(first), len(second)) <= columns
    assert not any("Epoch" in line or "loss" in line for line in above)


def test_a_dumb_terminal_gets_plain_lines_and_none_nothing(tmp_path, capsys, monkeypatch, clock):
    monkeypatch.setenv("TERM", "dumb")
    with open_recorder(tmp_path, "bar") as recorder:
        tell_two_epochs(recorder, clock)
    assert "\x1b" not in capsys.readouterr().out
    silent = tmp_path / "silent"
    silent.mkdir()
    with open_recorder(silent, "none") as recorder:
        tell_two_epochs(recorder, clock)
    assert capsys.readouterr() == ("", "")
    for folder in (tmp_path, silent):
        assert sum(record["kind"] == "step" for record in read_records(folder)) == 6


def test_a_resumed_launch_counts_its_own_pace(tmp_path, capsys, clock):
    with open_recorder(tmp_path, "plain") as recorder:
        tell(recorder, "run")
        for step in (25, 26, 27):
            clock.skip(1.0)
            tell(recorder, "step", epoch=9, step=step)
        tell(recorder, "epoch", epoch=9)
    assert capsys.readouterr().out.endswith(" 0:03 left\n")


def test_failures_and_unknown_figures_are_shown(tmp_path, capsys, clock):
    unknown = {"loss": math.nan, "accuracy": None}
    with open_recorder(tmp_path, "plain") as recorder:
        tell(recorder, "run")
        own = {"images_per_second": math.inf, "seconds": {}, "slowest_rank": None}
        tell(recorder, "step", step=1, **unknown, **own)
        tell(recorder, "epoch", **unknown)
        reason = "loss is NaN in step 1\nsecond line"
        tell(recorder, "end", status="failed", reason=reason, seconds=7.4)
    epoch, end, folder = capsys.readouterr().out.splitlines()[-3:]
    assert "nan" in epoch and "accuracy" not in epoch and folder.strip() == str(tmp_path)
    assert "0:07" in end and end.endswith("loss is NaN in step 1")


def test_the_figures_of_another_task_are_shown(tmp_path, capsys, monkeypatch, clock):
    for kind in ("step", "epoch", "evaluation"):
        monkeypatch.setitem(FIELDS[kind], "mae", FIELDS[kind]["loss"])
    own = {"loss": 0.5, "accuracy": None, "mae": 1234567.0}
    with open_recorder(tmp_path, "plain") as recorder:
        tell(recorder, "run", figures=OTHER)
        tell(recorder, "step", step=1)
        tell(recorder, "epoch", **own)
        tell(recorder, "evaluation", **own)
        tell(recorder, "end", status="done")
    shown = capsys.readouterr().out
    assert shown.count("  loss   0.5000  mae 1.23e+06  ") == 2 and "accuracy" not in shown
    assert ": test mae 1.23e+06\n" in shown


SHORT_RUN = """
recorder.write("run", **run | {"name": "short", "epochs": 2, "steps_per_epoch": 500})
for number in range(1, 1001):
    step(number)
    if number % 100 == 0:
        recorder.note("x" * 9973)
recorder.end("done")
print("others print, too")
"""
FEW_STEPS = 'recorder.write("run", **run | {"name": "few", "epochs": 2, "steps_per_epoch": 1})'


GONE = {"full disk": '"$@" > /dev/full', "closed pipe": '"$@" | : ; exit ${PIPESTATUS[0]}'}


@pytest.mark.parametrize("mode", ["plain", "bar"])
@pytest.mark.parametrize("target", GONE)
def test_training_goes_on_where_output_is_gone(tmp_path, mode, target):
    done = run(["bash", "-c", GONE[target], "-", *recording(SHORT_RUN, tmp_path, mode)])
    full = "hpctrain: cannot write standard output: No space left on device; training goes on\n"
    assert (done.returncode, done.stderr) == (0, full if target == "full disk" else "")
    kinds = [record["kind"] for record in read_records(tmp_path)]
    assert (len(kinds), kinds[-1]) == (1 + 1000 + 10 + 1, "end")


# Called like some program, gives its child a pty of no size, or a pipe, and passes on what it says.
PARENT = """
import os, pty, subprocess, sys
with open("/proc/self/comm", "w") as name:
    name.write(sys.argv[1])
reading, writing = pty.openpty() if sys.argv[2] == "pty" else os.pipe()
subprocess.run(sys.argv[3:], stdout=writing, stdin=subprocess.DEVNULL)
os.write(1, os.read(reading, 10000))
"""
needs_proc = pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs Linux")


@needs_proc
@pytest.mark.parametrize(
    ("chain", "has_bar"),
    [
        ([], True),
        ([("prterun", "pty")], True),  # Open MPI, at a terminal or with its output in a file
        ([("mpiexec.hydra", "pipe")], True),  # MPICH
        ([("prterun", "pty"), ("bash", "pipe")], False),  # somebody else reads
        ([("prterun", "pty"), ("bash", "pty")], False),  # or may read
    ],
)
def test_a_bar_as_wide_as_the_terminal_that_shows_it_if_one_does(tmp_path, chain, has_bar):
    command = []
    for name, child in chain:
        command += [sys.executable, "-c", PARENT, name, child]
    command += recording(FEW_STEPS, tmp_path, "auto")
    shown = on_terminal(command, 61)
    assert "Run few" in shown and ("\x1b" in shown, "Epoch 1 of 2" in shown) == (has_bar, has_bar)
    if has_bar:
        assert 50 < len(re.search(r"Epoch 1 of 2 .* step 0 of 2", shown)[0]) <= 61
    piped = run(command).stdout
    assert "Run few" in piped and "\x1b" not in piped


def test_mpirun_into_a_file_gives_plain_lines(tmp_path):
    done = run_mpi(1, recording(FEW_STEPS, tmp_path, "auto")[1:])
    assert done.returncode == 0, done.stderr
    assert "Run few" in done.stdout and "\x1b" not in done.stdout
