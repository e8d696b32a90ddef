"""What a step copies: images and labels of all shards of a rank up, by one copy each, and what the
step came to down, by one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from hpctrain.data import loader
from hpctrain.streams import Snapshot, Upload
from hpctrain.training.train import train
from tests.data.pictures import class_folders, pack
from tests.support import external
from tests.support.packs import make_pack
from tests.training.runs import short_run

ROWS, BATCH, STEPS = 61, 16, 4


def pixels(folder):
    make_pack(folder / "data.h5", {"train": ROWS})
    return {}


def files(folder):
    made = class_folders(folder / "images", {"a": 35, "b": 33}, ".jpg", width=37, height=41)
    asked = {"split": "0.9,0.1", "size": "28x28", "channels": 1, "encoding": "jpeg"}
    pack(made, folder / "data.h5", **asked)
    return {"random_crop": 0.3}


def others(folder):
    made = external.pixels(68, (28, 28, 1), 5, ordered=False)
    external.write(folder / "data.h5", *made, chunks=(7, 28, 28, 1), compression="gzip")
    return {"images": "x", "labels": "y", "split": "0.9,0.1"}


@pytest.mark.parametrize("make", [pixels, files, others])
def test_one_copy_up_for_images_one_for_labels_and_one_down(one_rank, tmp_path, monkeypatch, make):
    copies, snapshot, upload, sent = (
        Counter(),
        Snapshot.__init__,
        Upload.make,
        loader.copy_to_device,
    )

    def counted(name, function):
        return lambda *args: copies.update([name]) or function(*args)

    settings = short_run(tmp_path, "data.h5", model="digits", run="a", shards=5, batch_size=BATCH)
    settings = dataclasses.replace(settings, threads=1, test=False, **make(tmp_path))
    monkeypatch.setattr(Snapshot, "__init__", counted("down", snapshot))
    monkeypatch.setattr(Upload, "make", counted("images", upload))
    monkeypatch.setattr(loader, "copy_to_device", counted("labels", sent))
    assert train(settings, one_rank) == 0
    assert copies == {"images": STEPS, "labels": STEPS, "down": STEPS}
