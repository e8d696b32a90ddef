"""`predict --figure` and `evaluate --mistakes`: which images are drawn, and where."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from hpctrain.report.results import draw_captioned
from tests.support.api import command_line
from tests.support.external import write
from tests.support.packs import make_pack
from tests.support.pictures import arrays, class_folders, tiles
from tests.support.ranks import command
from tests.support.runs import train_once

ONE_THREAD = ["--threads", "1", "--batch-size", "7"]


def read_sheet(path):
    with Image.open(path) as image:
        assert image.mode == "RGB"
        return np.asarray(image).astype(int)


def is_red(sheet, top, left):
    """Whether there is red below an image of 84x84."""
    caption = sheet[top + 84 : top + 84 + 50, left : left + 112]
    return (caption[:, :, 0] - caption[:, :, 1] > 100).any()


def test_predict_draws_random_images_of_a_split_the_same_ones_each_time(trained, tmp_path):
    run = trained.run("plain")
    for ranks in (1, 3):
        words = ["--output", tmp_path / f"{ranks}.csv", "--figure", "9", *ONE_THREAD]
        assert command(ranks, "predict", run, *words).code == 0
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "3.png").read_bytes()
    images, labels = arrays(trained.pack("plain"), "test")
    sheet = read_sheet(tmp_path / "1.png")
    found = {row: place for row, place in enumerate(tiles(sheet[:, :, 0], images, 3)) if place}
    assert len(found) == 9 and [*found] != [*range(9)]
    assert [*found.values()] == sorted(found.values()), "in the order of the split"
    answers = hp.load(run).predict(images)["label"]
    red = [is_red(sheet, *place) for place in found.values()]
    assert red == [answers[row] != labels[row] for row in found] and 0 < sum(red) < 9


@pytest.mark.ranks(1)
def test_evaluate_draws_the_mistakes_that_it_returns(comm, trained, tmp_path):
    found = hp.evaluate(trained.run("plain"), mistakes=10, output=tmp_path / "x.json")
    images, _ = arrays(trained.pack("plain"), "test")
    worst = [row for row, *_ in found.mistakes]
    sheet = read_sheet(tmp_path / "x.png")
    assert sheet.max(axis=2).min() == 0 and sheet[-1, -1].tolist() == [255, 255, 255]
    places = list(tiles(sheet[:, :, 0], images[worst], 3))
    assert None not in places and places == sorted(places)
    assert len({top for top, _ in places}) == 2  # rows of eight
    assert all(is_red(sheet, *place) for place in places)


def test_images_of_jpeg_files_and_floats_are_drawn(tmp_path):
    photos = class_folders(tmp_path / "photos", {"a": 43, "b": 31}, ".jpg", width=37, height=23)
    words = ["--size", "17x13", "--encoding", "jpeg", "--split", "0.5,0.5", "--jobs", "1"]
    assert command(1, "pack", photos, "--output", tmp_path / "jpeg.h5", *words).code == 0
    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "floats.h5", "w") as file:
        for name in ("train", "test"):
            file[f"{name}/x"] = random.normal(size=(29, 13, 17, 3), scale=3)
            file[f"{name}/y"] = random.integers(0, 3, 29)
    arrays = ["--images", "{split}/x", "--labels", "{split}/y", "--max-value", "2"]
    for name, more in (("jpeg", []), ("floats", arrays)):
        run = train_once(tmp_path / f"{name}.h5", "--model", "digits", *more, run=name)
        output = ["--output", tmp_path / f"{name}.csv", "--figure", "4"]
        assert command(2, "predict", run, *output).code == 0
        sheet = read_sheet(tmp_path / f"{name}.png")
        assert sheet.shape[0] > 6 * 13 and sheet.shape[1] > 4 * 6 * 17
        assert len(np.unique(sheet)) > 50
    with hp.Split(hp.read_pack(tmp_path / "jpeg.h5"), "test", threads=1) as split:
        images = split.gather(np.arange(len(split)), np.empty((len(split), 13, 17, 3), np.uint8))
    sheet = read_sheet(tmp_path / "jpeg.png")
    assert sum(place is not None for place in tiles(sheet[:, :, 0], images, 6)) == 4


@pytest.mark.parametrize(
    ("dtype", "low", "high", "channels"), [("u2", 0, 4000, 5), ("f4", -3.0, 9.0, 2)]
)
def test_images_of_any_type_are_drawn_by_the_range_of_the_training(
    tmp_path, dtype, low, high, channels
):
    """Of more than 3 channels, the first three; of 2, the first. A title says so."""
    steps = np.random.default_rng(0).integers(0, 256, (40, 12, 12, channels))
    steps[:, 0, :2] = [[0], [255]]
    images = (low + steps * ((high - low) / 255)).astype(dtype)
    path = write(tmp_path / "a.h5", images, np.arange(40) % 2)
    words = ["--images", "x", "--labels", "y", "--layout", "NHWC", "--split", "0.5,0.5"]
    words += ["--max-value", "4095"]
    run = train_once(path, "--model", "tests.support.nets:OneLayer", *words)
    words = [run, "--trust-code", "--split", "test", *ONE_THREAD, "--output"]
    assert command(1, "predict", *words, tmp_path / "a.csv", "--figure", "9").code == 0
    assert command(1, "evaluate", *words, tmp_path / "b.json", "--mistakes", "9").code == 0
    shown = ((images.astype(float) - low) / (high - low) * 255).round().clip(0, 255).astype(int)
    for name in "ab":
        sheet = read_sheet(tmp_path / f"{name}.png")
        assert (sheet[4:20, 4:300] < 128).any(), "a title"
        assert (sheet[4:20] == sheet[4:20, :, :1]).all()
        for channel in range(3):
            shift = channel if channels == 5 else 0
            places = tiles(sheet[20:, :, channel], shown[..., shift : shift + 1], 7)
            assert sum(place is not None for place in places) == 9


@pytest.mark.parametrize("normalize", ["pack", "image"])
def test_channels_of_different_units_are_drawn_by_their_own_means(tmp_path, normalize):
    steps = np.random.default_rng(0).integers(0, 9, (40, 12, 12, 3))
    steps[:, 0, :2] = [[0], [8]]
    images = (steps * [1e-3, 1.0, 100.0] + [0, 280, 50_000]).astype("f4")
    images[:, 5, 5] = -1
    path = write(tmp_path / "a.h5", images, np.arange(40) % 2)
    words = ["--images", "x", "--labels", "y", "--split", "0.5,0.5", "--nodata=-1"]
    words += ["--model", "tests.support.nets:OneLayer", "--normalize", normalize]
    run = train_once(path, *words)
    words = [run, "--trust-code", *ONE_THREAD, "--figure", "9"]
    assert command(1, "predict", *words, "--output", tmp_path / "a.csv").code == 0
    sheet = read_sheet(tmp_path / "a.png")
    for channel in range(3):
        drawn = sheet[24:108, 4:88, channel]
        assert drawn[40:42, 40:42].max() == 0, "no data"
        assert np.ptp(drawn) > 150


@pytest.mark.ranks(1, 3)
def test_files_are_drawn_but_none_that_cannot_be_read(comm, trained, tmp_path, monkeypatch, capsys):
    photos = tmp_path / "photos"
    if comm.rank == 0:
        class_folders(photos, {"x": 12}, width=28, height=28, channels=1)
        (photos / "x/003.png").write_bytes(b"no image")
    comm.Barrier()
    monkeypatch.chdir(tmp_path)
    words = [str(trained.run("plain")), "photos", "photos/x/001.png"]  # one of them twice
    assert command_line(["predict", *words, "--figure", "99", "--output", "-", *ONE_THREAD]) == 1
    printed = capsys.readouterr()
    if comm.rank == 0:
        names = [f"{n:03}.png" for n in range(12) if n != 3] + ["001.png"]
        images = [np.asarray(Image.open(photos / "x" / name))[:, :, None] for name in names]
        places = [*tiles(read_sheet(tmp_path / "predictions.png")[:, :, 0], images, 3)]
        assert None not in places and places[:11] == sorted(places[:11])
        assert "predictions.png" not in printed.out and "predictions.png" in printed.err
        assert len(printed.out.splitlines()) == 1 + 12


def test_no_mistakes_no_picture(tmp_path):
    pack = make_pack(tmp_path / "a.h5", {"train": 29, "test": 13}, (12, 12, 1), classes=1)
    run = train_once(pack, "--model", "digits")
    ended = command(2, "evaluate", run, "--mistakes", "6", "--output", tmp_path / "e.json")
    assert ended.code == 0 and "no mistakes" in ended.out
    assert not (tmp_path / "e.png").exists()


@pytest.mark.parametrize(
    ("output", "picture"),
    [("b.csv", "b.png"), ("b.JSON", "b.png"), ("b.v1", "b.v1.png"), ("b.png", "b.png.png")],
)
def test_the_picture_lies_beside_the_output_and_names_fit_their_images(
    trained, tmp_path, output, picture
):
    image = tmp_path / f"{'W' * 50}.png"
    Image.new("L", (28, 28)).save(image)
    words = ["--figure", "1", "--output", tmp_path / output]
    ended = command(1, "predict", trained.run("plain"), image, *words)
    assert ended.code == 0 and f"{output}: 1 images classified" in ended.out
    assert {path.name for path in tmp_path.iterdir()} == {image.name, output, picture}
    sheet = read_sheet(tmp_path / picture)
    assert (sheet[:, -4:] == 255).all() and (sheet[84:104, 50:] < 128).any()


def test_captions_up_to_240_pixels_are_whole():
    images = np.zeros((2, 48, 48, 1), np.uint8)
    words = ("none", "answer: effusion;pneumonia", "W" * 50)
    widths = [draw_captioned(images, [("a",), (word,)]).shape[1] // 2 - 8 for word in words]
    assert widths[0] == 120 < widths[1] < widths[2] == 240


def test_a_network_that_restores_images_has_no_answers(trained, tmp_path):
    run, image = trained.run("restored"), tmp_path / "x.png"
    Image.new("L", (28, 28)).save(image)
    for words in (["evaluate", run, "--mistakes", "3"], ["predict", run, image, "--figure", "3"]):
        ended = command(1, *words, "--output", tmp_path / "new")
        assert ended.code == 2 and words[-2] in ended.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("subcommand", ["predict", "evaluate"])
def test_a_picture_beside_the_output_replaces_no_other_file(trained, tmp_path, subcommand):
    """One that hpctrain has drawn is replaced, and the line says so."""
    picture = tmp_path / "b.png"
    Image.new("L", (28, 28)).save(picture)
    words = [subcommand, trained.run("plain"), "--output", tmp_path / "b.csv"]
    words += ["--figure", "1"] if subcommand == "predict" else ["--mistakes", "1"]
    for content in (picture.read_bytes(), b"no picture"):
        picture.write_bytes(content)
        ended = command(2, *words)
        assert ended.code == 2 and f"{picture} exists" in ended.err
        assert picture.read_bytes() == content and not (tmp_path / "b.csv").exists()
    picture.unlink()
    first, second = command(2, *words), command(2, *words)
    assert first.code == second.code == 0 and "(replaced)" not in first.out
    assert f"{picture} (replaced): " in second.out


def test_what_is_read_is_not_replaced(trained, tmp_path):
    """Whatever its name: a link to an image, the pack, the network."""
    image = tmp_path / "a.png"
    Image.new("L", (28, 28)).save(image)
    link = tmp_path / "b.csv"
    link.symlink_to(image)
    run = trained.run("plain")
    network = run / "model.safetensors"
    data = hp.load(run).metadata["pack"]
    before = [Path(path).read_bytes() for path in (image, network, data)]
    for words in (
        ["predict", run, image, "--output", link],
        ["predict", run, data, "--output", data],
        ["predict", run, "--output", data],
        ["predict", run, image, "--output", network],
        ["evaluate", run, "--output", data],
        ["evaluate", run, "--output", network],
    ):
        ended = command(2, *words)
        assert ended.code == 2 and f"{words[-1]} is read, and would be replaced" in ended.err
    assert before == [Path(path).read_bytes() for path in (image, network, data)]
