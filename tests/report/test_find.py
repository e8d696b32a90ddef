"""Runs and sweeps by name and by folder."""

from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.inference.network import find_model
from hpctrain.report.find import find_folder, find_runs


def make(*folders):
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "progress.jsonl").touch()


def test_runs_by_name_and_folder_and_those_of_a_sweep(tmp_path):
    sweep = tmp_path / "runs" / "s"
    make(tmp_path / "runs" / "a", tmp_path / "b", sweep / "02-x", sweep / "01-y")
    (sweep / "03-not-begun").mkdir()
    (sweep / "sweep.toml").touch()
    runs = str(tmp_path / "runs")
    found = find_runs([str(tmp_path / "b"), "s", "a", "a"], runs)
    assert found == [tmp_path / "b", sweep / "01-y", sweep / "02-x", tmp_path / "runs" / "a"]


def test_what_is_no_run_is_named_with_the_nearest(tmp_path):
    make(tmp_path / "first")
    with pytest.raises(UsageError, match="'frist'.*first"):
        find_runs(["frist"], str(tmp_path))
    with pytest.raises(UsageError, match="no run or sweep"):
        find_runs(["x"], str(tmp_path / "none"))


def test_what_is_nearly_right_is_proposed_and_never_what_was_given(tmp_path):
    make(tmp_path / "first-run")
    (tmp_path / "first-rum").mkdir()  # a folder, but no run
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").touch()
    runs = str(tmp_path)
    for ask in (lambda name: find_folder(name, runs), lambda name: find_model(name, runs)):
        with pytest.raises(UsageError, match="did you mean 'first-run'"):
            ask("frist-run")
        with pytest.raises(UsageError, match="did you mean 'begun'"):
            ask("begin")
        with pytest.raises(UsageError) as caught:
            ask("nothing-like-it")
        assert "did you mean" not in str(caught.value)
    with pytest.raises(UsageError, match="'first-rum'.* did you mean 'first-run'"):
        find_runs(["first-rum"], runs)
    with pytest.raises(UsageError) as caught:
        find_runs(["begun"], runs)  # its record has not begun
    assert "did you mean" not in str(caught.value)


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs" / "a", tmp_path / "b")
    (tmp_path / "runs" / "b").touch()  # a file of that name hides no folder elsewhere
    (tmp_path / "runs" / "c" / "progress.jsonl").mkdir(parents=True)
    assert find_folder("b", "runs") == find_runs(["b"], "runs")[0] == Path("b")
    for find in (lambda: find_folder("runs/b", "runs"), lambda: find_runs(["c"], "runs")):
        with pytest.raises(UsageError, match="there is no run or sweep"):
            find()
