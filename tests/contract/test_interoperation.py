"""What a trained run is good for afterwards: other commands, and the Python API, on the same.

All read the runs of tests/support/runs.py. The figures of one way must be those of another. More of
each is in tests/tools.
"""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest

import hpctrain as hp
from tests.support.pictures import arrays
from tests.support.ranks import command
from tests.support.records import read_strictly
from tests.support.runs import ROWS, RUNS

SAME = ["--threads", "1"]  # as in the training: then the bits are the same


def figures_of(run):
    """What the run's own test found."""
    return json.loads((run / "evaluation-test.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_evaluate_finds_what_the_run_found_on_any_number_of_ranks(trained, name, tmp_path):
    expected = figures_of(trained.run(name))
    for ranks in (1, 2, 3):
        output = tmp_path / f"{ranks}.json"
        ended = command(ranks, "evaluate", trained.run(name), *SAME, "--output", output)
        assert ended.code == 0, ended.err
        assert json.loads(output.read_text()) == expected
    if name == "tuned":  # whose network is not the last, but the best
        return
    words = ["evaluate", trained.run(name), *SAME, "--split=validation", "--output", output]
    assert command(2, *words).code == 0
    *_, last, test = read_strictly(trained.run(name), "evaluation")
    assert (last["split"], test["split"]) == ("validation", "test")
    assert json.loads(output.read_text())["loss"] == last["loss"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("name", "split"), [("plain", "train"), ("plain", "test"), ("tuned", "test")]
)
def test_figures_sum_up_the_answers_to_every_image(trained, tmp_path, name, split, ranks):
    """Those to images of train come from two blocks, the last one short."""
    words = [trained.run(name), *SAME, f"--split={split}", "--output"]
    for subcommand, output in (("evaluate", "found.json"), ("predict", "answers.csv")):
        ended = command(ranks, subcommand, *words, tmp_path / output)
        assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "found.json").read_text())
    rows = [*csv.DictReader((tmp_path / "answers.csv").read_text().splitlines())]
    _, labels = arrays(trained.pack(name), split)
    assert [int(row["row"]) for row in rows] == [*range(ROWS[split])]
    assert [row["class"] for row in rows] == [f"class{label}" for label in labels]
    chances = np.array([[float(row[each]) for each in found["classes"]] for row in rows])
    assert chances.sum(1) == pytest.approx(1, abs=1e-5)
    assert [row["prediction"] for row in rows] == [f"class{k}" for k in chances.argmax(1)]
    assert [float(row["probability"]) for row in rows] == chances.max(1).tolist()
    confusion = np.zeros_like(found["confusion"])
    np.add.at(confusion, (labels, chances.argmax(1)), 1)
    assert found["confusion"] == confusion.tolist() != confusion.T.tolist()
    assert (found["rows"], found["accuracy"]) == (len(rows), confusion.trace() / len(rows))
    if name == "plain":  # the loss of the other is weighted
        right = np.maximum(chances[np.arange(len(rows)), labels], 1e-7)
        tolerance = 1e-4 if split == "train" else 1e-3  # of answers with six decimals
        assert found["loss"] == pytest.approx(-np.log(right).mean(), rel=tolerance)


def run_onnx(path, images):
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    return session.run(None, {"images": images})[0]


def run_pt2(path, images):
    import torch

    return torch.export.load(path).module()(torch.from_numpy(images)).numpy()


@pytest.mark.parametrize(("suffix", "run"), [(".onnx", run_onnx), (".pt2", run_pt2)])
def test_an_exported_network_answers_as_torch_does(trained, tmp_path, suffix, run):
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    network = hp.load(trained.run("tuned"))
    images, _ = arrays(trained.pack("tuned"), "test")
    inputs = network.preprocess(images)
    scores = network.model(inputs).detach().numpy()
    plain, bytes_in = tmp_path / f"plain{suffix}", tmp_path / f"bytes{suffix}"
    words = ["export", trained.run("tuned"), "--output"]
    assert command(1, *words, plain).code == 0
    assert command(1, *words, bytes_in, "--preprocess").code == 0
    assert np.allclose(run(plain, inputs.numpy()), scores, rtol=1e-5, atol=1e-5)
    assert np.allclose(run(bytes_in, images), scores, rtol=1e-5, atol=1e-5)


def test_watch_prints_a_line_for_each_run(trained):
    ended = command(1, "watch", "--runs-dir", trained.runs, "--once")
    assert (ended.code, ended.err) == (0, "")
    lines = {line.split()[0]: line for line in ended.out.splitlines()}
    assert lines.keys() == RUNS.keys()
    for name, line in lines.items():
        assert line.split()[1] == "done"
        assert f"{figures_of(trained.run(name))['loss']:.4f}" in line


def test_weights_work_outside_of_their_folder_and_without_the_pack(trained, tmp_path):
    lonely = tmp_path / "a.safetensors"
    shutil.copy(trained.run("plain") / "model.safetensors", lonely)
    images, _ = arrays(trained.pack("plain"), "test")
    found, expected = (hp.load(path).predict(images) for path in (lonely, trained.run("plain")))
    assert np.array_equal(found.probabilities, expected.probabilities)
    assert hp.load(lonely).config is None
