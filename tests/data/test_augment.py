"""Augmentation against numpy, image by image, and scaling in both memory formats."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from hpctrain.data.augment import Augmentation, augment, check_shift, normalization, to_input
from hpctrain.errors import UsageError

ROWS = 997


def images(n: int = ROWS, shape: tuple[int, int, int] = (7, 5, 3)) -> torch.Tensor:
    """Bytes 1 to 255, so that black is only what a shift brings in."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(1, 256, (n, *shape), generator=generator).to(torch.uint8)


def moved(image: np.ndarray, flipped: bool, down: int, right: int, shift: int) -> np.ndarray:
    """One image (H, W, C) flipped and then shifted, the plain way."""
    height, width, _ = image.shape
    image = image[:, ::-1] if flipped else image
    bordered = np.pad(image, ((shift, shift), (shift, shift), (0, 0)))
    top, left = shift - down, shift - right
    return bordered[top : top + height, left : left + width]


def movements(before: torch.Tensor, after: torch.Tensor, shift: int) -> list[tuple[bool, int, int]]:
    """What happened to each image; fails where it is nothing that may happen."""
    assert after.shape == before.shape and after.dtype == torch.uint8
    steps = range(-shift, shift + 1)
    every = [(f, down, right) for f in (False, True) for down in steps for right in steps]
    found = []
    for old, new in zip(before.numpy(), after.numpy(), strict=True):
        fits = [m for m in every if np.array_equal(moved(old, *m, shift), new)]
        assert len(fits) == 1
        found.append(fits[0])
    return found


def test_flips_and_shifts_are_as_often_as_chance_says() -> None:
    before = images()
    found = movements(before, augment(before, Augmentation(True, 2), key=5), 2)
    counts = Counter(found)
    assert len(counts) == 2 * 5 * 5
    assert max(counts.values()) < 50  # 20 expected
    flips = sum(flipped for flipped, _, _ in found)
    assert abs(flips - ROWS / 2) < 5 * (ROWS / 4) ** 0.5
    for axis in (1, 2):
        by_shift = Counter(movement[axis] for movement in found)
        assert all(abs(count - ROWS / 5) < 5 * (ROWS / 5) ** 0.5 for count in by_shift.values())
    assert abs(np.corrcoef(np.array(found).astype(float).T) - np.eye(3)).max() < 0.16


def test_flip_alone_and_shift_alone() -> None:
    before = images(101)
    both = movements(before, augment(before, Augmentation(True, 2), key=5), 2)
    flips = movements(before, augment(before, Augmentation(True, 0), key=5), 0)
    shifts = movements(before, augment(before, Augmentation(False, 2), key=5), 2)
    assert [f for f, _, _ in flips] == [f for f, _, _ in both]
    assert {f for f, _, _ in shifts} == {False}
    assert [m[1:] for m in shifts] == [m[1:] for m in both]


def test_the_key_alone_decides() -> None:
    before = images(101)
    copy = before.clone()
    first = augment(before, Augmentation(True, 2), key=5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(augment(before, Augmentation(True, 2), key=5), first)
    assert not torch.equal(augment(before, Augmentation(True, 2), key=6), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(before, copy)
    augment(before, Augmentation(True, 2), key=2**63 - 1)


def test_nothing_is_touched_without_flip_and_shift() -> None:
    before = images(3)
    assert augment(before, Augmentation(False, 0), key=5) is before
    assert augment(before[:0], Augmentation(True, 2), key=5).shape == (0, 7, 5, 3)
    assert to_input(before[:0], torch.ones(3), torch.ones(3)).shape == (0, 3, 7, 5)


@pytest.mark.parametrize("shape", [(11, 13, 1), (5, 7, 3), (3, 3, 1)])
def test_the_largest_shift_and_a_single_image(shape: tuple[int, int, int]) -> None:
    shift = min(shape[:2]) - 1
    check_shift(shift, shape)
    before = images(1, shape)
    for key in range(13):
        movements(before, augment(before, Augmentation(True, shift), key), shift)


@pytest.mark.parametrize("shift", [-1, 5, 100])
def test_shifts_out_of_range_are_refused(shift: int) -> None:
    with pytest.raises(UsageError, match=f"--shift is {shift}; images of 5x7 allow 0 to 4"):
        check_shift(shift, (7, 5, 3))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_input_is_scaled_and_lies_as_asked(channels: int, channels_last: bool) -> None:
    before = images(13, (7, 5, channels))
    result = to_input(before, channels_last=channels_last)
    assert result.shape == (13, channels, 7, 5) and result.dtype == torch.float32
    expected = before.numpy().transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-7)
    strides = (35 * channels, 1, 5 * channels, channels) if channels_last else None
    assert result.stride() == (strides or (35 * channels, 35, 5, 1))
    convolved = torch.nn.functional.conv2d(result, torch.rand(7, channels, 3, 3))
    assert convolved.is_contiguous(memory_format=torch.channels_last) == channels_last


def test_unit_input_reaches_both_ends_exactly() -> None:
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 2, 1)
    assert to_input(ends).flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_input_is_normalized_per_channel(dtype: torch.dtype, channels_last: bool) -> None:
    before = images(13)
    mean, std = torch.tensor([0.5, 0.25, 0.125]), torch.tensor([0.2, 0.3, 0.4])
    result = to_input(before, mean, std, dtype, channels_last)
    assert result.dtype == dtype
    scaled = before.numpy() / 255
    expected = (scaled - mean.double().numpy()) / std.double().numpy()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    measured = result.double().numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(measured, expected, rtol=0, atol=tolerance)
    assert abs(measured - scaled).max() > 0.1


def test_input_never_shares_memory_with_the_bytes() -> None:
    before = images(3)
    result = to_input(before)
    copy = result.clone()
    before.zero_()
    assert torch.equal(result, copy)


def test_normalization_by_name() -> None:
    assert normalization("unit", (0.1,), (0.0,)) == ()
    assert normalization("pack", (0.1, 0.2), (0.3, 0.4)) == ((0.1, 0.2), (0.3, 0.4))
    imagenet = normalization("imagenet", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert imagenet == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_normalization_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="imagenet is for images of 3 channels; these have 1"):
        normalization("imagenet", (0.1,), (0.2,))
    with pytest.raises(UsageError, match=r"the pack's standard deviations are 0\.25, 0:"):
        normalization("pack", (0.1, 0.2), (0.25, 0.0))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_input_scaled_in_parts_has_the_same_bits(monkeypatch, scaled, channels_last):
    """A CPU scales as many images at a time as its cache holds."""
    images = torch.randint(0, 256, (11, 7, 5, 3), dtype=torch.uint8)
    numbers = (torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])) if scaled else ()
    whole = to_input(images, *numbers, channels_last=channels_last)
    for values in (1, 2 * 105, 4 * 105 + 1):
        monkeypatch.setattr("hpctrain.data.augment.CACHED_VALUES", values)
        assert torch.equal(to_input(images, *numbers, channels_last=channels_last), whole)
