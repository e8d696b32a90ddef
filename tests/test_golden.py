"""Files of earlier versions, as they lie in tests/golden: read, or refused with the way out."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hpctrain.cli import main
from tests.launch import ROOT

GOLDEN = ROOT / "tests" / "golden"
TRAIN = ("--data", "raw.h5", "--model", "digits", "--batch-size", "9", "--shards", "3")
TRAIN += ("--threads", "1", "--keep", "1", "--deterministic", "--progress", "none")


@pytest.fixture(params=sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def golden(request, tmp_path, monkeypatch):
    """A copy of one version's files, which is the working directory."""
    shutil.copytree(GOLDEN / request.param, tmp_path / "golden")
    monkeypatch.chdir(tmp_path / "golden")
    return request.param


def record(run):
    lines = Path("runs", run, "progress.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_packs_weights_and_records_are_read(golden, capsys):
    for pack in ("raw.h5", "jpeg.h5"):
        assert main(["pack", "--check", pack]) == 0
        assert "all checksums agree" in capsys.readouterr().out
    recorded = next(line for line in record("finished") if line.get("split") == "test")
    for pack in ("raw", "jpeg"):
        words = ("--data", f"{pack}.h5", "--output", f"{pack}.json")
        assert main(["evaluate", "runs/finished", *words]) == 0
    raw, jpeg = (json.loads(Path(name).read_text())["loss"] for name in ("raw.json", "jpeg.json"))
    assert raw == pytest.approx(recorded["loss"], rel=1e-4)
    assert jpeg == pytest.approx(raw, rel=0.1)  # JPEG files do not hold the very same pixels
    assert main(["compare", "runs/finished", "runs/finished"]) == 0
    assert main(["plot", "runs/finished", "runs/stopped", "--output", "curves.png"]) == 0
    assert main(["train", *TRAIN, "--init", "runs/finished", "--run", "new", "--epochs", "1"]) == 0


def test_a_finished_run_has_nothing_left_to_do(golden, capsys):
    before = load_file("runs/finished/model.safetensors")
    assert main(["train", *TRAIN, "--run", "finished", "--epochs", "2"]) == 0
    after = load_file("runs/finished/model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)


def test_a_stopped_run_goes_on_from_its_checkpoint_or_says_what_to_do(golden, capsys):
    shutil.rmtree("runs/stopped/ranks", ignore_errors=True)  # as of a version without it
    saved = json.loads(next(Path("runs/stopped/checkpoints").glob("*.json")).read_text())["step"]
    adam = ("--optimizer", "adam", "--epochs", "60", "--checkpoint-every", "5steps")
    code = main(["train", *TRAIN, *adam, "--run", "stopped"])
    lines = capsys.readouterr()
    if golden == "plan1":  # its samples came in another order
        assert code == 2 and "--run" in lines.err
    else:
        steps = [line["step"] for line in record("stopped") if line["kind"] == "step"]
        assert code == 0 and steps == list(range(1, 181)) and saved < 180
