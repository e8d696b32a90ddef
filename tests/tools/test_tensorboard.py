"""TensorBoard events: what a run recorded is read back by TensorBoard itself."""

from __future__ import annotations

import errno
import os
import sys

import pytest

import hpctrain as hp
from tests.support.api import open_recorder
from tests.support.ranks import command
from tests.support.records import read_strictly, tell

TRAIN = ["--run", "a", "--tensorboard", "--batch-size", "16", "--threads", "1"]
TRAIN += ["--metric", "tests.support.own_functions:top3", "--progress", "none"]
TRAIN += ["--checkpoint-every", "5steps", "--keep-checkpoints", "2"]


def tensorboard():
    """What torch writes events with."""
    return pytest.importorskip("torch.utils.tensorboard")


def events(folder):
    """The scalars of all event files below a folder: (name, step) -> value, each told once."""
    tensorboard()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    found = [
        ((name, event.step), event.value)
        for name in reader.Tags()["scalars"]
        for event in reader.Scalars(name)
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def recorded(folder):
    """What the record says of the same names."""
    found = {}
    for record in read_strictly(folder):
        if record["kind"] in ("step", "evaluation"):
            names = ["loss", "accuracy", "learning_rate", "images_per_second"]
            names = names if record["kind"] == "step" else names[:2]
            values = {name: record[name] for name in names} | record.get("metrics", {})
            where = record.get("split", "training")
            found |= {(f"{where}/{name}", record["step"]): value for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.filterwarnings("default")  # those of the reader are not ours
def test_events_are_those_of_the_record_also_where_a_resumed_launch_repeats_steps(
    trained, tmp_path
):
    words = ["train", "--data", trained.pack("plain"), *TRAIN]
    first = command(2, *words, "--epochs", "2", cwd=tmp_path)
    assert first.code == 0, first.err
    folder = tmp_path / "runs" / "a"
    told, expected = events(folder), recorded(folder)
    assert told == {name: pytest.approx(value) for name, value in expected.items()}
    names = {name for name, _ in told}
    assert {"training/loss", "training/learning_rate", "validation/accuracy", "test/loss"} <= names

    checkpoints = sorted((folder / "checkpoints").iterdir())
    for kept in (checkpoints[:1], []):  # the next launch goes on from the first one; anew
        for path in set(checkpoints) - set(kept):
            path.unlink()
        again = command(2, *words, "--epochs", "3" if kept else "4", cwd=tmp_path)
        assert again.code == 0, again.err
        told, expected = events(folder), recorded(folder)
        of_training = {name: value for name, value in told.items() if name[0][:5] != "test/"}
        assert of_training == {
            name: pytest.approx(value) for name, value in expected.items() if name[0][:5] != "test/"
        }
        checkpoints = list((folder / "checkpoints").iterdir())


def test_what_is_unknown_is_left_out(tmp_path):
    with open_recorder(tmp_path, "none", tensorboard=True) as recorder:
        tell(recorder, "run")
        tell(recorder, "step", step=1, accuracy=None)
        tell(recorder, "step", step=2)
    names = {"loss", "accuracy", "learning_rate", "images_per_second"}
    first = {(f"training/{name}", 1) for name in names - {"accuracy"}}
    assert events(tmp_path).keys() == first | {(f"training/{name}", 2) for name in names}


def test_no_events_unless_asked_for_and_without_the_package_one_line(tmp_path, monkeypatch):
    with open_recorder(tmp_path, "none") as recorder:
        tell(recorder, "run")
    assert [path.name for path in tmp_path.iterdir()] == ["progress.jsonl"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (tmp_path / "other").mkdir()
    with pytest.raises(hp.UsageError, match="pip install tensorboard") as caught:
        open_recorder(tmp_path / "other", "none", tensorboard=True)
    assert "\n" not in str(caught.value) and not list((tmp_path / "other").iterdir())


def test_events_that_cannot_be_written_are_one_error_that_is_recorded(tmp_path, monkeypatch):
    def fails(*values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensorboard().SummaryWriter, "add_scalar", fails)
    error = pytest.raises(hp.RunError, match="TensorBoard.*No space left")
    with error, open_recorder(tmp_path, "none", tensorboard=True) as recorder:
        tell(recorder, "run")
        tell(recorder, "step", step=1)
    assert [record["kind"] for record in read_strictly(tmp_path)] == ["run", "step", "end"]
