"""A crash, a full disk or a stall at any point: the same command then ends with the same bits.

HPCTRAIN_FAULT names the points (hpctrain/fault.py). Killed are processes of their own; a full disk
and a stall happen on the ranks of the long-lived job.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import ranks
from tests.support.killed import run_each
from tests.support.launch import as_flags
from tests.support.launches import check_same
from tests.support.packs import make_pack
from tests.support.pictures import class_folders
from tests.support.records import read_strictly
from tests.support.spoil import SPOILT, spoil

STATES = ("written", "synced", "renamed", "durable")  # of a file that is written whole
FILES = ("config", "plan", "checkpoint", "best", "model", "evaluation-test")
ON_DISK = [
    "folder.renamed",
    "record.written",
    "record.synced",
    *(f"{f}.{s}" for f in FILES for s in STATES),
    "best.superseded",
]
POINTS = ["mpi.starting", "mpi.started", "lock.taken", "step.done", "evaluation.begun"]
POINTS += ["checkpoint.begun", *ON_DISK, "mpi.ending"]
STAGING = ["stage.written", "stage.renamed"]
PACKING = ["pack.written", "pack.synced", "pack.renamed", "pack.durable"]
TIMES = dict.fromkeys(["step", "evaluation", "record", "checkpoint"], 3)  # else 1
TIMES |= dict.fromkeys(["best", "model"], 2) | {"best.superseded": 1}


def times(point):
    """How often a run passes a point, up to 3."""
    return TIMES.get(point, TIMES.get(point.partition(".")[0], 1))


def is_slow(point, states):
    """Whether only a slow test has this point: one of a file in another state than these."""
    return point.startswith(FILES) and not point.endswith(states)


def some(points, *states):
    """All points, as parameters."""
    slow = pytest.mark.slow
    return [pytest.param(p, marks=[slow] if is_slow(p, states) else []) for p in points]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pack, and a run `whole` that nothing broke."""
    folder = tmp_path_factory.mktemp("faults")
    make_pack(folder / "pack.h5", {"train": 48, "validation": 13, "test": 11}, (12, 12, 1))
    assert ranks.command(1, *training(folder, "whole")).code == 0
    return folder


def settings(folder, name):
    """A run of 6 steps, with a checkpoint after every second one."""
    return {
        **{"data": folder / "pack.h5", "run": name, "runs_dir": folder / "runs"},
        **{"model": "digits", "epochs": 2, "batch_size": 16, "shards": 4, "deterministic": True},
        **{"checkpoint_every": "2steps", "final": "best", "progress": "none"},
    }


def training(folder, name, *flags):
    """The words that train it."""
    return ["train", *as_flags(settings(folder, name)), *map(str, flags)]


@pytest.fixture
def run(folder):
    """The folder of the run that a test breaks."""
    yield folder / "runs/broken"
    shutil.rmtree(folder / "runs/broken", ignore_errors=True)


def files(run):
    """What lies in the folder of a run."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def check_whole(folder, name):
    """Check that a run does not differ from the whole one."""
    check_same(settings(folder, name), settings(folder, "whole"))
    run, whole = folder / "runs" / name, folder / "runs/whole"
    assert files(run) == files(whole)
    for file in whole.rglob("best-*"):
        best, expected = (load_file(each / file.relative_to(whole)) for each in (run, whole))
        assert all(np.array_equal(best[key], expected[key]) for key in expected)


def finish(folder, name, size, *flags):
    """Give the same command again, on `size` ranks: the run then does not differ."""
    again = ranks.command(size, *training(folder, name, *flags))
    assert again.code == 0, again.err
    check_whole(folder, name)


def check_kills(folder, stage, faults):
    """Kill a run by each fault, launch by launch where there are several; finish it on 1 to 3
    ranks, or on one if it was killed while it staged the pack: its copy is the same.
    """
    runs = {re.sub("[: ]", "-", text): text.split() for text in faults}
    flags = {name: ["--stage", stage / name] if "stage" in name else [] for name in runs}
    struck = [(name, fault) for name in runs for fault in runs[name]]
    cases = [({"HPCTRAIN_FAULT": f}, training(folder, name, *flags[name])) for name, f in struck]
    codes = run_each(cases, folder, 30 + 10 * len(cases))
    assert dict(zip(struck, codes, strict=True)) == dict.fromkeys(struck, -9)
    for number, name in enumerate(runs):
        size = 1 if flags[name] else number % 3 + 1
        finish(folder, name, size, *flags[name])
        shutil.rmtree(folder / "runs" / name)
    assert os.listdir(folder / "runs") == ["whole"], "nothing else is left there"
    staged = [name for name in runs if flags[name]]
    assert [path.suffix for path in stage.glob("*/*")] == [".staged"] * len(staged)


@pytest.mark.parametrize("part", [1, 2], ids="half {}".format)
def test_a_run_that_is_killed_at_a_point_ends_with_the_same_bits(folder, tmp_path, part):
    """The first, second or third time that the run passes it."""
    points = [
        p
        for p in [*POINTS, *STAGING]
        if not is_slow(p, ("begun", "written", "renamed", "superseded"))
    ]
    faults = [f"{point}:kill:{n % times(point) + 1}" for n, point in enumerate(points)]
    check_kills(folder, tmp_path, faults[part - 1 :: 2])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_any_time_it_passes_a_point_ends_with_the_same_bits(folder, tmp_path):
    points = [*POINTS, *STAGING]
    faults = [f"{point}:kill:{n + 1}" for point in points for n in range(times(point))]
    check_kills(folder, tmp_path, faults)


def test_a_run_that_is_killed_while_it_saves_its_last_step_again_ends_with_the_same_bits(
    folder, tmp_path
):
    """The launch before was killed as it wrote the network, after its last checkpoint."""
    again = ["checkpoint.written", "checkpoint.renamed", "checkpoint.durable"]
    check_kills(folder, tmp_path, [f"model.written:kill {point}:kill" for point in again])


def test_the_best_network_of_steps_that_are_repeated_is_removed(folder, run):
    """They may end otherwise than before; no checkpoint names what they had written."""
    killed = [({"HPCTRAIN_FAULT": "best.durable:kill:2"}, training(folder, "broken"))]
    assert run_each(killed, folder) == [-9]
    *_, last = sorted(run.glob("best-*"))
    last.rename(run / "best-00000004.safetensors")
    finish(folder, "broken", 1)


def test_a_checkpoint_that_is_kept_has_its_best_network(folder, run):
    """The newest one is damaged, so the one before it is taken, with another best network."""
    killed = [({"HPCTRAIN_FAULT": "model.written:kill"}, training(folder, "broken"))]
    assert run_each(killed, folder) == [-9]
    spoil(run / "checkpoints/00000006.safetensors", "short")
    finish(folder, "broken", 2)
    said = " ".join(note["text"] for note in read_strictly(run) if note["kind"] == "note")
    assert "going on after step 4" in said and "best" not in said


@pytest.mark.parametrize("how", ["another", *SPOILT])
def test_a_best_network_that_is_not_what_the_checkpoint_names_is_refused(folder, run, how):
    """Put back, it is used; removed, the run ends with its last network, and says so."""
    killed = [({"HPCTRAIN_FAULT": "model.written:kill"}, training(folder, "broken"))]
    assert run_each(killed, folder) == [-9]
    (best,) = run.glob("best-*")
    (first,) = run.glob("checkpoints/best-*")
    content = best.read_bytes()
    shutil.copy(first, best) if how == "another" else spoil(best, how)
    again = ranks.command(2, *training(folder, "broken"))
    if how == "gone":
        said = " ".join(note["text"] for note in read_strictly(run) if note["kind"] == "note")
        assert again.code == 0 and f"{best} is gone" in said
        return
    assert again.code == 2 and again.err.count("\n") == 1 and str(best) in again.err
    best.write_bytes(content)
    finish(folder, "broken", 2)


@pytest.mark.parametrize("point", some([*ON_DISK, *STAGING], "written"))
def test_a_full_disk_is_one_line_and_the_run_ends_once_there_is_room(folder, run, point, tmp_path):
    staged = ("--stage", tmp_path) if point in STAGING else ()
    words = training(folder, "broken", *staged)
    broken = ranks.command(1, *words, fault=f"{point}:full:{times(point)}")
    assert broken.code == 1
    assert re.fullmatch(r"hpctrain: .*no (space|room) left.*\n", broken.err, re.IGNORECASE)
    assert not [*run.parent.rglob(".*"), *tmp_path.glob(".*")]
    finish(folder, "broken", 3, *staged)
    assert sorted(os.listdir(folder)) == ["pack.h5", "runs"]
    assert {path.suffix for path in tmp_path.iterdir()} <= {".staged"}


@pytest.mark.parametrize("point", some(POINTS[:-1], "begun"))  # MPI still runs
def test_a_rank_that_stalls_at_a_point_is_waited_for(folder, run, point):
    fault = f"{point}:stall:{times(point)}"
    assert ranks.command(3, *training(folder, "broken"), fault=fault).code == 0
    check_whole(folder, "broken")


@pytest.mark.ranks(1)
def test_files_reach_the_disk_before_their_names(comm, folder, run, monkeypatch):
    """fsync of each file before its rename, of its folder after it, of the record in between."""
    from tests.support.api import command_line as main

    calls = []  # (what was done, path)
    for name in ("fsync", "rename", "replace"):
        original = getattr(os, name)

        def noted(*arguments, name=name, original=original):
            if name == "fsync":
                calls.append((name, os.readlink(f"/proc/self/fd/{arguments[0]}")))
            else:
                calls.append(("rename", *map(str, arguments)))
            return original(*arguments)

        monkeypatch.setattr(os, name, noted)
    assert main(training(folder, "broken")) == 0
    renamed = [(place, *call[1:]) for place, call in enumerate(calls) if call[0] == "rename"]
    names = {Path(new).name for _, _, new in renamed if "/ranks/" not in new}
    last = {f"0000000{step}.safetensors" for step in (2, 4, 6)}
    assert names >= last | {"model.safetensors", "plan.json", "config.toml", "broken"}
    for place, old, new in renamed:
        if "/ranks/" in new:  # heartbeats may be lost
            continue
        if "/checkpoints/best-" in new:  # it was written under its other name
            assert any(call[1:] == ("rename", old) or call[-1] == old for call in calls[:place])
            continue
        assert ("fsync", old) in calls[:place] or new == str(run), f"{new} has no content yet"
        assert ("fsync", str(Path(new).parent)) in calls[place:], f"{new} may be lost"
        if "checkpoints" in new:
            others = [n for n, _, other in renamed if n < place and "checkpoints" in other]
            assert ("fsync", str(run / "progress.jsonl")) in calls[max(others, default=0) : place]


def test_packing_that_is_killed_or_meets_a_full_disk_leaves_nothing(tmp_path):
    """The same command then writes the same bytes."""
    images = class_folders(tmp_path / "images", {"a": 6, "b": 6})
    words = ["pack", str(images), "--jobs", "1", "--split", "0.5,0,0.5", "--output"]
    assert ranks.command(1, *words, tmp_path / "whole.h5").code == 0
    whole = (tmp_path / "whole.h5").read_bytes()
    killed = [str(tmp_path / f"{point}.h5") for point in PACKING]
    cases = [
        ({"HPCTRAIN_FAULT": f"{point}:kill"}, [*words, path])
        for point, path in zip(PACKING, killed, strict=True)
    ]
    assert run_each(cases, tmp_path) == [-9] * len(cases)
    for point, path in zip(PACKING, killed, strict=True):
        there = point in ("pack.renamed", "pack.durable")
        assert ranks.command(1, *words, path).code == (2 if there else 0)  # 2: the file exists
        assert Path(path).read_bytes() == whole
        os.unlink(path)
        if not there:
            full = ranks.command(1, *words, path, fault=f"{point}:full:1")
            assert full.code == 1
            assert re.fullmatch(
                "hpctrain: .*: No space left on device; nothing is kept\n", full.err
            )
    assert sorted(os.listdir(tmp_path)) == ["images", "whole.h5"]
