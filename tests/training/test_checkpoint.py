"""Checkpoint files: atomic, checksummed, few."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from hpctrain.config import Interval, checkpoint_interval, validation_interval
from hpctrain.errors import RunError, UsageError
from hpctrain.files import UMASK
from hpctrain.models import as_bytes
from hpctrain.report.find import checkpoint_steps
from hpctrain.training import checkpoint
from hpctrain.training.checkpoint import Writer, make_ready, newest, verify
from tests.flips import flip_each_bit
from tests.support.launch import environment
from tests.support.nets import fine_tuned
from tests.support.wait import wait_for

OFTEN = Interval(steps=1)
TENSORS = {"weights": torch.arange(101.0), "norms.updates": torch.tensor([3, 4])}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "progress.jsonl").write_text("")
    make_ready(tmp_path, 0)
    return tmp_path


def save(run, step, keep=2, tensors=TENSORS):
    with Writer(run, OFTEN, keep) as writer:
        writer.save(step, tensors, {"epoch": step, "figures": {"loss": 0.1 + 0.2}})
        writer.wait()


def step_of(found):
    checkpoint, lines = found
    return checkpoint and checkpoint.step, lines


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("5steps", Interval(steps=5)),
        ("1step", Interval(steps=1)),
        ("2epochs", Interval(epochs=2)),
        ("90s", Interval(seconds=90)),
        ("0.5m", Interval(seconds=30)),
        ("1:30:00", Interval(seconds=5400)),
        ("0", Interval()),
    ],
)
def test_intervals(text, interval):
    assert checkpoint_interval(text) == interval
    if interval.seconds == math.inf:
        assert validation_interval(text) == interval


WRONG = ["5", "-3", "", "often", "0m", "0steps", "1.5epochs", "²", "auto", "9" * 5000]


@pytest.mark.parametrize("text", [*WRONG, "9" * 400 + "s"])
def test_intervals_that_are_none(text):
    with pytest.raises(UsageError, match="--checkpoint-every"):
        checkpoint_interval(text)


@pytest.mark.parametrize("text", [*WRONG, "10m", "90s"])
def test_the_ranks_validate_after_a_number_of_steps(text):
    with pytest.raises(UsageError, match="--validate-every .*: give .* 2epochs or 500steps; 0 ="):
        validation_interval(text)


def test_when_a_checkpoint_is_due(run, monkeypatch):
    every = Interval(steps=4)
    assert [step for step in range(1, 10) if every.follows(step, 7)] == [4, 8]
    assert [step for step in range(1, 30) if Interval(epochs=2).follows(step, 7)] == [14, 28]
    with Writer(run, every, 2) as by_steps, Writer(run, Interval(seconds=60), 2) as by_time:
        assert not by_time.interval.follows(4, 7) and not by_time.overdue()
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 61)
        assert by_time.overdue() and not by_steps.overdue()
        by_time.save(1, TENSORS, {})
        assert not by_time.overdue()


def test_what_is_written_is_read(run):
    save(run, 7)
    found = verify(run, 7)
    assert found.state == {"epoch": 7, "figures": {"loss": 0.1 + 0.2}}
    tensors = found.tensors()
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].dtype == tensor.dtype


def test_tensors_of_all_kinds(run):
    """Also where a buffer changes its type or shape between two checkpoints."""
    tensors = dict(fine_tuned((28, 28, 1), 10).named_buffers())
    with Writer(run, OFTEN, 2) as writer:
        writer.save(1, tensors, {})
        writer.save(2, tensors | {"scalar": torch.tensor(1j), "bool": torch.ones(3, 2) > 0}, {})
    found = verify(run, 1).tensors()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name
    found = verify(run, 2).tensors()
    assert found["scalar"].item() == 1j
    assert found["bool"].tolist() == [[True, True]] * 3


def test_the_newest_few_are_kept(run):
    for step in (5, 30, 200, 1000):
        save(run, step)
    assert checkpoint_steps(run / "checkpoints") == [200, 1000]
    assert len(list((run / "checkpoints").iterdir())) == 4
    assert step_of(newest(run, 9999)) == (1000, [])


def corrupt(path, how):
    content = path.read_bytes()
    match how:
        case "flipped":
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        case "short":
            path.write_bytes(content[:-3])
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "nonsense":
            path.write_bytes(b"{}")


@pytest.mark.parametrize("how", ["flipped", "short", "empty", "gone", "nonsense"])
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_corrupt_one_is_named_and_passed_over(run, how, suffix):
    save(run, 5)
    save(run, 6)
    corrupt(run / "checkpoints" / f"00000006{suffix}", how)
    step, lines = step_of(newest(run, 9999))
    assert step == 5
    if (how, suffix) == ("gone", ".json"):
        assert lines == []  # it was never finished
    else:
        assert len(lines) == 1
        assert "00000006" in lines[0]
        with pytest.raises(UsageError, match="00000006"):
            verify(run, 6)
    make_ready(run, 6)


def test_every_flipped_bit_is_refused_or_has_no_effect(run):
    save(run, 5)
    written = verify(run, 5)
    for suffix in (".safetensors", ".json"):
        without_effect = 0
        for place in flip_each_bit(run / "checkpoints" / f"00000005{suffix}"):
            try:
                found = verify(run, 5)
            except UsageError:
                continue
            without_effect += 1
            assert (found, suffix) == (written, ".json"), place
        assert without_effect < 100, "spaces and line ends of the JSON file"
    assert verify(run, 5) == written


@pytest.mark.parametrize("fails", ["content", "whole_file", "sync"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(run, monkeypatch, fails):
    save(run, 5)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, Writer(run, OFTEN, 2) as writer:
        patch.setattr(checkpoint, fails, full)
        writer.save(6, TENSORS, {})
        with pytest.raises(RunError, match="cannot write a checkpoint to .*: No space left"):
            writer.wait()
    assert step_of(newest(run, 9999)) == (5, [])


def test_files_reach_the_disk_before_their_names(run, monkeypatch):
    """fsync of each file before its rename, of the folder after it, of the record in between."""
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)

        def noted(*arguments, name=name, original=original):
            what = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else arguments[1]
            calls.append((name, os.path.basename(what)))
            return original(*arguments)

        monkeypatch.setattr(os, name, noted)
    save(run, 5)
    kinds = [
        (name, "tmp" if what.endswith("tmp") else what.replace("00000005", "5"))
        for name, what in calls
    ]
    assert kinds == [
        ("fsync", "tmp"),
        ("replace", "5.safetensors"),
        ("fsync", "checkpoints"),
        ("fsync", "progress.jsonl"),
        ("fsync", "tmp"),
        ("replace", "5.json"),
        ("fsync", "checkpoints"),
    ]


def test_training_may_go_on_while_a_checkpoint_is_written(run, monkeypatch):
    """What is saved is the state at the time of the call, and the call does not wait."""
    original, may_write = checkpoint.content, threading.Event()

    def held(*arguments):
        assert may_write.wait(60)
        return original(*arguments)

    monkeypatch.setattr(checkpoint, "content", held)
    tensor = torch.zeros(101)
    with Writer(run, OFTEN, 2) as writer:
        writer.save(5, {"weights": tensor}, {})
        assert not checkpoint_steps(run / "checkpoints")
        tensor += 1
        may_write.set()
    assert verify(run, 5).tensors()["weights"].sum() == 0


def test_what_a_killed_writer_left_is_removed(run):
    save(run, 5)
    half = run / "checkpoints/.00000006.safetensors.host-1.tmp"
    half.write_bytes(b"half")
    make_ready(run, 5)
    assert not half.exists()
    assert checkpoint_steps(run / "checkpoints") == [5]


WRITING = """
import sys, torch
from pathlib import Path
from hpctrain.config import Interval
from hpctrain.training.checkpoint import Writer
with Writer(Path(sys.argv[1]), Interval(steps=1), 2) as writer:
    for step in range(1, 9999):
        writer.save(step, {"weights": torch.zeros(11_000_000)}, {})
"""


def test_a_writer_that_is_killed_leaves_nothing_for_ever(run):
    folder = run / "checkpoints"
    with subprocess.Popen([sys.executable, "-c", WRITING, str(run)], env=environment()) as writer:
        wait_for(lambda: list(folder.glob(".*safetensors*")))
        writer.kill()
    newest_step = max(checkpoint_steps(folder), default=0)
    make_ready(run, newest_step)
    known = {path.name for step in checkpoint_steps(folder) for path in folder.glob(f"{step:08}*")}
    assert {path.name for path in folder.iterdir()} == known
    assert len(known) == 2 * len(checkpoint_steps(folder))


def test_a_checkpoint_of_a_later_format_is_refused(run):
    save(run, 5)
    path = run / "checkpoints" / "00000005.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(UsageError, match="has format 99, this hpctrain knows 1"):
        newest(run, 9999)


def test_a_checkpoint_of_steps_that_the_record_lost_is_passed_over(run):
    save(run, 5)
    save(run, 8)
    assert step_of(newest(run, 8)) == (8, [])
    step, lines = step_of(newest(run, 7))
    assert step == 5
    assert lines == ["the record ends at step 7: the checkpoint of 8 is passed over"]
    assert step_of(newest(run, 0)) == (8, []), "better a gap in the record than nothing"


def test_a_failure_is_told_without_waiting_for_the_next_checkpoint(run, monkeypatch):
    monkeypatch.setattr(checkpoint, "sync", lambda path: 1 / 0)
    with Writer(run, OFTEN, 2) as writer:
        writer.save(6, TENSORS, {})
        until = time.monotonic() + 10
        while not writer._task.done() and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(RunError, match="cannot write a checkpoint"):
            writer.check()
        writer.check()


def test_lines_tell_what_was_passed_over(run):
    for step in (7, 8, 9):
        save(run, step, keep=3)
    corrupt(run / "checkpoints" / "00000008.safetensors", "flipped")
    step, lines = step_of(newest(run, 7))
    assert step == 7
    assert len(lines) == 2
    assert "00000008.safetensors is corrupt" in lines[0]
    assert lines[1] == "the record ends at step 7: the checkpoint of 9 is passed over"
    step, lines = step_of(newest(run, 0))
    assert step == 9
    assert len(lines) == 1
    assert "00000008.safetensors is corrupt" in lines[0]


def test_a_step_that_is_saved_again_is_whole_at_every_moment(run, monkeypatch):
    """Its tensors may be others: those of the best network."""
    save(run, 5, keep=1)
    other = {name: tensor + 1 for name, tensor in TENSORS.items()}
    names = []
    original = checkpoint.whole_file

    def dies_at_the_second(path):
        names.append(path.name)
        if len(names) == 2:
            raise OSError(28, "No space left on device")
        return original(path)

    with monkeypatch.context() as patch, Writer(run, OFTEN, 1) as writer:
        patch.setattr(checkpoint, "whole_file", dies_at_the_second)
        writer.save(5, other, {"epoch": 6})
        with pytest.raises(RunError):
            writer.wait()
    found, lines = newest(run, 9)
    assert (found.state["epoch"], lines) == (5, [])
    assert torch.equal(found.tensors()["weights"], TENSORS["weights"])
    make_ready(run, 5)
    assert len(list((run / "checkpoints").iterdir())) == 2, "what nobody tells of is removed"
    with Writer(run, OFTEN, 1) as writer:
        writer.save(5, other, {"epoch": 6})
    found, _ = newest(run, 9)
    assert found.state["epoch"] == 6
    assert torch.equal(found.tensors()["weights"], other["weights"])
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_the_same_state_is_not_written_twice(run):
    with Writer(run, OFTEN, 2) as writer:
        writer.save(5, TENSORS, {"epoch": 1})
        writer.wait()
        path = run / "checkpoints" / "00000005.json"
        path.unlink()
        writer.save(5, TENSORS, {"epoch": 1})
        writer.wait()
        assert not path.exists()
        writer.save(5, TENSORS, {"epoch": 2})
    assert path.exists()


def test_what_a_killed_writer_left_in_the_runs_folder_is_removed(run):
    stale = run / ".best.safetensors.host-1.tmp"
    stale.write_bytes(b"half")
    make_ready(run, 0)
    assert not stale.exists()


def test_others_may_read_what_this_user_lets_them_read(run):
    save(run, 5)
    modes = {path.stat().st_mode & 0o777 for path in (run / "checkpoints").iterdir()}
    assert modes == {0o666 & ~UMASK}
