"""Networks read back: corruption is named, answers are never given by what is broken."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from hpctrain.config import Config, EvaluateConfig, check_settings
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.network import find_model, restore
from hpctrain.inference.opening import open_network, open_pack_for
from hpctrain.models import read_model, save_model
from hpctrain.report.record import read_records
from hpctrain.training import loop as inner
from hpctrain.training import train as loop
from hpctrain.training.setup import set_up
from hpctrain.training.steps import CannotContinue
from tests.support.launch import run_cli
from tests.support.packs import make_pack


@pytest.fixture
def run(comm, tmp_path, monkeypatch):
    """The folder of a run of one epoch."""
    monkeypatch.chdir(tmp_path)
    make_pack(tmp_path / "pack.h5", {"train": 29, "test": 7})
    settings = Config(data="pack.h5", run="a", epochs=1, threads=1, progress="none")
    loop.train(settings, comm)
    return tmp_path / "runs" / "a"


def changed(run, tensors=None, **metadata):
    """The run's network with other tensors or metadata, as a file."""
    own, known = read_model(run / "model.safetensors")
    model = torch.nn.Module()
    for number, (name, value) in enumerate({**own, **(tensors or {})}.items()):
        model.register_buffer(f"b{number}", value)
        model._names = [*getattr(model, "_names", []), name]
    model.state_dict = lambda: dict(zip(model._names, model.buffers(), strict=True))
    save_model(run / "other.safetensors", model, {**known, **metadata})
    return run / "other.safetensors"


@pytest.mark.parametrize(
    "damage",
    [
        {"image_shape": [28, 28]},
        {"image_shape": "abc"},
        {"classes": 5},
        {"model": 5},
        {"mean": "abc"},
    ],
    ids=str,
)
def test_corrupt_metadata_are_named(run, damage):
    assert restore(changed(run)).image_shape == (28, 28, 1)
    with pytest.raises(UsageError, match=f"its metadata are corrupt, {next(iter(damage))}"):
        restore(changed(run, **damage))


PAYLOAD = """from pathlib import Path
from hpctrain.models import build
Path("proof").touch()
def net(image_shape, classes):
    return build("digits", image_shape, classes)
"""


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_a_network_that_a_file_names_is_imported_with_trust_code_only(run, command):
    Path("payload.py").write_text(PAYLOAD)
    changed(run, model="payload:net").replace(run / "model.safetensors")
    more = {
        "evaluate": ["--batch-size=7"],
        "predict": ["--batch-size=7", "--output=p"],
        "export": [],
    }
    words = [command, "a", *more[command]]
    done = run_cli(words)
    assert (done.returncode, done.stdout) == (2, "")
    error = done.stderr.splitlines()[-1]
    assert error == (
        "hpctrain: runs/a/model.safetensors names payload:net: a function that a file names is"
        " imported only with --trust-code (in Python, trust_code=True)"
    )
    assert not Path("proof").exists()
    trusted = run_cli([*words, "--trust-code"])
    assert (trusted.returncode, Path("proof").exists()) == (0, True), trusted.stderr


def test_weights_that_are_not_finite_give_no_answers(run, comm):
    bad = changed(run, {"fc.bias": torch.tensor([float("nan")] * 10)})
    with pytest.raises(UsageError, match=r"fc\.bias holds values that are not finite"):
        restore(bad)
    again = Config(data="pack.h5", run="b", init=str(bad), threads=1, dry_run=True)
    with pytest.raises(UsageError, match=r"fc\.bias holds values that are not finite"):
        loop.train(again, comm)


def test_first_weights_may_come_from_a_run_by_name(run, comm, capsys):
    job = set_up(Config(data="pack.h5", init="a", threads=1), comm)
    weights, _ = read_model(Path("runs/a/model.safetensors"))
    assert torch.equal(job.trainer.model.conv1.weight, weights["conv1.weight"])
    with pytest.raises(UsageError, match="there is no run 'c'"):
        loop.train(Config(data="pack.h5", run="b", init="c", threads=1), comm)


def test_a_last_layer_that_starts_fresh_is_said_and_recorded(run, comm, capsys):
    make_pack(Path("seven.h5"), {"train": 29}, classes=7)
    config = Config(data="seven.h5", run="b", init="a", threads=1, epochs=1, progress="plain")
    said = "--init runs/a/model.safetensors: 15 of 17 tensors loaded; classifier fc (7 classes)"
    said += " starts fresh: the file's has 10"
    assert loop.train(dataclasses.replace(config, dry_run=True), comm) == 0
    assert f"note           {said}\n" in capsys.readouterr().out
    assert loop.train(config, comm) == 0
    assert f"{said}\n" in capsys.readouterr().out
    record = list(read_records(Path("runs/b")))
    facts = {"fresh": {"fc.weight": 10, "fc.bias": 10}, "tensors": 17, "adapted": {}}
    assert record[0]["init"] == record[0]["init"] | facts
    assert record[1]["text"] == said
    assert loop.train(dataclasses.replace(config, epochs=2), comm) == 0
    assert said not in capsys.readouterr().out  # the checkpoint gives all weights


def test_another_pack_in_the_place_of_the_one_of_training_is_noticed(run, comm):
    settings = EvaluateConfig(run="a", threads=1)
    saved = open_network(settings, comm).saved
    assert open_pack_for(saved, settings, comm).uuid == saved.metadata["pack_uuid"]
    make_pack(Path("pack.h5"), {"train": 29, "test": 7}, seed=1)
    with pytest.raises(UsageError, match="is not the pack that .* was trained on"):
        open_pack_for(saved, settings, comm)
    assert open_pack_for(saved, dataclasses.replace(settings, data="pack.h5"), comm).uuid
    Path("pack.h5").unlink()
    with pytest.raises(UsageError, match=r"trained on, .*pack\.h5, is gone: give --data"):
        open_pack_for(saved, settings, comm)


def test_a_pack_that_is_replaced_while_training_is_noticed_and_the_weights_are_kept(
    comm, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make_pack(tmp_path / "pack.h5", {"train": 29, "test": 7})
    step = inner.train_step

    def replacing(*arguments):
        make_pack(tmp_path / "pack.h5", {"train": 29, "test": 7}, seed=1)
        return step(*arguments)

    monkeypatch.setattr(inner, "train_step", replacing)
    with pytest.raises(CannotContinue, match="is not the file that was checked"):
        loop.train(Config(data="pack.h5", run="a", epochs=1, threads=1, progress="none"), comm)
    assert read_model("runs/a/model.safetensors")[1]["step"] == 1


def test_a_run_that_cannot_begin_leaves_its_name_free(run, comm, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    settings = Config(data="pack.h5", run="b", epochs=1, threads=1, progress="none")
    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.training.folder.to_toml", full)
        with pytest.raises(RunError, match="cannot make runs/b: No space left"):
            loop.train(settings, comm)
    assert [path.name for path in Path("runs").iterdir()] == ["a"]
    assert loop.train(settings, comm) == 0
    assert list(read_records(Path("runs/b")))[-1]["status"] == "done"


def test_runs_that_begin_in_the_same_second_have_names_of_their_own(run, comm, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    settings = Config(data="pack.h5", epochs=1, threads=1, progress="none")
    for _ in range(3):
        assert loop.train(settings, comm) == 0
    found = sorted(path.name for path in Path("runs").iterdir())
    base = "20260101-000000-digits"
    assert found == [base, f"{base}-2", f"{base}-3", "a"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/tmp/x", "a/b", "a\nb", "n" * 201])
def test_a_name_is_one_folder_below_the_others(name):
    with pytest.raises(UsageError, match="--run .*: give the name of a folder"):
        check_settings(Config(run=name))
    check_settings(Config(run="a b-c.1"))


def test_more_threads_than_any_machine_has_are_refused():
    with pytest.raises(UsageError, match=r"--threads 100000: this machine has \d+ cores"):
        check_settings(Config(threads=100000))


def test_a_file_or_a_run_is_found(run, capsys):
    assert find_model("a", "runs") == Path("runs/a/model.safetensors")
    Path("runs/b").mkdir()
    with pytest.raises(UsageError, match="the run has not ended; its command continues it"):
        find_model("b", "runs")
    Path("runs/b/best.safetensors").touch()
    capsys.readouterr()
    assert find_model("b", "runs") == Path("runs/b/best.safetensors")
    assert capsys.readouterr().err == "runs/b has not ended: its best network so far\n"
    assert find_model("runs/a", "elsewhere") == Path("runs/a/model.safetensors")
    with pytest.raises(UsageError, match="name a run"):
        find_model(None, "runs")
