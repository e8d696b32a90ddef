"""Runs that learn several classes, or values, of HDF5 files of other programs, and their networks.

What is read, and what is refused, is in tests/data/test_external_targets.py.
"""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from tests.support.launches import check_same, launch, notes, run_of
from tests.support.ranks import command
from tests.support.refused import check_refused
from tests.support.short import records

ROWS, FILES = 120, 8


def draw():
    """Images, 30 classes that they show, and values; some are unknown."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (ROWS, 9, 8, 1), dtype=np.uint8)
    classes = (images.reshape(ROWS, -1)[:, :30] > 180).astype("f4")
    classes[random.random(classes.shape) < 0.1] = np.nan
    age = 20 + images.mean((1, 2, 3))
    age[::7] = np.nan
    return images, classes, age


IMAGES, CLASSES, AGE = draw()
LONG = np.repeat(AGE[:, None], 6, 1).astype(">f8")
CASES = {  # how rows are stored, and settings
    "classes of many files": ({"chunks": (4, 5)}, {"task": "multilabel", "labels": "y"}, True),
    "classes in blocks": (
        {},
        {"task": "multilabel", "labels": "y", "shuffle": "blocks", "read_buffer": "1K"},
        False,
    ),
    "held values": ({}, {"task": "regress", "targets": "age,size"}, False),
    "long values of many files": ({}, {"task": "regress", "targets": "long"}, True),
}


def write_rows(path, rows, storage):
    with h5py.File(path, "w") as file:
        file["x"] = IMAGES[rows]
        file.create_dataset("y", data=CLASSES[rows], **storage)
        file["age"] = AGE[rows]
        file["size"] = 0.5 * AGE[rows] + 3
        file["long"] = LONG[rows]


@pytest.fixture
def settings(tmp_path, case):
    """Settings of a run of 4 shards and two epochs, whose files are there."""
    storage, how, is_set = CASES[case]
    data = tmp_path / "a.h5"
    if is_set:
        data = tmp_path / "set" / "*.h5"
        data.parent.mkdir()
        for number, rows in enumerate(np.array_split(np.arange(ROWS), FILES)):
            write_rows(data.with_name(f"{number}.h5"), rows, storage)
    else:
        write_rows(data, np.arange(ROWS), storage)
    run = {"model": "digits", "epochs": 2, "batch_size": 16, "shards": 4, "deterministic": True}
    run |= {"data": str(data), "images": "x", "split": "0.6,0.2,0.2", "threads": 1}
    folders = {"runs_dir": str(tmp_path / "runs"), "cache_dir": str(tmp_path / "cache")}
    return run | folders | how | {"run": "a", "progress": "none"}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_equal_on_any_ranks_and_when_resumed_on_others(settings):
    for size in (1, 2, 3):
        assert launch(settings, size, run=str(size)).status == "done"
        check_same(settings | {"run": str(size)}, settings | {"run": "1"})
    assert launch(settings, 3, leave=3, run="resumed").status == "preempted"
    assert launch(settings, 2, run="resumed").status == "done"
    check_same(settings | {"run": "resumed"}, settings | {"run": "1"})


@pytest.mark.parametrize("case", ["classes of many files", "held values"])
def test_networks_are_evaluated_on_the_targets_of_their_training(settings, tmp_path):
    """And on those of another file. To predict its rows, it needs none."""
    assert launch(settings, 2).status == "done"
    model = run_of(settings)
    cache = ["--cache-dir", settings["cache_dir"]]
    found = tmp_path / "test.json"
    ended = command(2, "evaluate", model, "--output", found, *cache)
    assert ended.code == 0, ended.err
    expected = records(settings, "evaluation")[-1]
    assert json.loads(found.read_text())["loss"] == expected["loss"]
    other = tmp_path / "other.h5"
    write_rows(other, np.arange(ROWS), {})
    ended = command(1, "evaluate", model, "--data", other, *cache)
    assert ended.code == 0, ended.err
    assert "24 of 120 images are its split test" in ended.err
    table = tmp_path / "a.csv"
    with h5py.File(other, "r+") as file:
        for name in ("y", "age", "size"):
            del file[name]
    ended = command(1, "predict", model, other, "--output", table, *cache)
    assert ended.code == 0, ended.err
    assert len(table.read_text().splitlines()) == 1 + ROWS
    ended = command(1, "evaluate", model, "--data", other, *cache)
    check_refused(ended, ["there is no dataset"])


@pytest.mark.parametrize("case", ["held values"])
def test_unknown_entries_are_counted_in_a_line(settings):
    assert launch(settings, 1, dry_run=False, epochs=1).status == "done"
    (line,) = [note for note in notes(settings) if "unknown" in note]
    assert "of 2 columns of values: age, size" in line
    assert "36 of 240 entries are unknown (age 18, size 18)" in line


@pytest.mark.parametrize("case", ["held values"])
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"task": "classify"}, "--targets names values, and --task classify learns none"),
        ({"labels": "y"}, "--labels y and --targets age,size exclude each other"),
        ({"targets": None}, "--images needs --labels, or --targets"),
        ({"targets": "age,none"}, "there is no dataset 'none'"),
        ({"targets": None, "labels": "y", "task": "classify"}, "give --task multilabel"),
        ({"targets": None, "labels": "age", "task": "classify"}, "give --task regress"),
    ],
)
def test_targets_that_a_task_does_not_learn_are_refused_in_one_line(settings, more, said):
    words = []
    for name, value in (settings | more).items():
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    check_refused(command(1, "train", *words), [said])
