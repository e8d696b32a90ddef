"""The driver, with a command in place of training: slots, failures, signals, kill -9."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from hpctrain.sweep import driver as driver_module
from tests.support.launch import Job
from tests.support.wait import wait_for, when
from tests.sweep.sweeps import begun, events, make_driver, statuses

THREE = "[base]\nepochs = 2\nlr = 0.5\n[grid]\nseed = [1, 2, 3]\n"


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """The driver looks often, so that networks may be short."""
    monkeypatch.setattr(driver_module, "POLL_PROCESSES_EVERY", 0.02)
    monkeypatch.setattr(driver_module, "POLL_FILES_EVERY", 0.05)


@pytest.fixture
def held(tmp_path, monkeypatch):
    """A file: until it is there, each network waits after its first epoch, unless it is stopped."""
    monkeypatch.setenv("FAKE_HOLD", str(tmp_path / "go"))
    return tmp_path / "go"


def notify(number):
    """A function that sends this signal to the driver."""
    return lambda: os.kill(os.getpid(), number)


def at_once(folder):
    """The largest number of networks that ran side by side."""
    running, most = 0, 0
    for what, _, _ in events(folder):
        running += 1 if what == "begin" else -1
        most = max(most, running)
    return most


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (5, 3)])
def test_more_and_fewer_networks_than_slots(tmp_path, slots, most, capsys, held):
    folder = tmp_path / "s"
    when(lambda: len(begun(folder)) == most, held.touch)
    assert make_driver(folder, THREE, slots).run() == 0
    assert at_once(folder) == most
    assert sorted(begun(folder)) == ["01", "02", "03"]
    assert statuses(folder) == {"01": "done", "02": "done", "03": "done"}
    running = {}
    for what, number, gpu in events(folder):  # no two share a slot
        assert what == "end" or gpu not in running.values()
        running.pop(number, None)
        running |= {number: gpu} if what == "begin" else {}
    assert "(3 of 3)" in capsys.readouterr().out


def test_a_network_that_fails_leaves_the_others_alone(tmp_path, capsys):
    folder = tmp_path / "s"
    text = """
        [base]
        epochs = 2
        lr = 0.5
        [grid]
        model = ["diverges", "killed", "raises", "auto"]
    """
    assert make_driver(folder, text).run() == 1
    assert statuses(folder) == {"01": "failed", "02": "failed", "03": "failed", "04": "done"}
    table = (folder / "results.csv").read_text()
    assert "the loss of step 3 is not finite" in table
    assert "ValueError: the cause" in table
    assert "signal 9" in table
    assert "04-model=auto,done,,auto,0.3" in table
    capsys.readouterr()
    assert make_driver(folder, text).run() == 1  # nothing is repeated
    assert len(begun(folder)) == 4
    assert make_driver(folder, text, retry=True).run() == 1  # only the failed ones
    assert sorted(begun(folder)[4:]) == ["01", "02", "03"]


def epochs(folder):
    """How many epochs each network has recorded."""
    return [path.read_text().count('"epoch", ') for path in folder.glob("*/progress.jsonl")]


def test_a_notice_lets_all_save_and_the_next_driver_goes_on(tmp_path, held):
    folder = tmp_path / "s"
    driver = make_driver(folder, THREE)
    when(lambda: epochs(folder) == [1, 1], notify(signal.SIGTERM))
    assert driver.run() == 75
    assert statuses(folder) == {"01": "unfinished", "02": "unfinished", "03": "waiting"}
    records = (folder / "01-seed=1/progress.jsonl").read_text()
    assert '"preempted"' in records
    held.touch()
    make_driver(folder, THREE).run()
    assert set(statuses(folder).values()) == {"done"}
    assert epochs(folder) == [2, 2, 2]  # the first two went on, and did not begin anew


def test_a_second_notice_kills(tmp_path, held):
    folder = tmp_path / "s"
    driver = make_driver(folder, THREE.replace("lr", 'model = "deaf"\nlr'))
    when(lambda: epochs(folder) == [1, 1], notify(signal.SIGINT))
    noticed = lambda: [what for what, _, _ in events(folder)].count("notice") == 2  # noqa: E731
    when(noticed, notify(signal.SIGINT))
    assert driver.run() == 75
    assert set(statuses(folder).values()) == {"unfinished", "waiting"}


def test_a_network_that_has_to_leave_takes_the_sweep_along(tmp_path, held):
    folder = tmp_path / "s"
    text = THREE + '[[variant]]\nname = "first"\nmodel = "leaves"\n'
    assert make_driver(folder, text, slots=4).run() == 75
    assert set(statuses(folder).values()) == {"unfinished"}


def test_a_stop_file_stops_all_and_the_next_driver_goes_on(tmp_path, held):
    folder = tmp_path / "s"
    driver = make_driver(folder, THREE)
    when(lambda: epochs(folder) == [1, 1], (folder / "STOP").touch)
    assert driver.run() == 0
    assert statuses(folder) == {"01": "stopped", "02": "stopped", "03": "waiting"}
    assert not (folder / "STOP").exists()
    held.touch()
    assert make_driver(folder, THREE, slots=3).run() == 0
    assert set(statuses(folder).values()) == {"done"}


def test_kill_9_of_the_driver_ends_its_networks_and_the_next_one_goes_on(tmp_path, held):
    folder = tmp_path / "s"
    make_driver(folder, THREE)
    command = [sys.executable, "-m", "tests.sweep.sweeps", str(folder), "2"]
    job = Job(command)
    try:
        wait_for(lambda: epochs(folder) == [1, 1])
        assert len(job.members()) == 3
        job.kill()
        job.wait(timeout=60)
        wait_for(lambda: job.members() == [])
    finally:
        job.end()
    assert statuses(folder) == {"01": "running", "02": "running", "03": "waiting"}
    held.touch()
    assert make_driver(folder, THREE, slots=3).run() == 0
    assert sorted(begun(folder)) == ["01", "01", "02", "02", "03"]
    assert epochs(folder) == [2, 2, 2]
    assert make_driver(folder, THREE).run() == 0
    assert len(begun(folder)) == 5  # nothing that is done is repeated


def test_a_network_in_whose_folder_another_job_works_waits(tmp_path):
    folder = tmp_path / "s"
    driver = make_driver(folder, THREE)
    run = folder / "01-seed=1"
    run.mkdir()
    program = (
        "import time; from pathlib import Path; from hpctrain.training.control import RunLock;"
        f"lock = RunLock(); lock.take(Path({str(run)!r})); print('held', flush=True);"
        "time.sleep(1000)"
    )
    other = Job([sys.executable, "-c", program])
    try:
        assert other.stdout.readline() == "held\n"
        when(lambda: sorted(begun(folder)) == ["02", "03"], other.kill)
        assert driver.run() == 0
    finally:
        other.end()
    assert begun(folder)[-1] == "01"
