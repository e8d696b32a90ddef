"""--loss, --augment and --metric in whole runs; those that break a rule are in tests/contract."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import hpctrain as hp
from tests.support import launch, nets, own_functions
from tests.support.packs import draw_entries, make_pack
from tests.support.pictures import arrays
from tests.support.ranks import command
from tests.support.records import read_strictly
from tests.support.runs import SAME, train_once

ROWS = {"train": 101, "validation": 13, "test": 23}


def own(name):
    return f"tests.support.own_functions:{name}"


@pytest.fixture
def pack(tmp_path):
    return make_pack(tmp_path / "small.h5", ROWS)


def weights_of(run):
    return load_file(run / "model.safetensors")


def evaluations(run):
    return [record for record in read_strictly(run) if record["kind"] == "evaluation"]


def test_torchs_own_loss_as_a_function_gives_the_same_run(pack):
    words = ["--class-weights", "1,2,3,4,5,6,7,8,9,10"]
    plain = train_once(pack, *words, run="plain")
    same = train_once(pack, *words, "--loss", own("cross_entropy"), run="same", ranks=3)
    for name, expected in weights_of(plain).items():
        torch.testing.assert_close(weights_of(same)[name], expected, rtol=1e-3, atol=1e-5)
    losses = [[record["loss"] for record in evaluations(run)] for run in (plain, same)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.ranks(1, 3)
def test_a_loss_and_a_metric_are_evaluated_as_in_one_process(comm, pack):
    functions = {"loss": own("focal"), "metric": own("counts")}
    given = {"data": str(pack), "runs_dir": str(pack.parent), "progress": "none", "threads": 1}
    folder = Path(hp.train(**given, **functions, epochs=1, batch_size=16, final="best").folder)
    again = hp.evaluate(folder, trust_code=True, threads=1, batch_size=7)
    if comm.rank:
        return
    images, targets = arrays(pack, "test")
    network, targets = hp.load(folder), torch.from_numpy(targets).long()
    with torch.no_grad():
        outputs = network.model(network.preprocess(images))
    expected = {
        name: (values[0].sum() / values[1].sum() if isinstance(values, tuple) else values)
        for name, values in own_functions.counts(outputs, targets).items()
    }
    expected = {name: value.double().mean().item() for name, value in expected.items()}
    del expected["recall of none"]  # 0 / 0
    found = json.loads((folder / "evaluation-test.json").read_text())
    loss = own_functions.focal(outputs, targets).mean().item()
    for figures in (found, evaluations(folder)[-1], again.figures()):
        metrics = dict(figures["metrics"])
        assert not np.isfinite(metrics.pop("recall of none") or np.nan)
        assert metrics == pytest.approx(expected, rel=1e-4)
        assert figures["loss"] == pytest.approx(loss, rel=1e-4)
        assert figures["accuracy"] == found["accuracy"]
    assert abs(loss - F.cross_entropy(outputs, targets).item()) > 1e-3


def test_a_loss_of_known_values_gives_the_same_run_and_a_metric_has_the_units_of_the_data(tmp_path):
    splits = {}
    for split, rows in ROWS.items():
        images, _, values = draw_entries(np.random.default_rng(rows), rows, (28, 28, 1))
        splits[split] = images, values[:, :1]
    hp.write_pack(tmp_path / "values.h5", splits, columns=["sum"])
    words = ["--task", "regress", "--metric", own("mean_error")]
    plain = train_once(tmp_path / "values.h5", *words, run="plain")
    words += ["--loss", own("known_squares")]
    same = train_once(tmp_path / "values.h5", *words, run="same", ranks=3)
    for name, expected in weights_of(plain).items():
        torch.testing.assert_close(weights_of(same)[name], expected, rtol=1e-3, atol=1e-5)
    for record in [*evaluations(plain), *evaluations(same)]:
        assert record["metrics"]["error"] == pytest.approx(record["mae"], rel=1e-5)
    answers = hp.load(plain).predict(splits["test"][0])["sum"]
    expected = np.nanmean(abs(answers - splits["test"][1][:, 0].astype(float)))
    assert evaluations(plain)[-1]["mae"] == pytest.approx(expected, rel=1e-5)


def test_a_metric_of_one_figure_has_the_name_of_its_function(pack):
    run = train_once(pack, "--metric", own("correct"), ranks=2)
    assert len(evaluations(run)) == 2
    for each in evaluations(run):
        assert each["metrics"] == {"correct": each["accuracy"]}
    shown = command(1, "evaluate", run, "--trust-code").out
    assert f"correct {evaluations(run)[-1]['accuracy']:.4f}" in shown


def test_the_figures_of_blocks_are_added_by_name(trained, tmp_path):
    words = ["evaluate", trained.run("plain"), "--batch-size", "2"]
    words += ["--output", tmp_path / "e.json", "--metric"]
    assert command(3, *words, own("in_any_order")).code == 0
    assert json.loads((tmp_path / "e.json").read_text())["metrics"] == {"one": 1, "two": 2}
    ended = command(3, *words, own("by_class"))
    assert ended.code == 2 and own("by_class") in ended.err


@pytest.mark.parametrize("setting", ["loss", "metric", "augment"])
def test_a_function_that_fails_later_is_one_line(pack, setting):
    words = ["--data", pack, "--runs-dir", pack.parent, "--progress", "none", "--batch-size", "16"]
    ended = command(1, "train", *words, f"--{setting}", own("fails_later"))
    (line,) = ended.err.splitlines()
    assert ended.code in (1, 2)
    assert f"--{setting} {own('fails_later')}" in line and "own_functions.py, line " in line


FAILING = {
    "training": "failed in training mode on 32 images: KeyError: 'teacher' (tests/support/nets.py",
    "exit": "failed in training mode on 32 images: SystemExit: 3 (tests/support/nets.py",
    "small": "failed in training mode on 5 images: AssertionError: five (tests/support/nets.py",
    "backward": "failed in backward in training mode on 2 images: RuntimeError: one of the"
    " variables needed for gradient computation has been modified by an inplace operation",
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_network_that_fails_is_one_line_before_the_first_step(pack, kind):
    ended = train_failing(pack, kind, ranks=1 if kind == "small" else 3)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and line.startswith(f"hpctrain: the network {FAILING[kind]}")
    assert "nets.py, line " in line and not (pack.parent / "runs").exists()
    assert kind != "backward" or "(computed in tests/support/nets.py, line " in line


@pytest.mark.parametrize(("kind", "inside"), [("later", ""), ("later_inside", ", layer linear")])
def test_the_traceback_of_a_network_that_fails_later_is_in_a_file(pack, kind, inside):
    ended = train_failing(pack, kind)
    (line,) = ended.err.splitlines()
    file = pack.parent / "runs/a/traceback-0.txt"
    assert ended.code == 2 and f"nets.py, line {line_of(kind)}{inside}" in line
    assert line.endswith(f"; its traceback is in {file}")
    assert file.read_text().startswith("Traceback (most recent call last):")
    assert f"in when_{kind}" in file.read_text()


def test_a_network_that_fails_in_an_evaluation_is_one_line(pack):
    ended = train_failing(pack, "evaluation", ranks=3)
    (line,) = ended.err.splitlines()
    said = "validation cannot be evaluated: rank 2: the network failed in evaluation mode on 13"
    assert (
        ended.code == 1
        and f"{said} images: KeyError: 'block' (tests/support/nets.py, line " in line
    )
    files = [Path(word) for word in line.replace(";", " ").split() if "traceback-" in word]
    assert files and "in when_evaluation" in files[0].read_text()


def test_the_network_of_a_file_fails_in_one_line(tmp_path):
    pack = make_pack(tmp_path / "a.h5", {"train": 29, "test": 23})
    run = train_once(pack, "--model", "tests.support.nets:failing_evaluation", "--no-test")
    said = "the network failed in evaluation mode on 23 images: KeyError: 'block' (tests/support/"
    for words in (["evaluate", run], ["predict", run, "--output", run / "answers.csv"]):
        ended = command(2, *words, "--trust-code")
        assert ended.code == 2 and len(ended.err.splitlines()) == 2 and said in ended.err
    images, _ = arrays(pack, "test")
    with pytest.raises(hp.UsageError, match=r"evaluation mode on 23 images: KeyError.*nets\.py"):
        hp.load(run, trust_code=True).predict(images)


def test_a_network_of_which_all_ranks_fail_is_one_line(pack):
    """Of rank 0, which ends the others."""
    run = ["--data", pack, "--runs-dir", pack.parent, "--run", "a", "--progress", "none"]
    words = ["train", *run, "--batch-size", "16", "--model", "tests.support.nets:failing_later"]
    ended = launch.run_mpi(2, ["-m", "hpctrain", *map(str, words)])
    lines = [line for line in ended.stderr.splitlines() if "KeyError" in line]
    assert ended.returncode and "Traceback" not in ended.stderr
    assert len(lines) == 1 and lines[0].startswith("[rank 0 of 2 ")
    assert lines[0].endswith(f"its traceback is in {pack.parent / 'a/traceback-0.txt'}")


def test_what_needs_nchw_is_told_the_option(pack):
    words = ["--model", "tests.support.nets:Viewing"]
    ended = command(1, "train", "--data", pack, "--progress", "none", *words)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and "nets.py, line " in line
    assert "; with --no-channels-last it works" in line
    assert train_once(pack, *words, "--no-channels-last").is_dir()


def train_failing(pack, kind, ranks=1):
    words = ["--data", pack, "--runs-dir", pack.parent / "runs", "--run", "a", "--epochs", "1"]
    words += ["--batch-size", "16" if ranks == 1 else "48", "--progress", "none", "--threads", "1"]
    words += ["--model", f"tests.support.nets:failing_{kind}"]
    return command(ranks, "train", *words)


def line_of(kind):
    """The line of nets.py in which the network fails."""
    lines = inspect.getsource(nets).splitlines()
    start = next(n for n, line in enumerate(lines) if f"def when_{kind}(" in line)
    return start + 3


def test_a_denoising_run_with_a_loss_of_its_own(pack):
    run = train_once(pack, "--task", "denoise", "--loss", own("absolute"), ranks=2)
    for words in (["--loss", own("absolute")], ["--trust-code"]):
        ended = command(2, "evaluate", run, *words, "--threads", "1")
        assert ended.code == 0 and "dB" not in ended.out
        found = float(ended.out.rpartition("loss ")[2].partition(",")[0])
        assert found == pytest.approx(evaluations(run)[-1]["loss"], rel=1e-3)


def test_an_augmentation_works_on_the_images_of_training_alone(tmp_path):
    """Images of half the brightness, by a function or in the file, give the same network.

    Running statistics may differ in their last bit: their first shift is that of other images.
    """
    random = np.random.default_rng(0)
    images, labels = random.random((101, 12, 12, 1), np.float32), np.arange(101) % 3
    for name, scale in (("whole", 1), ("half", 2)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for split in ("train", "test"):
                file[f"{split}/x"] = images / (scale if split == "train" else 1)
                file[f"{split}/y"] = labels
    given = ["--images", "{split}/x", "--labels", "{split}/y", "--model", "digits"]
    half = train_once(tmp_path / "half.h5", *given, run="half")
    dark = train_once(tmp_path / "whole.h5", *given, "--augment", own("darken"), run="dark")
    for name, expected in weights_of(half).items():
        torch.testing.assert_close(weights_of(dark)[name], expected, rtol=1e-6, atol=1e-8)
    assert evaluations(half)[-1]["loss"] == pytest.approx(evaluations(dark)[-1]["loss"], rel=1e-5)


def test_an_augmentation_is_given_images_before_normalization(pack):
    words = ["--normalize", "pack", "--flip"]
    plain = train_once(pack, *words, run="plain")
    same = train_once(pack, *words, "--augment", own("check_unit"), run="same", ranks=2)
    for name, expected in weights_of(plain).items():
        torch.testing.assert_close(weights_of(same)[name], expected, rtol=1e-3, atol=1e-5)


def test_the_test_at_the_start_changes_neither_network_nor_random_numbers(pack):
    words = ["--model", "tests.support.nets:with_dropout"]
    plain = train_once(pack, *words, run="plain")
    tested = train_once(pack, *words, "--metric", own("top3"), run="tested")
    for name, expected in weights_of(plain).items():
        assert torch.equal(weights_of(tested)[name], expected)


def test_functions_of_the_training_are_imported_with_trust_code_only(pack):
    """By evaluate, unless others are given, and by --config; predict needs none."""
    functions = {"loss": own("focal"), "metric": own("top3"), "augment": own("darken")}
    given = {name: [f"--{name}", function] for name, function in functions.items()}
    both = [*given["loss"], *given["metric"]]
    run = train_once(pack, *both, *given["augment"])
    evaluate, config = ["evaluate", run], ["train", "--config", run / "config.toml", "--dry-run"]
    for words, named in (
        (evaluate, ["loss", "metric"]),
        ([*evaluate, *given["loss"]], ["metric"]),
        (config, ["loss", "augment", "metric"]),
    ):
        ended = command(1, *words)
        assert ended.code == 2 and "--trust-code" in ended.err
        assert all((function in ended.err) == (n in named) for n, function in functions.items())
    top3 = f"top3 {evaluations(run)[-1]['metrics']['top3']:.4f}"
    for more in (both, ["--trust-code"], [*given["loss"], "--trust-code"]):
        ended = command(1, *evaluate, *more)
        assert ended.code == 0 and top3 in ended.out
    assert command(1, *config, "--trust-code").code == 0
    assert command(1, *config, *both, *given["augment"]).code == 0
    assert command(1, "predict", run, "--output", run / "answers.csv").code == 0
    with pytest.raises(hp.UsageError, match=r"config\.toml names .*trust_code=True"):
        _ = hp.load(run).config
    assert hp.load(run, trust_code=True).config.augment == (own("darken"),)
    settings = run / "config.toml"
    settings.write_text("epochs = ")
    with pytest.raises(hp.UsageError, match=r"a/config\.toml is no TOML: "):
        _ = hp.load(run, trust_code=True).config


def test_a_run_is_resumed_without_importing_what_its_files_name(pack):
    """Only what its command names: the same again, as in requeued and supervised jobs."""
    run = train_once(pack, "--loss", own("focal"))
    plain = train_once(pack, run="plain")
    words = ["--data", pack, "--runs-dir", run.parent, *SAME, "--epochs", "2", "--run"]
    mine = ["train", *words, run.name, "--loss", own("focal")]
    config, before = plain / "config.toml", (plain / "config.toml").read_text()
    for name in ("loss", "metric", "augment", "model"):
        kept = [line for line in before.splitlines() if not line.startswith(name)]
        config.write_text("\n".join([*kept, f'{name} = "planted:function"']))
        for more in ([], ["--init", run / "model.safetensors"] * (name == "model")):
            ended = command(1, "train", *words, "plain", *more)
            assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
            assert f"was begun with --{name} planted:function, not with" in ended.err
        ended = command(1, "train", *words, "plain", f"--{name}", "planted:function")
        assert ended.code == 2 and "importing planted" in ended.err
    config.write_text(before)
    assert command(1, *mine).code == 0
