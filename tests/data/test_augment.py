"""Augmentation against numpy, image by image, and scaling in both memory formats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.api import Augmentation

ROWS = 997


def images(n: int = ROWS, shape: tuple[int, int, int] = (7, 5, 3)) -> torch.Tensor:
    """Bytes 1 to 255, so that black is only what a shift brings in."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(1, 256, (n, *shape), generator=generator).to(torch.uint8)


def augment(before: torch.Tensor, flip: bool, shift: int, key: int) -> np.ndarray:
    """The bytes (n, H, W, C) that training would see."""
    prepared = hp.Pipeline(augmentation=Augmentation(flip, shift)).inputs(before, key)
    return np.rint(prepared.permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)


def moved(image: np.ndarray, flipped: bool, down: int, right: int, shift: int) -> np.ndarray:
    """One image (H, W, C) flipped and then shifted, the plain way."""
    height, width, _ = image.shape
    image = image[:, ::-1] if flipped else image
    bordered = np.pad(image, ((shift, shift), (shift, shift), (0, 0)))
    top, left = shift - down, shift - right
    return bordered[top : top + height, left : left + width]


def movements(before: torch.Tensor, flip: bool, shift: int, key: int = 5) -> np.ndarray:
    """What happened to each image, (n, 3): flipped, down, right; nothing else may happen."""
    steps = range(-shift, shift + 1)
    every = [(f, down, right) for f in (False, True) for down in steps for right in steps]
    found = []
    for old, new in zip(before.numpy(), augment(before, flip, shift, key), strict=True):
        fits = [m for m in every if np.array_equal(moved(old, *m, shift), new)]
        assert len(fits) == 1
        found.append(fits[0])
    return np.array(found)


def test_flips_and_shifts_are_as_often_as_chance_says() -> None:
    found = movements(images(), True, 2)
    counts = Counter(map(tuple, found.tolist()))
    assert len(counts) == 2 * 5 * 5 and max(counts.values()) < 50  # 20 expected
    assert abs(found[:, 0].sum() - ROWS / 2) < 5 * (ROWS / 4) ** 0.5
    for axis in (1, 2):
        by_shift = np.bincount(found[:, axis] + 2)
        assert (abs(by_shift - ROWS / 5) < 5 * (ROWS / 5) ** 0.5).all()
    assert abs(np.corrcoef(found.astype(float).T) - np.eye(3)).max() < 0.16


def test_flips_are_the_same_with_and_without_shifts() -> None:
    before = images(101)
    both, flips, shifts = (movements(before, *of) for of in ((True, 2), (True, 0), (False, 2)))
    assert (flips[:, 0] == both[:, 0]).all() and not shifts[:, 0].any()
    assert (shifts[:, 1:] == both[:, 1:]).all()


def test_the_key_alone_decides() -> None:
    before = images(101)
    copy, state = before.clone(), torch.get_rng_state()
    first = augment(before, True, 2, key=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert np.array_equal(augment(before, True, 2, key=5), first)
    assert not np.array_equal(augment(before, True, 2, key=6), first)
    assert torch.equal(before, copy)
    augment(before, True, 2, key=2**63 - 1)


@pytest.mark.parametrize("shape", [(11, 13, 1), (5, 7, 3), (3, 3, 1)])
def test_the_largest_shift_and_a_single_image(shape: tuple[int, int, int]) -> None:
    for key in range(13):
        movements(images(1, shape), True, min(shape[:2]) - 1, key)
    assert augment(images(3)[:0], True, 2, 5).shape == (0, 7, 5, 3)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_input_is_scaled_and_of_the_memory_format_asked_for(channels, channels_last) -> None:
    before = images(13, (7, 5, channels))
    result = hp.Pipeline(channels_last=channels_last).inputs(before)
    assert result.shape == (13, channels, 7, 5) and result.dtype == torch.float32
    plain = before.numpy().transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(result.numpy(), plain, rtol=2e-7)
    strides = (1, 5 * channels, channels) if channels_last else (35, 5, 1)
    assert result.stride() == (35 * channels, *strides)
    convolved = torch.nn.functional.conv2d(result, torch.rand(7, channels, 3, 3))
    assert convolved.is_contiguous(memory_format=torch.channels_last) == channels_last
    kept = result.clone()
    before.zero_()
    assert torch.equal(result, kept)  # the memory of the bytes is reused
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 2, 1)
    assert hp.Pipeline().inputs(ends).flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_input_is_normalized_per_channel(dtype: torch.dtype, channels_last: bool) -> None:
    before = images(13)
    mean, std = torch.tensor([0.5, 0.25, 0.125]), torch.tensor([0.2, 0.3, 0.4])
    result = hp.Pipeline("cpu", dtype, channels_last, (mean, std)).inputs(before)
    plain = (before.numpy() / 255 - mean.double().numpy()) / std.double().numpy()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    measured = result.double().numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(measured, plain, rtol=0, atol=tolerance)
    assert result.dtype == dtype


@pytest.mark.parametrize("scaling", [None, ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))])
def test_a_large_batch_has_the_bits_of_its_images(scaling) -> None:
    """A CPU scales as many images at a time as its cache holds."""
    before = images(101, (64, 64, 3))
    pipeline = hp.Pipeline(normalization=scaling)
    alone = [pipeline.inputs(part) for part in before.split(1)]
    assert torch.equal(pipeline.inputs(before), torch.cat(alone))
