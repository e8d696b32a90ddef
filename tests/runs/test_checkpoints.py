"""Checkpoints: when they are written and how many are kept, what they hold, and damage to them.

That none is torn by a crash or a full disk is said in tests/contract/test_fault_points.py, and that
a damaged one is passed over in test_resume.py there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hpctrain as hp
from tests.support import ranks
from tests.support.launches import check_same, checkpoint_steps, launch, run_of
from tests.support.short import records, short_run

EVERY_STEP = {"checkpoint_every": "1step", "keep_checkpoints": 99}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    return short_run(folder) | {"deterministic": True, "shards": 4}


@pytest.fixture(scope="module")
def whole(pack):
    """A run with a checkpoint after each of its 14 steps."""
    whole = pack | {"run": "whole"} | EVERY_STEP
    assert launch(whole).code == 0
    return whole


@pytest.fixture
def settings(pack, tmp_path):
    return pack | {"runs_dir": str(tmp_path / "runs")}


@pytest.fixture(scope="module")
def begun(pack):
    """The same, interrupted after 6 steps."""
    begun = pack | {"run": "begun"} | EVERY_STEP
    assert launch(begun, leave=5).step == 6
    return begun


@pytest.fixture
def left(begun, tmp_path):
    """A copy of it, to be damaged."""
    shutil.copytree(run_of(begun), tmp_path / "runs/begun")
    return begun | {"runs_dir": str(tmp_path / "runs")}


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ("4steps", [4, 8, 12, 14]),
        ("1epochs", [7, 14]),
        ("0", [14]),
        ("1:30:00", [14]),
    ],
)
def test_checkpoints_are_due_by_steps_epochs_or_time(settings, every, steps):
    settings |= {"checkpoint_every": every, "keep_checkpoints": 99}
    assert launch(settings).code == 0
    assert checkpoint_steps(settings) == steps


def begin_early(patch):
    from tests.support.api import IN_FLIGHT  # the rank's own, not a copy that is sent

    patch.setitem(IN_FLIGHT, "cpu", 1)


def test_a_checkpoint_by_time_of_a_late_run_holds_a_whole_step(settings):
    """Totals are read a step late, as on GPUs; when the clock of rank 0 tells, all read first."""
    by_step, by_time = (
        settings | {"run": name, "checkpoint_every": name, "keep_checkpoints": 99}
        for name in ("1step", "0.001s")
    )
    assert launch(by_step).code == launch(by_time, first=begin_early).code == 0
    found = checkpoint_steps(by_time)
    assert len(found) > 3 and found[-1] == 14
    for step in found:
        file = f"checkpoints/{step:08}.safetensors"
        one, other = (load_file(run_of(each) / file) for each in (by_step, by_time))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), step


def test_the_newest_few_are_kept(settings):
    assert launch(settings, checkpoint_every="3steps", keep_checkpoints=3).code == 0
    assert checkpoint_steps(settings) == [9, 12, 14]
    folder = run_of(settings) / "checkpoints"
    assert len([path for path in folder.iterdir() if not path.name.startswith("best-")]) == 3
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}


def slow_first_checkpoint(comm, settings):
    """The first checkpoint is not written before a validation, after another step."""
    if comm.rank == 0:
        os.environ[ranks.FAULT] = "checkpoint.begun:stall:1"
    seen = []

    def go_on(record):
        seen.append(os.environ.pop(ranks.FAULT, None))

    assert hp.train(hp.Config(**settings), on_evaluation=go_on).exit_code == 0
    return seen


def test_training_continues_while_a_checkpoint_is_written(settings, whole):
    """What is saved is the state at the time of the step, and the step after does not wait."""
    settings |= {"checkpoint_every": "4steps", "validate_every": "6steps", "keep_checkpoints": 9}
    seen, *_ = ranks.on_ranks(3, slow_first_checkpoint, settings=settings)
    assert seen[0] == "checkpoint.begun:stall:0"
    saved, expected = (
        load_file(run_of(each) / "checkpoints/00000004.safetensors") for each in (settings, whole)
    )
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_but_one(settings):
    failed = launch(settings, 1, fault="checkpoint.written:full", checkpoint_every="2steps")
    assert failed.code == 1
    assert "cannot write a checkpoint to" in failed.error and "No space left" in failed.error
    assert len(records(settings, "step")) <= 4


def seal(path, digest="hpctrain.sha256", **change):
    """Change what is known in a checkpoint, and its digest, as it is documented."""
    with safe_open(path, "pt") as file:
        known = json.loads(file.metadata()["hpctrain"])
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        kinds = {name: file.get_slice(name).get_dtype() for name in tensors}
    text = json.dumps(known | change)
    found = hashlib.sha256(text.encode())
    for name, tensor in tensors.items():
        found.update(f"{name} {kinds[name]} {tuple(tensor.shape)}".encode())
        found.update(tensor.numpy().tobytes())
    save_file(tensors, path, {"hpctrain": text, digest: found.hexdigest()})


@pytest.mark.parametrize("how", ["later format", "unreadable"])
def test_one_that_may_be_intact_is_not_thrown_away(left, whole, how):
    folder = run_of(left) / "checkpoints"
    path = folder / "00000006.safetensors"
    before = path.read_bytes()
    if how == "later format":
        seal(path, format=99)
    else:
        path.unlink()
        os.symlink(path.name, path)  # the error is neither "not found" nor one of its content
    names = sorted(os.listdir(folder))
    refused = launch(left)
    assert refused.code == (2 if how == "later format" else 1)
    assert ("has format 99" if how == "later format" else "may be whole") in refused.error
    assert sorted(os.listdir(folder)) == names
    path.unlink()
    path.write_bytes(before)
    assert launch(left).code == 0
    check_same(left, whole)


def test_a_checkpoint_without_its_digest_is_passed_over(left, whole):
    seal(run_of(left) / "checkpoints/00000006.safetensors", digest="another")
    assert launch(left).code == 0
    check_same(left, whole)
    said = " ".join(note["text"] for note in records(left, "note"))
    assert "00000006" in said and "passed over" in said and "going on after step 5" in said


def slow_model(comm, settings):
    """Train what fails on all ranks; the seconds at which each had ended, on rank 0 had written."""
    import time

    from tests.support.wait import wait_for, when

    written = []

    def go_on():
        began = time.monotonic()
        wait_for(lambda: time.monotonic() > began + 0.3)
        written.append(time.monotonic())
        del os.environ[ranks.FAULT]

    if comm.rank == 0:
        os.environ[ranks.FAULT] = "model.written:stall:1"
        when(lambda: os.environ[ranks.FAULT].endswith(":0"), go_on)
    with pytest.raises(hp.RunError, match="is not finite"):
        hp.train(hp.Config(**settings))
    return written[0] if comm.rank == 0 else time.monotonic()


def test_no_rank_ends_before_rank_0_has_written(settings):
    """Also where all ranks raise the same error: the others would give up waiting in Finalize."""
    settings |= {"lr": 1e30, "deterministic": False}
    written, *ended = ranks.on_ranks(3, slow_model, settings=settings)
    assert min(ended) >= written
