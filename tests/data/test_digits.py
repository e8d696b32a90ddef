"""The built-in digits: what they are, that they never change, and that they are hard enough."""

import hashlib

import numpy as np
import pytest
import torch

from hpctrain.data import builtin as digits
from hpctrain.data import glyphs

# Of the images and labels of seed 0, each split. Every operation of the generator is exact by IEEE
# 754: equal bytes came from numpy 1.26, 2.0 and 2.4, with and without AVX.
SHA256 = {
    "train": "7ae80152856932c547ba1e40f81e618e61dfd66623a902c56b0ec6025c902767",
    "test": "1f53cea93047ead86a69eb677af6918c127c9bf6ef7eb6accbadf02d76575fb8",
    "unseen": "61a00d6dcb515d54e4e99984b1a7e7e0d4da6de4d2039c30cd88ad56452bc0d1",
}


@pytest.fixture(scope="module")
def made():
    return digits.generate()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(digits, "PER_CLASS", 20)
    monkeypatch.setattr(digits, "TEST_PER_CLASS", 2)
    monkeypatch.setattr(digits, "UNSEEN_PER_CLASS", 3)


def sha256(split):
    images, labels = split
    return hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()


def as_bytes(images):
    return [image.tobytes() for image in images]


def test_sizes_types_and_classes(made):
    splits, classes, provenance = made
    assert classes == tuple("0123456789")
    assert list(splits) == ["train", "test", "unseen"]
    for (images, labels), rows in zip(splits.values(), (9000, 1000, 1000), strict=True):
        assert (images.shape, images.dtype) == ((rows, 28, 28, 1), np.uint8)
        assert (labels.shape, labels.dtype) == ((rows,), np.int64)
        assert np.bincount(labels).tolist() == [rows // 10] * 10
    assert (len(provenance["styles"]), len(provenance["unseen_styles"])) == (10, 5)


def test_bytes_never_change(made):
    assert {name: sha256(split) for name, split in made[0].items()} == SHA256


def test_seeds(small):
    first, again, other = (digits.generate(seed)[0] for seed in (0, 0, 1))
    for name in first:
        assert sha256(first[name]) == sha256(again[name]) != sha256(other[name])


def test_rows_are_shuffled(made):
    labels = made[0]["train"][1]
    part = np.bincount(labels[:3000], minlength=10)  # 300 expected, standard deviation 13
    assert 240 < part.min() <= part.max() < 360


def test_no_image_twice(made):
    rows = [image for images, _ in made[0].values() for image in as_bytes(images)]
    assert len(set(rows)) == len(rows) == 11000


def test_white_on_black_within_the_image(made):
    for images, _ in made[0].values():
        assert np.all(images.max(axis=(1, 2, 3)) > 200)  # every image has full strokes
        assert np.median(images) < 10
        border = np.concatenate([images[:, 0], images[:, -1]])
        assert border.max() <= 12  # noise only
        assert np.all((images > 128).mean(axis=(1, 2, 3)) < 0.35)


def test_styles_are_apart_and_complete():
    for table in (glyphs.STYLES, glyphs.UNSEEN):
        assert all(len(row) == 10 for row in table.values())
    drawn = {glyph for row in glyphs.STYLES.values() for glyph in row}
    assert not drawn & {glyph for row in glyphs.UNSEEN.values() for glyph in row}
    assert len(drawn) >= 95  # of 100: hardly any glyph stands in two styles


def test_turns_are_uniform_and_reach_both_ends():
    cosine, sine = digits.turns((np.arange(997) + 0.5) / 997)
    degrees = np.degrees(np.arctan2(sine, cosine))
    assert np.allclose(degrees, np.linspace(-45, 45, 997), atol=0.11)
    assert digits.turns(np.array([0.0]))[1] < -0.7 and digits.turns(np.array([0.9999]))[1] > 0.7


def test_spread_fills_every_part_of_every_range():
    drawn = digits.spread(key=5, rows=101)
    assert list(drawn) == list(digits.RANGES)
    for name, (low, high) in digits.RANGES.items():
        part = np.floor((drawn[name] - low) / (high - low) * 101).astype(int)
        assert sorted(part) == list(range(101)), name
    assert np.all(np.diff(drawn["turn"]) > 0)
    assert abs(np.corrcoef(drawn["height"], drawn["turn"])[0, 1]) < 0.3


def test_coverage_is_the_distance_to_the_nearest_segment():
    lines = np.array([[[-6.0, -5.0, 4.0, 2.0], [4.0, 2.0, 4.0, 2.0], [-3.0, 7.0, 8.0, 7.0]]])
    got = digits.coverage(lines, np.array([1.25]))[0]
    centres = np.arange(28) - 13.5
    pixels = np.stack(np.meshgrid(centres, centres), axis=-1)  # x, y
    nearest = np.full((28, 28), np.inf)
    for line in lines[0]:
        points = line[:2] + np.linspace(0, 1, 4001)[:, None] * (line[2:] - line[:2])
        for point in points:
            nearest = np.minimum(nearest, np.hypot(*np.moveaxis(pixels - point, -1, 0)))
    assert np.abs(got - np.clip(1.75 - nearest, 0, 1)).max() < 1e-3


def test_place_keeps_strokes_inside():
    draws = digits.spread(key=3, rows=101)
    draws["height"] = draws["height"] * 2  # far too large: must be shrunk
    lines = digits.place(glyphs.segments("- 0,0 60,100"), draws)
    reach = digits.MARGIN - draws["half_width"]
    assert np.all(np.abs(lines).max(axis=(1, 2)) <= reach + 1e-9)
    assert np.all(np.abs(lines).max(axis=(1, 2)) > reach - 2 * digits.LARGEST_SHIFT)


def test_pieces_of_glyphs():
    assert glyphs.polyline("- 1,2 3,4") == [(1, 2), (3, 4)]
    assert glyphs.polyline("= 0,0 4,0 4,4") == [(0, 0), (4, 0), (4, 4), (0, 0)]
    smooth = glyphs.polyline("~ 0,0 4,2 8,4")
    assert len(smooth) == 9 and smooth[4] == (4, 2) and smooth[::8] == [(0, 0), (8, 4)]
    closed = glyphs.polyline("o 0,0 8,0 8,8 0,8")
    assert len(closed) == 17 and closed[0] == closed[-1] and min(y for _, y in closed) < 0
    circle = np.array(glyphs.polyline("@ 10,20 8,8 0,360"))
    assert np.allclose(np.hypot(*(circle - (10, 20)).T), 8, atol=1 / 64)
    assert np.allclose(glyphs.polyline("@ 10,20 8,4 90,180")[0], (10, 24))
    assert glyphs.segments("- 0,0 1,2; - 3,4 5,6").tolist() == [[0, 0, 1, 2], [3, 4, 5, 6]]


def best_linear_accuracy(train, test, steps):
    """Highest test accuracy that softmax regression on the pixels passes through in training."""
    (x, y), (x_test, y_test) = (
        (torch.from_numpy(images).flatten(1) / 255, torch.from_numpy(labels))
        for images, labels in (train, test)
    )
    layer = torch.nn.Linear(784, 10)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=steps, line_search_fn="strong_wolfe")
    best = [0.0]

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(layer(x), y)
        loss.backward()
        with torch.no_grad():
            best[0] = max(best[0], (layer(x_test).argmax(1) == y_test).double().mean().item())
        return loss

    optimizer.step(closure)
    return best[0]


def test_a_linear_classifier_is_not_enough(made, monkeypatch):
    assert 0.6 < best_linear_accuracy(made[0]["train"], made[0]["test"], steps=60) < 0.95
    # Control: upright and in the middle, it is, so the classifier is worth its name.
    monkeypatch.setattr(digits, "LARGEST_TURN", 0)
    monkeypatch.setattr(digits, "LARGEST_SHIFT", 0)
    monkeypatch.setattr(digits, "PER_CLASS", 200)
    monkeypatch.setattr(digits, "TEST_PER_CLASS", 20)
    easy = digits.generate()[0]
    assert best_linear_accuracy(easy["train"], easy["test"], steps=30) > 0.97
