"""A line says which channel of new images has values unlike those of the training.

All channels together may have the same range: temperatures beside heights, in kelvins or Celsius.
"""

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import command_line
from tests.support.external import write
from tests.tools.test_one_answer import SIDE, train

CELSIUS = "channel 1 from -40 to 35, not from 233.15 to 308.15"
SETTINGS = {"images": "x", "labels": "y", "layout": "NCHW", "batch_size": 8, "lr": 1e-3}


def fields(count=24, offset=273.15, seed=0, height=300.0):
    """Images (N, C, H, W) of heights and temperatures, which are `offset` and -40 to 35."""
    random = np.random.default_rng(seed)
    heights = random.uniform(-100, height, (count, 1, SIDE, SIDE))
    heights[:, :, 0, :2] = -100, height
    temperatures = random.uniform(-40, 35, (count, 1, SIDE, SIDE))
    temperatures[:, :, 0, :2] = -40, 35
    return np.concatenate([heights, temperatures + offset], axis=1).astype("f4")


def write_fields(path, **kind):
    images = fields(**kind)
    return write(path, images, np.arange(len(images)) % 2)


@pytest.fixture(scope="module", params=["pack", "1"])
def trained(request, tmp_path_factory):
    """A network, normalized by all images or not: then some of them were read."""
    folder = tmp_path_factory.mktemp("fields")
    settings = {"normalize": "pack"} if request.param == "pack" else {"max_value": 1.0}
    return train(folder, write_fields(folder / "fields.h5"), **SETTINGS, **settings)


def predict_rows(run, path):
    assert (
        command_line(["predict", str(run), str(path), "--trust-code", f"--output={path}.csv"]) == 0
    )


def predict_arrays(run, path):
    with h5py.File(path) as file:
        hp.load(run, trust_code=True).predict(file["x"][:].transpose(0, 2, 3, 1))


def evaluate(run, path):
    assert (
        command_line(["evaluate", str(run), "--data", str(path), "--split=train", "--trust-code"])
        == 0
    )


def evaluate_pack(run, path):
    with h5py.File(path) as file:
        samples = file["x"][:].transpose(0, 2, 3, 1), file["y"][:]
    hp.write_pack(f"{path}.pack", {"train": samples}, ["0", "1"])
    given = ["evaluate", str(run), f"--data={path}.pack", "--split=train", "--trust-code"]
    assert command_line(given) == 0


@pytest.mark.parametrize("use", [predict_rows, predict_arrays, evaluate, evaluate_pack])
def test_other_units_of_one_channel_are_said(trained, tmp_path, capfd, use):
    for offset, lines in ((273.15, 0), (0, 1)):
        path = write_fields(tmp_path / f"{offset}.h5", offset=offset, seed=1)
        capfd.readouterr()
        use(trained, path)
        said = [line for line in capfd.readouterr().err.splitlines() if "channel" in line]
        assert len(said) == lines, said
    assert f"{CELSIUS} as in the training" in said[0]


def test_smaller_values_of_a_channel_are_no_other_units(trained, capfd):
    """A day without rain has none of the values of a wet one; but not ten times as many."""
    network = hp.load(trained, trust_code=True)
    for height, is_said in ((30.0, False), (1190.0, False), (1210.0, True)):
        capfd.readouterr()
        network.predict(fields(4, height=height).transpose(0, 2, 3, 1))
        said = capfd.readouterr().err
        assert ("training" in said) == is_said, said


def plan(folder, data, *words):
    """What a dry run of training prints."""
    names = ["--images=x", "--labels=y", "--layout=NCHW", "--normalize=pack", "--model=digits"]
    given = ["train", f"--data={data}", *names, *words, f"--runs-dir={folder}", "--dry-run"]
    assert command_line([*given, "--trust-code"]) == 0


def test_another_unit_of_a_split_is_said(tmp_path, capfd):
    path = tmp_path / "fields.h5"
    with h5py.File(path, "w") as file:
        for split, offset in (("train", 273.15), ("validation", 0)):
            file[f"{split}/x"] = fields(offset=offset)
            file[f"{split}/y"] = np.arange(24) % 2
    plan(tmp_path, path, "--images={split}/x", "--labels={split}/y")
    assert f"validation has {CELSIUS} as in train" in capfd.readouterr().out


def test_another_unit_than_in_the_training_of_init_is_said(trained, tmp_path, capfd):
    path = write_fields(tmp_path / "fields.h5", offset=0)
    plan(
        tmp_path,
        path,
        f"--init={trained}/model.safetensors",
        "--model=tests.tools.test_one_answer:tiny",
    )
    assert f"{path}: {CELSIUS} as in the training of --init" in capfd.readouterr().out
