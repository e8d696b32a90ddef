"""Agreement between ranks: what must be equal is compared, and what differs is never kept.

That all raise what one finds wrong is asserted wherever a run is refused (tests/support/launches).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from unittest import mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import hpctrain as hp
from tests.support import nets, ranks
from tests.support.api import cluster, command_line
from tests.support.launches import checkpoint_steps, launch, run_of
from tests.support.short import records

LAST = 2  # of three ranks
DIFFER = "rank 2 of 3 held other weights .*they differ in "


def test_a_buffer_that_differs_before_the_first_step_is_refused(settings):
    """No sum over ranks would change it; it may come from a file that only some hosts have."""

    def another(patch):
        init = nets.OneLayer.__init__

        def with_buffer(self, image_shape, classes):
            init(self, image_shape, classes)
            self.register_buffer("offset", torch.tensor(float(cluster.launched_rank() == LAST)))

        patch.setattr(nets.OneLayer, "__init__", with_buffer)

    refused = launch(settings | {"model": "tests.support.nets:OneLayer"}, first=another)
    assert refused.code == 2 and not run_of(settings).exists()
    assert refused.error.startswith("the model's offset differs between ranks: ")


@pytest.mark.parametrize("setting", ["model", "loss", "metric", "augment"])
def test_functions_of_the_user_are_of_equal_files_on_all_ranks(settings, setting, tmp_path):
    module = "nets" if setting == "model" else "own_functions"
    names = {"model": "OneLayer", "augment": "mirror"}
    function = f"tests.support.{module}:{names.get(setting, 'cross_entropy')}"
    other = tmp_path / "other.py"
    other.write_text("# of an earlier version\n")

    def another(patch):
        if cluster.launched_rank() == LAST:
            patch.setattr(f"tests.support.{module}.__file__", str(other))

    refused = launch(settings | {setting: function}, first=another)
    assert refused.code == 2 and not run_of(settings).exists()
    said = f"the file of --{setting} {function} differs between ranks: SHA-256 "
    assert refused.error.startswith(said) and refused.error.endswith(" on rank 2")
    assert launch(settings | {setting: function}, dry_run=True).code == 0


def fail_on(ranks):
    def fail(patch):
        if cluster.launched_rank() in ranks:
            patch.setattr(nets.OneLayer, "__init__", "no function")

    return fail


@pytest.mark.parametrize(
    ("ranks", "named"), [((0, 1, 2), ""), ((1, 2), "rank 1: "), ((2,), "rank 2: ")]
)
def test_the_first_of_some_failures_is_raised_on_all_ranks_with_its_number(settings, ranks, named):
    settings |= {"model": "tests.support.nets:OneLayer"}
    failed = launch(settings, first=fail_on(ranks))
    assert failed.code == 2 and re.match(f"{named}--model .*not a callable", failed.error)


def diverge(comm, settings, step, notice="", statistics=False):
    """Train; the last rank has other weights, or other running statistics, after this step. Before
    it, rank 0 gets a notice.
    """
    init, norms, done = hp.BatchNorms.__init__, [], []

    def remember(self, *arguments):
        init(self, *arguments)
        norms.append(self)

    def change(optimizer, *_):
        done.append(1)
        if comm.rank == LAST and len(done) == step:
            weights = optimizer.param_groups[0]["params"][0].data
            (norms[0].running if statistics else weights).view(-1)[0] += 1e-3

    if comm.rank == 0:
        os.environ[ranks.FAULT] = notice
    hook = register_optimizer_step_post_hook(change)
    try:
        with (
            mock.patch.object(hp.BatchNorms, "__init__", remember),
            pytest.raises(hp.RunError, match=f"after step {step} {DIFFER}") as caught,
        ):
            hp.train(hp.Config(**settings))
    finally:
        hook.remove()
    return caught.value.exit_code, str(caught.value)


@pytest.mark.parametrize("number", ["usr1", "int"])
def test_ranks_that_differ_in_the_step_after_which_they_leave_save_nothing(settings, number):
    """The notice and Ctrl-C are heard after step 3, and all ranks know of it with step 4."""
    given = {"settings": settings, "step": 4, "notice": f"step.done:{number}:3"}
    (ended, *others) = ranks.on_ranks(3, diverge, **given)
    assert ended[0] == 1 and others == [ended] * 2
    assert records(settings, "end")[-1]["status"] == "failed"
    assert len(records(settings, "step")) == 4 and checkpoint_steps(settings) == []
    assert not (run_of(settings) / "model.safetensors").exists()


def test_running_statistics_that_differ_on_one_rank_are_noticed(settings):
    settings |= {"checkpoint_every": "3steps"}
    (code, text), *_ = ranks.on_ranks(3, diverge, settings=settings, step=3, statistics=True)
    assert code == 1 and text.endswith(".running_mean")
    assert checkpoint_steps(settings) == []


CALLS = {  # what the last rank does in place of ("train", settings) -> what differs
    "a setting": ({"lr": 0.2}, "--lr differs between ranks: 0.1 on rank 0, 0.2 on rank 2"),
    "no value": ({"lr": None}, "--lr differs between ranks: 0.1 on rank 0, none on rank 2"),
    "a run": ({"run": "b"}, "--run differs between ranks: a on rank 0, b on rank 2"),
    "a plan": (
        {"dry_run": True},
        "--dry-run differs between ranks: False on rank 0, True on",
    ),
    "a mistake": ({"seed": -1.5}, "rank 2: hpctrain.train: --seed -1.5: expected an integer"),
    "a function": (
        {"on_evaluation": print},
        "on_evaluation is given on another rank, but not on rank 0, which calls it",
    ),
    "another call": (
        "evaluate",
        "what is asked for differs between ranks: hpctrain.train on rank 0, hpctrain.",
    ),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_ask_for_something_else_are_refused_on_all(comm, settings, name):
    other, said = CALLS[name]
    settings |= {"lr": 0.1}
    given = settings
    if comm.rank == LAST and name != "another call":
        given = {name: value for name, value in (settings | other).items() if value is not None}
    with pytest.raises(hp.UsageError, match=f"^{re.escape(said)}"):
        if comm.rank == LAST and name == "another call":
            hp.evaluate("a", runs_dir=settings["runs_dir"])
        else:
            hp.train(**given)
    assert not run_of(settings).exists()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("package", ["torch", "numpy", "hpctrain"])
def test_ranks_of_other_versions_are_refused(comm, settings, monkeypatch, package):
    if comm.rank == LAST:
        monkeypatch.setattr(sys.modules[package], "__version__", "0.0.7")
    with pytest.raises(hp.UsageError, match=f"the version of {package} differs .* 0.0.7 on rank 2"):
        hp.train(**settings)


@pytest.mark.ranks(3)
def test_ranks_of_other_versions_of_the_library_of_a_part_are_refused(comm, settings, monkeypatch):
    """Before it is imported, which a rank may have done for another run."""
    if comm.rank == LAST:
        monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0.7")
    part = {"optimizer": "torch:NAdam()", "lr": 0.001}
    with pytest.raises(hp.UsageError, match=r"torch differs between ranks: .* 0.0.7 on rank 2"):
        hp.train(**settings | part)


@pytest.mark.ranks(3)
def test_values_that_mean_the_same_and_the_progress_are_not_compared(comm, settings):
    last = comm.rank == LAST
    given = {"epochs": 1, "time_limit": "60m" if last else "1h", "dry_run": True}
    assert hp.train(**settings | given | {"progress": "none" if last else "plain"}).step == 0


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("words", "other", "said"),
    [
        ("train --lr 0.1", "train --lr 0.2", "--lr differs between ranks: 0.1 on rank 0, 0.2 on"),
        ("train --seed 1", "evaluate a", "what is asked for differs between ranks: hpctrain train"),
        ("predict a b", "predict a c", "--files differs between ranks: "),
    ],
)
def test_command_lines_that_differ_are_refused(comm, capfd, words, other, said):
    """As by mpirun -n 2 hpctrain ... : -n 1 hpctrain ..."""
    given = other if comm.rank == LAST else words
    assert command_line([*given.split(), "--runs-dir", "none"]) == 2
    _, err = capfd.readouterr()
    printed = [line for line in err.splitlines() if line.startswith("hpctrain: ")]
    assert len(printed) == (comm.rank == 0)
    if comm.rank == 0:
        assert printed[0].startswith(f"hpctrain: {said}")
