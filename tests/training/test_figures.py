"""`predict --figure` and `evaluate --mistakes`: pictures of images with their answers."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.config import Config, EvaluateConfig, PredictConfig, check_settings
from hpctrain.data.images import read_image
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference import evaluate, predict
from hpctrain.inference.gallery import picture_path
from hpctrain.inference.network import restore
from hpctrain.report import pictures
from hpctrain.training.train import train
from tests.data.pictures import class_folders, pack
from tests.support.packs import make_pack
from tests.training.runs import short_run

COUNTS = {"train": 29, "test": 43}


def make_data(folder, kind):
    """Data of this kind; what the settings of a run say about it."""
    if kind == "jpeg":
        photos = class_folders(folder / "images", {"a": 43, "b": 31}, ".jpg", width=37, height=23)
        pack(photos, folder / "data.h5", size="17x13", encoding="jpeg", split="0.5,0.5")
    elif kind == "floats":
        rng = np.random.default_rng(0)
        with h5py.File(folder / "data.h5", "w") as file:
            for name, count in COUNTS.items():
                file[f"{name}/x"] = rng.normal(size=(count, 13, 11, 3), scale=3)
                file[f"{name}/y"] = rng.integers(0, 3, count)
        return {"images": "{split}/x", "labels": "{split}/y", "max_value": 2.0}
    else:
        make_pack(folder / "data.h5", COUNTS, classes=5)
    return {}


@pytest.fixture
def made(comm, shared_tmp, request):
    """An untrained run on data of the kind that the test asks for: its folder."""
    kind = getattr(request, "param", "raw")
    more = comm.bcast(make_data(shared_tmp, kind) if comm.rank == 0 else None)
    config = short_run(shared_tmp, "data.h5", model="digits", run="a", test=False, **more)
    train(Config(**{**vars(config), "lr": 1e-9, "threads": 1, "batch_size": 8}), comm)
    comm.Barrier()
    return Path(config.runs_dir) / "a"


@pytest.fixture
def drawn(monkeypatch):
    """What was drawn on this rank: (images, captions, marked) of each picture."""
    found = []
    original = pictures.draw_captioned

    def draw(images, captions, marked):
        found.append((images, captions, [*marked]))
        return original(images, captions, marked)

    monkeypatch.setattr(pictures, "draw_captioned", draw)
    return found


def answers_of(folder, images):
    """Probability and predicted class of images (n, H, W, C), by torch alone."""
    model = restore(folder / "model.safetensors").model
    whole = 255 if images.dtype == np.uint8 else 1
    inputs = torch.from_numpy(images.astype(np.float32)).permute(0, 3, 1, 2) / whole
    with torch.no_grad():
        return [values.tolist() for values in model(inputs).softmax(1).max(1)]


def test_split(folder):
    """Images, labels and classes of the test split that the network knows."""
    metadata = restore(folder / "model.safetensors").metadata
    if metadata["external"]:
        with h5py.File(metadata["pack"]) as file:
            return file["test/x"][:] / 2.0, file["test/y"][:].tolist(), metadata["classes"]
    with Split(read_pack(metadata["pack"]), "test") as source:
        images = np.empty((len(source), *source.image_shape), np.uint8)
        return source.gather(np.arange(len(source)), images), [*source.labels], metadata["classes"]


test_split.__test__ = False


def same_pixels(shown, stored):
    """Whether an image in [0, 1] is the stored one, on the scale of its page."""
    if stored.dtype == np.uint8:
        return np.array_equal(np.rint(shown * 255), stored)
    return np.corrcoef(shown.ravel(), stored.ravel())[0, 1] > 0.99999


@pytest.mark.mpi
@pytest.mark.parametrize("made", ["raw", "jpeg", "floats"], indirect=True)
def test_the_most_confident_mistakes_of_a_split(comm, made, drawn, capsys):
    output = made.parent / "figures.json"
    asked = EvaluateConfig(run=str(made), output=str(output), mistakes=6, threads=1, batch_size=7)
    assert evaluate.main(asked) == 0
    printed = capsys.readouterr().out
    if comm.rank:
        assert drawn == [] and printed == ""
        return
    images, labels, classes = test_split(made)
    sure, answers = answers_of(made, images)
    wrong = [row for row in range(len(labels)) if answers[row] != labels[row]]
    wrong = sorted(wrong, key=lambda row: -sure[row])[:6]
    ((shown, captions, marked),) = drawn
    assert (len(shown), marked) == (6, [0, 1, 2, 3, 4, 5])
    for row, image, caption in zip(wrong, shown, captions, strict=True):
        assert same_pixels(image, images[row])
        true, answer = (classes[k] for k in (labels[row], answers[row]))
        assert caption == (f"true: {true}", f"answer: {answer}", f"{100 * sure[row]:.1f} %")
    confusion = np.array(json.loads(output.read_text())["confusion"])
    count = confusion.sum() - np.trace(confusion)
    assert f"figures.png: the 6 most confident of {count} mistakes" in printed
    with Image.open(output.with_suffix(".png")) as sheet:
        assert sheet.mode == "RGB" and sheet.width > 6 * 84


@pytest.mark.mpi
@pytest.mark.parametrize("made", ["raw", "jpeg", "floats"], indirect=True)
def test_random_images_of_a_split_with_their_answers(comm, made, drawn):
    output = made.parent / "answers.csv"
    asked = PredictConfig(run=str(made), output=str(output), figure=9, threads=1, batch_size=7)
    assert predict.main(asked) == 0
    assert predict.main(asked) == 0
    assert (made.parent / "answers.png").is_file()
    if comm.rank:
        assert drawn == []
        return
    images, labels, classes = test_split(made)
    sure, answers = answers_of(made, images)
    (shown, captions, marked), again = drawn
    assert np.array_equal(shown, again[0]) and captions == again[1]
    rows = []
    for image, caption in zip(shown, captions, strict=True):
        rows += [row for row in range(len(images)) if same_pixels(image, images[row])]
        true, answer = (classes[k] for k in (labels[rows[-1]], answers[rows[-1]]))
        assert caption[:2] == (f"true: {true}", f"answer: {answer}")
        assert float(caption[2][:-1]) == pytest.approx(100 * sure[rows[-1]], abs=0.06)
    assert len(set(rows)) == 9 and rows != [*range(9)]
    if images.dtype == np.uint8:  # the samples of an external file have another order
        assert rows == sorted(rows)
    assert marked == [n for n, row in enumerate(rows) if answers[row] != labels[row]]


@pytest.mark.mpi
def test_random_files_but_none_that_cannot_be_read(comm, made, drawn, monkeypatch, capsys):
    photos = made.parent / "photos"
    if comm.rank == 0:
        class_folders(photos, {"x": 12}, width=40, height=30)
        (photos / "x/003.png").write_bytes(b"no image")
    comm.Barrier()
    images = (str(photos), str(photos / "x/001.png"))  # one of them twice
    asked = PredictConfig(
        run=str(made), images=images, figure=99, output="-", threads=1, batch_size=5
    )
    monkeypatch.chdir(made.parent)
    with pytest.raises(RunError, match="1 of 13 images cannot be used"):
        predict.main(asked)
    printed = capsys.readouterr()
    if comm.rank:
        assert drawn == []
        return
    ((shown, captions, marked),) = drawn
    names = [f"{n:03}.png" for n in range(12) if n != 3] + ["001.png"]
    assert [caption[0] for caption in captions] == names and marked == []
    for image, name in zip(shown, names, strict=True):
        assert same_pixels(image, read_image(str(photos / "x" / name), (28, 28, 1)))
    assert (made.parent / "predictions.png").is_file()
    assert "predictions.png" not in printed.out and "12 images with their" in printed.err


@pytest.mark.mpi
def test_no_mistakes_no_picture(comm, made, drawn, monkeypatch, capsys):
    original = evaluate.evaluate

    def never_wrong(*arguments):
        found = original(*arguments)
        counts, right = evaluate.Confusion(5), np.zeros(found.rows, int)
        counts.add(right, right)
        return evaluate.dataclasses.replace(found, counts=counts, mistakes=[])

    monkeypatch.setattr(evaluate, "evaluate", never_wrong)
    monkeypatch.chdir(made.parent)
    assert evaluate.main(EvaluateConfig(run=str(made), mistakes=6, threads=1)) == 0
    assert drawn == [] and not (made / "mistakes.png").exists()
    assert comm.rank or capsys.readouterr().out.endswith("\ntest: no mistakes to draw\n")


@pytest.mark.mpi
def test_a_network_that_restores_images_has_no_answers(comm, shared_tmp):
    if comm.rank == 0:
        make_pack(shared_tmp / "data.h5", COUNTS)
    comm.Barrier()
    asked = short_run(shared_tmp, "data.h5", run="a", task="denoise", test=False, threads=1)
    train(asked, comm)
    run = str(shared_tmp / "runs/a")
    with pytest.raises(UsageError, match="--mistakes shows wrong classes"):
        evaluate.main(EvaluateConfig(run=run, mistakes=3, threads=1))
    with pytest.raises(UsageError, match="--figure shows classes"):
        predict.main(PredictConfig(run=run, images=("x.png",), figure=3, threads=1))


@pytest.mark.parametrize(
    ("output", "picture"),
    [
        *((None, "default.png"), ("-", "default.png"), ("a/b.csv", "a/b.png")),
        *(("b.JSON", "b.png"), ("b", "b.png"), ("b.v1", "b.v1.png"), ("b.png", "b.png.png")),
    ],
)
def test_the_picture_lies_beside_the_output(output, picture):
    assert picture_path(output, Path("default.png")) == Path(picture)


def test_a_page_holds_so_many_images():
    for settings in (PredictConfig(figure=1001), EvaluateConfig(mistakes=-1)):
        with pytest.raises(UsageError, match=r"number in \[0, 1000\]"):
            check_settings(settings)
