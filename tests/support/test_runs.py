"""Trained runs that tests share: made once, the same for all."""

from tests.support.runs import RUNS, make_trained_runs


def test_runs_are_trained_once_and_copied_for_those_who_change_them(trained, trained_copy):
    before = (trained.run("plain") / "progress.jsonl").stat().st_mtime_ns
    assert make_trained_runs(trained.folder.parent) == trained
    assert (trained.run("plain") / "progress.jsonl").stat().st_mtime_ns == before
    assert {path.name for path in trained_copy.runs.iterdir()} == set(RUNS)
    (trained_copy.run("plain") / "model.safetensors").unlink()
    assert (trained.run("plain") / "model.safetensors").exists()
