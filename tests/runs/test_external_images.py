"""Runs on HDF5 files of other programs: what draws their splits, and how values are normalized."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import read_plan
from tests.support.external import read
from tests.support.launches import check_same, launch, notes
from tests.support.ranks import Placed, command

ROWS, CLASSES = 101, 5
NODATA = -9999.0


def draw(channels, dtype, rows=ROWS, nodata=None):
    """Images that can be learnt, (N, 9, 8, C), and labels: signed, each channel of its own size."""
    random = np.random.default_rng((channels, rows))
    labels = np.arange(rows) % CLASSES
    sizes = 10.0 ** (1 + np.arange(channels) % 3)
    images = random.normal(size=(rows, 9, 8, channels)) * sizes + 3 * sizes
    images[:, 2:6] += labels[:, None, None, None] * sizes
    images = images.astype(dtype)
    if nodata is not None:
        images[random.random(images.shape) < 0.2] = nodata
        images[:, 0, 0, 0] = 5  # no image is without data
    return images, labels


@pytest.fixture
def settings(tmp_path):
    """Settings of a run of 4 shards and two epochs; `write` makes its file."""
    how = {"model": "digits", "epochs": 2, "batch_size": 16, "shards": 4, "deterministic": True}
    files = {"data": str(tmp_path / "a.h5"), "images": "x", "labels": "y", "layout": "NHWC"}
    return files | how | {"runs_dir": str(tmp_path / "runs"), "run": "a", "progress": "none"}


def write(comm, settings, images, labels, **storage):
    if comm.rank == 0:
        with h5py.File(settings["data"], "w") as file:
            file.create_dataset("x", data=images, **storage)
            file["y"] = labels
    comm.Barrier()


def plan_of(result):
    return json.loads((Path(result.folder) / "plan.json").read_text())


# Which images are tested


@pytest.mark.ranks(1)
def test_the_seed_of_a_run_never_moves_an_image_between_splits(comm, settings):
    write(comm, settings, *draw(3, "u1"))
    settings |= {"epochs": 1, "test": True}
    plans = {}
    trained = {}
    for run, more in {"a": {}, "b": {"seed": 1}, "c": {"split_seed": 1}}.items():
        result = hp.train(**settings | more | {"run": run})
        plans[run] = plan_of(result)
        trained[run] = hp.load(result.folder).metadata["external"]["seed"]
    assert trained == {"a": 0, "b": 0, "c": 1}
    assert [plans[run]["split_seed"] for run in "abc"] == [0, 0, 1]
    assert plans["a"]["pack_uuid"] == plans["c"]["pack_uuid"]  # of the same file
    with pytest.raises(hp.UsageError, match="without --split-seed, not with --split-seed 1|0, not"):
        hp.train(**settings | {"epochs": 2, "split_seed": 1})
    hp.train(**settings | {"run": "d", "init": str(Path(settings["runs_dir"]) / "c")})
    said = [note for note in notes(settings | {"run": "d"}) if "drawn from this file" in note]
    assert len(said) == 1 and "--split-seed 1, and those of this run" in said[0]
    hp.train(**settings | {"run": "e", "init": str(Path(settings["runs_dir"]) / "b")})
    assert not [note for note in notes(settings | {"run": "e"}) if "drawn" in note]


@pytest.mark.ranks(1)
def test_a_run_of_before_keeps_the_split_of_its_seed(comm, settings):
    """Then --seed drew the splits, and the plan did not name a seed of theirs."""
    write(comm, settings, *draw(3, "u1"))
    settings |= {"epochs": 1, "seed": 1}
    result = hp.train(**settings | {"split_seed": 1})
    file = Path(result.folder) / "plan.json"
    plan = dataclasses.replace(read_plan(plan_of(result)), split_seed=None)
    file.write_text(plan.to_json())
    config = file.with_name("config.toml")
    config.write_text(config.read_text().replace("split_seed = 1\n", ""))
    result = hp.train(**settings | {"epochs": 2})
    assert hp.load(result.folder).metadata["external"]["seed"] == 1
    assert hp.load(result.folder).metadata["epoch"] == 2


# How values are normalized


CASES = {  # images, storage, settings
    "int16, 5 channels": (draw(5, "i2"), {}, {"normalize": "pack"}),
    "big endian, chunks": (draw(5, ">i2"), {"chunks": (7, 9, 8, 5)}, {"normalize": "pack"}),
    "float32, 13 channels, no data": (
        draw(13, "f4", nodata=NODATA),
        {},
        {"normalize": "pack", "nodata": NODATA, "flip": True, "shift": 2},
    ),
    "NaN is no data": (
        draw(2, "f8", nodata=np.nan),
        {"chunks": (4, 3, 8, 2)},
        {"normalize": "image", "nodata": "nan", "shift": 1},
    ),
    "int32, each image by itself": (draw(2, "i4"), {}, {"normalize": "image", "flip": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_equal_on_any_ranks_and_when_resumed_on_others(settings, case):
    data, storage, how = CASES[case]
    write(Placed(1), settings, *data, **storage)
    settings |= how
    for size in (1, 2, 3):
        assert launch(settings, size, run=str(size)).status == "done"
        check_same(settings | {"run": str(size)}, settings | {"run": "1"})
    assert launch(settings, 3, leave=3, run="resumed").status == "preempted"
    assert launch(settings, 2, run="resumed").status == "done"
    check_same(settings | {"run": "resumed"}, settings | {"run": "1"})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_equal_on_many_ranks(settings, case):
    data, storage, how = CASES[case]
    write(Placed(1), settings, *data, **storage)
    settings |= how | {"shards": 8}
    for size in (1, 5, 8):
        words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        words = [word.removesuffix("=True") for word in words]
        assert command(size, "train", *words, "--run", size).code == 0
        check_same(settings | {"run": str(size)}, settings | {"run": "1"})


def train_rows(settings, **how):
    """The training images of the file and their labels, as a split draws them."""
    pack = read(settings["data"], layout="NHWC", block_rows=0, **how)
    info = pack.splits["train"]
    with h5py.File(settings["data"]) as file:
        return file["x"][:][info.rows], info.rows


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "f4"])
@pytest.mark.parametrize("nodata", [None, 5])
def test_mean_and_std_are_those_of_a_pack_of_the_same_rows(comm, settings, tmp_path, dtype, nodata):
    images, labels = draw(3, "i2")
    images = abs(images).astype(dtype)
    images[0] = 5
    images[0, 0, 0, 0] = 6
    write(comm, settings, images, labels)
    settings |= {"epochs": 1, "normalize": "pack"}
    how = {} if nodata is None else {"nodata": nodata}
    found = plan_of(hp.train(**settings | how))["scaling"]
    rows, order = train_rows(settings, **how)
    splits = {"train": (rows, labels[order]), "test": (images[:CLASSES], labels[:CLASSES])}
    hp.write_pack(tmp_path / "pack.h5", splits, tuple("abcde"), **how)
    settings |= {"data": str(tmp_path / "pack.h5"), "run": "pack"}
    for name in ("images", "labels", "layout"):
        del settings[name]
    assert plan_of(hp.train(**settings))["scaling"] == found
    values = rows.astype("f8")[rows != nodata] if nodata is None else None
    if values is not None:
        divisor = {"u1": 255, "u2": 65535}.get(dtype, 1)
        assert np.allclose(found[0], rows.astype("f8").mean((0, 1, 2)) / divisor, rtol=1e-12)
        assert np.allclose(found[1], rows.astype("f8").std((0, 1, 2)) / divisor, rtol=1e-12)


@pytest.mark.ranks(1)
def test_a_resumed_run_takes_mean_and_std_from_its_plan(comm, settings, monkeypatch):
    write(comm, settings, *draw(3, "i2"))
    settings |= {"epochs": 1, "normalize": "pack"}
    counts = [0]
    gather = hp.Split.gather

    def count(split, indices, *rest, **how):
        counts[-1] += len(indices)
        return gather(split, indices, *rest, **how)

    monkeypatch.setattr(hp.Split, "gather", count)
    first = plan_of(hp.train(**settings))
    before = first["scaling"]
    counts.append(0)
    result = hp.train(**settings | {"epochs": 2})
    assert counts[0] - counts[1] == first["rows"], "one pass less"
    assert plan_of(result)["scaling"] == before
    network = hp.load(result.folder)
    assert [network.metadata["mean"], network.metadata["std"]] == before


@pytest.mark.ranks(1)
def test_a_network_keeps_that_images_are_normalized_each_by_itself(comm, settings):
    images, labels = draw(3, "f4")
    images = abs(images)
    write(comm, settings, images, labels)
    result = hp.train(**settings | {"epochs": 1, "normalize": "image", "test": True})
    network = hp.load(result.folder)
    inputs = network.preprocess(images[:7]).numpy().transpose(0, 2, 3, 1)
    values = images[:7].astype("f8")
    mean = values.mean((1, 2), keepdims=True)
    std = values.std((1, 2), keepdims=True)
    assert np.allclose(inputs, (values - mean) / std, rtol=1e-5, atol=1e-6)
    assert plan_of(result)["scaling"] == "image"
    tested = result.figures["test_loss"]
    assert hp.evaluate(result.folder, threads=1).loss == pytest.approx(tested, rel=1e-6)
    after = hp.train(**settings | {"epochs": 1, "run": "b", "init": str(result.folder)})
    assert plan_of(after)["scaling"] == "image"


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("data", "how", "said"),
    [
        (draw(3, "i2"), {}, "--max-value 1, .* or --normalize pack or image"),
        (draw(3, "f4"), {"normalize": "imagenet"}, "--normalize pack or image"),
        ((abs(draw(3, "f4")[0]), draw(3, "f4")[1]), {}, r"--max-value \d+(\.\d+)?, which divides"),
        ((abs(draw(3, "u4")[0]), draw(3, "f4")[1]), {}, "not from 0 to 1"),
        (
            draw(1, "f4"),
            {"task": "denoise", "model": "autoencoder"},
            "in .0, 1., and .* give another --max-value",
        ),
        (draw(3, "f4", nodata=np.nan), {"normalize": "pack"}, "holds NaN .* --nodata nan"),
        (draw(3, "i2"), {"nodata": -40000}, "int16, which has no such value"),
    ],
)
def test_values_beyond_0_to_1_need_a_scale(comm, settings, data, how, said):
    write(comm, settings, *data)
    with pytest.raises(hp.UsageError, match=said):
        hp.train(**settings | how)
    assert not Path(settings["runs_dir"]).exists()


@pytest.mark.ranks(1)
def test_integers_that_float32_rounds_are_said_unless_their_mean_is_subtracted(comm, settings):
    images, labels = draw(3, "i4")
    write(comm, settings, images + 2**28, labels)
    settings |= {"epochs": 1}
    said = {}
    for run, how in {"a": {"max_value": 2.0**28}, "b": {"normalize": "pack"}}.items():
        hp.train(**settings | how | {"run": run})
        said[run] = [note for note in notes(settings | {"run": run}) if "float32" in note]
    assert len(said["a"]) == 1 and "--normalize pack or image" in said["a"][0]
    assert not said["b"]
    write(comm, settings, images.astype("u8") + 2**55, labels)
    hp.train(**settings | {"normalize": "pack", "run": "c"})
    said = [note for note in notes(settings | {"run": "c"}) if "are rounded: float64" in note]
    assert len(said) == 1 and "to 9,007,199,254,740,992 alone" in said[0]


@pytest.mark.ranks(1)
def test_values_beyond_those_that_were_probed_are_said(comm, settings):
    """Where all training images are read: a value for no data may be in few of them."""
    images, labels = draw(3, "i2")
    settings |= {"epochs": 1, "normalize": "pack", "split": "1"}
    write(comm, settings, images, labels)
    hp.train(**settings | {"run": "a"})
    images[1, 2] = -30000
    write(comm, settings, images, labels)
    hp.train(**settings | {"run": "b"})
    said = [[note for note in notes(settings | {"run": run}) if "--nodata" in note] for run in "ab"]
    assert said[0] == []
    assert len(said[1]) == 1
    assert said[1][0].startswith("the values of all training images are from -30000 to ")


def test_a_network_takes_the_range_of_all_images_that_it_was_normalized_by(settings):
    """Not that of the few that are read to recognise the file, as its own images go beyond it."""
    images, labels = draw(3, "f4")
    images = abs(images)
    images[1] *= -50
    write(Placed(1), settings, images, labels)
    settings |= {"normalize": "pack", "split": "1"}
    assert launch(settings, 2, leave=1).status == "preempted"
    assert launch(settings, 1).status == "done"
    network = hp.load(Path(settings["runs_dir"]) / settings["run"])
    assert (network.scale.low, network.scale.high) == (images.min(), images.max())
    assert len(network.predict(images)["prediction"]) == ROWS


@pytest.mark.ranks(1)
def test_max_value_of_a_pack_takes_the_place_of_its_own(comm, tmp_path):
    images, labels = draw(3, "u1")
    splits = {"train": (images // 4, labels), "test": (images[:9] // 4, labels[:9])}
    hp.write_pack(tmp_path / "pack.h5", splits, tuple("abcde"))
    settings = {"data": str(tmp_path / "pack.h5"), "model": "digits", "epochs": 1, "threads": 1}
    settings |= {"runs_dir": str(tmp_path / "runs"), "run": "a", "progress": "none"}
    network = hp.load(hp.train(**settings, max_value=63.0).folder)
    assert network.metadata["scale"]["divisor"] == 63
    values = network.preprocess(images[:5] // 4)
    assert values.max().item() == pytest.approx((images[:5] // 4).max() / 63, rel=1e-6)
