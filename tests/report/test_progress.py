"""What a run shows: the same lines with a bar and without, wherever its output goes."""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.live import Live

from hpctrain.report import bar, progress
from hpctrain.report.bar import Bar
from hpctrain.report.record import read_records
from hpctrain.report.recorder import Recorder
from hpctrain.text import printable
from tests.report.records import record_epoch, record_evaluation, record_step
from tests.support.launch import environment, run, run_mpi

FACTS = {
    "name": "first",
    "model": "digits",
    "parameters": 1234567,
    "ranks": 4,
    "hosts": ["a", "b"],
    "shards": 8,
    "batch_size": 101,
    "rank_shares": "26, 25, 25, 25 by rank",
    "epochs": 10,
    "steps_per_epoch": 3,
    "rows": {"train": 9000, "validation": 0, "test": 1000},
    "pack": "data/digits.h5",
    "device": "cpu",
    "precision": "bf16",
    "threads": 1,
    "mpi": "Open MPI 5",
}
PLAIN = """\
Run first: digits, 1,234,567 parameters, 4 ranks on 2 hosts, 8 shards
  digits.h5: 9,000 train, 1,000 test; mini-batch 101; 10 epochs of 3 steps
  shares of the mini-batch: 26, 25, 25, 25 by rank
  cpu, bf16, 1 thread a rank, Open MPI 5
Epoch  1 of 10  loss   1.5000  accuracy 0.2500    4,812 images/s   0:27 left
  validation    loss   0.0123  accuracy 0.9971    2,000 images/s  1,000 images
a note
Epoch  2 of 10  loss   1.5000  accuracy 0.2500    4,812 images/s   0:24 left
  validation    loss   0.0123  accuracy 0.9971    2,000 images/s  1,000 images
a note
  test          loss 1.00e-05     10.0 images/s     10 images
Done in 1:02:03: test loss 1.00e-05
  validation accuracy 0.9971
  step 2,000.0 ms: data 13 %, compute 75 %, reduce 6 %, other 6 %
  rank 2 was the slowest in 67 % of the steps
  data-bound: keep the pack on a local disk (--stage) or use more cores
  """


def follow(recorder: Recorder, tick: Callable[[], None], look: Callable[[], None]) -> None:
    """Two of the ten epochs of a run, `tick` after every step, `look` in the middle."""
    recorder.run(FACTS)
    seconds = {"data": 0.25, "compute": 1.5, "reduce": 0.125, "total": 2.0}
    for number in range(1, 7):
        epoch = (number + 2) // 3
        slowest = 1 if number % 3 == 1 else 2
        tick()
        own = {"images_per_second": 4812.3, "seconds": seconds, "slowest_rank": slowest}
        record_step(recorder, epoch, number, 1.5, 0.25, **own)
        if number == 4:
            look()
        if number % 3 == 0:
            record_epoch(recorder, epoch, 1.5, 0.25, 4812.3, 6.0)
            record_evaluation(recorder, epoch, number, "validation", 0.0123, 0.9971, 1000, 0.5)
            recorder.note("a note")
    record_evaluation(recorder, 2, 6, "test", 0.00001, None, 10, 1.0)
    recorder.end("done", seconds=3723.0)


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever terminal the tests run on."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A clock that stands still but for one second a call."""
    now = [100.0]

    def pass_a_second() -> None:
        now[0] += 1.0

    for module in (progress, bar):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return pass_a_second


def screen(output: str) -> list[str]:
    """What a terminal shows after `output`: lines without trailing spaces.

    Knows newline, carriage return and the sequences ESC [ n A (up), 2K (erase line), m (colour)
    and ?25l, ?25h (cursor); refuses all others.
    """
    lines, row, column = [""], 0, 0
    for control, argument, letter, text in re.findall(
        r"(?s)([\r\n])|\x1b\[([?0-9;]*)([A-Za-z])|([^\r\n\x1b]+)", output
    ):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif control == "\r":
            column = 0
        elif control == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif letter == "A":
            row -= int(argument)
        elif letter == "K":
            assert argument == "2"
            lines[row] = ""
        else:
            assert letter == "m" or argument + letter in ("?25l", "?25h")
    return [line.rstrip() for line in lines if line.strip()]


def test_plain_is_a_line_per_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tick: Callable[[], None]
) -> None:
    with Recorder(tmp_path, "plain") as recorder:
        follow(recorder, tick, lambda: None)
    assert capsys.readouterr().out == f"{PLAIN}{tmp_path}\n"
    assert max(map(len, PLAIN.splitlines())) < 80


@pytest.mark.parametrize("columns", [80, 100])
def test_the_bar_stands_below_the_same_lines_and_goes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tick: Callable[[], None],
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    seen, output = [], []

    def look() -> None:
        print("printed by a model")
        output.append(capsys.readouterr().out)
        seen[:] = screen("".join(output))

    with Recorder(tmp_path, "bar") as recorder:
        follow(recorder, tick, look)
    output.append(capsys.readouterr().out)

    *above, first, second = seen
    plain = PLAIN.splitlines()
    assert above == [*plain[:7], "printed by a model"]
    parts = re.fullmatch(
        r"Epoch  2 of 10  (━+)(─+)   13 %  step 4 of 30  0:26 left  4 ranks", first
    )
    assert parts is not None and columns - 25 < len(first) <= columns
    assert len(parts[1]) == len(parts[1] + parts[2]) * 4 // 30
    assert second == "  loss   1.5000  accuracy 0.2500    4,812 images/s"
    expected = [*plain[:7], "printed by a model", *plain[7:-1]]
    shown = screen("".join(output))
    assert shown[: len(expected)] == expected
    assert "".join(shown[len(expected) :]).strip() == str(tmp_path)
    assert "".join(output).rfind("\x1b[?25h") > "".join(output).rfind("\x1b[?25l")


def test_the_bar_ends_at_100_per_cent_and_tells_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps take no time, so that none but the last is due to be drawn."""
    monkeypatch.setenv("COLUMNS", "100")
    output = ""

    def first_line() -> str:
        nonlocal output
        output += capsys.readouterr().out
        return screen(output)[-2]

    with Recorder(tmp_path, "bar") as recorder:
        recorder.run({"epochs": 1, "steps_per_epoch": 97, "ranks": 2})
        monkeypatch.setattr(Bar, "due", lambda self: False)
        for number in range(1, 98):
            record_step(recorder, 1, number, 0.1, 0.5)
            if number == 96:
                assert "step 0 of 97" in first_line()
        assert re.search(r"━ +100 %  step 97 of 97  0:00 left  2 ranks", first_line())
        recorder.phase("evaluating test")
        assert re.search(r"━ +100 %  step 97 of 97  evaluating test  2 ranks", first_line())
        record_evaluation(recorder, 1, 97, "test", 0.1, 0.5, 8, 1.0)
    assert [record["kind"] for record in read_records(tmp_path)].count("evaluation") == 1


def test_a_killed_run_leaves_the_cursor_visible(capsys: pytest.CaptureFixture[str]) -> None:
    live = Bar()
    live.draw("before", 0.5, "after", "below")
    output = capsys.readouterr().out
    live.close()
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize(("cost", "wait"), [(0.0, 0.2), (0.0005, 0.5), (0.1, 2.0)])
def test_drawing_takes_little_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost: float, wait: float
) -> None:
    now, drawn = [100.0], []

    def update(self: Live, renderable: object, refresh: bool) -> None:
        drawn.append(now[0])
        now[0] += cost  # of the terminal

    monkeypatch.setattr(Live, "update", update)
    for module in (progress, bar):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Recorder(tmp_path, "bar") as recorder:
        recorder.run({"epochs": 1, "steps_per_epoch": 10**6})
        for number in range(1, 1001):
            now[0] += 0.01
            record_step(recorder, 1, number, 0.1, 0.5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(drawn)]
    assert len(gaps) >= 4
    assert wait - 1e-6 <= min(gaps) and max(gaps) <= wait + cost + 0.01 + 1e-6


def test_too_narrow_a_terminal_keeps_two_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "23")
    live = Bar()
    for _ in range(3):
        live.draw("Epoch 1 of 20", 0.5, " 50 %  step 1", "loss 0.1234  accuracy 0.1234")
    shown = screen(capsys.readouterr().out)
    live.close()
    assert len(shown) == 2 and all(len(line) <= 23 for line in shown)


def test_a_dumb_terminal_gets_plain_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with Recorder(tmp_path, "bar") as recorder:
        recorder.run(FACTS)
    assert "\x1b" not in capsys.readouterr().out


def test_none_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recorder(tmp_path, "none") as recorder:
        follow(recorder, lambda: None, lambda: None)
    assert capsys.readouterr() == ("", "")
    assert sum(record["kind"] == "step" for record in read_records(tmp_path)) == 6


def test_a_run_that_is_taken_up_again_counts_its_own_pace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tick: Callable[[], None]
) -> None:
    with Recorder(tmp_path, "plain") as recorder:
        recorder.run(FACTS)
        for number in (25, 26, 27):
            tick()
            record_step(recorder, 9, number, 1.0, 0.5)
        record_epoch(recorder, 9, 1.0, 0.5, 101.0, 3.0)
    assert capsys.readouterr().out.splitlines()[-1].endswith(" 0:03 left")


def test_failures_and_unknown_figures_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tick: Callable[[], None]
) -> None:
    with Recorder(tmp_path, "plain") as recorder:
        recorder.run({"model": "digits"})
        tick()
        own = {"images_per_second": math.inf, "seconds": {}, "slowest_rank": None}
        record_step(recorder, 1, 1, math.nan, None, **own)
        record_epoch(recorder, 1, math.nan, None, 0.5, 3.0)
        recorder.end("failed", "loss is NaN in step 1\nsecond line", seconds=7.4)
    assert capsys.readouterr().out.splitlines() == [
        "Run digits",
        "Epoch   1  loss      nan      0.5 images/s",
        "Failed after 0:07: loss is NaN in step 1",
        f"  {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0.4, "0:00"), (59.6, "1:00"), (3599.4, "59:59"), (3600, "1:00:00")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert progress.duration(seconds) == text


def test_a_note_cannot_command_the_terminal() -> None:
    text = "caf\u00e9\n\x1b[31m\udcff.jpg"
    assert printable(text, "utf-8") == "caf\u00e9\n\\x1b[31m\\udcff.jpg"
    assert printable(text, "ascii") == "caf\\xe9\n\\x1b[31m\\udcff.jpg"


SHORT_RUN = """
import sys
from pathlib import Path
from hpctrain.report.recorder import Recorder
from tests.report.records import record_step
with Recorder(Path(sys.argv[1]), sys.argv[2]) as recorder:
    recorder.run({"name": "short", "epochs": 2, "steps_per_epoch": 500})
    for number in range(1, 1001):
        record_step(recorder, 1, number, 0.1, 0.5)
        if number % 100 == 0:
            recorder.note("x" * 9973)
    recorder.end("done")
print("others print, too")
"""


FEW_STEPS = """
import sys
from pathlib import Path
from hpctrain.report.recorder import Recorder
with Recorder(Path(sys.argv[1]), sys.argv[2]) as recorder:
    recorder.run({"name": "few", "epochs": 2, "steps_per_epoch": 1})
"""


@pytest.mark.parametrize("mode", ["plain", "bar"])
@pytest.mark.parametrize("target", ["full disk", "closed pipe"])
def test_training_goes_on_where_output_is_gone(tmp_path: Path, mode: str, target: str) -> None:
    if target == "full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, output = os.pipe()
        os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", SHORT_RUN, str(tmp_path), mode],
            stdout=output,
            stderr=subprocess.PIPE,
            env=environment(),
            timeout=60,
            check=False,
        )
    finally:
        os.close(output)
    assert (done.returncode, done.stderr) == (0, b"")
    kinds = [record["kind"] for record in read_records(tmp_path)]
    assert (len(kinds), kinds[-1]) == (1 + 1000 + 10 + 1, "end")


ASK = "from hpctrain.report.bar import terminal_columns as c; print('columns', c(), flush=True)"
# Called like some program, gives its child a pty of no size, or a pipe, and passes on what it says.
PARENT = f"""
import os, pty, subprocess, sys
with open("/proc/self/comm", "w") as name:
    name.write(sys.argv[1])
reading, writing = pty.openpty() if sys.argv[2] == "pty" else os.pipe()
command = sys.argv[3:] or [sys.executable, "-c", {ASK!r}]
subprocess.run(command, stdout=writing, stdin=subprocess.DEVNULL)
os.write(1, os.read(reading, 1000))
"""


def on_terminal(command: list[str], columns: int) -> str:
    """What a program prints whose output is a terminal of so many columns."""
    terminal, output = pty.openpty()
    fcntl.ioctl(output, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        subprocess.run(
            command, stdin=output, stdout=output, env=environment(), timeout=60, check=True
        )
        return os.read(terminal, 10**5).decode()
    finally:
        os.close(terminal)
        os.close(output)


needs_proc = pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs Linux")


@pytest.mark.parametrize("columns", [61, 91])
def test_a_terminal_is_recognised(columns: int) -> None:
    command = [sys.executable, "-c", ASK]
    assert on_terminal(command, columns).strip() == f"columns {columns}"
    assert run(command).stdout == "columns None\n"


@needs_proc
@pytest.mark.parametrize(
    ("chain", "terminal"),
    [
        (
            [("prterun", "pty")],
            "columns 91",
        ),  # Open MPI, at a terminal or with its output in a file
        ([("mpiexec.hydra", "pipe")], "columns 91"),  # MPICH
        ([("prterun", "pty"), ("bash", "pipe")], "columns None"),  # somebody else reads
    ],
)
def test_a_launcher_is_asked_for_its_terminal(chain: list[tuple[str, str]], terminal: str) -> None:
    command = []
    for name, child in chain:
        command += [sys.executable, "-c", PARENT, name, child]
    assert on_terminal(command, 91).strip() == terminal
    assert run(command).stdout.strip() == "columns None"


def test_mpirun_into_a_file_gives_plain_lines(tmp_path: Path) -> None:
    done = run_mpi(1, ["-c", SHORT_RUN, str(tmp_path), "auto"])
    assert done.returncode == 0, done.stderr
    assert "Run short" in done.stdout and "\x1b" not in done.stdout


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    output = on_terminal([sys.executable, "-c", FEW_STEPS, str(tmp_path), "auto"], 80)
    assert screen(output)[0] == "Run few" and "Epoch 1 of 2  ─" in output
