"""A run that is interrupted, however, ends with the bits of one that was not, on any ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest

import hpctrain as hp
from tests.support.launch import Job, as_flags, mpirun
from tests.support.launches import check_same, launch, notes, run_of
from tests.support.packs import draw_entries
from tests.support.ranks import command
from tests.support.short import ROWS, records, short_run
from tests.support.spoil import SPOILT, spoil
from tests.support.wait import wait_for

LAUNCHED = 2  # ranks of each launch that is interrupted


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Two epochs of 7 steps, the last of them smaller; a validation after every third."""
    return {
        **short_run(tmp_path_factory.mktemp("resume")),
        **{"shards": 6, "optimizer": "adam", "deterministic": True, "shift": 2},
        **{"validate_every": "3steps", "checkpoint_every": "2steps", "final": "best"},
    }


@pytest.fixture(scope="module")
def whole(pack):
    """A run that nothing interrupted."""
    assert launch(pack | {"run": "whole"}, LAUNCHED).code == 0
    return pack | {"run": "whole"}


@pytest.fixture
def settings(pack, tmp_path):
    """The same, for a run in a folder of its own."""
    return pack | {"runs_dir": str(tmp_path / "runs")}


def check_end(settings, whole, size):
    """Give the command once more, on `size` ranks: the run is then as the whole one."""
    again = command(size, "train", *as_flags(settings))
    assert again.code == 0, again.err
    check_same(settings, whole)
    assert not (run_of(settings) / "STOP").exists()


def stop_file(settings):
    """The file lies there before the first validation ends."""

    def touch(record):
        (run_of(settings) / "STOP").touch()
        began = time.monotonic()
        wait_for(lambda: time.monotonic() > began + 0.6)  # rank 0 looks for it twice a second

    return {"on_evaluation": touch}


def as_under_srun(patch):
    """Without the variables of mpirun, which kills the ranks after its SIGTERM."""
    for name in [n for n in os.environ if n.startswith(("OMPI_", "PRTE_", "HYDI_", "MPI_LOCAL"))]:
        patch.delenv(name)


#: How a launch is interrupted: by a signal to its last rank, or by a limit that it needs to save,
#: so that the time is up after the first step.
WAYS = {
    "stop file": stop_file,
    "SIGUSR1": lambda settings: {"leave": "evaluation.begun"},
    "SIGUSR2": lambda settings: {"leave": "evaluation.begun", "signal": "usr2"},
    "SIGTERM": lambda settings: {
        "leave": "evaluation.begun",
        "signal": "term",
        "first": as_under_srun,
    },
    "time limit": lambda settings: {"time_limit": "5s"},
}


@pytest.mark.parametrize("size", [LAUNCHED, 3, 1], ids="resumed on {} ranks".format)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_asked_to_leave_resumes_to_the_same_bits(settings, whole, way, size):
    ended = launch(settings, LAUNCHED, **WAYS[way](settings))
    expected = (0, "stopped") if way == "stop file" else (75, "preempted")
    assert (ended.code, ended.status) == expected and 0 < ended.step < 14
    check_end(settings, whole, size)


@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_a_run_with_unknown_targets_is_interrupted_twice_and_ends_with_the_same_bits(
    pack, tmp_path, task
):
    """The means and deviations of values are those of the first launch."""
    splits, names = {}, {"classes": ["a", "b", "c"]}
    if task == "regress":
        names = {"columns": ["sum", "share"]}
    for split, rows in ROWS.items():
        images, present, values = draw_entries(np.random.default_rng(rows), rows, (12, 12, 1))
        splits[split] = images, present if task == "multilabel" else values
    hp.write_pack(tmp_path / "entries.h5", splits, **names)
    settings = pack | {"data": str(tmp_path / "entries.h5"), "runs_dir": str(tmp_path / "runs")}
    settings |= {"task": task, "ema": 0.9, "final": "ema"}
    assert launch(settings | {"run": "whole"}, LAUNCHED).code == 0
    assert launch(settings, LAUNCHED, leave=3).code == 75
    assert launch(settings, 3, leave=4).code == 75
    check_end(settings, settings | {"run": "whole"}, 1)


@pytest.mark.parametrize("whom", ["rank", "mpirun"])
def test_a_run_whose_rank_or_mpirun_is_killed_resumes_to_the_same_bits(settings, whole, whom):
    """All ranks stall after step 5, in the middle of an epoch, until they are killed.

    Until then another launch is refused and changes nothing.
    """
    train = [sys.executable, "-m", "hpctrain", "train", *as_flags(settings)]
    job = Job([mpirun(), "-n", str(LAUNCHED), *train], {"HPCTRAIN_FAULT": "step.done:stall:5"})
    run = run_of(settings)
    try:
        wait_for(
            lambda: (run / "checkpoints/00000004.safetensors").exists() or job.poll() is not None
        )
        beats = [json.loads(path.read_text()) for path in (run / "ranks").glob("*.json")]
        pid = next(beat["pid"] for beat in beats if beat["rank"] == 1)
        record = (run / "progress.jsonl").read_bytes()
        second = command(1, "train", *as_flags(settings))
        assert second.code == 2 and str(run) in second.err and second.err.count("\n") == 1
        after = (run / "progress.jsonl").read_bytes()
        assert after.startswith(record) and after.count(b'"kind": "run"') == 1
        os.kill(pid if whom == "rank" else job.pid, signal.SIGKILL)
        _, err = job.communicate(timeout=60)
        wait_for(lambda: job.members() == [])
    finally:
        job.end()
    assert job.returncode not in (0, 75), err
    cause = "killed, .*: rank 1 on " if whom == "rank" else "all ranks were killed, .*: rank 0 on "
    for size in (LAUNCHED, 3):
        copy = settings | {"run": f"copy {size}"}
        shutil.copytree(run, run_of(copy))
        check_end(copy, whole, size)
        first, _ = records(copy, "end")
        assert first["status"] == "failed" and re.match(cause, first["reason"]), first
        assert not list((run_of(copy) / "ranks").iterdir())


def test_a_rank_that_hangs_is_named_and_ends_the_run_which_resumes(settings, whole):
    train = [sys.executable, "-m", "hpctrain", *as_flags(settings | {"hang_timeout": "15s"})]
    command = [mpirun(), "-n", "1", *train, ":", "-n", "1"]
    job = Job([*command, "env", "HPCTRAIN_FAULT=step.done:stall:5", *train])
    try:
        _, err = job.communicate(timeout=100)
    finally:
        job.end()
    assert job.returncode == 1
    assert re.search(r"rank 1 \(process \d+ on .*\) did not arrive, it is in: ", err), err
    check_end(settings, whole, LAUNCHED)


@pytest.fixture(scope="module")
def broken(pack):
    """A run that met a full disk in its third checkpoint, after step 6."""
    broken = pack | {"run": "broken"}
    assert launch(broken, 1, fault="checkpoint.written:full:3").code == 1
    return run_of(broken)


def test_a_checkpoint_stays_until_the_next_is_whole(broken):
    assert max((broken / "checkpoints").iterdir()).name == "00000004.safetensors"


@pytest.mark.parametrize("how", [*SPOILT, "swapped"])
def test_a_damaged_checkpoint_is_passed_over(settings, broken, whole, how):
    """The one before it is taken; the run ends with the same bits, and its record says so."""
    damaged = shutil.copytree(broken, run_of(settings)) / "checkpoints/00000004.safetensors"
    if how == "swapped":
        shutil.copy(damaged.with_stem("00000002"), damaged)
    else:
        spoil(damaged, how)
    check_end(settings, whole, 1)
    said = " ".join(notes(settings))
    assert "going on after step 2" in said
    assert ("00000004" in said and "passed over" in said) != (how == "gone")


def test_a_run_keeps_the_shards_that_its_first_launch_chose(settings):
    """By default as many as it had ranks."""
    del settings["shards"]
    whole = settings | {"run": "whole"}
    assert launch(whole, LAUNCHED).code == 0
    assert launch(settings, LAUNCHED, leave=3).code == 75
    check_end(settings, whole, 1)
