"""What runs have come to, and which run of a sweep is the best."""

import json

import pytest

from hpctrain.errors import UsageError
from hpctrain.report.find import best_run
from hpctrain.report.history import Metrics
from hpctrain.report.record import HistoryReader, read_history


def put(folder, kind, second=0, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    line = {"kind": kind, "time": f"2026-01-01T00:00:{second:02d}.000Z", **fields}
    with open(folder / "progress.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def validation(folder, loss, accuracy, second=0):
    put(folder, "evaluation", second, step=1, split="validation", loss=loss, accuracy=accuracy)


def test_a_record_is_followed_as_it_grows_and_when_it_is_cut_back(tmp_path):
    reader = HistoryReader(tmp_path / "a", "none")

    def look():
        reader.poll()
        return reader.history

    assert look().planned_epochs == 0
    put(tmp_path / "a", "run", epochs=5)
    put(tmp_path / "a", "step", 3, step=1)
    put(tmp_path / "a", "epoch", 4, epoch=1, loss=2.0, accuracy=0.5)
    validation(tmp_path / "a", 1.5, 0.6, 6)
    assert look().epochs == 1
    validation(tmp_path / "a", None, 0.4, 8)
    with open(tmp_path / "a/progress.jsonl", "a") as file:
        file.write('{"kind": "epoch", "ti')
    found = look()
    assert found.validations == [Metrics(1.5, 0.6), Metrics(None, 0.4)]
    assert found.best_validation() == Metrics(1.5, 0.6)
    assert (found.planned_epochs, found.training) == (5, Metrics(2.0, 0.5))
    assert (found.seconds, found.outcome.status) == (8, "")
    text = (tmp_path / "a/progress.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a/new").write_text("".join(text[:4]))
    (tmp_path / "a/new").rename(tmp_path / "a/progress.jsonl")
    put(tmp_path / "a", "run", 30, epochs=5)
    put(tmp_path / "a", "end", 32, status="done", reason="patience")
    found = look()
    assert (len(found.validations), found.outcome[:2]) == (1, ("done", "patience"))
    assert found.seconds == 6 + 2
    assert found.validations == read_history(tmp_path / "a").validations


def sweep(tmp_path, runs, settings=""):
    for name, (points, train, test) in runs.items():
        folder = tmp_path / name
        put(folder, "epoch", epoch=1, loss=train, accuracy=1 - train)
        for loss in points:
            validation(folder, loss, 1 - loss)
        put(folder, "evaluation", step=1, split="test", loss=test, accuracy=1 - test)
        (folder / "config.toml").write_text(settings)
        (folder / "model.safetensors").touch()
    (tmp_path / "sweep.toml").touch()
    return tmp_path


def test_the_best_is_chosen_by_validation_and_never_by_the_test(tmp_path):
    runs = {"a": ([0.2, 0.5], 0.1, 0.1), "b": ([0.6, 0.3], 0.4, 0.4), "c": ([], 0.0, 0.0)}
    folder, why = best_run(sweep(tmp_path, runs))
    assert (folder.name, why) == ("b", "validation accuracy 0.7")  # a's last network is worse
    for name in runs:
        (tmp_path / name / "config.toml").write_text('final = "best"')
    assert best_run(tmp_path)[0].name == "a"
    (tmp_path / "a/model.safetensors").unlink()
    assert best_run(tmp_path)[0].name == "b"


def test_without_validation_training_decides_and_denoising_goes_by_loss(tmp_path):
    runs = {"a": ([], 0.2, 0.1), "b": ([], 0.1, 0.4)}
    assert best_run(sweep(tmp_path, runs)) == (tmp_path / "b", "training accuracy 0.9")
    (tmp_path / "a/config.toml").write_text('task = "denoise"')
    assert best_run(tmp_path) == (tmp_path / "b", "training loss 0.1")


def test_a_sweep_without_a_network_that_ended(tmp_path):
    (tmp_path / "sweep.toml").touch()
    with pytest.raises(UsageError, match="no network has ended yet"):
        best_run(tmp_path)
