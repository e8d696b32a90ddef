"""What `import hpctrain as hp` offers: train, evaluate, load, predict, history."""

from __future__ import annotations

import ast
import contextlib
import csv
import dataclasses
import io
import json
import os
import pydoc
import re
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain as hp
from hpctrain.config import Config, EvaluateConfig, PackConfig, PredictConfig
from hpctrain.data.pack import make_pack as pack_images
from hpctrain.data.pack import write_pack
from hpctrain.inference import evaluate as evaluating
from hpctrain.inference import predict as predicting
from hpctrain.launcher import notice_signals
from hpctrain.report.bar import terminal_columns
from hpctrain.report.record import read_records
from hpctrain.report.recorder import Recorder
from hpctrain.training.control import is_locked
from hpctrain.training.train import train
from tests.data.pictures import class_folders, picture
from tests.support.launch import ROOT, run, run_mpi
from tests.support.packs import make_pack

ROWS = {"train": 47, "validation": 12, "test": 29}
NAMES = ("loss", "accuracy")
SIGNALS = (signal.SIGINT, *notice_signals())


@pytest.fixture
def data(comm, shared_tmp):
    """Settings of a short run, as keywords."""
    if comm.rank == 0:
        make_pack(shared_tmp / "a.h5", ROWS, (28, 28, 3), 5)
    comm.Barrier()
    return {
        "data": str(shared_tmp / "a.h5"),
        "model": "digits",
        "epochs": 2,
        "batch_size": 16,
        "runs_dir": str(shared_tmp / "runs"),
        "progress": "none",
        "threads": 1,
    }


@pytest.fixture
def trained(comm, data):
    """A run of the name "a": its folder."""
    hp.train(**data, run="a", shards=4, deterministic=True)
    return Path(data["runs_dir"]) / "a"


def state_of_process():
    """What a call is to leave as it was."""
    handlers = [signal.getsignal(number) for number in SIGNALS]
    alive = {thread.name for thread in threading.enumerate()}
    flags = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torchs = flags, torch.get_num_threads(), torch.get_rng_state().tolist()
    return handlers, alive, opened_files(), [*warnings.filters], torchs


def opened_files():
    """The open files of runs and packs."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(name for name in names if name.endswith(".h5") or "/runs/" in name)


@pytest.mark.mpi
def test_train_trains_as_the_command_line_does(comm, data, capsys):
    more = {"shards": 4, "deterministic": True}
    torch.set_num_threads(2)
    before = state_of_process()
    found = hp.train(**data, run="a", **more)
    assert state_of_process() == before
    assert (found.status, found.exit_code, found.step, found.epoch) == ("done", 0, 6, 2)
    assert comm.allgather(found) == [found] * comm.size
    assert train(Config(**data, run="b", **more), comm) == 0
    if comm.rank == 0:
        runs = Path(data["runs_dir"])
        ends = [list(read_records(runs / name))[-1] for name in "ab"]
        assert ends[0]["digest"] == ends[1]["digest"]
        assert found.figures["test_accuracy"] == ends[0]["test_accuracy"]
        assert {*found.figures} == {f"{s}{n}" for s in ("", "validation_", "test_") for n in NAMES}
    assert capsys.readouterr().out == ""
    assert hp.train(**data, run="a", **more) == found
    assert comm.rank or "is finished, 2 epochs" in capsys.readouterr().out


@pytest.mark.mpi
def test_a_configuration_and_settings_that_take_precedence(comm, data):
    config = Config(**data, run="a")
    found = hp.train(config, epochs=1, lr=np.float32(0.5), data=Path(data["data"]), seed=None)
    network = hp.load(found.folder, device=torch.device("cpu"))
    assert network.config == dataclasses.replace(config, epochs=1, lr=0.5)
    assert hp.train(config, epochs=1, lr=0.5, dry_run=True, run="b").status == "planned"
    assert not (Path(data["runs_dir"]) / "b").exists()


def tiny(image_shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28 * 3, classes))


@pytest.mark.mpi
def test_settings_of_python_types_are_those_of_the_command_line(comm, data):
    given = {**data, "epochs": 1, "model": tiny, "class_weights": [1, 2, 3, 4, 5.5], "run": "a"}
    folder = hp.train(**given).folder
    network = hp.load(folder, trust_code=True)
    assert network.config.model == f"{__name__}:tiny"
    assert network.config.class_weights == "1,2,3,4,5.5"
    assert hp.evaluate(folder, trust_code=True, threads=1).rows == ROWS["test"]
    with pytest.raises(hp.UsageError, match="test_api has no .*lambda"):
        hp.train(**{**given, "model": lambda shape, classes: tiny(shape, classes), "run": "b"})


@pytest.mark.mpi
def test_mistakes_are_usage_errors_of_one_line_on_all_ranks(comm, data, trained):
    mistakes = {
        "unknown setting 'datta', did you mean 'data'": dict(datta="x"),
        "epochs must be": dict(epochs=True),
        "expected an integer": dict(epochs=1.5),
        "give 1 or more": dict(epochs=0),
        "no such network": dict(model="nope"),
        "is no file and no built-in set": dict(data="nope"),
        "unknown setting 'epoch', did you mean 'epochs'": dict(epoch=None),
    }
    for message, wrong in mistakes.items():
        with pytest.raises(hp.UsageError, match=message) as caught:
            hp.train(**{**data, **wrong})
        assert "\n" not in str(caught.value)
        assert caught.value._render_traceback_() == [f"UsageError: {caught.value}"]  # by IPython
    with pytest.raises(hp.UsageError, match="a.h5 is no hpctrain.Config"):
        hp.train("a.h5")
    with pytest.raises(hp.UsageError, match="no split 'nope'"):
        hp.evaluate("a", runs_dir=data["runs_dir"], split="nope", threads=1)
    for wrong in (lambda: hp.load("b", runs_dir=data["runs_dir"]), lambda: hp.evaluate("b")):
        with pytest.raises(hp.UsageError, match="there is no run 'b'"):
            wrong()
    with pytest.raises(hp.UsageError, match="there is no run or sweep 'b'"):
        hp.history("b")


@pytest.mark.mpi
def test_evaluate_returns_what_the_command_writes(comm, data, trained, capsys):
    torch.set_num_threads(2)
    before = state_of_process()
    found = hp.evaluate(
        trained, split="validation", threads=1, mistakes=3, output=trained / "x.json"
    )
    assert state_of_process() == before
    assert "recall" not in capsys.readouterr().out
    output = str(trained / "y.json")
    asked = {"run": str(trained), "split": "validation", "threads": 1, "output": output}
    assert evaluating.main(EvaluateConfig(**asked)) == 0
    comm.Barrier()
    written = json.loads(Path(output).read_text())
    assert (found.loss, found.accuracy) == (written["loss"], written["accuracy"])
    assert found.confusion.tolist() == written["confusion"]
    wrong = 12 - np.trace(found.confusion)
    assert [*found.classes] == written["classes"] and len(found.mistakes) == min(3, wrong) > 0
    assert json.loads((trained / "x.json").read_text()) == written
    assert (trained / "x.png").is_file()


@pytest.fixture
def photos(comm, shared_tmp):
    """A folder of 9 image files of three sizes."""
    folder = shared_tmp / "photos"
    if comm.rank == 0:
        for number in range(3):
            class_folders(folder / str(number), {"x": 3}, width=20 + 9 * number, height=28)
    comm.Barrier()
    return folder


@pytest.mark.mpi
def test_predict_answers_as_the_command_does(comm, trained, photos):
    """Files, arrays and Pillow's images of any sizes, and one by one."""
    output = str(trained / "answers.csv")
    asked = PredictConfig(run=str(trained), images=(str(photos),), output=output, threads=1)
    assert predicting.main(asked) == 0
    comm.Barrier()
    with open(output) as file:
        lines = list(csv.DictReader(file))
    network = hp.load(trained)
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
    assert np.array_equal(answers.probabilities[:, 2], answers[network.classes[2]])
    files = sorted(photos.rglob("*.png"))
    images = [Image.open(file) for file in files]
    names = [*map(str, files)]
    for given in (files, names, iter(files), np.array(names), images, [*map(np.asarray, images)]):
        found = network.predict(given, batch_size=4)
        assert np.allclose(found.probabilities, answers.probabilities, rtol=1e-5)
    assert found["row"].tolist() == [*range(9)]
    alone = network.predict(np.asarray(images[5]))
    assert np.allclose(alone.probabilities, answers.probabilities[5:6], rtol=1e-5)
    assert [image.size for image in images] == [(20 + 9 * (n // 3), 28) for n in range(9)]
    scores = network.model(network.preprocess(photos))
    assert np.allclose(scores.softmax(1).detach(), answers.probabilities, rtol=1e-5)


@pytest.mark.mpi
def test_the_split_of_a_pack_given_as_an_array(comm, data, trained):
    """It is preprocessed as `evaluate` does it, with the scaling of the training."""
    found = hp.train(**{**data, "normalize": "pack", "epochs": 1}, run="scaled", test=False)
    network = hp.load("scaled", runs_dir=data["runs_dir"])
    tested = hp.evaluate(found.folder, threads=1)
    with hp.Split(hp.read_pack(data["data"]), "test") as split:
        images = split.gather(np.arange(29), np.empty((29, 28, 28, 3), np.uint8))
    answers = network.predict(images)
    assert np.mean(answers["label"] == split.labels) == tested.accuracy
    loss = torch.nn.functional.nll_loss
    chances = torch.from_numpy(answers.probabilities).log()
    assert loss(chances, torch.from_numpy(split.labels)).item() == pytest.approx(tested.loss, 1e-5)
    inputs = network.preprocess(images)
    mean, std = (np.array(network.metadata[name]) for name in ("mean", "std"))
    expected = ((images / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert np.allclose(inputs.numpy(), expected, atol=1e-5) and inputs.shape == (29, 3, 28, 28)
    for dtype in ("<f4", ">f4"):
        floats = network.predict((images / 255).astype(dtype))
        assert np.allclose(floats.probabilities, answers.probabilities, rtol=1e-4)
    assert network.predict(images[:, :, :, 0]).probabilities.shape == (29, 5)  # gray: converted


REFUSED = {
    r"shape \(2, 3, 28, 28\)": np.zeros((2, 3, 28, 28), np.uint8),
    r"shape \(40, 30, 4\): give an image as \(H, W, C\)": np.zeros((40, 30, 4), np.uint8),
    r"shape \(3, 40, 30\): give an image as \(H, W, C\)": np.zeros((3, 40, 30), np.uint8),
    "files among arrays": ["nowhere.png", np.zeros((28, 28, 3), np.uint8)],
    r"shape \(4,\): give \(N, H, W, C\)": np.zeros(4, np.uint8),
    "type uint16": np.zeros((2, 28, 28, 3), np.uint16),
    "type bool": np.zeros((2, 28, 28, 3), bool),
    "values from 0 to 255": np.full((2, 28, 28, 3), np.arange(3) * 127.5),
    "only uint8 is resized": np.zeros((2, 20, 28, 3), np.float32),
    "several types: float32, uint8": [np.zeros((28, 28, 3), t) for t in (np.uint8, np.float32)],
    "there is no such file": "nowhere.png",
}


@pytest.mark.parametrize("message", REFUSED)
def test_images_that_no_network_takes(trained, message):
    network = hp.load(trained)
    for take in (network.predict, network.preprocess):
        with pytest.raises(hp.UsageError, match=message):
            take(REFUSED[message])


def test_images_that_cannot_be_read(trained, photos):
    network = hp.load(trained)
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
    broken = np.zeros((3, 28, 28, 3), np.float32)
    broken[1] = np.nan
    with pytest.raises(hp.RunError, match="image 1: the network's answer is not finite"):
        network.predict(broken)
    assert network.predict(broken, skip_bad=True)["row"].tolist() == [0, 2]
    assert len(network.predict([])["prediction"]) == 0


def test_the_network_is_put_back_into_its_mode(trained):
    network, images = hp.load(trained), np.full((2, 28, 28, 3), [[[[9]]], [[[200]]]], np.uint8)
    assert not network.model.training
    expected = network.predict(images).probabilities
    network.model.train()
    assert np.array_equal(network.predict(images).probabilities, expected)
    assert network.model.training


def test_images_are_cropped_where_the_pack_cropped_them(trained, photos):
    network = hp.load(trained)
    stretched = network.preprocess(photos)
    network.metadata["provenance"]["fit"] = "crop"
    files = sorted(photos.rglob("*.png"))
    cropped = network.preprocess(photos)
    assert not torch.equal(cropped, stretched)
    for given in ([Image.open(file) for file in files], [np.asarray(Image.open(f)) for f in files]):
        assert torch.equal(network.preprocess(given), cropped)


def test_the_terminal_of_a_notebooks_server_is_not_that_of_the_notebook(monkeypatch):
    master, terminal = os.openpty()
    output = io.TextIOWrapper(os.fdopen(terminal, "wb"))
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "__stdout__", output)
    assert terminal_columns() is not None
    monkeypatch.setattr(sys, "__stdout__", None)
    assert terminal_columns() is None
    output.close()
    os.close(master)


def test_classes_of_any_names_have_columns_of_their_own():
    names = ["file", "x", "x", "probability"]
    chances = np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
    answers = hp.Predictions({"file": np.array(["a"])}, names, chances, {})
    assert [*answers][4:] == ["file (0)", "x (1)", "x (2)", "probability (3)"]
    assert answers["file"] == ["a"] and answers["prediction"] == ["probability (3)"]


@pytest.mark.mpi
def test_the_record_as_columns(comm, data, trained):
    steps, epochs, evaluations = hp.history("a", data["runs_dir"])
    records = list(read_records(trained))
    for kind, table in (("step", steps), ("epoch", epochs), ("evaluation", evaluations)):
        found = [record for record in records if record["kind"] == kind]
        assert {len(column) for column in table.values()} == {len(found)} and len(found) > 1
        assert table["loss"].tolist() == [record["loss"] for record in found]
        assert table["time"].dtype == np.dtype("datetime64[ms]")
        assert f"{table['time'][0]}Z" == found[0]["time"]
    assert steps["step"].tolist() == [*range(1, 7)] and steps["step"].dtype.kind == "i"
    first = next(record for record in records if record["kind"] == "step")
    assert steps["seconds_compute"][0] == first["seconds"]["compute"]
    assert evaluations["split"].tolist() == ["validation", "validation", "test"]
    lines = repr(hp.history("a", data["runs_dir"])).splitlines()
    assert len(lines) == 3 and lines[0].startswith("steps: 6 rows of time, epoch, step, loss, ")


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
    assert repr(hp.history(tmp_path)).endswith("\nepochs: 0 rows\nevaluations: 0 rows")
    (tmp_path / "sweep.toml").touch()
    with pytest.raises(hp.UsageError, match="is a sweep: name one of its runs"):
        hp.history(tmp_path)


def signalled(monkeypatch, *numbers, at=2):
    """Send these signals to this process when it records the step `at`."""
    original = Recorder.step

    def step(self, **given):
        original(self, **given)
        if given["step"] == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(Recorder, "step", step)


@pytest.mark.parametrize(
    ("numbers", "status", "code"),
    [
        ([signal.SIGINT], "stopped", 0),
        ([signal.SIGTERM], "preempted", 75),
        ([signal.SIGUSR1], "preempted", 75),
    ],
)
def test_signals_end_a_run_and_leave_nothing_behind(data, monkeypatch, numbers, status, code):
    before = state_of_process()
    with monkeypatch.context() as patched:
        signalled(patched, *numbers)
        found = hp.train(**data, run="a")
    assert (found.status, found.exit_code) == (status, code)
    assert 2 <= found.step < 6
    assert state_of_process() == before and not is_locked(found.folder)
    assert ("test_loss" in found.figures) == (status == "stopped")
    done = hp.train(**data, run="a")
    assert (done.status, done.step, done.exit_code) == ("done", 6, 0)


@pytest.mark.mpi
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
    comm.Barrier()
    if comm.rank == 0:
        make_pack(Path(data["runs_dir"]) / "bare.h5", {"train": 47}, (28, 28, 3), 5)
    comm.Barrier()
    own = print if comm.rank == 0 else None  # the others may leave it out
    with pytest.raises(hp.UsageError, match="on_evaluation needs a split validation"):
        hp.train(**{**data, "data": data["runs_dir"] + "/bare.h5"}, on_evaluation=own)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_error_in_on_evaluation_ends_all(data, ranks):
    folder = Path(data["data"]).parent
    program = """
import hpctrain as hp

def fail(record):
    raise ValueError(f"seen {record['split']}")

hp.train(data="a.h5", model="digits", epochs=2, run="a", on_evaluation=fail)
print("not reached")
"""
    (folder / "fails.py").write_text(program)
    done = run_mpi(ranks, ["fails.py"], cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stderr
    assert "ValueError: seen validation" in done.stderr and "not reached" not in done.stdout
    end = list(read_records(folder / "runs" / "a"))[-1]
    assert (end["status"], end["reason"]) == ("failed", "ValueError: seen validation")


def test_a_run_over_jpeg_files_leaves_nothing_behind(data, tmp_path):
    folder = class_folders(tmp_path / "jpeg", {"a": 9, "b": 9}, ".jpg", width=28, height=28)
    settings = PackConfig(str(folder), encoding="jpeg", output=str(tmp_path / "jpeg.h5"))
    given = {**data, "data": str(pack_images(settings)), "batch_size": 8}
    before = state_of_process()
    for dry_run in (True, False):
        hp.train(**given, run="jpeg", dry_run=dry_run)
        assert state_of_process() == before


def test_a_second_interrupt_ends_at_once_and_the_run_can_be_resumed(data, monkeypatch):
    before = state_of_process()
    with monkeypatch.context() as patched:
        signalled(patched, signal.SIGINT, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            hp.train(**data, run="a", checkpoint_every="1step")
    assert state_of_process() == before
    folder = Path(data["runs_dir"]) / "a"
    assert not is_locked(folder)
    assert hp.train(**data, run="a", checkpoint_every="1step").status == "done"


def test_training_in_another_thread(data):
    """As web applications do; it cannot catch signals."""
    found = []
    thread = threading.Thread(target=lambda: found.append(hp.train(**data, run="a")))
    thread.start()
    thread.join(60)
    assert found[0].status == "done"


OWN = """
import sys
import numpy as np
import torch
import hpctrain as hp

def tiny(image_shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28 * 3, classes))

"""
TRAIN = """
hp.train(data="a.h5", model="__main__:tiny", epochs=1, batch_size=16, run="own", progress="none")
try:
    hp.load("own")
except hp.UsageError as error:
    print(error)
"""
LOAD = """
network = hp.load("own", trust_code=True)
answers = network.predict(np.zeros((3, 50, 28, 3), np.uint8))
assert len(hp.history("own").steps["loss"]) == 3 and network.config.epochs == 1
print(answers["prediction"].shape, {"mpi4py", "mpi4py.MPI", "h5py"} & {*sys.modules})
"""


def test_a_network_of_a_notebook_is_loaded_without_mpi(data):
    folder = Path(data["data"]).parent
    (folder / "train_it.py").write_text(OWN + TRAIN)
    (folder / "load_it.py").write_text(OWN + LOAD)
    made = run([sys.executable, "train_it.py"], cwd=folder)
    assert made.returncode == 0, made.stderr
    assert "names __main__:tiny: " in made.stdout and "trust_code=True" in made.stdout
    done = run([sys.executable, "load_it.py"], cwd=folder)
    assert (done.stdout, done.stderr) == ("(3,) set()\n", "")


ONE_FAILS = """
import sys
import hpctrain as hp
from hpctrain.report import recorder
from hpctrain.training import loop

comm = hp.start_mpi()
try:
    hp.train(data="nowhere.h5")
except hp.UsageError as error:
    print("told", comm.rank, error, flush=True)
train_step = loop.train_step

def fail(*given):
    if comm.rank == 1:
        raise ValueError("only here")
    return train_step(*given)

loop.train_step = fail
hp.train(data="a.h5", model="digits", epochs=1, progress="none")
print("not reached")
"""


def test_an_error_of_one_rank_ends_all(data):
    folder = Path(data["data"]).parent
    (folder / "fails.py").write_text(ONE_FAILS)
    done = run_mpi(2, ["fails.py"], cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stderr
    assert sorted(re.findall(r"told (\d) ", done.stdout)) == ["0", "1"]
    assert "ValueError: only here" in done.stderr and "not reached" not in done.stdout


ONE_CALLS = """
import hpctrain as hp

if hp.start_mpi().rank == 0:
    hp.evaluate("a", hang_timeout="2s")
"""


def test_a_call_that_one_rank_does_not_make_ends_all(tmp_path):
    (tmp_path / "calls.py").write_text(ONE_CALLS)
    done = run_mpi(2, ["calls.py"], cwd=tmp_path, timeout=90)
    assert done.returncode == 1, done.stderr
    assert "nothing new for 6 s while in: waiting for all in hpctrain.evaluate" in done.stderr


def test_all_names_are_known_to_type_checkers_and_have_docstrings():
    tree = ast.parse((ROOT / "hpctrain/__init__.py").read_text())
    block, hidden = (node for node in tree.body if isinstance(node, ast.If))
    assert [node.name for node in hidden.body] == ["__getattr__"]  # it would know every name
    checked = {
        alias.name: node.module.removeprefix("hpctrain.")
        for node in block.body
        if node.module.startswith("hpctrain")
        for alias in node.names
    }
    assert checked == hp._HOME
    (listed,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    assert sorted(ast.literal_eval(listed)) == sorted(hp._HOME)
    names = {}
    exec("from hpctrain import *", names)
    assert {*names} >= {*hp._HOME}
    for name in hp._HOME:
        assert len(pydoc.getdoc(getattr(hp, name)).split()) > 4, f"{name} has no docstring"
    shown = pydoc.plain(pydoc.render_doc(hp))
    assert all(f"    {name}(" in shown or f"class {name}" in shown for name in hp._HOME)
    assert {*dir(hp)} >= {*hp._HOME, "__version__"} and "Any" not in dir(hp)


def test_the_settings_of_make_pack_are_checked(tmp_path):
    with pytest.raises(hp.UsageError, match="--channels 2: 1 is gray, 3 is colour"):
        pack_images(PackConfig(source=str(tmp_path), channels=2))


def blocks():
    """The Python blocks of docs/python.md as one program; those with a file's name by that."""
    text = (ROOT / "docs/python.md").read_text().replace('"resnet18"', '"digits"')  # is faster
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    apart = {m[1]: block for block in found if (m := re.match(r"# (\w+\.py)", block))}
    return "".join(block for block in found if block not in apart.values()), apart


@pytest.fixture
def place(tmp_path):
    """A folder with the files that the page names."""
    rows = {"train": 40, "validation": 10, "test": 16}
    make_pack(tmp_path / "photos.h5", rows, (32, 32, 3), 3)
    (tmp_path / "new_photos").mkdir()
    for number, name in enumerate("ab"):
        Image.fromarray(picture(number, 40, 30)).save(tmp_path / f"new_photos/{name}.png")
    return tmp_path


def test_the_programs_of_the_page_run(place):
    program, apart = blocks()
    (place / "page.py").write_text(program)
    done = run([sys.executable, "page.py"], cwd=place, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "runs/first done" in done.stdout and (place / "tested.json").is_file()
    (place / "program.py").write_text(apart["program.py"])
    done = run_mpi(2, ["program.py"], cwd=place, timeout=100, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert (place / "runs/on-four/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "package", "printed"),
    [("search.py", "optuna", " {'lr': 0."), ("live.py", "IPython", "Figure(640x480)\n" * 5)],
)
def test_the_programs_of_on_evaluation_run(place, name, package, printed):
    pytest.importorskip(package)
    pytest.importorskip("matplotlib")
    (place / name).write_text(blocks()[1][name])
    done = run([sys.executable, name], cwd=place, timeout=100, env={"MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout, done.stdout


def test_the_notebook_runs(tmp_path):
    """Its cells one after another, over fewer digits; no output is stored in it."""
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "docs/example.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5 and not any(c["outputs"] or c["execution_count"] for c in code)
    rng, splits = np.random.default_rng(0), {}
    for name, count in {"train": 256, "test": 50, "unseen": 50}.items():
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 99, (count, 28, 28, 1), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 120
        splits[name] = images, labels
    (tmp_path / "data").mkdir()
    write_pack(tmp_path / "data/digits.h5", splits, tuple("0123456789"))
    lines = ["cells = " + repr(["".join(cell["source"]) for cell in code]), "names = {}"]
    lines += ["for cell in cells:", "    exec(cell, names)"]
    lines += ["print('figures', len(names['plt'].get_fignums()), names['result'].status)"]
    (tmp_path / "cells.py").write_text("\n".join(lines))
    done = run([sys.executable, "cells.py"], cwd=tmp_path, env={"MPLBACKEND": "Agg"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "figures 3 done"
