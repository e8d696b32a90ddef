"""Evaluation and prediction: every image once, the figures of plain torch, on any ranks."""

from __future__ import annotations

import csv
import json
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain as hp
from tests.support.packs import make_pack
from tests.support.pictures import arrays
from tests.support.ranks import command
from tests.support.runs import ROWS, train_once
from tests.support.spoil import overwrite

TEST = ROWS["test"]
SAME = ["--threads", "1", "--batch-size", "7"]  # eight blocks, the last of them smaller


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("kept", [1, 5, 1000])
def test_the_most_confident_mistakes(comm, trained, tmp_path, kept):
    run, (images, labels) = trained.run("plain"), arrays(trained.pack("plain"), "test")
    found = hp.evaluate(run, threads=1, batch_size=7, mistakes=kept, output=tmp_path / "a.json")
    network = hp.load(run)
    with torch.no_grad():
        sure, answers = network.model(network.preprocess(images)).softmax(1).max(1)
    wrong = [row for row in range(TEST) if answers[row] != labels[row]]
    assert 5 < len(wrong) < TEST
    wrong.sort(key=lambda row: -sure[row].item())
    shown = [(row, label, answer) for row, label, answer, _ in found.mistakes]
    assert shown == [(row, labels[row], answers[row]) for row in wrong[:kept]]
    assert [m.probability for m in found.mistakes] == pytest.approx(
        sure[wrong[:kept]].tolist(), 1e-5
    )


def test_blocks_of_any_size_are_added_to_the_same_bits_on_any_ranks(trained, tmp_path):
    found = []
    for ranks in (1, 2, 3):
        paths = tmp_path / f"{ranks}.json", tmp_path / f"{ranks}.csv"
        for name, path in zip(("evaluate", "predict"), paths, strict=True):
            ended = command(ranks, name, trained.run("tuned"), *SAME, "--output", path)
            assert ended.code == 0, ended.err
        found.append([path.read_bytes() for path in paths])
    assert found[0] == found[1] == found[2]


@pytest.mark.ranks(1, 3)
def test_21000_classes_need_no_dense_matrix(comm, tmp_path):
    classes = 21_000
    if comm.rank == 0:
        random = np.random.default_rng(0)
        splits = {
            name: (random.integers(0, 256, (53, 4, 4, 1), np.uint8), random.integers(0, 9, 53))
            for name in ("train", "test")
        }
        hp.write_pack(tmp_path / "a.h5", splits, [f"class{k}" for k in range(classes)])
    comm.Barrier()
    settings = {"data": str(tmp_path / "a.h5"), "runs_dir": str(tmp_path), "progress": "none"}
    made = {"model": "tests.support.nets:DataDependent", "lr": 1, "epochs": 2, "batch_size": 53}
    run = hp.train(**settings, **made, run="a", threads=1, test=False).folder
    output = tmp_path / "e.json"
    tracemalloc.start()
    found = hp.evaluate(run, trust_code=True, threads=1, batch_size=7, output=output)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, "a matrix takes 3.5 GB"
    comm.Barrier()
    images, labels = map(torch.from_numpy, arrays(settings["data"], "test"))
    inputs, labels = images.permute(0, 3, 1, 2) / 255, labels.long()
    answers = hp.load(run, trust_code=True).model(inputs).argmax(1)
    right = (labels == answers).double()
    assert found.accuracy == right.mean() and 0 < found.accuracy < 1
    recalls = [right[labels == k].mean() for k in labels.unique()]
    assert found.balanced_accuracy == pytest.approx(np.mean(recalls), rel=1e-12)
    written = json.loads(output.read_text())
    assert written["confusion"] is None and found.confusion is None
    counts = {"true": labels, "predicted": answers, "correct": labels[labels == answers]}
    for name, of in counts.items():
        assert written["by_class"][name] == torch.bincount(of, minlength=classes).tolist()


def test_numbers_drawn_in_evaluation_belong_to_the_block(tmp_path):
    """Of the run's own test or of another size; the state of torch's generator does not matter."""
    pack = make_pack(tmp_path / "a.h5", {"train": 29, "test": TEST})
    run = train_once(pack, "--model", "tests.support.nets:drawing_in_evaluation")
    found = []
    for ranks, words in ((1, SAME[:2]), (3, SAME[:2]), (1, SAME), (2, SAME)):
        output = tmp_path / f"{len(found)}.json"
        ended = command(ranks, "evaluate", run, "--trust-code", *words, "--output", output)
        assert ended.code == 0, ended.err
        found.append(json.loads(output.read_text()))
    own = json.loads((run / "evaluation-test.json").read_text())
    assert found[0] == found[1] == own and found[2] == found[3]
    assert found[2]["loss"] != own["loss"]


def test_figures_that_cannot_be_written_are_printed(trained, tmp_path):
    words = [trained.run("plain"), "--threads", "1", "--output", tmp_path / "nowhere/x.json"]
    ended = command(3, "evaluate", *words)
    assert ended.code == 1 and "nowhere/x.json" in ended.err
    assert f"test: {TEST} images, loss" in ended.out
    words[-1] = tmp_path / "nowhere/x.csv"
    assert command(3, "predict", *words).code == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_predict_answers_what_can_be_read_and_names_the_rest(trained, tmp_path, ranks):
    """At most 10 lines; in the order of the files. With --skip-bad, that is no failure."""
    photos, output = tmp_path / "photos", tmp_path / "files.csv"
    photos.mkdir()
    for number in range(29):
        noise = np.random.default_rng(number).integers(0, 256, (40, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(photos / f"{number:02}.png")
    words = ["predict", trained.run("plain"), photos, "--output", output]
    words += ["--batch-size", "2", "--threads", "1"]
    assert command(ranks, *words).code == 0
    whole = output.read_text().splitlines()
    names = [Path(line.partition(",")[0]).name for line in whole[1:]]
    assert names == [f"{number:02}.png" for number in range(29)]
    for bad in ([3, 17], [3, *range(5, 27)], [*range(29)]):
        for number in bad:
            (photos / f"{number:02}.png").write_bytes(b"no image")
        ended = command(ranks, *words)
        assert ended.code == 1 and f"{len(bad)} of 29 images" in ended.err
        named = [line.split()[0] for line in ended.err.splitlines() if line.startswith("  ")]
        assert [Path(name).name for name in named[:10]] == [f"{n:02}.png" for n in bad[:10]]
        assert (f"and {len(bad) - 10} more" in ended.err) == (len(bad) > 10)
        left = output.read_text().splitlines()
        assert left == [line for row, line in enumerate(whole, -1) if row not in bad]
        if len(bad) == 2:
            ended = command(ranks, *words, "--skip-bad")
            assert ended.code == 0 and output.read_text().splitlines() == left
            assert "2 of 29 images" in ended.err and "03.png" in ended.err


def test_an_answer_that_is_not_finite_is_left_out(tmp_path):
    pack = make_pack(tmp_path / "a.h5", {"train": 29, "test": TEST}, (8, 8, 1))
    images, labels = arrays(pack, "test")
    images[[5, 23], 0, 0] = 255
    others = np.flatnonzero(images[:, 0, 0, 0] != 255)
    splits = dict.fromkeys(("train", "test"), (images, labels))
    hp.write_pack(tmp_path / "marked.h5", splits, [f"class{k}" for k in range(10)])
    run = train_once(pack, "--model", "tests.support.nets:Unanswered")
    output = tmp_path / "a.csv"
    words = [run, "--trust-code", "--data", tmp_path / "marked.h5", "--output", output, *SAME]
    ended = command(2, "predict", *words)
    assert ended.code == 1 and f"{TEST - len(others)} of {TEST}" in ended.err
    with output.open(newline="") as file:
        assert [int(row["row"]) for row in csv.DictReader(file)] == others.tolist()


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_corrupt_images_have_no_answers(trained, trained_copy, tmp_path, name):
    pack = trained_copy.pack("plain")
    with h5py.File(pack) as file:
        place = file["test/images"].id.get_offset()
    overwrite(pack, place)
    words = [trained.run("plain"), "--data", pack, *SAME, "--output", tmp_path / "p"]
    ended = command(3, name, *words)
    assert ended.code == 1 and "sample 0 of split 'test' is corrupt" in ended.err
    lines = (tmp_path / "p").read_text().splitlines() if name == "predict" else []
    assert len(lines) == (TEST if name == "predict" else 0)  # a head, and all rows but one
