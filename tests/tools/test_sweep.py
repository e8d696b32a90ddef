"""A sweep trains all its networks, whatever happens to some of them, and goes on where it stopped.

Networks are stand-ins, tests/support/fake_train.py: a program `srun` launches these, and the sweep
takes this for an allocation of Slurm.
"""

from __future__ import annotations

import csv
import glob
import os
import re
import signal
import socket
import sys
import time
import tomllib

import pytest

from tests.support.launch import ROOT, Job
from tests.support.packs import make_pack
from tests.support.ranks import alone
from tests.support.records import (
    FILE,
    beat,
    end_line,
    epoch_line,
    evaluation_line,
    make_other,
    make_run,
    run_line,
    statuses,
)
from tests.support.scripts import write_scripts
from tests.support.wait import wait_for, when

BASE = "[base]\ndata = 'pack.h5'\nepochs = 2\nlr = 0.5\n"
THREE = BASE + "[grid]\nseed = [1, 2, 3]\n"


class Sweep:
    """A sweep in the current folder, with stand-ins for its networks."""

    def __init__(self, place):
        self.place, self.folder = place, place / "runs/s"
        srun = f'PYTHONPATH={ROOT} exec {sys.executable} -m tests.support.fake_train "$@"'
        self.env = {"SLURM_JOB_ID": "1", "PATH": write_scripts(place / "bin", srun=srun)}
        self.go = place / "go"
        make_pack(place / "pack.h5", {"train": 5})

    def hold(self):
        """Let each network wait after its first epoch, unless it is stopped, until release()."""
        self.env["FAKE_HOLD"] = str(self.go)

    def release(self):
        self.go.touch()

    def words(self, text, slots=2):
        (self.place / "s.toml").write_text(text)
        return ["sweep", "s.toml", "--run", "s", "--slots", str(slots)]

    def run(self, text=THREE, slots=2, *words):
        return alone(*self.words(text, slots), *words, env=self.env)

    def statuses(self):
        return statuses(self.folder)

    def events(self, kind):
        """Numbers of the networks that began, got a notice, or ended, in order."""
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == kind]

    def epochs(self):
        """How many epochs each network has recorded."""
        files = sorted(self.folder.glob("*/progress.jsonl"))
        return [path.read_text().count('"epoch", ') for path in files]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Sweep(tmp_path)


def notify(number):
    """A function that sends this signal to the sweep."""
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (5, 3)])
def test_networks_wait_for_a_free_slot(sweep, slots, most):
    sweep.hold()
    when(lambda: len(sweep.events("begin")) == most, sweep.release)
    ended = sweep.run(slots=slots)
    assert ended.code == 0, ended.err
    assert sweep.statuses() == {"01": "done", "02": "done", "03": "done"}
    used, at_once = {}, 0
    for line in ended.out.splitlines():
        if begun := re.match(r"(\S+) begins in slot (\d)", line):
            assert begun[2] not in used.values()
            used[begun[1]] = begun[2]
            at_once = max(at_once, len(used))
        elif line.split(" ")[0] in used and " done" in line:
            used.pop(line.split(" ")[0])
    assert (at_once, used) == (most, {})


def test_networks_that_fail_leave_the_others_alone_and_are_repeated_on_request(sweep):
    text = BASE + "[grid]\nmodel = ['diverges', 'killed', 'raises', 'auto']\n"
    assert sweep.run(text).code == 1
    assert sweep.statuses() == {"01": "failed", "02": "failed", "03": "failed", "04": "done"}
    table = (sweep.folder / "results.csv").read_text()
    for reason in ("the loss of step 3 is not finite", "ValueError: the cause", "signal 9"):
        assert reason in table
    assert sweep.run(text).code == 1
    assert len(sweep.events("begin")) == 4
    assert sweep.run(text, 2, "--retry").code == 1
    assert sorted(sweep.events("begin")[4:]) == ["01", "02", "03"]


@pytest.mark.parametrize(
    ("ask", "code", "status"),
    [(notify(signal.SIGTERM), 75, "unfinished"), (lambda: alone("stop", "s"), 0, "stopped")],
)
def test_a_signal_or_a_stop_ends_all_and_the_same_command_goes_on(sweep, ask, code, status):
    sweep.hold()
    when(lambda: sweep.epochs() == [1, 1], ask)
    assert sweep.run().code == code
    assert sweep.statuses() == {"01": status, "02": status, "03": "waiting"}
    assert sorted(sweep.events("end")) == ["01", "02"]
    sweep.release()
    assert sweep.run(slots=3).code == 0
    assert set(sweep.statuses().values()) == {"done"}
    assert sweep.epochs() == [2, 2, 2]  # the first two went on, and did not begin anew


def test_a_second_interrupt_kills_networks_that_do_not_save(sweep):
    sweep.hold()
    when(lambda: sweep.epochs() == [1, 1], notify(signal.SIGINT))
    times = []

    def heard():
        """Whether both networks got their notice, a while ago: two signals at once count as one."""
        if len(sweep.events("notice")) == 2:
            times.append(time.monotonic())
        return times and times[-1] > times[0] + 1.5

    when(heard, notify(signal.SIGINT))
    assert sweep.run(BASE + "model = 'deaf'\n[grid]\nseed = [1, 2, 3]\n").code == 75
    assert set(sweep.statuses().values()) == {"unfinished", "waiting"}
    assert sweep.events("end") == []


def test_a_network_that_is_preempted_takes_the_sweep_along(sweep):
    sweep.hold()
    assert sweep.run(THREE + "[[variant]]\nname = 'first'\nmodel = 'leaves'\n", 4).code == 75
    assert set(sweep.statuses().values()) == {"unfinished"}


def test_kill_9_ends_the_networks_too_and_the_same_command_goes_on(sweep):
    sweep.hold()
    job = Job([sys.executable, "-m", "hpctrain", *sweep.words(THREE)], sweep.env, sweep.place)
    try:
        wait_for(lambda: sweep.epochs() == [1, 1])
        refused = sweep.run()
        assert refused.code == 2 and "runs/s" in refused.err  # one at a time
        job.kill()
        job.wait()
        wait_for(lambda: job.members() == [])
    finally:
        job.end()
    assert sweep.statuses() == {"01": "running", "02": "running", "03": "waiting"}
    sweep.release()
    assert sweep.run(slots=3).code == 0
    assert sorted(sweep.events("begin")) == ["01", "01", "02", "02", "03"]
    assert sweep.epochs() == [2, 2, 2]
    assert sweep.run().out.endswith("runs/s: 3 done\n")
    assert len(sweep.events("begin")) == 5


def test_a_network_in_whose_folder_another_job_works_waits(sweep):
    assert alone(*sweep.words(THREE), "--prepare").code == 0
    run = sweep.folder / "01-seed=1"
    run.mkdir()
    program = f"""
import fcntl, sys, time
file = open({str(run / "lock")!r}, "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1000)
"""
    other = Job([sys.executable, "-c", program])
    try:
        assert other.stdout.readline() == "held\n"
        when(lambda: sorted(sweep.events("begin")) == ["02", "03"], other.kill)
        assert sweep.run().code == 0
    finally:
        other.end()
    assert sweep.events("begin")[-1] == "01"


def test_another_file_of_the_same_name_is_refused(sweep):
    assert alone(*sweep.words(THREE), "--prepare").code == 0
    ended = sweep.run(THREE.replace("3]", "4]"))
    assert ended.code == 2 and "s.toml" in ended.err and "--run" in ended.err


def test_a_sweep_whose_folder_was_left_by_a_full_disk_begins_with_the_same_command(sweep):
    words = [*sweep.words(THREE), "--prepare"]
    assert alone(*words).code == 0
    os.remove("runs/s/sweep.toml")  # it is written last
    os.remove(min(glob.glob("runs/s/*.toml")))
    assert alone(*words).code == 0
    os.rename("runs/s/sweep.toml", "runs/s/notes.txt")
    assert "is no sweep of this" in alone(*words).err


def results(sweep, networks):
    """The closing table of a sweep of networks with these records: status by name, in order."""
    names = [f"n{number}" for number in range(1, len(networks) + 1)]
    text = BASE + "".join(f"[[variant]]\nname = '{n}'\nseed = {n[1:]}\n" for n in names)
    assert alone(*sweep.words(text), "--prepare").code == 0
    for name, lines in zip(names, networks, strict=True):
        if lines:
            run = make_run(sweep.folder / f"0{name[1:]}-{name}", run_line(), *lines)
            (run / "model.safetensors").touch()
    ended = alone(*sweep.words(text), "--results")
    assert ended.code == 0, ended.err
    return dict(re.findall(r"0\d-(n\d)\W+([a-z]+)", ended.out))


def accuracies(training, test, *validations):
    """Records of these accuracies; the losses say the contrary."""
    found = [epoch_line(1, accuracy=training, loss=training)]
    for epoch, value in enumerate(validations, start=1):
        found.append(evaluation_line(10 * epoch, accuracy=value, loss=value))
    return [*found, evaluation_line(20, "test", accuracy=test, loss=test), end_line("done")]


@pytest.mark.parametrize(
    ("figures", "order"),  # of training, test and validations, of which the last is of the weights
    [
        ([(0.9, 1.0, 0.7, 0.8), (0.5, 0.6, 0.95, 0.7), (0.6, 0.7, 0.85)], ["n3", "n1", "n2"]),
        ([(0.5, 1.0), (0.9, 0.1)], ["n2", "n1"]),  # nothing was validated
    ],
)
def test_the_closing_table_has_the_best_first_and_the_test_never_decides(sweep, figures, order):
    assert list(results(sweep, [accuracies(*each) for each in figures])) == order


def test_a_task_of_another_figure_has_columns_of_it(sweep, tmp_path):
    made = [make_other(tmp_path / f"{least}", least, least + 2.0) for least in (3.0, 1.0)]
    assert list(results(sweep, [[(run / FILE).read_bytes()] for run in made])) == ["n2", "n1"]
    with open(sweep.folder / "results.csv", newline="") as file:
        first, second = csv.DictReader(file)
    columns = "name status reason seed best_validation_accuracy best_validation_loss"
    columns += " best_validation_mae test_accuracy test_loss test_mae epochs seconds"
    assert [*first] == columns.split()
    assert (first["best_validation_mae"], first["test_mae"]) == ("3.0", "5.0")
    assert (second["best_validation_mae"], second["test_loss"]) == ("1.0", str(1 / 3))
    assert (first["best_validation_accuracy"], first["test_accuracy"]) == ("", "")


@pytest.mark.parametrize(("final", "order"), [("best", ["n2", "n1"]), ("last", ["n1", "n2"])])
def test_the_figure_of_best_by_ranks_the_networks_that_are_saved(sweep, final, order):
    """One of --metric, by its direction; accuracy and loss say the contrary."""
    facts = {
        "figures": {"dice": "max", "accuracy": "max", "loss": "min"},
        "settings": {"best_by": "dice:max", "final": final},
    }
    made = []
    for values in ((0.2, 0.6, 0.5), (0.2, 0.7, 0.1)):
        lines = [run_line(**facts), epoch_line(1)]
        for epoch, dice in enumerate(values, start=1):
            own = {"accuracy": 1 - dice, "loss": dice, "metrics": {"dice": dice}}
            lines.append(evaluation_line(10 * epoch, **own))
        made.append([*lines, end_line("done")])
    assert list(results(sweep, made)) == order
    shown = alone("watch", sweep.folder, "--once").out
    assert "0.6000" in shown and "0.7000" in shown, "the best of each"
    table = " ".join(alone("sweep", "runs/s", "--results", "--launcher", "srun").out.split())
    assert "training accuracy 0." in table, "another figure than that of the validation"
    assert "validation 0." in table, "the figure that ranks has no name"


def test_networks_that_died_are_unfinished(sweep):
    found = results(sweep, [[epoch_line(1)], None, accuracies(0.5, 0.5)])
    assert found == {"n1": "unfinished", "n2": "waiting", "n3": "done"}
    beat(sweep.folder / "01-n1", doing="step 2", host=socket.gethostname(), pid=2**22 + 1)
    ended = alone("sweep", "runs/s", "--results", "--launcher", "srun")  # needs no launcher
    assert ended.code == 0 and "step 2" in (sweep.folder / "results.csv").read_text(), ended


AFFINE = "kornia:RandomAffine(degrees=15)"
ERASING = "torchvision:RandomErasing(p=0.25)"


def test_a_value_of_the_grid_may_be_a_list_of_transforms(sweep):
    """Parts of other libraries need no --trust-code; functions in a list do."""
    grid = f"{BASE}[grid]\naugment = [['{AFFINE}', '{ERASING}'], '{AFFINE}', []]\n"
    assert sweep.run(grid).code == 0
    with open(sweep.folder / "results.csv", newline="") as file:
        assert [row["augment"] for row in csv.DictReader(file)] == [
            f"{AFFINE} + {ERASING}",
            AFFINE,
            "",
        ]
    files = sorted(sweep.folder.glob("*.toml"))
    settings = [tomllib.loads(path.read_text()).get("augment") for path in files]
    assert [value for value in settings if value is not None] == [[AFFINE, ERASING], AFFINE]
    name = "01-augment=kornia:RandomAffine_degrees=15_+torchvision:RandomErasing_p=0.25_.toml"
    assert files[0].name == name


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        (f"[['{AFFINE}', 'mine:f']]", "s.toml names mine:f: a function that a file names"),
        (f"[['{AFFINE}', 'kornia:RandomAfine()']]", "did you mean 'RandomAffine'?"),
        (f"[['{AFFINE}', 5]]", "expected texts, not 5"),
    ],
)
def test_transforms_of_a_grid_are_checked_before_any_network_begins(sweep, augment, said):
    ended = sweep.run(f"{BASE}[grid]\naugment = {augment}\n")
    assert ended.code == 2 and said in ended.err and not sweep.folder.exists()
