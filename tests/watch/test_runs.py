"""What is said of runs: alive or not, how far, in one line; which runs; how they are stopped."""

from __future__ import annotations

import json
import socket
import sys
import time

import pytest

from hpctrain.cli import main
from hpctrain.errors import UsageError
from hpctrain.report.progress import cost_lines
from hpctrain.report.record import FILE_NAME
from hpctrain.watch import runs as runs_module
from hpctrain.watch.drawing import cells, facts_line, status_line
from hpctrain.watch.runs import WatchedRuns
from tests.support.launch import run as run_command
from tests.support.launch import run_cli
from tests.support.records import (
    append,
    end_line,
    evaluation_line,
    line,
    make_run,
    run_line,
    step_line,
)

LONG_AGO = 1_000_000_000.0
NO_PROCESS = 2**22 + 1  # above the largest number that Linux gives


def watched(folder):
    runs = WatchedRuns([str(folder)], "runs")
    runs.poll()
    return runs.all()[0]


def beat(run, **fields):
    (run / "ranks").mkdir(exist_ok=True)
    own = {"rank": 0, "host": "far", "pid": 1, "doing": "step 3", "seconds": 2, "time": time.time()}
    (run / "ranks" / "0.json").write_text(json.dumps(own | fields))


def test_a_run_under_way(tmp_path):
    moment = time.time()
    steps = [step_line(n, time=moment - 2 + n / 10) for n in range(1, 21)]
    run = make_run(tmp_path / "a", run_line(), *steps, evaluation_line(20))
    one = watched(run)
    summary = one.summary()
    assert one.status == ("running", "running")
    assert (summary["step"], summary["steps"], summary["share"]) == (20, 40, 0.5)
    assert summary["seconds_left"] == pytest.approx(2.0, abs=1.0)
    assert summary["images_per_second"] == pytest.approx(80)
    assert summary["percents"]["compute"] == 60
    text = status_line(summary)
    for part in ("a  running", "epoch 2 of 4", "step 20 of 40", "50 %", "training loss 0.0500"):
        assert part in text
    for part in ("validation loss 0.2500, accuracy 0.7500", "80.0 images/s", "ranks 2", "reduce 2"):
        assert part in text
    assert cells(summary)[:4] == ("a", "running", "2/4", "50 %")


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        (("done", None), "done", "done"),
        (("stopped", "asked to stop"), "stopped", "stopped: asked to stop"),
        (("preempted", "the time is up"), "preempted", "preempted: the time is up"),
        (("failed", "disk full\nat once"), "failed", "failed: disk full"),
        (("odd", None), "failed", "failed"),
    ],
)
def test_how_a_run_ended(tmp_path, end, kind, text):
    one = watched(make_run(tmp_path / "a", run_line(), step_line(1), end_line(*end)))
    assert (one.status.kind, one.status.text, one.status.can_be_stopped) == (kind, text, False)


def test_a_run_that_is_silent_by_its_record_and_its_heartbeat(tmp_path):
    old = time.time() - 185
    run = make_run(tmp_path / "a", run_line(), step_line(1, time=old))
    assert watched(run).status == ("silent", "silent for 3 min")
    beat(run, time=old)
    assert watched(run).status == ("silent", "silent for 3 min")
    beat(run, doing="waiting for all in step 2", seconds=180)
    text = "silent for 3 min, rank 0 is in: waiting for all in step 2"
    assert watched(run).status == ("silent", text)
    beat(run, doing="block 3 in the evaluation of test after step 1", seconds=180)
    kind, text = watched(run).status
    assert kind == "running" and "evaluation of test after step 1 for 3:0" in text
    append(run, step_line(2))
    assert watched(run).status == ("running", "running")


def test_slow_steps_are_no_silence(tmp_path):
    slow = {"seconds": {"total": 100.0}, "time": time.time() - 120}
    run = make_run(tmp_path / "a", run_line(), step_line(1, **slow))
    assert watched(run).status.kind == "running"


def test_a_process_of_this_machine_that_is_gone(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1, time=time.time() - 30))
    beat(run, host=socket.gethostname(), pid=NO_PROCESS)
    one = watched(run)
    text = "failed: all ranks were killed, reason unknown: rank 0 on "
    assert one.status.kind == "failed" and one.status.text.startswith(text)
    beat(run, host=f"{socket.gethostname()}-other", pid=NO_PROCESS)
    assert watched(run).status.kind == "silent"


def test_a_rank_of_another_machine_that_said_why_it_ended(tmp_path):
    """Only where it has been silent since: a heartbeat that is new is no end."""
    run = make_run(tmp_path / "a", run_line(), step_line(1, time=time.time() - 300))
    for age, failed, kind in (
        (300, "no memory", "failed"),
        (300, "", "silent"),
        (0, "x", "silent"),
    ):
        beat(run, time=time.time() - age, failed=failed)
        status = watched(run).status
        assert status.kind == kind and (kind != "failed" or "rank 0: no memory" in status.text)


def test_silence_counts_from_what_is_seen_not_from_another_machines_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(runs_module.time, "monotonic", lambda: now[0])
    seen = runs_module.IdleTimer()
    assert seen.seconds("a", time.time() - 50) == pytest.approx(50, abs=1)
    now[0] += 5
    assert seen.seconds("a", LONG_AGO) == pytest.approx(55, abs=1)
    assert seen.seconds("b", LONG_AGO) == 0
    assert runs_module.IdleTimer().seconds("a", time.time() + 999) == 0


def test_a_run_that_was_taken_up_again_can_be_stopped(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1), end_line("stopped", "asked"))
    one = watched(run)
    append(run, run_line())
    one.poll()
    assert one.status == ("running", "running")


@pytest.mark.parametrize(
    ("seconds", "text"), [(59, "59 s"), (185, "3 min"), (7300, "2 h"), (200_000, "2 days")]
)
def test_rough_times(seconds, text):
    assert runs_module.rough(seconds) == text


def test_runs_of_a_sweep_that_begin_while_it_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "FIND_RUNS_EVERY", -1)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.toml").touch()
    runs = WatchedRuns(["s"], str(tmp_path))
    assert runs.all() == []
    make_run(tmp_path / "s" / "b", run_line())
    runs.poll()
    first = runs.all()[0]
    make_run(tmp_path / "s" / "a", run_line())
    runs.poll()
    assert [run.name for run in runs.all()] == ["a", "b"]
    assert runs.all()[1] is first and runs.get(first.key) is first


def test_equal_names_are_told_apart_and_odd_ones_cannot_steer_a_terminal(tmp_path):
    for folder in ("x/a", "y/a", "x/\x1b[2Jb"):
        make_run(tmp_path / folder, run_line(), line("note", text="\x1b]0;evil\x07"))
    runs = WatchedRuns([str(tmp_path / f) for f in ("x/a", "y/a", "x/\x1b[2Jb")], "runs")
    runs.poll()
    assert [run.name for run in runs.all()][:2] == ["x/a", "y/a"]
    odd = runs.all()[2].summary()
    shown = [odd["name"], odd["folder"], *odd["notes"], *cells(odd), status_line(odd)]
    assert "2Jb" in shown[0] and "evil" in shown[2]
    assert all(text.isprintable() for text in shown)


def test_stop_writes_the_file_once_and_not_for_what_has_ended(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1))
    one = watched(run)
    assert "is asked to stop" in one.stop() and (run / "STOP").exists()
    assert one.status.kind == "stopping" and not one.status.can_be_stopped
    over = make_run(tmp_path / "b", run_line(), step_line(1))
    one = watched(over)
    append(over, end_line("failed", "no"))
    assert "already ended" in one.stop() and not (over / "STOP").exists()


def test_without_a_terminal_a_line_for_each_run(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, run_line(), step_line(1), end_line())
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "config.toml").touch()
    done = run_cli(["watch", "a", "b", "c"], cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert [text.split("  ")[:2] for text in lines] == [
        ["a", "done"],
        ["b", "done"],
        ["c", "not begun yet"],
    ]


def test_without_a_name_all_runs_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "b", run_line(), step_line(1), end_line())
    make_run(tmp_path / "runs" / "a", run_line(), step_line(1), end_line())
    (tmp_path / "runs" / "no run").mkdir()
    assert main(["watch"]) == 0
    assert [text[:7] for text in capsys.readouterr().out.splitlines()] == ["a  done", "b  done"]


def test_a_damaged_run_is_one_line_among_others(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a", b"rubbish\n")
    make_run(tmp_path / "runs" / "b", run_line(), step_line(1), end_line())
    assert main(["watch", "a", "b", "--once"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "not the record of a run" in first and second.startswith("b  done")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs-dir", "none"], "there is no run in none"),
        (["first", "--port", "70000", "--web"], "--port 70000"),
        (["first", "--port", "80"], "--port goes with --web"),
        (["first", "--once", "--web"], "exclude each other"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "first", run_line())
    assert main(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "first", run_line(), step_line(1), end_line())
    assert main(["watch", "frist", "first", "--once"]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one == "frist  waiting for runs/frist, did you mean 'first'?"
    assert other.startswith("first  done")
    runs = WatchedRuns(["first", "second", "grid"], "runs")
    runs.poll()
    assert [run.status.kind for run in runs.all()] == ["done", "pending", "pending"]
    assert runs.all()[1].status.text == "waiting for runs/second"
    assert (
        not runs.all()[1].status.can_be_stopped and cells(runs.all()[1].summary())[1] == "pending"
    )
    with pytest.raises(UsageError):
        runs.all()[1].stop()
    make_run(tmp_path / "runs" / "second", run_line(), step_line(1))
    (tmp_path / "runs" / "grid").mkdir()  # a driver makes its folder before it writes into it
    runs.poll()
    assert [run.status.kind for run in runs.all()][:2] == ["done", "running"]
    (tmp_path / "runs" / "grid" / "sweep.toml").touch()
    make_run(tmp_path / "runs" / "grid" / "01-base", run_line(), step_line(1))
    monkeypatch.setattr(runs_module, "FIND_RUNS_EVERY", -1)
    runs.poll()
    assert [run.name for run in runs.all()] == ["first", "second", "01-base"]


def test_the_test_after_the_last_step_is_told(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(39))
    beat(run, doing="block 3 in the evaluation of test after step 40", seconds=0)
    assert watched(run).status == ("running", "running")
    append(run, step_line(40))
    kind, text = watched(run).status
    assert kind == "running" and text.startswith("running: block 3 in the evaluation of test")


def test_summary_and_watch_agree_and_add_up(tmp_path):
    shares = {"data": 0.123, "compute": 0.456, "reduce": 0.417, "other": 0.004}
    ended = {"shares": shares, "step_seconds": 0.1, "idle": 0.0, "advice": []}
    more = {"slowest_rank": 1, "slowest_share": 0.676}
    run = make_run(tmp_path / "a", run_line(), step_line(1), end_line(**ended, **more))
    (first, second, *_) = cost_lines({**ended, **more})
    assert first.strip() == "step 100.0 ms: data 12 %, compute 46 %, reduce 42 %, other 0 %"
    assert second.strip() == "rank 1 was the slowest in 68 % of the steps"
    line = facts_line(watched(run).summary())
    assert "slowest rank 1 in 68 % of steps" in line
    assert "100.0 ms: data 12 %, compute 46 %, reduce 42 %, other 0 %" in line


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "pictures").mkdir()
    with pytest.raises(UsageError, match="no run or sweep 'pictures'"):
        WatchedRuns(["pictures"], str(tmp_path))


def test_watching_imports_neither_torch_nor_mpi(tmp_path):
    make_run(tmp_path / "runs" / "a", run_line(), step_line(1))
    program = (
        "import sys, hpctrain.watch.web, hpctrain.watch.terminal\n"
        "from hpctrain.cli import main\n"
        "main(['watch', 'a', '--once'])\n"
        "print(sorted({'torch', 'mpi4py', 'numpy', 'h5py', 'cupy'} & set(sys.modules)))"
    )
    done = run_command([sys.executable, "-c", program], cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_missing_record_later_is_said(tmp_path):
    run = make_run(tmp_path / "a", run_line(), step_line(1))
    one = watched(run)
    (run / FILE_NAME).unlink()
    one.poll()
    assert one.status == ("waiting", "not begun yet")


def test_a_link_has_its_own_name(tmp_path):
    make_run(tmp_path / "run-of-monday", run_line(), step_line(1))
    (tmp_path / "latest").symlink_to("run-of-monday")
    assert [run.name for run in WatchedRuns(["latest"], str(tmp_path)).all()] == ["latest"]
