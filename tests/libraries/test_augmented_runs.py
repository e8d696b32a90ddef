"""Whole runs with transforms of libraries: the same bits on any ranks, whatever takes how long."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from tests.support.launch import as_flags
from tests.support.launches import check_same, launch
from tests.support.ranks import command
from tests.support.records import read_strictly
from tests.support.short import short_run

#: The network draws its dropout while the loader's thread draws; the third part takes long.
AUGMENT = (
    "kornia:RandomAffine(degrees=15)",
    "kornia:RandomClahe(grid_size=(2, 2), p=1.0)",
    "torchvision:TrivialAugmentWide()",
)
OWN = "tests.support.own_functions:brighten"  # beyond [0, 1], too
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on one rank that nothing interrupted."""
    settings = {
        **short_run(tmp_path_factory.mktemp("augmented")),
        **{"shards": 6, "deterministic": True, "flip": True, "shift": 2, "run": "whole"},
        **{"model": "tests.support.nets:with_dropout", "augment": AUGMENT},
    }
    assert launch(settings, 1).code == 0
    return settings


@pytest.mark.parametrize("size", [2, 3])
def test_transforms_draw_the_same_on_any_ranks_beside_dropout(whole, tmp_path, size):
    settings = whole | {"runs_dir": str(tmp_path), "run": "again"}
    ended = command(size, "train", *as_flags(settings))
    assert ended.code == 0, ended.err
    check_same(settings, whole)


def test_a_run_with_transforms_is_resumed_on_other_ranks_with_the_same_bits(whole, tmp_path):
    settings = whole | {"runs_dir": str(tmp_path), "run": "again"}
    ended = launch(settings, 2, leave="evaluation.begun")
    assert (ended.code, ended.status) == (75, "preempted")
    again = command(3, "train", *as_flags(settings))
    assert again.code == 0, again.err
    check_same(settings, whole)


def test_other_transforms_give_another_run(whole, tmp_path):
    settings = whole | {"runs_dir": str(tmp_path), "run": "again", "augment": AUGMENT[1:2]}
    assert command(2, "train", *as_flags(settings)).code == 0
    with pytest.raises(AssertionError):
        check_same(settings, whole)


# Values that are not in [0, 1]


@pytest.fixture
def signed(tmp_path):
    """Signed values of two channels that have ranges of their own; one lies beyond the probe."""
    random = np.random.default_rng(1)
    images = random.normal(size=(120, 12, 12, 2)).clip(-3, 3).astype("f4") * (1, 40)
    images[77, 5, 5] = -9, 321
    with h5py.File(tmp_path / "signed.h5", "w") as file:
        file["x"] = images.astype("f4")
        file["y"] = random.integers(0, 3, 120)
    return {
        **{"data": str(tmp_path / "signed.h5"), "images": "x", "labels": "y", "split": "0.9,0.1"},
        **{"normalize": "image", "runs_dir": str(tmp_path), "epochs": 1, "batch_size": 18},
        **{"shards": 3, "deterministic": True, "progress": "none"},
        "augment": (AUGMENT[0], "torchvision:RandomErasing()", OWN),
        **{"model": "tests.support.nets:with_dropout", "threads": 1},
    }


def test_the_range_of_all_training_rows_becomes_0_to_1_and_is_said_and_kept(signed, tmp_path):
    for size, name in ((1, "one"), (3, "three")):
        ended = command(size, "train", *as_flags(signed | {"run": name}))
        assert ended.code == 0, ended.err
        notes = [r["text"] for r in read_strictly(tmp_path / name) if r["kind"] == "note"]
        assert [text for text in notes if "-9 to" in text and "as 0 to 1" in text], notes
    check_same(signed | {"run": "one"}, signed | {"run": "three"})
    again = command(2, "train", *as_flags(signed | {"run": "one", "epochs": 2}))
    assert again.code == 0, again.err
    lows, highs = json.loads((tmp_path / "one" / "plan.json").read_text())["augment_range"]
    assert lows[0] == -9 and highs[1] == 321 and lows[1] > -121 and highs[0] <= 3


def test_a_transform_is_not_given_what_another_returned_beyond_0_to_1(whole):
    words = as_flags(whole | {"run": "beyond", "augment": (OWN, AUGMENT[0])})
    ended = command(1, "train", *words)
    (line,) = ended.err.splitlines()
    assert ended.code == 2 and AUGMENT[0] in line and "a transform before it" in line


def test_a_value_above_the_largest_that_was_given_is_refused_with_the_numbers(signed, tmp_path):
    with h5py.File(signed["data"], "r+") as file:
        images = abs(file["x"][:]).clip(0, 2.5)
        images[77, 5, 5] = 4
        file["x"][:] = images
    words = as_flags(signed | {"run": "big", "max_value": 2.5, "shuffle": "global"})
    ended = command(1, "train", *words)
    assert ended.code in (1, 2)
    assert "takes values in [0, 1]" in ended.err and "1.6" in ended.err


def test_the_dry_run_shows_the_pipeline_in_its_order(whole):
    words = as_flags(whole | {"run": "dry"})
    ended = command(1, "train", *words, "--dry-run", "--rotate90")
    (line,) = (line for line in ended.out.splitlines() if line.startswith("augmentation"))
    names = ("flip", "rotate90", "shift 2", f"{AUGMENT[0]} with p=0.5", *AUGMENT[1:])
    assert line.split(maxsplit=1)[1] == "; then ".join(names)
