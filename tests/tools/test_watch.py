"""What watch says of runs: alive or not, how far, in one line; which runs; how they are stopped."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from tests.support.launch import run as run_command
from tests.support.page import watched
from tests.support.ranks import alone
from tests.support.records import (
    FILE,
    SECONDS,
    append,
    beat,
    end_line,
    evaluation_line,
    make_run,
    run_line,
    step_line,
    step_lines,
)

NO_PROCESS = 2**22 + 1  # above the largest number that Linux gives


def said(run):
    """The status of a run in the line that `watch --once` prints of it."""
    done = alone("watch", run, "--once")
    assert (done.code, done.err) == (0, "")
    return done.out.removesuffix("\n").split("  ")[1]


def test_a_line_for_each_run(tmp_path, clock, golden, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, runs = run_line(device="cpu"), tmp_path / "runs"
    steps = [step_line(n, time=clock.now - 2 + n / 10) for n in range(1, 21)]
    make_run(runs / "running", first, *steps, evaluation_line(20))
    waits = {"seconds": SECONDS | {"data": 0.0123, "idle": 0.02}, "slowest_rank": 1}
    tests = [evaluation_line(40, "test", accuracy=None), end_line()]
    make_run(runs / "done", first, *step_lines(1, 40, **waits), *tests)
    make_run(runs / "silent", first, step_line(1, time=clock.now - 185))
    reasons = {"failed": "disk full\nat once", "preempted": "x", "stopped": "y"}
    for status, reason in reasons.items():
        make_run(runs / status, first, end_line(status, reason))
    make_run(runs / "starting", first)
    make_run(runs / "new")
    (runs / "no-run").mkdir()
    done, refused = alone("watch"), alone("watch", "no-run")
    assert (done.code, done.err) == (0, "")
    golden("watch.txt", done.out)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert "no-run" in refused.err


HERE = {"host": socket.gethostname(), "pid": NO_PROCESS}
AFAR = {"host": f"{socket.gethostname()}-other", "pid": NO_PROCESS}
WAITING = {"doing": "waiting for all in step 2", "seconds": 180}
EVALUATING = {"doing": "block 3 in the evaluation of test after step 1", "seconds": 180}
SLOW = {"seconds": {"total": 100.0}}
ALIVE = [  # age of the last step and its fields; age of the heartbeat and its fields; the status
    (185, {}, None, {}, "silent for 3 min"),
    (59, {}, None, {}, "silent for 59 s"),
    (7300, {}, None, {}, "silent for 2 h"),
    (200_000, {}, None, {}, "silent for 2 days"),
    (5, {}, None, {}, "running"),
    (120, SLOW, None, {}, "running"),
    (185, {}, 185, {}, "silent for 3 min"),
    (185, {}, 0, WAITING, "silent for 3 min, rank 0 is in: waiting for all in step 2"),
    (185, {}, 0, EVALUATING, "running: block 3 in the evaluation of test after step 1 for 3:00"),
    (30, {}, 0, HERE, "failed: all ranks were killed, reason unknown: rank 0 on "),
    (30, {}, 30, AFAR, "silent for 30 s"),
    (300, {}, 300, {"failed": "no memory"}, "failed: rank 0: no memory"),
    (300, {}, 300, {"failed": ""}, "silent for 5 min"),
    (
        185,
        {},
        0,
        {"doing": "reading for step 2"},
        "silent for 3 min, rank 0 is in: reading for step 2",
    ),
    (185, {}, 0, {"doing": "recording step 1"}, "silent for 3 min, rank 0 is in: recording step 1"),
    (300, {}, 0, {"failed": "x"}, "silent for 5 min, rank 0 is in: step 3"),  # as it goes on
]


@pytest.mark.parametrize(("age", "step", "beaten", "fields", "text"), ALIVE)
def test_whether_a_run_is_alive(tmp_path, clock, age, step, beaten, fields, text):
    run = make_run(tmp_path / "a", run_line(), step_line(1, time=clock.now - age, **step))
    if beaten is not None:
        beat(run, time=clock.now - beaten, **fields)
    assert said(run).startswith(text) and (said(run) == text or "killed" in text)
    append(run, step_line(2), step_line(3))
    assert "killed" in text or said(run).startswith("running")


def test_silence_counts_from_what_is_seen_not_by_another_machines_clock(tmp_path, clock):
    run = make_run(tmp_path / "a", run_line(), step_line(1, time=clock.now - 50))
    with watched(run) as page:
        assert page.runs()[0]["text"] == "silent for 50 s"
        append(run, step_line(2, time=clock.now - 999))
        clock.skip(5)
        assert page.runs()[0]["status"] == "running"
        clock.skip(55)
        assert page.runs()[0]["text"] == "silent for 55 s"
    ahead = make_run(tmp_path / "b", run_line(), step_line(1, time=clock.now + 999))
    assert said(ahead) == "running"


def test_the_time_left_is_that_at_the_pace_of_this_launch(tmp_path, clock):
    before = [step_line(1, time=clock.now - 500), step_line(20, time=clock.now - 400)]
    steps = [step_line(21, time=clock.now - 4), step_line(23, time=clock.now)]
    run = make_run(tmp_path / "a", run_line(), *before, run_line(), *steps)
    assert said(run) == "running, 0:34 left"
    append(run, step_line(40))
    assert said(run) == "running"


def test_a_record_that_cannot_be_read_is_a_failure(tmp_path):
    (tmp_path / "a" / FILE).mkdir(parents=True)
    (tmp_path / "a" / "config.toml").touch()
    assert said(tmp_path / "a").startswith(f"cannot read {tmp_path / 'a' / FILE}")


def test_no_rank_is_called_the_slowest_where_none_is_recorded(tmp_path):
    steps = step_lines(1, 40, seconds=SECONDS | {"idle": 0.02}, slowest_rank=0)
    named, unnamed = steps, [line.replace(b"slowest_rank", b"slowest_rang") for line in steps]
    for lines, is_named in ((named, True), (unnamed, False)):
        run = make_run(tmp_path / f"{is_named}", run_line(), *lines, end_line())
        assert ("was the slowest" in alone("watch", run, "--once").out) == is_named


def test_a_long_poll_holds_up_no_curves(tmp_path):
    with watched(make_run(tmp_path / "a", run_line(), step_line(1))) as page:
        page.runs()
        before, (run,) = page.curves(), page.watched.all.values()
        follow, gate, begun = run.history.follow, threading.Event(), threading.Event()

        def read():
            append(run.folder, step_line(2))
            begun.set()
            return follow() and gate.wait(60)

        run.history.follow = read
        thread = threading.Thread(target=run.poll)
        thread.start()
        assert begun.wait(60) and page.curves() == before
        gate.set()
        thread.join()
        assert [step for step, _ in page.curves()["loss"]["training"]] == [1, 2]


def test_the_test_after_the_last_step_is_named(tmp_path, clock):
    run = make_run(tmp_path / "a", run_line(), step_line(39))
    beat(run, doing="block 3 in the evaluation of test after step 40", seconds=0)
    assert said(run) == "running"
    append(run, step_line(40))
    assert said(run).startswith("running: block 3 in the evaluation of test")


def test_a_run_is_followed_from_its_first_launch_to_the_next(tmp_path, clock):
    with watched(tmp_path / "a", tmp_path / "b") as page:

        def statuses():
            clock.skip(1.0)
            return [found["status"] for found in page.runs()]

        assert statuses() == ["pending", "pending"]
        make_run(tmp_path / "a")
        assert statuses() == ["waiting", "pending"]
        append(tmp_path / "a", run_line(), step_line(1))
        assert statuses() == ["running", "pending"]
        append(tmp_path / "a", end_line("stopped", "asked to"))
        make_run(tmp_path / "b", run_line(), step_line(1))
        assert statuses() == ["stopped", "running"]
        append(tmp_path / "a", run_line())
        assert statuses() == ["running", "running"]
        (tmp_path / "a" / FILE).unlink()
        assert statuses() == ["waiting", "running"]


def test_runs_of_a_sweep_that_begin_while_it_is_watched(tmp_path, clock):
    sweep, first = tmp_path / "grid", make_run(tmp_path / "first", run_line())
    with watched(first, sweep) as page:
        sweep.mkdir()  # by a driver that has not filled it yet
        assert [found["status"] for found in page.runs()] == ["running", "waiting"]
        (sweep / "sweep.toml").touch()
        assert alone("watch", sweep, "--once").out == "no run has begun yet\n"
        make_run(sweep / "b", run_line(), step_line(1, time=clock.now - 50))
        assert page.runs()[1]["status"] == "silent"
        clock.skip(5)
        make_run(sweep / "a", run_line())
        names = {found["name"]: found["text"] for found in page.runs()}
        assert list(names) == ["first", "a", "b"] and names["b"] == "silent for 55 s"


def test_runs_of_one_name_are_told_apart_and_a_link_has_its_own(tmp_path):
    for folder in ("x/a", "y/a", "run-of-monday"):
        make_run(tmp_path / folder, run_line(), end_line())
    (tmp_path / "latest").symlink_to("run-of-monday")
    words = [tmp_path / name for name in ("x/a", "y/a", "latest")]
    lines = alone("watch", *words).out.splitlines()
    assert [text.partition("  ")[0] for text in lines] == ["x/a", "y/a", "latest"]


def test_stop_is_asked_once_and_not_of_what_has_ended(tmp_path, clock):
    runs = [make_run(tmp_path / name, run_line(), step_line(1)) for name in "abc"]
    with watched(*runs) as page:
        append(runs[1], end_line("failed", "no"))
        (runs[2] / "STOP").symlink_to("no-folder/STOP")  # it cannot be written
        assert "asked to stop" in page.stop(0) and (runs[0] / "STOP").exists()
        assert page.stop(1) == "b: failed: no" and not (runs[1] / "STOP").exists()
        assert "cannot write" in page.stop(2)
        first, *_ = page.runs()
        assert (first["status"], first["can_be_stopped"]) == ("stopping", False)
    silent = make_run(tmp_path / "d", run_line(), step_line(1, time=clock.now - 999))
    with watched(silent, make_run(tmp_path / "e")) as page:
        assert ["asked to stop" in page.stop(number) for number in (0, 1)] == [True, True]


def test_watching_imports_neither_torch_nor_mpi(tmp_path):
    make_run(tmp_path / "runs" / "a", run_line())
    program = "import sys, hpctrain.cli, hpctrain.watch.web; hpctrain.cli.main(['watch', 'a'])\n"
    program += "print({'torch', 'mpi4py', 'numpy', 'h5py', 'cupy'} & {*sys.modules})"
    done = run_command([sys.executable, "-c", program], cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
