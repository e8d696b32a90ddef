"""Runs and sweeps by name and by folder, for all subcommands; the best run of a sweep."""

from __future__ import annotations

import shutil

import pytest

import hpctrain as hp
from tests.support.ranks import alone
from tests.support.records import (
    FILE,
    append,
    end_line,
    epoch_line,
    evaluation_line,
    make_other,
    make_run,
    run_line,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_ended(folder):
    return make_run(folder, run_line(), end_line())


def names(*words):
    done = alone("watch", *words, "--once")
    assert (done.code, done.err) == (0, "")
    return [line.partition("  ")[0] for line in done.out.splitlines()]


def test_runs_by_name_and_folder_and_those_of_a_sweep_once_each(folder):
    for path in ("runs/a", "b", "runs/s/02-x", "runs/s/01-y"):
        make_ended(folder / path)
    (folder / "runs" / "s" / "03-not-begun").mkdir()
    (folder / "runs" / "s" / "sweep.toml").touch()
    assert names(folder / "b", "s", "a", "a") == ["b", "01-y", "02-x", "a"]
    assert names("b", "runs/a") == ["b", "a"]


def test_a_file_is_no_folder(folder):
    for path in ("runs/a", "b"):
        make_ended(folder / path)
    (folder / "runs" / "b").touch()  # a file of that name hides no folder elsewhere
    assert names("b") == ["b"] and alone("stop", "b").code == 0
    assert alone("stop", "runs/b").code == 2
    (folder / "runs" / "c" / FILE).mkdir(parents=True)
    assert alone("plot", "c").code == 2


@pytest.mark.parametrize("command", ["plot {}", "stop {}", "compare {} first-run", "export {}"])
def test_a_name_that_is_nearly_right_is_proposed_and_no_other(folder, command):
    make_ended(folder / "runs" / "first-run")
    (folder / "runs" / "first-rum").mkdir()  # a folder, but no run

    def said(name):
        done = alone(*command.format(name).split())
        assert (done.code, done.err.count("\n")) == (2, 1) and name in done.err
        return done.err

    assert "did you mean 'first-run'" in said("frist-run")
    assert "did you mean" not in said("nothing-like-it")
    (folder / "runs" / "begun").mkdir()
    (folder / "runs" / "begun" / "config.toml").touch()
    assert "did you mean 'begun'" in said("begin")
    with pytest.raises(hp.UsageError, match="'frist-run'.*did you mean 'first-run'"):
        hp.history("frist-run")


def test_a_run_that_is_not_there_yet_is_waited_for_with_a_proposal(folder):
    make_ended(folder / "runs" / "first")
    one, other = alone("watch", "frist", "first", "--once").out.splitlines()
    assert one.startswith("frist  waiting for runs/frist") and "did you mean 'first'?" in one
    assert other.startswith("first  done")


def make_sweep(trained, folder, runs, like="plain"):
    """Runs that begin like a trained one; losses of validations, training, test are made up."""
    facts = (trained.run(like) / FILE).read_bytes().splitlines(keepends=True)[0]
    for name, (validations, training, test) in runs.items():
        lines = [evaluation_line(1, loss=loss, accuracy=1 - loss) for loss in validations]
        lines.append(epoch_line(1, loss=training, accuracy=1 - training))
        lines.append(evaluation_line(1, "test", loss=test, accuracy=1 - test))
        run = make_run(folder / name, facts, *lines)
        shutil.copy(trained.run("plain") / "model.safetensors", run)
    (folder / "sweep.toml").touch()
    return folder


def best(sweep):
    """The run of the best network."""
    return hp.load(sweep, best=True).path.parent.name


def test_the_best_is_chosen_by_validation_and_never_by_the_test(trained, tmp_path, capsys):
    runs = {"a": ([0.2, 0.5], 0.1, 0.1), "b": ([0.6, 0.3], 0.4, 0.4), "c": ([], 0.0, 0.0)}
    assert best(make_sweep(trained, tmp_path / "last", runs)) == "b"  # a's last network is worse
    assert "validation accuracy 0.7" in capsys.readouterr().err
    sweep = make_sweep(trained, tmp_path / "best", runs, like="tuned")  # with --final best
    assert best(sweep) == "a"
    (sweep / "a" / "model.safetensors").unlink()
    assert best(sweep) == "b"
    with pytest.raises(hp.UsageError, match="--best"):
        hp.load(sweep)


def test_without_validation_training_decides_and_denoising_goes_by_loss(trained, tmp_path):
    for like, chosen in (("plain", "a"), ("restored", "b")):
        runs = {"a": ([], 0.2, 0.1), "b": ([], 0.1, 0.4)}
        sweep = make_sweep(trained, tmp_path / like, runs, like)
        assert best(sweep) == "b"
        append(sweep / "a", epoch_line(2, loss=0.3, accuracy=0.99))
        assert best(sweep) == chosen


def test_a_task_of_another_figure_goes_by_it_and_by_loss_beside_others(trained, tmp_path, capsys):
    sweep = tmp_path / "sweep"
    for name, errors in {"a": (9.0, 2.0), "b": (1.0, 3.0)}.items():
        run = make_other(sweep / name, *errors)
        shutil.copy(trained.run("plain") / "model.safetensors", run)
    (sweep / "sweep.toml").touch()
    assert best(sweep) == "a"
    assert "validation mae 2" in capsys.readouterr().err
    make_sweep(trained, sweep, {"c": ([0.4], 0.4, 0.4)})
    assert best(sweep) == "b"
    assert "validation loss 0.3333" in capsys.readouterr().err


def test_a_sweep_without_a_network_that_ended_has_no_best(tmp_path):
    (tmp_path / "sweep.toml").touch()
    with pytest.raises(hp.UsageError, match="no network"):
        hp.load(tmp_path, best=True)
