"""What `import hpctrain as hp` offers: train, evaluate, load, predict, history."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import pydoc
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain as hp
from tests.support.api import command_line, read_records, task_class
from tests.support.launch import as_flags
from tests.support.packs import make_pack
from tests.support.pictures import arrays, class_folders, file_names

ROWS = {"train": 47, "validation": 12, "test": 29}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def data(tmp_path):
    """Settings of a short run, as keywords."""
    make_pack(tmp_path / "a.h5", ROWS, (12, 12, 3), 5)
    return {
        "data": str(tmp_path / "a.h5"),
        "model": "digits",
        "epochs": 2,
        "batch_size": 16,
        "runs_dir": str(tmp_path / "runs"),
        "progress": "none",
        "threads": 1,
    }


@pytest.fixture
def photos(tmp_path):
    """A folder of 9 image files of three sizes."""
    for number in range(3):
        size = {"width": 20 + 9 * number, "height": 28, "channels": 1}
        class_folders(tmp_path / "photos" / str(number), {"x": 3}, **size)
    return tmp_path / "photos"


def opened_files():
    """The open files of runs and packs."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in names if name.endswith(".h5") or "/runs/" in name)


def state_of_process():
    """What a call is to leave as it was."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    alive = {thread.name for thread in threading.enumerate()}
    flags = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torchs = flags, torch.get_num_threads(), torch.get_rng_state().tolist()
    return handlers, alive, opened_files(), [*warnings.filters], torchs


@pytest.mark.ranks(1, 3)
def test_train_trains_as_the_command_line_does(comm, data, capsys):
    more = {"shards": 4, "deterministic": True}
    torch.set_num_threads(2)
    before = state_of_process()
    found = hp.train(**data, run="a", **more)
    assert state_of_process() == before
    assert (found.status, found.exit_code, found.step, found.epoch) == ("done", 0, 6, 2)
    assert comm.allgather(found) == [found] * comm.size
    assert command_line(["train", *as_flags({**data, **more, "run": "b"})]) == 0
    if comm.rank == 0:
        runs = Path(data["runs_dir"])
        ends = [list(read_records(runs / name))[-1] for name in "ab"]
        assert ends[0]["digest"] == ends[1]["digest"]
        assert found.figures["test_accuracy"] == ends[0]["test_accuracy"]
        names = {f"{s}{n}" for s in ("", "validation_", "test_") for n in ("loss", "accuracy")}
        assert {*found.figures} == names
    assert capsys.readouterr().out == ""
    assert hp.train(**data, run="a", **more) == found
    assert comm.rank or "is finished, 2 epochs" in capsys.readouterr().out


@pytest.mark.ranks
def test_a_configuration_and_settings_that_take_precedence(comm, data):
    config = hp.Config(**data, run="a")
    found = hp.train(config, epochs=1, lr=np.float32(0.5), data=Path(data["data"]), seed=None)
    network = hp.load(found.folder, device=torch.device("cpu"))
    assert network.config == dataclasses.replace(config, epochs=1, lr=0.5)
    planned = hp.train(config, epochs=1, lr=0.5, dry_run=True, run="b")
    assert planned.status == "planned" and "status='planned'" in repr(planned)
    assert not (Path(data["runs_dir"]) / "b").exists()


def tiny(image_shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12 * 12 * 3, classes))


def flat(image_shape, classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(int(np.prod(image_shape)), classes)
    )


@pytest.mark.ranks
def test_settings_of_python_types_are_those_of_the_command_line(comm, data):
    given = {**data, "epochs": 1, "model": tiny, "class_weights": [1, 2, 3, 4, 5.5], "run": "a"}
    folder = hp.train(**given).folder
    network = hp.load(folder, trust_code=True)
    assert network.config.model == f"{__name__}:tiny"
    assert network.config.class_weights == (1, 2, 3, 4, 5.5)
    assert hp.evaluate(folder, trust_code=True, threads=1).rows == ROWS["test"]
    with pytest.raises(hp.UsageError, match=f"{__name__} has no .*lambda"):
        hp.train(**{**given, "model": lambda shape, classes: tiny(shape, classes), "run": "b"})


@pytest.mark.ranks
def test_mistakes_are_usage_errors_of_one_line_on_all_ranks(comm, data):
    mistakes = {
        "'datta', did you mean 'data'": dict(datta="x"),
        "epochs": dict(epochs=True),
        "1.5": dict(epochs=1.5),
        "nope": dict(data="nope"),
        "'epoch', did you mean 'epochs'": dict(epoch=None),
    }
    for message, wrong in mistakes.items():
        with pytest.raises(hp.UsageError, match=message) as caught:
            hp.train(**{**data, **wrong})
        assert "\n" not in str(caught.value)
        assert caught.value._render_traceback_() == [f"UsageError: {caught.value}"]  # by IPython
    with pytest.raises(hp.UsageError, match="a.h5 is no hpctrain.Config"):
        hp.train("a.h5")
    for call in (hp.load, hp.evaluate, hp.history):
        with pytest.raises(hp.UsageError, match="there is no run .*'b'"):
            call("b", runs_dir=data["runs_dir"])


@pytest.mark.ranks
def test_evaluate_leaves_the_process_as_it_was_and_prints_no_tables(
    comm, trained, tmp_path, capsys
):
    torch.set_num_threads(2)
    before = state_of_process()
    given = {"split": "validation", "threads": 1, "mistakes": 3, "output": tmp_path / "x.json"}
    found = hp.evaluate(trained.run("plain"), **given)
    assert state_of_process() == before
    assert "recall" not in capsys.readouterr().out
    written = json.loads((tmp_path / "x.json").read_text())
    assert (found.loss, found.accuracy) == (written["loss"], written["accuracy"])
    assert found.confusion.tolist() == written["confusion"] and len(found.mistakes) == 3
    assert (tmp_path / "x.png").is_file()


@pytest.mark.ranks(1)
def test_predict_answers_as_the_command_does(comm, trained, photos, tmp_path):
    """Files, arrays and Pillow's images of any sizes, and one by one."""
    words = [str(trained.run("plain")), str(photos), "--threads=1", f"--output={tmp_path}/a.csv"]
    assert command_line(["predict", *words]) == 0
    with open(tmp_path / "a.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    network = hp.load(trained.run("plain"))
    before = state_of_process()
    answers = network.predict(photos)
    assert state_of_process() == before
    assert [*answers] == [*lines[0]][:2] + ["label", *[*lines[0]][2:]]
    assert answers["file"].tolist() == [line["file"] for line in lines]
    assert answers["prediction"].tolist() == [line["prediction"] for line in lines]
    assert [network.classes[k] for k in answers["label"]] == answers["prediction"].tolist()
    for name in ("probability", *network.classes):
        assert [f"{value:.6f}" for value in answers[name]] == [line[name] for line in lines]
    assert answers.probabilities.dtype == np.float32 and answers.unusable == {}
    files = sorted(photos.rglob("*.png"))
    images = [Image.open(file) for file in files]
    names = [*map(str, files)]
    for given in (files, names, iter(files), np.array(names), images, [*map(np.asarray, images)]):
        found = network.predict(given, batch_size=4)
        assert np.allclose(found.probabilities, answers.probabilities, rtol=1e-5)
    assert found["row"].tolist() == [*range(9)]
    alone = network.predict(np.asarray(images[5]))
    assert np.allclose(alone.probabilities, answers.probabilities[5:6], rtol=1e-5)
    scores = network.model(network.preprocess(photos))
    assert np.allclose(scores.softmax(1).detach(), answers.probabilities, rtol=1e-5)


@pytest.mark.ranks(1)
def test_arrays_are_scaled_as_in_the_training(comm, trained):
    """The network computes in evaluation mode, and is put back into its own."""
    network, images = hp.load(trained.run("plain")), arrays(trained.pack("plain"), "test")[0][:29]
    inputs, expected = network.preprocess(images), network.predict(images).probabilities
    assert not network.model.training
    network.model.train()
    mean, std = (np.array(network.metadata[name]) for name in ("mean", "std"))
    scaled = ((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert np.allclose(inputs.numpy(), scaled, atol=1e-5) and inputs.shape == (29, 1, 28, 28)
    colour = np.repeat(images, 3, axis=3)  # is made gray
    unit = images / 255
    for given in (
        unit.astype("<f4"),
        unit.astype(">f4"),
        unit.astype("f2"),
        unit[..., 0],
        np.asfortranarray(unit),
        torch.from_numpy(unit),
        unit[:, None, :, :, 0].transpose(0, 2, 3, 1),
        (image for image in images),
        images[..., 0],
        images[::-1, ::-1][::-1, ::-1],
        colour,
    ):
        assert np.allclose(network.predict(given).probabilities, expected, rtol=1e-3, atol=1e-5)
    assert np.array_equal(network.predict(images).probabilities, expected)
    assert network.model.training


REFUSED = {
    r"uint8 \(3, 28, 28\)": np.zeros((2, 3, 28, 28), np.uint8),
    r"uint8 \(40, 30, 4\)": np.zeros((40, 30, 4), np.uint8),
    "files among arrays": ["nowhere.png", np.zeros((28, 28, 1), np.uint8)],
    r"uint8 \(4,\)": np.zeros(4, np.uint8),
    "uint16 images do not say": np.zeros((2, 28, 28, 1), np.uint16),
    "image of bool": np.zeros((2, 28, 28, 1), bool),
    "values from 200 to 200": np.full((2, 28, 28, 1), 200.0),
    r"float32 \(20, 28, 1\)": np.zeros((2, 20, 28, 1), np.float32),
    "float32, uint8": [np.zeros((28, 28, 1), t) for t in (np.uint8, np.float32)],
    "no such file": "nowhere.png",
    "a masked array": np.ma.masked_less(np.ones((28, 28), np.uint8), 1),
    "a masked": [np.ma.masked_less(np.ones((28, 28), np.uint8), 1)],
    "image of complex64": np.zeros((28, 28, 1), np.complex64),
    f"image of {np.dtype(np.longdouble)}": np.zeros((28, 28, 1), np.longdouble),
    "int64 images do not say": np.zeros((28, 28, 1), int),
    "BFloat16": torch.zeros(28, 28, 1, dtype=torch.bfloat16),
    "requires grad": [torch.zeros(28, 28, 1, requires_grad=True)],
    r"image of int64 \(\)": np.array(5),
    r"image of float64 \(1, 28, 28\)": np.zeros((3, 1, 28, 28)),
    "values from -1 to 0": np.full((28, 28), -1.0) + np.eye(28),
    "None is no image": None,
    r"flat images \(5, 784\)": np.zeros((5, 784), np.uint8),
    "image of object": [{}],
}


@pytest.mark.ranks(1)
def test_images_that_no_network_takes(comm, trained):
    network = hp.load(trained.run("plain"))
    for message, images in REFUSED.items():
        for take in (network.predict, network.preprocess):
            with pytest.raises(hp.UsageError, match=message):
                take(images)


@pytest.mark.ranks(1)
def test_gray_images_whose_width_looks_like_channels_are_a_batch(comm, data, tmp_path):
    """(N, H, 3) of a network for images of Hx3, and not one colour image."""
    make_pack(tmp_path / "narrow.h5", ROWS, (12, 3, 1), 5)
    narrow = {"data": str(tmp_path / "narrow.h5"), "run": "narrow", "epochs": 1, "model": flat}
    network = hp.load(hp.train(**{**data, **narrow}).folder, trust_code=True)
    assert len(network.predict(np.zeros((7, 12, 3), np.uint8))["row"]) == 7
    assert len(network.predict(np.zeros((12, 3, 1), np.uint8))["row"]) == 1
    assert len(network.predict(np.zeros((12, 3), np.uint8))["row"]) == 1


@pytest.mark.ranks(1)
def test_networks_of_other_channels_than_pictures_take_arrays(comm, data, tmp_path, photos):
    """Arrays of the network's shape, such as the rows of its HDF5 file."""
    make_pack(tmp_path / "four.h5", ROWS, (12, 12, 4), 5)
    four = {"data": str(tmp_path / "four.h5"), "run": "four", "epochs": 1, "model": flat}
    network = hp.load(hp.train(**{**data, **four}).folder, trust_code=True)
    images = arrays(tmp_path / "four.h5", "test")[0]
    expected = network.predict(images).probabilities
    unit = (images / 255).astype("f4")
    assert np.allclose(network.predict(unit).probabilities, expected, rtol=1e-3, atol=1e-5)
    alone = network.predict(images[5]).probabilities
    assert np.allclose(alone, expected[5:6], rtol=1e-3, atol=1e-5)
    for given in (photos, Image.new("RGB", (12, 12)), images[:, :9], np.zeros((12, 12, 3), "u1")):
        reason = "[13] channels?, not 4|12, 12, 4"
        with pytest.raises((hp.RunError, hp.UsageError), match=reason):
            network.predict(given)


@pytest.mark.ranks(1)
def test_out_of_memory_names_the_batch_size(comm, trained):
    def fill(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    network = hp.load(trained.run("plain"))
    handle = torch.nn.modules.module.register_module_forward_pre_hook(fill)
    try:
        with pytest.raises(hp.RunError, match=r"^out of memory .*: a smaller batch_size needs"):
            network.predict(np.zeros((2, *network.image_shape), np.uint8))
        with pytest.raises(hp.RunError, match=r"^out of memory .*: a smaller --batch-size needs"):
            hp.evaluate(trained.run("plain"), threads=1)
    finally:
        handle.remove()


@pytest.mark.ranks(1)
def test_images_that_cannot_be_read(comm, trained, photos):
    network = hp.load(trained.run("plain"))
    before = state_of_process()
    (photos / "0/x/001.png").write_bytes(b"no image")
    for take in (network.predict, network.preprocess):
        with pytest.raises(hp.RunError, match="1 of 9 images cannot be used") as caught:
            take(photos)
        assert "0/x/001.png cannot be read as an image" in str(caught.value)
    answers = network.predict(photos, skip_bad=True)
    assert len(answers["file"]) == len(answers.probabilities) == 8
    assert [Path(name).name for name in answers.unusable] == ["001.png"]
    assert state_of_process() == before
    broken = np.zeros((3, 28, 28, 1), np.float32)
    broken[1] = np.nan
    with pytest.raises(hp.RunError, match="image 1 holds NaN or infinite values"):
        network.predict(broken)
    assert network.predict(broken, skip_bad=True)["row"].tolist() == [0, 2]
    assert len(network.predict([])["prediction"]) == 0


@pytest.mark.ranks(1)
def test_a_folder_is_listed_as_pack_lists_it(comm, trained, photos, tmp_path, capfd):
    """By content and not by suffix; linked folders, but neither loops nor devices."""
    network = hp.load(trained.run("plain"))
    image = (photos / "0/x/000.png").read_bytes()
    for name in ("0/a", "0/b.JFIF", "0/@eaDir/1.png", "1/__macosx/1.png", "1/THUMBS.DB", "0/c.txt"):
        (photos / name).parent.mkdir(exist_ok=True)
        (photos / name).write_bytes(image)
    (photos / "0/c.txt").write_text("no image")
    (photos / "2/zero.png").symlink_to("/dev/zero")
    (photos / "2/loop").symlink_to(photos)
    (photos / "1/linked").symlink_to(photos / "2/x")
    answers = network.predict(photos, skip_bad=True)
    said = capfd.readouterr().err
    assert "system: 3 names (0/@eaDir, 1/THUMBS.DB, 1/__macosx)" in said
    assert "1 link (2/loop/)" in said
    words = ["pack", photos, "--size", "20x20", "--output", tmp_path / "b.h5", "--skip-bad"]
    assert command_line([*map(str, words), "--split", "1", "--jobs", "1"]) == 0
    packed = {*file_names(tmp_path / "b.h5")}
    assert {os.path.relpath(file, photos) for file in answers["file"]} == packed
    assert len(packed) == 14 and "left out" in capfd.readouterr().err
    assert [os.path.relpath(file, photos) for file in answers.unusable] == ["0/c.txt", "2/zero.png"]
    for name, text in {"/dev/zero": "regular file", tmp_path / "x.zip": "an archive"}.items():
        (tmp_path / "x.zip").write_bytes(b"PK\3\4")
        with pytest.raises(hp.UsageError, match=text):
            network.predict([name])


@pytest.mark.ranks(1)
def test_images_are_cropped_where_the_pack_cropped_them(comm, photos, tmp_path):
    found, classes = [], str(class_folders(tmp_path / "classes", {"a": 9, "b": 9}, width=20))
    for crop in ([], ["--crop"]):
        pack, name = str(tmp_path / f"{len(crop)}.h5"), f"r{len(crop)}"
        words = [classes, "--size", "16x10", "--output", pack, "--jobs", "1"]
        assert command_line(["pack", *words, *crop, "--split", "0.6,0.4"]) == 0
        given = {"data": pack, "runs_dir": str(tmp_path), "run": name, "model": "digits"}
        hp.train(**given, epochs=1, batch_size=4, threads=1, progress="none")
        network = hp.load(tmp_path / name)
        images = [Image.open(file) for file in sorted(photos.rglob("*.png"))]
        inputs = network.preprocess(photos)
        for same in (images, [*map(np.asarray, images)]):
            assert torch.equal(network.preprocess(same), inputs)
        found.append(inputs)
    assert not torch.equal(*found)


def test_classes_of_any_names_have_columns_of_their_own():
    names = ["file", "x", "y", "probability"]
    chances = np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
    answers = task_class("classify")(classes=tuple(names)).table(chances)
    assert [*answers][3:] == ["file (0)", "x", "y", "probability (3)"]
    assert answers["prediction"] == ["probability (3)"]


def test_the_record_as_columns(trained):
    steps, epochs, evaluations = hp.history("plain", trained.runs)
    records = [r for r in read_records(trained.run("plain")) if r["kind"] == "step"]
    assert steps["time"].dtype == np.dtype("datetime64[ms]")
    assert f"{steps['time'][0]}Z" == records[0]["time"]
    assert steps["loss"].tolist() == [record["loss"] for record in records]
    computing = [record["seconds"]["compute"] for record in records]
    assert steps["seconds_compute"].tolist() == computing
    assert steps["step"].tolist() == [*range(1, 15)] and steps["step"].dtype.kind == "i"
    assert evaluations["split"].tolist() == ["validation", "validation", "test"]
    assert epochs["epoch"].tolist() == [1, 2]
    lines = repr(hp.history("plain", trained.runs)).splitlines()
    assert len(lines) == 3 and lines[0].startswith("steps: 14 rows of time, epoch, step, loss, ")


def test_numbers_that_were_not_recorded_are_nan(tmp_path):
    lines = [{"loss": 1.0}, {"loss": None, "nonfinite": ["loss"]}, {"f1": 0.5, "loss": 2.0}]
    with open(tmp_path / "progress.jsonl", "w") as file:
        for n, each in enumerate(lines):
            record = {"kind": "step", "time": f"2030-01-0{n + 1}T00:00:00.000Z", "step": n} | each
            file.write(json.dumps(record) + "\n")
    steps = hp.history(tmp_path).steps
    assert {*steps} == {"time", "step", "loss", "f1"}
    assert np.array_equal(steps["loss"], [1, np.nan, 2], equal_nan=True)
    assert np.array_equal(steps["f1"], [np.nan, np.nan, 0.5], equal_nan=True)
    assert hp.history(tmp_path).epochs == {}
    (tmp_path / "sweep.toml").touch()
    with pytest.raises(hp.UsageError, match="is a sweep: name one of its runs"):
        hp.history(tmp_path)


def send(*numbers):
    """A function for on_evaluation that sends these signals to this process, the first time.

    For tests in the process of pytest: of a rank that mpirun started, they would mean other things.
    """
    left = [*numbers]

    def f(record):
        while left:
            os.kill(os.getpid(), left.pop(0))

    return f


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (signal.SIGINT, "stopped", 0),
        (signal.SIGTERM, "preempted", 75),
        (signal.SIGUSR1, "preempted", 75),
    ],
)
def test_signals_end_a_run_and_leave_nothing_behind(data, number, status, code):
    before = state_of_process()
    found = hp.train(**data, run="a", validate_every="2steps", on_evaluation=send(number))
    assert (found.status, found.exit_code) == (status, code)
    assert found.step == 3, "the step after the first validation"
    assert state_of_process() == before
    assert ("test_loss" in found.figures) == (status == "stopped")
    done = hp.train(**data, run="a", validate_every="2steps")
    assert (done.status, done.step, done.exit_code) == ("done", 6, 0)


def test_a_second_interrupt_ends_at_once_and_the_run_can_be_resumed(data):
    before = state_of_process()
    more = {"run": "a", "validate_every": "2steps", "checkpoint_every": "1step"}
    with pytest.raises(KeyboardInterrupt):
        hp.train(**data, **more, on_evaluation=send(signal.SIGINT, signal.SIGINT))
    assert state_of_process() == before
    assert hp.train(**data, **more).status == "done"


@pytest.mark.ranks
def test_on_evaluation_gets_every_validation_and_stops_the_run(comm, data):
    seen = []
    found = hp.train(**data, run="a", on_evaluation=seen.append)
    assert found.status == "done"
    if comm.rank == 0:
        records = [r for r in read_records(found.folder) if r["kind"] == "evaluation"]
        assert seen == [r for r in records if r["split"] == "validation"] and len(seen) == 2
    else:
        assert seen == []
    longer = {**data, "epochs": 5, "run": "b"}
    found = hp.train(**longer, on_evaluation=lambda record: record["epoch"] == 2)
    ends = comm.allgather((found.status, found.exit_code, found.step))
    assert ends == [("stopped", 0, 7)] * comm.size  # of 3 steps an epoch
    assert hp.train(**longer).status == "done"
    bare = str(Path(data["runs_dir"]) / "bare.h5")
    if comm.rank == 0:
        make_pack(Path(bare), {"train": 47}, (12, 12, 3), 5)
    comm.Barrier()
    own = print if comm.rank == 0 else None  # the others may leave it out
    with pytest.raises(hp.UsageError, match="on_evaluation needs a split validation"):
        hp.train(**{**data, "data": bare}, on_evaluation=own)


@pytest.mark.ranks(1)
def test_an_error_in_on_evaluation_ends_the_run(comm, data):
    def fail(record):
        raise ValueError(f"seen {record['split']}")

    before = state_of_process()
    with pytest.raises(ValueError, match="seen validation"):
        hp.train(**data, run="a", on_evaluation=fail)
    assert state_of_process() == before
    end = list(read_records(Path(data["runs_dir"]) / "a"))[-1]
    assert (end["status"], end["reason"]) == ("failed", "ValueError: seen validation")


@pytest.mark.ranks(1)
def test_a_run_over_jpeg_files_leaves_nothing_behind(comm, data, tmp_path):
    folder = class_folders(tmp_path / "jpeg", {"a": 9, "b": 9}, ".jpg", width=28, height=28)
    pack = str(tmp_path / "jpeg.h5")
    assert command_line(["pack", str(folder), "--encoding=jpeg", "--jobs=1", "--output", pack]) == 0
    before = state_of_process()
    for dry_run in (True, False):
        hp.train(**{**data, "data": pack, "batch_size": 8}, run="jpeg", dry_run=dry_run)
        assert state_of_process() == before


@pytest.mark.ranks(1)
def test_training_in_another_thread(comm, data):
    """As web applications do; it cannot catch signals."""
    found = []
    thread = threading.Thread(target=lambda: found.append(hp.train(**data, run="a")))
    thread.start()
    thread.join(60)
    assert found[0].status == "done"


def test_all_names_are_there_with_docstrings():
    names = {}
    exec("from hpctrain import *", names)
    offered = {name for name in names if not name.startswith("__")}
    assert {"train", "evaluate", "load", "history", "Config", "UsageError"} <= offered <= {*dir(hp)}
    for name in offered:
        assert len(pydoc.getdoc(getattr(hp, name)).split()) > 4, f"{name} has no docstring"
    shown = pydoc.plain(pydoc.render_doc(hp))
    assert all(f"    {name}(" in shown or f"class {name}" in shown for name in offered)
