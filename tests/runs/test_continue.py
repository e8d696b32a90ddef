"""Continuing a run: by which settings, from what is left of it, and as what it then ends."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import hpctrain as hp
from tests.support import nets, ranks
from tests.support.api import read_plan
from tests.support.launches import (
    change_lines,
    check_same,
    checkpoint_steps,
    launch,
    notes,
    place_of,
    run_of,
)
from tests.support.short import records, short_run
from tests.support.spoil import spoil

THIRD = {"validate_every": "3steps"}
CASES = {  # with adam: tests/contract/test_resume.py
    "dropout": {"model": "tests.support.nets:with_dropout"},
    "cosine": {"schedule": "cosine", "class_weights": "balanced"},
    "denoise, best": {"task": "denoise", "model": "autoencoder", "final": "best"} | THIRD,
    "patience": {"validate_every": "2steps", "patience": 2, "lr": 0.3},
    "bf16": {"precision": "bf16", "shift": 2},
    "freeze": {
        **{"optimizer": "adamw", "weight_decay": 0.1, "no_decay": "norm", "schedule": "cosine"},
        **{"min_lr": 1e-4, "freeze": "conv1,bn1", "lr_factors": "fc=2", "final": "best", **THIRD},
    },
    "ema": {
        **{"ema": 0.9, "final": "ema", "schedule": "one-cycle", "freeze": "conv1,bn1", **THIRD},
        **{"lr_factors": "conv2=0.8,conv3=0.64"},
    },
    "unused": {"model": "tests.support.nets:Branches", "weight_decay": 0.1},
    "buffers of all kinds": {"model": "tests.support.nets:FineTuned", "channels_last": True},
    "their strides": {"model": "tests.support.nets:FineTuned", "channels_last": False},
}
SAME_RUN = {"deterministic": True, "shards": 8, "threads": None}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """The settings of a run, and its pack in a folder that tests share."""
    return short_run(tmp_path_factory.mktemp("pack")) | SAME_RUN


@pytest.fixture
def settings(pack, tmp_path):
    """A run of 14 steps in two epochs, in a folder of its own."""
    return pack | {"runs_dir": str(tmp_path / "runs")}


@pytest.fixture(scope="module")
def whole(pack):
    """The same run, which nothing interrupted."""
    whole = pack | {"run": "whole"}
    assert launch(whole).code == 0
    return whole


@pytest.mark.parametrize("case", CASES)
def test_all_state_continues_on_any_ranks(settings, case):
    """4 steps a launch, also over the end of an epoch; on 3 ranks and on 1 in turn."""
    settings |= CASES[case]
    whole = settings | {"run": "whole"}
    assert launch(whole, size=2).code == 0
    for size in (3, 1, 3):
        code, status, *_ = launch(settings, size, leave=3)
        assert (code, status) in ((75, "preempted"), (0, "done"))
    if code:
        assert launch(settings, 1).code == 0
    check_same(settings, whole)


def test_a_default_that_has_changed_since_does_not_change_a_run(settings):
    """A run begun by a package whose --momentum was 0.8 by default goes on with it."""
    whole = settings | {"run": "whole", "momentum": 0.8}
    assert launch(whole).code == 0
    assert launch(settings, leave=3, momentum=0.8).code == 75
    assert launch(settings).error.startswith(f"the run {run_of(settings)} was begun with --mom")
    path = run_of(settings) / "plan.json"
    plan = read_plan(json.loads(path.read_text()))
    assert "momentum" in plan.chosen
    chosen = tuple(name for name in plan.chosen if name != "momentum")
    path.write_text(dataclasses.replace(plan, chosen=chosen).to_json())
    assert launch(settings, momentum=0.7).code == 2
    assert launch(settings, leave=2).code == 75
    assert "momentum = 0.8" in (run_of(settings) / "config.toml").read_text()
    assert launch(settings).code == 0
    check_same(settings, whole)


def test_threads_are_those_of_the_first_launch(settings):
    """The bits depend on them."""
    assert launch(settings, leave=3, threads=2).code == 75
    assert launch(settings).code == 0
    assert json.loads((run_of(settings) / "plan.json").read_text())["threads"] == 2
    two = settings | {"run": "two", "threads": 2}
    assert launch(two).code == 0
    check_same(settings, two)


def test_frozen_parameters_stay_when_the_weights_they_came_from_are_gone(settings):
    settings |= {"model": "tests.support.nets:frozen"}
    first = settings | {"seed": 1, "run": "first", "epochs": 1}
    assert launch(first).code == 0
    settings |= {"init": str(run_of(first) / "model.safetensors")}
    whole = settings | {"run": "whole"}
    assert launch(whole).code == 0
    assert launch(settings, leave=3).code == 75
    Path(settings["init"]).unlink()
    assert launch(settings).code == 0
    check_same(settings, whole)
    assert f'init = "{settings["init"]}"' in (run_of(settings) / "config.toml").read_text()


# Notices and requests at other moments than between steps


@pytest.mark.parametrize("begun", [True, False], ids=["in a validation", "before all"])
def test_a_notice_before_the_first_step_is_submitted_again_once(settings, whole, begun):
    if begun:
        assert launch(settings, leave="evaluation.begun").code == 75, "it trained"
    how = {"leave": "evaluation.begun"} if begun else {"fault": "lock.taken:usr1"}
    for code in (75, 1):
        step = 7 if begun else 0
        assert launch(settings, **how)[:3] == (code, "preempted", step)
        reason = records(settings, "end")[-1]["reason"]
        assert reason == "SIGUSR1; saved, before the first step of this launch: nothing is lost"
    assert launch(settings).code == 0
    check_same(settings, whole)


def test_a_notice_in_the_final_test(settings, whole):
    assert launch(settings, leave="evaluation.begun:3").code == 75, "it trained"
    assert launch(settings, leave="evaluation.begun").code == 75, "only the test was left"
    assert launch(settings, leave="evaluation.begun").code == 1, "and again"
    assert launch(settings).code == 0
    check_same(settings, whole)


def test_a_notice_does_not_take_back_a_stop(settings):
    """It comes while the network is tested: the job must not be started again."""
    assert launch(settings, leave=2).code == 75
    (run_of(settings) / "STOP").touch()
    assert launch(settings, leave="evaluation.begun")[:3] == (0, "stopped", 4)
    assert "test_accuracy" not in records(settings, "end")[-1]


# What is left of a run may be damaged


def test_without_a_checkpoint_a_run_begins_again_and_says_so(settings, whole):
    assert launch(settings, leave=3).code == 75
    shutil.rmtree(run_of(settings) / "checkpoints")
    change_lines(settings, lambda lines: [*lines[:2], b"[[\n", *lines[2:]])
    assert launch(settings).code == 0
    problem, note = notes(settings)
    assert "progress.jsonl, line 3 is no line of a record" in problem
    assert note == "no checkpoint was left: from the first step"
    check_same(settings, whole)


def damage_a_step(lines):
    place = place_of(lines, "step", step=5)
    return [*lines[:place], b"\0" * 40 + b"\n", *lines[place + 1 :]]


def rename_a_field(lines):
    place = place_of(lines, "step", step=5)
    return [*lines[:place], lines[place].replace(b'"step":', b'"stdp":'), *lines[place + 1 :]]


def lose_a_validation(lines):
    return lines[: place_of(lines, "evaluation")]


def lose_steps(lines):
    lines = lines[: place_of(lines, "step", step=6)]
    del lines[place_of(lines, "step", step=3)]
    return lines


@pytest.mark.parametrize(
    ("how", "damage", "lost"),
    [
        ({"leave": 5, "checkpoint_every": "2steps"}, damage_a_step, "steps that were done: 5-6"),
        ({"leave": 5, "checkpoint_every": "2steps"}, rename_a_field, "steps that were done: 5-6"),
        ({"epochs": 1}, lose_a_validation, "the last epoch or validation that was done"),
        ({"leave": 8, "keep_checkpoints": 1}, lose_steps, "steps that were done: 3, 6-9"),
    ],
)
def test_what_a_record_lost_is_named_and_nothing_else_is_lost(settings, whole, how, damage, lost):
    """The checkpoint holds all that the run needs, and nothing is done again."""
    done = launch(settings, **how).step
    change_lines(settings, damage)
    assert launch(settings).code == 0
    *problem, said, going_on = notes(settings)
    assert (said, going_on) == (f"the record has lost {lost}", f"going on after step {done}")
    assert bool(problem) == (damage in (damage_a_step, rename_a_field))
    assert all("is no line of a record" in text for text in problem)
    if damage is lose_steps:
        assert [r["step"] for r in records(settings, "step")] == [1, 2, 4, 5, *range(10, 15)]
    check_same(settings, whole, whole_record=False)


CHANGES = {
    "'model.1.bias'": lambda model: setattr(model[1], "bias", None),
    "'model.scale'": lambda model: model.register_buffer("scale", torch.ones(3)),
}


@pytest.mark.parametrize("named", CHANGES)
def test_a_model_with_another_fixed_state_is_refused(settings, named):
    settings |= {"model": "tests.support.nets:frozen"}
    assert launch(settings, leave=3).code == 75

    def changed(image_shape, classes, original=nets.frozen):
        model = original(image_shape, classes)
        CHANGES[named](model)
        return model

    refused = launch(settings, first=lambda patch: patch.setattr(nets, "frozen", changed))
    assert refused.code == 2 and named in refused.error


# What may differ from the first launch; tests/contract/test_refused.py has what may not


@pytest.fixture(scope="module")
def begun(pack):
    """A run that was interrupted after 3 steps, and one of another seed, for tests of refusals."""
    settings = pack | {"runs_dir": str(Path(pack["data"]).parent / "begun")}
    assert launch(settings, leave=2).code == 75
    assert launch(settings | {"seed": 1, "run": "other"}, leave=2).code == 75
    return settings


def test_a_name_that_no_folder_can_have_is_refused(begun):
    refused = launch(begun, run="n" * 300)
    assert refused.code == 2 and "--run" in refused.error


def copy_of(settings, folder):
    """A copy of a run, for a test that changes it."""
    shutil.copytree(settings["runs_dir"], folder / "runs")
    return settings | {"runs_dir": str(folder / "runs")}


def test_settings_that_do_not_change_the_results_are_free(begun, tmp_path):
    free = {"threads": 2, "keep_checkpoints": 5, "test": False, "epochs": None}
    assert launch(copy_of(begun, tmp_path), **free).code == 0


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("plan.json", lambda text: "{}", "plan.json is corrupt"),
        ("plan.json", lambda text: "[", "plan.json is corrupt"),
        ("plan.json", lambda text: "[" * 100_000, "plan.json is corrupt (nested too deeply)"),
        ("config.toml", lambda text: "a = " + "[" * 10_000, "config.toml is corrupt"),
        ("plan.json", lambda text: text.replace('"epochs": 2', '"epochs": "x"'), "its digest is"),
        ("plan.json", lambda text: text.replace('"rows": 101', '"rows": 103'), "its digest is"),
        ("plan.json", lambda text: text.replace('"version": 3', '"version": 2'), "has version 2"),
        ("config.toml", lambda text: text.replace("epochs = 2", 'epochs = "x"'), "--epochs x"),
        ("config.toml", lambda text: "batch_size = ", "config.toml is corrupt"),
        ("config.toml", None, "it has no config.toml"),
        ("checkpoints/00000003.safetensors", None, "holds no whole checkpoint"),
        ("ranks", "file", "ranks"),
        ("checkpoints", "file", "checkpoints"),
        ("lock", "folder", "lock"),
    ],
)
def test_a_folder_that_is_no_run_to_continue_is_refused(begun, tmp_path, name, change, named):
    settings = copy_of(begun, tmp_path)
    path = run_of(settings) / name
    if callable(change):
        before = path.read_text()
        path.write_text(change(before))
        assert path.read_text() != before
    elif change is None:
        path.unlink()
    else:
        path.unlink() if path.is_file() else shutil.rmtree(path)
        path.mkdir() if change == "folder" else path.touch()
    refused = launch(settings, resume="must" if "00000003" in name else "auto")
    assert refused.code in (1, 2)
    assert named in refused.error and "\n" not in refused.error


def lose_empty_folders(run):
    """As git, rsync --prune-empty-dirs and object stores do."""
    for path in [*run.iterdir()]:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    assert not (run / "ranks").exists()


def change_newlines(run):
    """As git does on other systems; in binary files, too."""
    for path in (path for path in run.rglob("*") if path.is_file()):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def lose_what_is_no_state(run):
    for name in ("lock", "model.safetensors", "evaluation-test.json", "training.png"):
        (run / name).unlink(missing_ok=True)


def rename_and_make_old(run):
    """Renamed where it lies; modified in 1970, and readable only."""
    moved = run.rename(run.with_name("moved"))
    for path in moved.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o555 if path.is_dir() else 0o444)
    moved.rename(run)


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (lose_empty_folders, 0),
        (lose_empty_folders, 3),
        (change_newlines, 3),
        (lose_what_is_no_state, 3),
        (rename_and_make_old, 3),
    ],
)
def test_a_run_goes_on_from_a_copy_that_lost_no_state(settings, whole, change, step):
    """After 3 steps, and before the first: then there is no checkpoint yet."""
    how = {"leave": 2} if step else {"fault": "folder.renamed:full"}
    assert launch(settings, size=1, **how).step == step
    change(run_of(settings))
    assert launch(settings).code == 0
    check_same(settings, whole, whole_record=change is not change_newlines)
    going_on = [note for note in notes(settings) if note.startswith("going on after step")]
    assert bool(going_on) == (step == 3 and change is not change_newlines)


@pytest.mark.parametrize("name", ["config.toml", "plan.json"])
def test_settings_that_were_removed_come_back_as_the_error_advises(begun, tmp_path, name):
    settings = copy_of(begun, tmp_path)
    again = settings | {"run": "again"}
    (run_of(settings) / name).unlink()
    assert "same command on as many ranks" in launch(settings).error
    assert launch(again, leave=1).code == 75
    shutil.copy(run_of(again) / name, run_of(settings))
    assert launch(settings)[:3] == (0, "done", 14)


@pytest.mark.parametrize("place", ["file", "file/deep"])
def test_a_file_in_the_place_of_the_folder_for_runs_is_named(pack, tmp_path, place):
    (tmp_path / "file").touch()
    refused = launch(pack, runs_dir=str(tmp_path / place))
    assert refused.code == 1
    assert f"cannot write {tmp_path / place}" in refused.error


# Finished runs


def test_a_run_records_its_settings(whole):
    first, *_ = records(whole, "run")
    always = {"model": "digits", "optimizer": "sgdm", "lr": 0.01, "batch_size": 16, "seed": 0}
    chosen = {"data": whole["data"], "epochs": 2, "shards": 8, "deterministic": True}
    assert first["settings"] == always | chosen


def test_a_finished_run_says_so_and_more_epochs_extend_it(settings, whole):
    longer = whole | {"run": "longer", "epochs": 3}
    assert launch(longer).code == launch(settings).code == 0
    assert launch(settings)[:3] == (0, "done", 14)
    weights = run_of(settings) / "model.safetensors"
    for how in ("flipped", "gone"):
        spoil(weights, how)
        refused = launch(settings)
        assert refused.code == 2 and "model.safetensors" in refused.error
    assert launch(settings, epochs=3).code == 0
    check_same(settings, longer, whole_record=False)


STRETCHED = {  # whether an extended run stretches the schedule
    "cosine": True,
    "one-cycle": True,
    "step": False,
    "constant": False,
}


@pytest.mark.parametrize("schedule", STRETCHED)
def test_a_learning_rate_that_jumps_in_an_extended_run_is_noted(settings, schedule):
    settings |= {"schedule": schedule, "test": False}
    assert launch(settings, epochs=1).code == 0
    assert launch(settings, epochs=2).code == 0
    said = [note for note in notes(settings) if "the learning rate goes" in note]
    assert len(said) == STRETCHED[schedule]
    rates = hp.history(run_of(settings)).steps["learning_rate"]
    last, following = rates[len(rates) // 2 - 1 : len(rates) // 2 + 1]
    for note in said:
        assert note.startswith(f"the {schedule} schedule is stretched from 1 to 2 epochs: ")
        assert f"goes from {last:.3g} to {following:.3g};" in note
        assert "--init a --schedule constant" in note
    assert launch(settings, epochs=2).code == 0


def test_a_finished_run_is_refused_without_its_pack_or_with_another(settings, whole, tmp_path):
    gone = launch(whole, data=str(tmp_path / "gone.h5"))
    assert gone.code == 2 and "gone.h5" in gone.error and "\n" not in gone.error
    (tmp_path / "other").mkdir()
    other = launch(whole, data=short_run(tmp_path / "other", classes=7)["data"])
    assert other.code == 2 and "was begun with pack" in other.error and "\n" not in other.error
    assert launch(whole).code == 0


def test_a_test_is_forgotten_when_the_run_is_extended(settings):
    assert launch(settings, epochs=1).code == 0
    assert (run_of(settings) / "evaluation-test.json").exists()
    assert launch(settings, test=False).code == 0
    assert not (run_of(settings) / "evaluation-test.json").exists()


# The loss of each validation is that of the first.
NEVER_BETTER = {"lr": 1e-30, "model": "tests.support.nets:frozen"}


def test_a_run_that_patience_ended_continues_when_extended_even_if_killed_at_once(settings):
    settings |= {**NEVER_BETTER, "validate_every": "2steps", "patience": 1}
    assert launch(settings).step == 4
    assert launch(settings, epochs=3, leave="evaluation.begun").step == 6
    assert launch(settings, epochs=3).step == 6, "one more validation, which is no better"
    assert records(settings, "end")[-1]["status"] == "done"


def test_an_extension_after_patience_has_all_of_it_again(settings):
    settings |= {**NEVER_BETTER, "validate_every": "2steps", "patience": 2}
    assert launch(settings).step == 6
    assert launch(settings, epochs=3).step == 10


def test_the_reason_of_patience_does_not_outlive_an_extension(settings):
    def halve(patch):
        loss = functional.cross_entropy
        patch.setattr(functional, "cross_entropy", lambda *two, **how: loss(*two, **how) / 2)

    settings |= {**NEVER_BETTER, "validate_every": "2epochs", "patience": 1}
    assert launch(settings, epochs=4).step == 28
    assert "no better loss than" in records(settings, "end")[-1]["reason"]
    assert launch(settings, epochs=5, first=halve).step == 35
    assert records(settings, "end")[-1]["reason"] is None


def damage_the_best(comm, settings):
    """Train; the best network, that of step 3, is damaged while the run goes on."""

    def go_on(record):
        if record["step"] == 9:
            spoil(run_of(settings) / "best-00000003.safetensors", "flipped")

    with pytest.raises(hp.RunError) as caught:
        hp.train(hp.Config(**settings), on_evaluation=go_on)
    return str(caught.value)


def test_a_best_network_that_is_damaged_while_a_run_goes_on_loses_nothing_else(settings):
    settings |= {**NEVER_BETTER, "validate_every": "3steps", "final": "best"}
    for said in ranks.on_ranks(2, damage_the_best, settings=settings):
        assert "best-00000003.safetensors is not what was written" in said
    assert records(settings, "end")[-1]["status"] == "failed"
    refused = launch(settings)
    assert refused.code == 2 and "or remove it" in refused.error
    (run_of(settings) / "best-00000003.safetensors").unlink()
    assert launch(settings).code == 0
    assert records(settings, "end")[-1]["steps"] == 14


def test_the_best_network_is_tested_once_in_the_record_of_an_extended_run(settings):
    settings |= {**NEVER_BETTER, "validate_every": "3steps", "final": "best"}
    whole = settings | {"run": "whole", "epochs": 3}
    assert launch(whole).code == 0
    assert launch(settings).code == launch(settings, epochs=3).code == 0
    check_same(settings, whole)
    tests = [r["step"] for r in records(settings, "evaluation") if r["split"] == "test"]
    assert tests == [3] and records(settings, "end")[-1]["steps"] == 21


def test_the_best_network_alone_lies_beside_the_last_one(settings):
    """Also if the last checkpoint, of step 14, names another: that of step 12 is kept for it."""
    settings |= {"validate_every": "4steps", "final": "best", "lr": 0.003}
    whole = settings | {"run": "whole", "epochs": 3}
    assert launch(whole).code == launch(settings).code == 0
    names = [sorted(p.name for p in run_of(settings).glob(f"{d}best-*")) for d in ("", "*/")]
    assert names == [[f"best-{step:08}.safetensors"] for step in (14, 12)]
    assert launch(settings, epochs=3).code == 0
    check_same(settings, whole)
    assert len([*run_of(settings).glob("best-*")]) == 1


def test_checkpoints_that_were_passed_over_do_not_push_out_new_ones(settings):
    often = {"checkpoint_every": "2steps", "keep_checkpoints": 2}
    assert launch(settings, leave=6, **often).step == 7
    for path in (run_of(settings) / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"damaged")
    assert launch(settings, leave=2, **often).step == 3
    assert checkpoint_steps(settings) == [2, 3]
