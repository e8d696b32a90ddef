"""Going on: a run that was interrupted ends with the same bits as one that was not."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from hpctrain import compare, plot
from hpctrain.compare import first_difference
from hpctrain.config import CompareConfig, EvaluateConfig, PlotConfig
from hpctrain.errors import RunError, UsageError
from hpctrain.inference import evaluate
from hpctrain.parallel.mpi import agreed
from hpctrain.report.find import checkpoint_steps
from hpctrain.report.record import read_records
from hpctrain.training import checkpoint, validate
from hpctrain.training import loop as inner
from hpctrain.training import state as resume
from hpctrain.training import train as program
from hpctrain.training.control import Control
from hpctrain.watch.runs import WatchedRun
from tests.support import nets
from tests.support.packs import make_pack
from tests.training import runs

pytestmark = pytest.mark.mpi
CASES = {
    "sgdm": {},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "dropout": {"model": "tests.support.nets:with_dropout"},
    "cosine": {"schedule": "cosine"},
    "denoise, best": {
        "task": "denoise",
        "model": "autoencoder",
        "validate_every": "3steps",
        "final": "best",
    },
    "patience": {"validate_every": "2steps", "patience": 2, "lr": 0.3},
    "bf16": {"precision": "bf16", "shift": 2},
    **runs.FINE_TUNING,
    "unused": {"model": "tests.support.nets:branches", "weight_decay": 0.1},
}


@pytest.fixture
def settings(small_settings):
    own = {"shards": 8, "deterministic": True, "threads": None}
    return dataclasses.replace(small_settings, **own)


@pytest.fixture
def leave_after(comm):
    """A function that makes the last rank vote for leaving in these steps, and in no others; gives
    one that lets steps count from 1 again.
    """
    with contextlib.ExitStack() as stack:

        def script(*steps):
            stack.close()
            last = comm.rank == comm.size - 1
            return stack.enter_context(runs.leave_after(*steps, votes=last)).clear

        yield script


def end(settings, comm, name="a"):
    """The last record of a run. Collective."""
    folder = Path(settings.runs_dir) / name
    return comm.bcast(list(read_records(folder))[-1] if comm.rank == 0 else None)


def check_record(settings, other):
    """The record holds every step and digest once, in order, and the figures of an uninterrupted
    run.
    """
    folders = [Path(settings.runs_dir) / name for name in ("a", other)]
    records, reference = (list(read_records(folder)) for folder in folders)
    numbers = [r["step"] for r in records if r["kind"] == "step"]
    assert numbers == list(range(1, len(numbers) + 1))
    for kind, name in (("epoch", "epoch"), ("digest", "step")):
        found = [r[name] for r in records if r["kind"] == kind]
        assert found and found == sorted(set(found))
    assert first_difference(records, reference) is None


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_without_interruption(comm, settings, leave_after, case):
    config = dataclasses.replace(settings, **CASES[case])
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    whole = end(settings, comm, "whole")
    again = leave_after(3)
    for _ in range(4):  # 3 steps a launch, also over the end of an epoch
        again()
        code = program.train(config, comm)
        if code == 0:
            break
        assert code == 75
        assert end(settings, comm)["status"] == "preempted"
    else:
        leave_after()
        assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == whole["digest"]
    if comm.rank == 0:
        check_record(settings, "whole")


def test_on_another_number_of_ranks(comm, settings, leave_after):
    """All ranks, one alone, all again."""
    alone = comm.Split(comm.rank)
    assert program.train(dataclasses.replace(settings, run="whole"), comm) == 0
    again = leave_after(4)
    assert program.train(settings, comm) == 75
    comm.Barrier()
    again()
    if comm.size > 1:
        leave_after()
    if comm.rank == 0:
        few = dataclasses.replace(settings, checkpoint_every="2steps")
        if comm.size > 1:
            with runs.leave_after(5):
                assert program.train(few, alone) == 75
        else:
            assert program.train(few, alone) == 75
    comm.Barrier()
    leave_after()
    assert program.train(settings, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        check_record(settings, "whole")
    alone.Free()


@pytest.mark.parametrize("dies_after", [1, 6, 7, 8])
def test_a_run_that_died_goes_on_after_its_last_checkpoint(comm, settings, monkeypatch, dies_after):
    config = dataclasses.replace(settings, checkpoint_every="3steps")
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    step = inner.train_step

    def dying(trainer, *arguments):
        if trainer.norms.updates[0] == dies_after:
            raise agreed(RunError("dies"))
        return step(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(inner, "train_step", dying)
        with pytest.raises(RunError, match="dies"):
            program.train(config, comm)
    begun = []
    monkeypatch.setattr(
        inner, "train_step", lambda t, *a: (begun.append(int(t.norms.updates[0])), step(t, *a))[1]
    )
    assert program.train(config, comm) == 0
    assert begun[0] == dies_after // 3 * 3
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        check_record(settings, "whole")


def test_a_corrupt_checkpoint_is_named_and_the_one_before_is_used(comm, settings, leave_after):
    config = dataclasses.replace(settings, checkpoint_every="2steps")
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    leave_after(7)
    assert program.train(config, comm) == 75
    folder = Path(settings.runs_dir) / "a" / "checkpoints"
    if comm.rank == 0:
        assert checkpoint_steps(folder) == [6, 7]
        path = folder / "00000007.safetensors"
        content = bytearray(path.read_bytes())
        content[-50] ^= 4
        path.write_bytes(bytes(content))
    comm.Barrier()
    leave_after()
    assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        notes = [r["text"] for r in read_records(folder.parent) if r["kind"] == "note"]
        assert "00000007.safetensors is corrupt: its SHA-256 is not" in notes[0]
        assert notes[1] == "going on after step 6"


def test_without_a_checkpoint_a_run_begins_again_and_says_so(comm, settings, leave_after):
    assert program.train(dataclasses.replace(settings, run="whole"), comm) == 0
    leave_after(3)
    assert program.train(settings, comm) == 75
    folder = Path(settings.runs_dir) / "a"
    if comm.rank == 0:
        shutil.rmtree(folder / "checkpoints")
        lines = (folder / "progress.jsonl").read_bytes().splitlines(keepends=True)
        lines[2:2] = [b"[[\n"]
        (folder / "progress.jsonl").write_bytes(b"".join(lines))
    comm.Barrier()
    leave_after()
    assert program.train(settings, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        problem, *notes = [r["text"] for r in read_records(folder) if r["kind"] == "note"]
        assert "progress.jsonl, line 3 is no line of a record: no JSON" in problem
        assert notes == ["no checkpoint was left: from the first step"]
        check_record(settings, "whole")


def flip_last(path):
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def test_a_finished_run_says_so_and_more_epochs_extend_it(comm, settings, capsys):
    whole = dataclasses.replace(settings, epochs=3, run="whole")
    assert program.train(whole, comm) == program.train(settings, comm) == 0
    folder = Path(settings.runs_dir) / "a"
    before = comm.bcast((folder / "progress.jsonl").read_bytes() if comm.rank == 0 else None)
    capsys.readouterr()
    assert program.train(settings, comm) == 0
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert printed == (
            f"The run {folder} is finished, 2 epochs: a larger --epochs extends it\n"
        )
        assert (folder / "progress.jsonl").read_bytes() == before
    for message, change in (("is not what was written", flip_last), ("No such file", Path.unlink)):
        if comm.rank == 0:
            change(folder / "model.safetensors")
        comm.Barrier()
        with pytest.raises(UsageError, match=f"model.safetensors.*{message}"):
            program.train(settings, comm)
    assert program.train(dataclasses.replace(settings, epochs=3), comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": 7}, "was begun with --shards 8, not with --shards 7"),
        ({"lr": 0.5}, "was begun without --lr, not with --lr 0.5"),
        ({"model": "resnet18"}, "was begun with --model digits, not with --model resnet18"),
        ({"resume": "never"}, "exists: choose another name with --run"),
        ({"data": "other.h5"}, "was begun with pack .*-.*, not .*: it cannot go on"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_run_is_not_continued(comm, settings, leave_after, change, message):
    leave_after(2)
    assert program.train(settings, comm) == 75
    if "data" in change:
        other = Path(settings.data).with_name("other.h5")
        if comm.rank == 0:
            make_pack(other, {"train": 101, "validation": 13, "test": 23}, seed=1)
        comm.Barrier()
        change = {"data": str(other)}
    with pytest.raises(UsageError, match=message):
        program.train(dataclasses.replace(settings, **change), comm)
    leave_after()
    free = dataclasses.replace(settings, threads=2, keep_checkpoints=5, progress="plain")
    assert program.train(dataclasses.replace(free, test=False), comm) == 0


def test_must_resume(comm, settings, leave_after):
    must = dataclasses.replace(settings, resume="must")
    with pytest.raises(UsageError, match="--resume must, but there is no run"):
        program.train(must, comm)
    leave_after(2)
    assert program.train(settings, comm) == 75
    leave_after()
    if comm.rank == 0:
        for path in (Path(settings.runs_dir) / "a" / "checkpoints").glob("*.json"):
            path.unlink()
    comm.Barrier()
    with pytest.raises(UsageError, match="holds no whole checkpoint"):
        program.train(must, comm)
    assert program.train(settings, comm) == 0  # from the beginning
    if comm.rank == 0:
        numbers = [
            r["step"] for r in read_records(Path(settings.runs_dir) / "a") if r["kind"] == "step"
        ]
        assert numbers == list(range(1, 15))


def test_a_stop_is_a_pause(comm, settings):
    assert program.train(dataclasses.replace(settings, run="whole"), comm) == 0
    folder = Path(settings.runs_dir) / "a"
    counted = []

    def asked(self):
        counted.append(1)
        if comm.rank == 0 and len(counted) == 5:
            (folder / "STOP").touch()
            return True
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Control, "asked", asked)
        assert program.train(settings, comm) == 0
    assert end(settings, comm)["status"] == "stopped"
    assert end(settings, comm)["steps"] == 5
    comm.Barrier()
    assert program.train(settings, comm) == 0
    assert not (folder / "STOP").exists()
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]


def test_leaving_in_the_middle_of_a_validation(comm, settings, monkeypatch):
    assert program.train(dataclasses.replace(settings, run="whole"), comm) == 0
    asked = []

    def leaving(self, evaluating=False):
        asked.append(1)
        return "SIGUSR2" if comm.rank == comm.size - 1 and len(asked) > 7 else None

    with monkeypatch.context() as patch:  # after 7 steps comes the validation
        patch.setattr(Control, "preempted_by", leaving)
        assert program.train(settings, comm) == 75
        assert program.train(settings, comm) == 1, "nothing was gained: nobody is to start it again"
    assert end(settings, comm)["reason"] == "SIGUSR2; saved"
    assert program.train(settings, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        check_record(settings, "whole")


def test_threads_are_those_of_the_first_launch(comm, settings, leave_after):
    """The bits depend on them."""
    two = dataclasses.replace(settings, threads=2)
    assert program.train(dataclasses.replace(two, run="whole"), comm) == 0
    leave_after(3)
    assert program.train(two, comm) == 75
    leave_after()
    assert program.train(settings, comm) == 0
    if comm.rank == 0:
        plan = json.loads((Path(settings.runs_dir) / "a" / "plan.json").read_text())
        assert plan["threads"] == 2
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]


def test_without_deterministic_a_run_goes_on_too(comm, settings, leave_after):
    config = dataclasses.replace(settings, deterministic=False, threads=1)
    leave_after(5)
    assert program.train(config, comm) == 75
    leave_after()
    assert program.train(config, comm) == 0
    if comm.rank == 0:
        folder = Path(settings.runs_dir) / "a"
        plan = json.loads((folder / "plan.json").read_text())
        assert (plan["shards"], plan["ranks"]) == (8, comm.size)
        numbers = [r["step"] for r in read_records(folder) if r["kind"] == "step"]
        assert numbers == list(range(1, 15))


def test_frozen_parameters_are_those_of_the_first_launch(comm, settings, leave_after):
    """They came from --init, whose file may be gone when the run goes on."""
    model = {"model": "tests.support.nets:frozen"}
    first = dataclasses.replace(settings, **model, seed=1, run="first", epochs=1)
    assert program.train(first, comm) == 0
    weights = str(Path(settings.runs_dir) / "first" / "model.safetensors")
    config = dataclasses.replace(settings, **model, init=weights)
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    leave_after(3)
    assert program.train(config, comm) == 75
    leave_after()
    comm.Barrier()
    if comm.rank == 0:
        Path(weights).unlink()
    comm.Barrier()
    assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]


@pytest.mark.parametrize("channels_last", [True, False])
def test_fine_tuning(comm, settings, leave_after, monkeypatch, channels_last):
    """Frozen convolutions and buffers of all types and strides survive checkpoints, as they lie in
    memory, and the file of weights.
    """
    seen = []

    def restore(earlier, trainer, *others):
        notes = resume.restore(earlier, trainer, *others)
        named = (*trainer.model.named_parameters(), *trainer.model.named_buffers())
        seen.append({name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in named})
        return notes

    monkeypatch.setattr(program, "restore", restore)
    model = {"model": "tests.support.nets:fine_tuned", "channels_last": channels_last}
    config = dataclasses.replace(settings, **model)
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    leave_after(3)
    assert program.train(config, comm) == 75
    leave_after()
    assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0]["frozen.weight"][1][1] == 1) is channels_last
    folder = Path(settings.runs_dir) / "a"
    own = {"run": "a", "trust_code": True, "runs_dir": settings.runs_dir}
    given = EvaluateConfig(**own, output=str(folder / "again.json"))
    assert evaluate.main(given) == 0
    if comm.rank == 0:
        first, again = folder / "evaluation-test.json", folder / "again.json"
        assert json.loads(again.read_text())["loss"] == json.loads(first.read_text())["loss"]


def lack_bias(model):
    model[1].bias = None


def have_more(model):
    model.register_buffer("scale", torch.ones(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lack_bias,
            r"the model has no place for the tensor 'model.1.bias', \(8,\) of torch.float32",
        ),
        (
            have_more,
            "00000003.safetensors cannot be resumed from: it lacks the tensor 'model.scale'",
        ),
    ],
)
def test_a_model_with_another_fixed_state_is_refused(
    comm, settings, leave_after, monkeypatch, change, message
):
    config = dataclasses.replace(settings, model="tests.support.nets:frozen")
    leave_after(3)
    assert program.train(config, comm) == 75
    leave_after()
    original = nets.frozen

    def changed(image_shape, classes):
        model = original(image_shape, classes)
        change(model)
        return model

    monkeypatch.setattr(nets, "frozen", changed)
    with pytest.raises(UsageError, match=message):
        program.train(config, comm)


@pytest.mark.parametrize("keep", [2, 3])
def test_a_record_that_lost_a_validation_is_told_again_or_named(comm, settings, leave_after, keep):
    """After step 7 there are an epoch and a validation, and a checkpoint that follows them."""
    config = dataclasses.replace(settings, checkpoint_every="1step", keep_checkpoints=keep)
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    leave_after(8)
    assert program.train(config, comm) == 75
    leave_after()
    folder = Path(settings.runs_dir) / "a"
    if comm.rank == 0:
        lines = (folder / "progress.jsonl").read_bytes().splitlines(keepends=True)
        place = next(i for i, line in enumerate(lines) if b'"kind": "evaluation"' in line)
        assert b'"kind": "digest"' in lines[place - 1]
        (folder / "progress.jsonl").write_bytes(b"".join(lines[:place]))
    comm.Barrier()
    assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        notes = [r["text"] for r in read_records(folder) if r["kind"] == "note"]
        whole = read_records(folder.with_name("whole"))
        if keep == 3:
            told = "the record ends at step 7, before the epoch or the validation was named"
            assert f"{told}: the checkpoint of 7 is passed over" in notes
            assert first_difference(read_records(folder), whole) is None
        else:
            assert "the record has lost steps that were done: 8" in notes


def test_checkpoints_that_were_passed_over_do_not_push_out_new_ones(comm, settings, leave_after):
    config = dataclasses.replace(settings, checkpoint_every="2steps", keep_checkpoints=2)
    leave_after(7)
    assert program.train(config, comm) == 75
    folder = Path(settings.runs_dir) / "a" / "checkpoints"
    comm.Barrier()
    if comm.rank == 0:
        for path in folder.glob("*.safetensors"):
            path.write_bytes(b"damaged")
    comm.Barrier()
    leave_after(3)
    assert program.train(config, comm) == 75
    if comm.rank == 0:
        assert checkpoint_steps(folder) == [2, 3]


def test_leaving_in_the_final_test_is_progress(comm, settings, monkeypatch):
    assert program.train(dataclasses.replace(settings, run="whole"), comm) == 0
    with monkeypatch.context() as patch:
        testing = []
        evaluation = validate.evaluation

        def noted(run, split):
            testing.append(split)
            return evaluation(run, split)

        patch.setattr(validate, "evaluation", noted)
        patch.setattr(
            Control, "preempted_by", lambda *_, **__: "SIGUSR2" if "test" in testing else None
        )
        assert program.train(settings, comm) == 75
        testing.clear()
        assert program.train(settings, comm) == 1, "nothing but the test was left to do"
    assert program.train(settings, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        check_record(settings, "whole")


def test_a_stop_that_was_asked_for_before_the_first_step_is_honoured(comm, settings, leave_after):
    """As where the job waits in the queue when `hpctrain stop` is called."""
    leave_after(2)
    assert program.train(settings, comm) == 75
    leave_after()
    folder = Path(settings.runs_dir) / "a"
    if comm.rank == 0:
        (folder / "STOP").touch()
    comm.Barrier()
    assert program.train(settings, comm) == 0
    assert (end(settings, comm)["status"], end(settings, comm)["steps"]) == ("stopped", 3)
    assert not (folder / "STOP").exists()


def test_a_notice_does_not_take_back_a_stop(comm, settings, monkeypatch):
    """It comes while the network is tested: the job must not be started again."""
    with monkeypatch.context() as patch:
        patch.setattr(Control, "asked", lambda self: self.slowest_step > 0)
        original = Control.preempted_by
        patch.setattr(
            Control,
            "preempted_by",
            lambda self, evaluating=False: "SIGUSR2" if evaluating else original(self),
        )
        assert program.train(settings, comm) == 0
    found = end(settings, comm)
    assert (found["status"], found["steps"]) == ("stopped", 2)
    assert "test_accuracy" not in found


@pytest.mark.parametrize("bad", [b"\0" * 40 + b"\n", b"[5]\n", b'{"kind": "step", "step": "x"}\n'])
def test_a_record_that_lost_a_line_is_told_again_from_there(comm, settings, leave_after, bad):
    """As after a power failure: only what a checkpoint covers has reached the disk for sure."""
    config = dataclasses.replace(settings, checkpoint_every="2steps")
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    leave_after(6)
    assert program.train(config, comm) == 75
    leave_after()
    if comm.rank == 0:
        path = Path(settings.runs_dir) / "a" / "progress.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        place = next(i for i, line in enumerate(lines) if b'"step": 5,' in line)
        path.write_bytes(b"".join([*lines[:place], bad, *lines[place + 1 :]]))
    comm.Barrier()
    assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        notes = [
            r["text"] for r in read_records(Path(settings.runs_dir) / "a") if r["kind"] == "note"
        ]
        passed = "the record ends at step 4: the checkpoint of 6 is passed over"
        assert "line 8 is no line of a record" in notes[0]
        assert notes[1:] == [passed, "going on after step 4"]
        check_record(settings, "whole")


def test_steps_that_the_record_lost_are_named(comm, settings, leave_after, capfd):
    """Cut shorter than the only checkpoint, and without a line in between: nothing else is lost."""
    config = dataclasses.replace(
        settings, keep_checkpoints=1, progress="plain", validate_every="2steps"
    )
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    leave_after(9)
    assert program.train(config, comm) == 75
    leave_after()
    folder = Path(settings.runs_dir) / "a"
    if comm.rank == 0:
        path = folder / "progress.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        lost = [i for i, line in enumerate(lines) if b'"step", ' in line and b'"step": 3,' in line]
        end_of_5 = next(i for i, line in enumerate(lines) if b'"step": 6,' in line)
        path.write_bytes(b"".join(line for i, line in enumerate(lines[:end_of_5]) if i not in lost))
    comm.Barrier()
    capfd.readouterr()
    assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        text = "the record has lost steps that were done: 3, 6 to 9"
        records = list(read_records(folder))
        notes = [r["text"] for r in records if r["kind"] == "note"]
        # Its end was cut off too, but it left no heartbeats: nothing claims a crash.
        assert notes == [text, "going on after step 9"]
        assert text in capfd.readouterr().out
        steps_told = [r["step"] for r in records if r["kind"] == "step"]
        assert steps_told == [1, 2, 4, 5, *range(10, 15)]
        plot.main(PlotConfig((str(folder),), output=str(folder / "gap.svg")))
        watched = WatchedRun(0, folder)
        watched.poll()
        shown = watched.summary()
        assert (shown["step"], shown["share"]) == (14, 1.0)
        assert any(text in note for note in shown["notes"])
        assert compare.main(CompareConfig(str(folder), str(folder.with_name("whole")))) == 1
        assert "differ at step 3, one has step 4, the other step 3" in capfd.readouterr().out


@pytest.fixture
def ever_worse(monkeypatch):
    """Validations find the step's number as loss."""
    original = validate.evaluation

    def evaluation(run, split):
        found = original(run, split)
        if split == "validation":
            return dataclasses.replace(found, means={"loss": float(run.state.step)})
        return found

    monkeypatch.setattr(validate, "evaluation", evaluation)


@pytest.mark.usefixtures("ever_worse")
def test_a_run_that_patience_ended_goes_on_when_extended_even_if_killed_at_once(
    comm, settings, monkeypatch
):
    flags = {"validate_every": "2steps", "patience": 1, "checkpoint_every": "1000steps"}
    config = dataclasses.replace(settings, **flags)
    assert program.train(config, comm) == 0
    assert (end(settings, comm)["status"], end(settings, comm)["steps"]) == ("done", 4)
    more = dataclasses.replace(config, epochs=3)
    step = inner.train_step
    with monkeypatch.context() as patch:
        patch.setattr(inner, "train_step", lambda *a: (_ for _ in ()).throw(agreed(RunError("x"))))
        with pytest.raises(RunError, match="x"):
            program.train(more, comm)
    assert inner.train_step is step
    assert program.train(more, comm) == 0
    assert end(settings, comm)["steps"] == 6, "one more validation, which is no better"


@pytest.mark.usefixtures("ever_worse")
def test_the_best_network_is_tested_once_in_the_record_of_an_extended_run(comm, settings):
    config = dataclasses.replace(settings, validate_every="3steps", final="best")
    longer = dataclasses.replace(config, epochs=3)
    assert program.train(dataclasses.replace(longer, run="whole"), comm) == 0
    assert program.train(config, comm) == program.train(longer, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]
    if comm.rank == 0:
        check_record(settings, "whole")
        records = list(read_records(Path(settings.runs_dir) / "a"))
        assert [r["step"] for r in records if r.get("split") == "test"] == [3]
        assert records[-1]["steps"] == 21


def test_what_a_run_was_begun_from_stays_in_its_configuration(comm, settings, leave_after):
    assert program.train(dataclasses.replace(settings, epochs=1, run="first"), comm) == 0
    tuned = dataclasses.replace(settings, init="first")
    leave_after(2)
    assert program.train(tuned, comm) == 75
    leave_after()
    assert program.train(tuned, comm) == 0
    if comm.rank == 0:
        text = (Path(settings.runs_dir) / "a" / "config.toml").read_text()
        assert 'init = "first"' in text


def test_the_plan_of_another_run_is_refused(comm, settings, leave_after):
    """A whole one, which the checksum within the file cannot find."""
    leave_after(1)
    other = dataclasses.replace(settings, seed=1, run="other")
    assert program.train(settings, comm) == 75
    leave_after(1)
    assert program.train(other, comm) == 75
    leave_after()
    folders = [Path(settings.runs_dir) / name for name in ("other", "a")]
    if comm.rank == 0:
        shutil.copy(folders[0] / "plan.json", folders[1])
    comm.Barrier()
    with pytest.raises(UsageError, match="a/plan.json is not the plan that the run was begun with"):
        program.train(settings, comm)


def test_fewer_epochs_are_refused(comm, settings, leave_after):
    leave_after(2)
    assert program.train(settings, comm) == 75
    leave_after()
    with pytest.raises(UsageError, match="begun with 2 epochs, which --epochs 1 cannot take back"):
        program.train(dataclasses.replace(settings, epochs=1), comm)
    assert program.train(dataclasses.replace(settings, epochs=None), comm) == 0


@pytest.mark.parametrize("how", ["format", "unreadable"])
def test_checkpoints_that_may_be_whole_are_not_thrown_away(
    comm, settings, leave_after, monkeypatch, how
):
    config = dataclasses.replace(settings, checkpoint_every="2steps")
    assert program.train(dataclasses.replace(config, run="whole"), comm) == 0
    leave_after(3)
    assert program.train(config, comm) == 75
    leave_after()
    folder = Path(settings.runs_dir) / "a" / "checkpoints"
    before = comm.bcast(sorted(p.name for p in folder.iterdir()))
    with monkeypatch.context() as patch:
        if how == "format":
            patch.setattr(checkpoint, "FORMAT", 0)
            message = "has format 1, this hpctrain knows 0"
        else:
            patch.setattr(checkpoint, "_sha256", lambda path: open(path / "x").close())
            message = "cannot be read: Not a directory; it may be whole"
        with pytest.raises((UsageError, RunError), match=message):
            program.train(config, comm)
    assert comm.bcast(sorted(p.name for p in folder.iterdir())) == before
    assert program.train(config, comm) == 0
    assert end(settings, comm)["digest"] == end(settings, comm, "whole")["digest"]


def test_no_rank_ends_before_rank_0_has_written(comm, settings, monkeypatch):
    """Also where all ranks raise the same error: the others would give up waiting in Finalize."""
    written = []
    original = program.save_network

    def slow(run):
        time.sleep(0.5)
        original(run)
        written.append(time.time())

    monkeypatch.setattr(program, "save_network", slow)
    with pytest.raises(RunError, match="is not finite"):
        program.train(dataclasses.replace(settings, lr=1e30, deterministic=False), comm)
    ended = comm.gather(time.time())
    if comm.rank == 0:
        assert min(ended) >= written[-1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan.json", "{}", "its plan.json is corrupt .*task is missing"),
        ("plan.json", "[", "its plan.json is corrupt .*no JSON"),
        ("plan.json", ('"epochs": 2', '"epochs": "x"'), "corrupt .epochs is 'x'"),
        ("plan.json", ('"rows": 101', '"rows": 103'), "corrupt .its digest is "),
        ("config.toml", ("epochs = 2", 'epochs = "2"'), "corrupt .epochs is '2', not int"),
        ("config.toml", "batch_size = ", "its config.toml is corrupt"),
        ("config.toml", None, "no run to continue, it has no config.toml"),
    ],
)
def test_a_corrupt_folder_is_reported_in_one_line(comm, settings, leave_after, name, text, message):
    leave_after(2)
    assert program.train(settings, comm) == 75
    leave_after()
    path = Path(settings.runs_dir) / "a" / name
    if comm.rank == 0:
        before = path.read_text()
        if text is None:
            path.unlink()
        else:
            path.write_text(before.replace(*text) if isinstance(text, tuple) else text)
        assert not path.exists() or path.read_text() != before
    comm.Barrier()
    with pytest.raises(UsageError, match=message):
        program.train(settings, comm)


@pytest.mark.parametrize("name", ["", ".", "..", "n" * 300])
def test_impossible_names_are_refused_before_anything_is_looked_up(comm, settings, name):
    with pytest.raises(UsageError, match="--run .*: give the name of a folder"):
        program.train(dataclasses.replace(settings, run=name), comm)


def test_no_folder_for_runs_where_a_file_is(comm, settings):
    with pytest.raises(RunError, match="cannot make .*: Not a directory"):
        program.train(dataclasses.replace(settings, runs_dir=settings.data), comm)


@pytest.mark.parametrize("name", ["ranks", "checkpoints", "lock"])
def test_what_stands_in_the_way_is_told_in_one_line(comm, settings, leave_after, name):
    leave_after(2)
    assert program.train(settings, comm) == 75
    leave_after()
    path = Path(settings.runs_dir) / "a" / name
    if comm.rank == 0:
        path.rename(path.with_suffix(".old"))
        path.mkdir() if name == "lock" else path.touch()
    comm.Barrier()
    with pytest.raises((UsageError, RunError), match=f"cannot (make|write) .*/{name}"):
        program.train(settings, comm)
