"""Runs and sweeps by name and by folder."""

import pytest

from hpctrain.errors import UsageError
from hpctrain.report.find import find_runs


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
