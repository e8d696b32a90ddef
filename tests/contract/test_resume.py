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
from safetensors.numpy import load_file

import hpctrain as hp
from tests.support import ranks
from tests.support.launch import Job, as_flags, mpirun
from tests.support.packs import make_pack
from tests.support.records import read_strictly
from tests.support.spoil import SPOILT, spoil
from tests.support.wait import wait_for

STEPS = list(range(1, 15))
LAUNCHED = 2  # ranks of each launch that is interrupted


def settings(folder, name):
    """Two epochs of 7 steps, the last of them smaller; a validation after every third."""
    return {
        **{"data": str(folder / "pack.h5"), "run": name, "runs_dir": str(folder / "runs")},
        **{"model": "digits", "epochs": 2, "batch_size": 16, "shards": 6, "optimizer": "adam"},
        **{"validate_every": "3steps", "checkpoint_every": "2steps", "final": "best"},
        **{"deterministic": True, "shift": 2, "progress": "none"},
    }


def words(folder, name, **more):
    """The same as a command line."""
    given = settings(folder, name) | more
    return ["train", *as_flags({k: v for k, v in given.items() if v is not None})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pack, and a run `whole` that nothing interrupted."""
    folder = tmp_path_factory.mktemp("resume")
    make_pack(folder / "pack.h5", {"train": 101, "validation": 13, "test": 23}, (12, 12, 1))
    assert ranks.command(LAUNCHED, *words(folder, "whole")).code == 0
    return folder


def records(folder, name, kind):
    return read_strictly(folder / "runs" / name, kind)


def check_end(folder, name, size):
    """Give the command once more, on `size` ranks: the run is then as the whole one."""
    again = ranks.command(size, *words(folder, name))
    assert again.code == 0, again.err
    assert [r["step"] for r in records(folder, name, "step")] == STEPS
    (*_, one), (*_, other) = (records(folder, run, "end") for run in (name, "whole"))
    assert (one["status"], one["digest"]) == ("done", other["digest"])
    assert not (folder / "runs" / name / "STOP").exists()
    one, other = (load_file(folder / "runs" / run / "model.safetensors") for run in (name, "whole"))
    assert one.keys() == other.keys()
    for key in one:
        assert np.array_equal(one[key], other[key]), key


def signal_last_rank(number):
    """What interrupts a run: its last rank gets this signal while rank 0 records a validation."""

    def interrupt(comm, folder):
        last = comm.bcast(os.getpid(), root=comm.size - 1)
        return {"on_evaluation": lambda record: os.kill(last, number)}

    return interrupt


def as_under_srun(interrupt):
    """Without the variables of mpirun, which kills the ranks after its SIGTERM."""

    def interrupt_srun(comm, folder):
        for name in [n for n in os.environ if n.startswith(("OMPI_", "HYDI_", "MPI_LOCAL"))]:
            del os.environ[name]
        return interrupt(comm, folder)

    return interrupt_srun


def stop_file(comm, folder):
    def touch(record):
        (folder / "STOP").touch()
        began = time.monotonic()
        wait_for(lambda: time.monotonic() > began + 0.6)  # rank 0 looks for it twice a second

    return {"on_evaluation": touch}


def time_limit(comm, folder):
    return {"time_limit": "5s"}  # which is needed to save: after the first step it is over


WAYS = {
    "stop file": (stop_file, "stopped"),
    "SIGUSR1": (signal_last_rank(signal.SIGUSR1), "preempted"),
    "SIGUSR2": (signal_last_rank(signal.SIGUSR2), "preempted"),
    "SIGTERM": (as_under_srun(signal_last_rank(signal.SIGTERM)), "preempted"),
    "time limit": (time_limit, "preempted"),
}


def train(comm, folder, name, interrupt, more=()):
    """Train by the API until the interruption; return the status and the number of steps."""
    config = hp.Config(**settings(folder, name) | dict(more))
    result = hp.train(config, **interrupt(comm, folder / "runs" / name))
    return result.status, result.step, result.exit_code


@pytest.mark.parametrize("size", [LAUNCHED, 3, 1], ids="resumed on {} ranks".format)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_asked_to_leave_resumes_to_the_same_bits(folder, way, size):
    interrupt, status = WAYS[way]
    given = {"folder": folder, "name": way, "interrupt": interrupt}
    try:
        (ended, *others) = ranks.on_ranks(LAUNCHED, train, **given)
        assert others == [ended]
        assert ended[0] == status and 0 < ended[1] < STEPS[-1]
        assert ended[2] == (0 if status == "stopped" else 75)
        check_end(folder, way, size)
    finally:
        shutil.rmtree(folder / "runs" / way, ignore_errors=True)


@pytest.mark.parametrize("whom", ["rank", "mpirun"])
def test_a_run_whose_rank_or_mpirun_is_killed_resumes_to_the_same_bits(folder, whom):
    """All ranks stall after step 5, in the middle of an epoch, until they are killed.

    Until then another launch is refused and changes nothing.
    """
    command = [mpirun(), "-n", str(LAUNCHED), sys.executable, "-m", "hpctrain"]
    job = Job([*command, *words(folder, whom)], {"HPCTRAIN_FAULT": "step.done:stall:5"})
    run = folder / "runs" / whom
    try:
        wait_for(lambda: (run / "checkpoints/00000004.json").exists() or job.poll() is not None)
        beats = [json.loads(path.read_text()) for path in (run / "ranks").glob("*.json")]
        pid = next(beat["pid"] for beat in beats if beat["rank"] == 1)
        record = (run / "progress.jsonl").read_bytes()
        second = ranks.command(1, *words(folder, whom))
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
        shutil.copytree(run, folder / "runs/copy")
        check_end(folder, "copy", size)
        first, _ = records(folder, "copy", "end")
        assert first["status"] == "failed" and re.match(cause, first["reason"]), first
        assert not list((folder / "runs/copy/ranks").iterdir())
        shutil.rmtree(folder / "runs/copy")


def test_a_rank_that_hangs_is_named_and_ends_the_run_which_resumes(folder):
    train = [sys.executable, "-m", "hpctrain", *words(folder, "hung", hang_timeout="15s")]
    command = [mpirun(), "-n", "1", *train, ":", "-n", "1"]
    job = Job([*command, "env", "HPCTRAIN_FAULT=step.done:stall:5", *train])
    try:
        _, err = job.communicate(timeout=100)
    finally:
        job.end()
    assert job.returncode == 1
    assert re.search(r"rank 1 \(process \d+ on .*\) did not arrive, it is in: ", err), err
    check_end(folder, "hung", LAUNCHED)


@pytest.fixture(scope="module")
def broken(folder):
    """A run that met a full disk in its third checkpoint, after step 6."""
    ended = ranks.command(1, *words(folder, "broken"), fault="manifest.written:full:3")
    assert ended.code == 1, ended.err
    return folder / "runs/broken"


def test_a_checkpoint_stays_until_the_next_is_whole(broken):
    assert max((broken / "checkpoints").glob("*.json")).name == "00000004.json"


@pytest.mark.parametrize("how", [*SPOILT, "swapped"])
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_damaged_checkpoint_is_passed_over(folder, broken, suffix, how):
    """The one before it is taken; the run ends with the same bits, and its record says so."""
    copy = shutil.copytree(broken, folder / "runs/damaged")
    damaged = copy / f"checkpoints/00000004{suffix}"
    if how == "swapped":
        shutil.copy(damaged.with_stem("00000002"), damaged)
    else:
        spoil(damaged, how)
    try:
        check_end(folder, "damaged", 1)
        notes = " ".join(note["text"] for note in records(folder, "damaged", "note"))
    finally:
        shutil.rmtree(copy)
    assert "going on after step 2" in notes
    never_finished = (how, suffix) == ("gone", ".json")
    assert ("00000004" in notes and "passed over" in notes) != never_finished


def test_a_run_keeps_the_shards_that_its_first_launch_chose(folder):
    """By default as many as it had ranks."""
    own = {"shards": None}
    ranks.on_ranks(LAUNCHED, train, folder=folder, name="own", interrupt=stop_file, more=own)
    for size, name in ((LAUNCHED, "own whole"), (1, "own")):
        ended = ranks.command(size, *words(folder, name, **own))
        assert ended.code == 0, ended.err
    (*_, one), (*_, other) = (records(folder, name, "end") for name in ("own", "own whole"))
    assert one["digest"] == other["digest"]
