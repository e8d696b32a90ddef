"""The picture of the worst mistakes that evaluate draws."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support.pictures import tiles
from tests.support.ranks import command


@pytest.fixture(scope="module")
def answers(trained):
    """Images and classes of the test, and what the network answers to each image."""
    with h5py.File(trained.pack("plain")) as file:
        images, labels = file["test/images"][:], file["test/labels"][:]
    return images, labels, hp.load(trained.run("plain"), device="cpu").predict(images)


def test_the_most_confident_mistakes_are_drawn_in_order(trained, answers, tmp_path):
    images, labels, predicted = answers
    wrong = np.flatnonzero(predicted["label"] != labels)
    assert len(wrong) > 10, "the network is too good for this test"
    worst = wrong[np.argsort(-predicted["probability"][wrong], kind="stable")][:10]
    words = ["evaluate", trained.run("plain"), "--mistakes", "10", "--output", tmp_path / "x.json"]
    done = command(1, *words)
    assert done.code == 0, done.err
    with Image.open(tmp_path / "x.png") as image:
        sheet = np.asarray(image.convert("RGB")).astype(int)
    assert sheet.max(axis=2).min() == 0 and sheet[-1, -1].tolist() == [255, 255, 255]
    places = list(tiles(sheet[:, :, 0], images[worst], 3))
    assert None not in places and places == sorted(places)
    assert len({top for top, _ in places}) == 2  # rows of eight
    for top, left in places:
        caption = sheet[top + 84 : top + 84 + 50, left : left + 112]
        assert (caption.sum(2) < 300).any() and (caption[:, :, 0] - caption[:, :, 1] > 100).any()
