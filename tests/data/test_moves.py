"""Flips, turns by right angles and shifts of stored values, against NumPy under the same draws."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import Augmentation

TYPES = ("u1", "i1", "u2", "i2", "i4", "i8", "f2", "f4", "f8")
KEY = 7
N = 41
SETTINGS = [
    Augmentation(*given)
    for given in itertools.product((False, True), (0, 2), (False, True), (False, True))
]


def derived_key(key, name):
    """The key of a stage's own, in 63 bits."""
    digest = hashlib.blake2b(f"int:{key}|str:'{name}'".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def moved(images, augmentation, key=KEY, **how):
    """Stored images (n, H, W, C) as training would see them, as float64."""
    pipeline = hp.Pipeline(dtype=torch.float64, augmentation=augmentation, **how)
    inputs = pipeline.inputs(torch.from_numpy(images), key, divisor=1)
    return inputs.permute(0, 2, 3, 1).numpy()


def draw(n, key, augmentation):
    """The numbers of n images by the keys that data/pipeline.py lists: an array of n each."""

    key = derived_key(key, "augment")

    def integers(key, *ranges):
        generator = torch.Generator().manual_seed(key)
        drawn = [torch.randint(*of, generator=generator) for of in ranges]
        return [values.numpy() for values in drawn]

    shift = augmentation.shift
    flips, shifts = integers(key, (0, 2, (n,)), (-shift, shift + 1, (2, n)))
    (upside_down,) = integers(derived_key(key, "flip vertical"), (0, 2, (n,)))
    (turns,) = integers(derived_key(key, "rotate90"), (0, 4, (n,)))
    zeros = np.zeros(n, int)
    return (
        flips if augmentation.flip else zeros,
        upside_down if augmentation.flip_vertical else zeros,
        turns if augmentation.rotate90 else zeros,
        *(shifts if shift else (zeros, zeros)),
    )


def move(image, flipped, upside_down, turns, down, right, border):
    """One image (H, W, C) moved by NumPy."""
    if flipped:
        image = np.fliplr(image)
    if upside_down:
        image = np.flipud(image)
    image = np.rot90(image, turns)
    height, width, _ = image.shape
    moved = np.full_like(image, border)
    for row, column in itertools.product(range(height), range(width)):
        if 0 <= row - down < height and 0 <= column - right < width:
            moved[row, column] = image[row - down, column - right]
    return moved


def random_images(dtype, shape, n=N):
    """Images of all values that are numbers other than 0, and exact in float64."""
    bits = np.random.default_rng(n).integers(1, 256, (n, *shape, np.dtype(dtype).itemsize), "u1")
    values = np.ascontiguousarray(bits).view(dtype)[..., 0]
    if dtype == "i8":
        values >>= 11
    return np.where(np.isnan(values) | (values == 0), np.ones(1, dtype), values)


@pytest.mark.parametrize("dtype", TYPES)
def test_images_are_moved_as_numpy_moves_them(dtype):
    images = random_images(dtype, (5, 5, 3))
    for augmentation in SETTINGS:
        drawn = zip(images, *draw(N, KEY, augmentation), strict=True)
        expected = np.array([move(*numbers, border=0) for numbers in drawn]).astype("f8")
        assert moved(images, augmentation).tobytes() == expected.tobytes(), augmentation


@pytest.mark.parametrize("dtype", TYPES)
def test_a_shift_brings_in_no_data_after_turns(dtype):
    """No data becomes 0, the value 0 does not."""
    images = np.ones((N, 5, 5, 3), dtype)
    how = {"nodata": 5.0, "normalization": ((0.5,) * 3, (1.0,) * 3)}
    result = moved(images, SETTINGS[-1], **how)
    drawn = draw(N, KEY, SETTINGS[-1])
    expected = np.array([move(*numbers, border=5) for numbers in zip(images, *drawn, strict=True)])
    assert np.array_equal(result, np.where(expected == 5, 0, 0.5))
    assert (result == 0).any()


def test_each_of_the_eight_symmetries_is_as_often_as_the_others():
    images = np.arange(9).reshape(1, 3, 3, 1).astype("i2").repeat(2000, 0)
    for is_flipped, count in ((True, 8), (False, 4)):
        result = moved(images, Augmentation(flip_vertical=is_flipped, rotate90=True))
        seen, counts = np.unique(result.reshape(2000, 9), axis=0, return_counts=True)
        spread = (2000 * (count - 1)) ** 0.5 / count
        assert len(seen) == count and abs(counts - 2000 / count).max() < 5 * spread


@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.sampled_from([1, 3, 60]),
    dtype=st.sampled_from(TYPES),
    key=st.integers(0, 2**63 - 1),
    flips=st.tuples(st.booleans(), st.booleans()),
)
def test_without_shifts_pixels_are_only_moved(height, width, channels, dtype, key, flips):
    """Each image keeps its pixels; the images that were given do not change."""
    images = random_images(dtype, (height, width, channels), n=5)
    before = images.copy()
    is_square = height == width
    augmentation = Augmentation(flip=flips[0], flip_vertical=flips[1], rotate90=is_square)
    result = moved(images, augmentation, key)
    assert result.shape == images.shape and before.tobytes() == images.tobytes()
    for old, new in zip(before.astype("f8"), result, strict=True):
        assert sorted(pixels_of(old)) == sorted(pixels_of(new))


def pixels_of(image):
    """The values of each pixel of an image (H, W, C)."""
    return image.reshape(-1, image.shape[2]).tolist()


@pytest.mark.parametrize("name", ["flip", "shift", "flip_vertical", "rotate90"])
def test_what_one_draws_does_not_depend_on_the_others(name):
    """Images of which all places are told apart: the movement can be read from them."""
    images = np.arange(25, dtype="i2").reshape(1, 5, 5, 1).repeat(N, 0)
    everything = Augmentation(flip=True, shift=2, flip_vertical=True, rotate90=True)
    alone = Augmentation(**{name: getattr(everything, name)})
    without = everything._replace(**{name: getattr(Augmentation(), name)})
    result = moved(images, everything)
    drawn = [*draw(N, KEY, without)]
    of_name = draw(N, KEY, alone)
    for place, numbers in enumerate(of_name):
        if numbers.any():
            drawn[place] = numbers
    expected = [move(*numbers, 0) for numbers in zip(images, *drawn, strict=True)]
    assert np.array_equal(result, expected)
    assert not np.array_equal(moved(images, without), result)
