"""Transforms in a row: their keys, their range, and the tests that refuse what would not repeat."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.api import transform_checks, transforms
from tests.support.own_functions import brighten

FLAG = "--augment kornia:Cheat()"


def images(n=64, shape=(3, 8, 6), dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    drawn = 0.1 + 0.8 * torch.rand((n, *shape), generator=generator, dtype=torch.float64)
    return drawn.to(dtype).contiguous(memory_format=torch.channels_last)


def part(function, by_sample=False):
    return transforms.LibraryTransform(FLAG, function, by_sample)


def own(function):
    return transforms.Imported("--augment tests:own", function, __file__)


def darker(images):
    """As a library does: draws of torch's generator, a number a sample."""
    return images * torch.rand(len(images), 1, 1, 1)


def darker_by_call(images):
    return images * torch.rand(())


class Counter:
    calls = 0

    def __call__(self, images):
        self.calls += 1
        return images * (1 if self.calls < 60 else 0.5)


class Cache:
    before = None

    def __call__(self, images):
        before, self.before = self.before, images.mean()
        return images if before is None else images * before


class OwnGenerator:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, images):
        return images * torch.rand((), generator=self.generator)


def rarely(images, draw):
    for row in range(len(images)):
        if torch.rand(()) < 0.1:
            images[row] *= draw()
    return images


CHEATS = {
    "numpy at p = 0.1": (lambda x: rarely(x, np.random.random), "from numpy.random"),
    "random": (lambda x: x * random.random(), "from random"),
    "random at p = 0.1": (lambda x: rarely(x, random.random), "from random"),
    "a fresh generator of numpy": (
        lambda x: rarely(x, np.random.default_rng().random),
        "draws from elsewhere",
    ),
    "the global generator": (
        lambda x: x * torch.rand((), generator=torch.default_generator),
        "rand is given a generator of its own",
    ),
    "a generator of its own": (OwnGenerator(), "rand is given a generator of its own"),
    "an operator": (lambda x: x * torch.ops.aten.rand([1]), "aten.rand"),
    "dropout": (torch.nn.functional.dropout, "dropout draws"),
    "a seed": (lambda x: x * torch.manual_seed(1).initial_seed(), "torch's default generator"),
    "a counter": (Counter(), "keeps something of earlier calls"),
    "the call before": (Cache(), "mixes images"),
    "the mean of the batch": (lambda x: x * x.mean(), "mixes images"),
    "a rank in the batch": (lambda x: x.sort(0).values, "mixes images"),
    "mixup": (lambda x: (x + x[torch.randperm(len(x))]) / 2, "mixes images"),
    "mixup at p = 0.2": (
        lambda x: (x + x.flip(0)) / 2 if torch.rand(()) < 0.2 else x,
        "mixes images",
    ),
    "the size of the batch": (lambda x: x / len(x), "in batches of other sizes"),
    "a crop": (lambda x: x[:, :, 1:], "shape (64, 3, 7, 6)"),
    "a gray image": (lambda x: x.mean(1, keepdim=True), "shape (64, 1, 8, 6)"),
    "another type": (lambda x: (x * 255).byte(), "torch.uint8"),
    "a tuple": (lambda x: (x, 1), "returned tuple"),
    "NaN": (lambda x: x / 0 * 0, "NaN or infinity"),
    "infinity": (lambda x: x.log().exp() / 0, "NaN or infinity"),
    "an error": (lambda x: x[99], "failed: IndexError"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_transform_that_would_not_repeat_is_refused_in_a_line_by_name(name):
    function, why = CHEATS[name]
    with pytest.raises(hp.UsageError) as caught:
        transform_checks.check_part(part(function), images(), 5)
    text = str(caught.value)
    assert text.startswith(FLAG) and why in text and "\n" not in text


@pytest.mark.parametrize("name", ["a counter", "the call before"])
def test_state_is_refused_also_of_one_that_is_called_by_sample(name):
    function = {"a counter": Counter, "the call before": Cache}[name]()
    with pytest.raises(hp.UsageError, match="earlier calls"):
        transform_checks.check_part(part(function, by_sample=True), images(), 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("by_sample", [False, True])
def test_a_transform_draws_by_key_and_keeps_dtype_strides_and_what_it_is_given(dtype, by_sample):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    given = images(dtype=dtype)
    kept = given.clone(memory_format=torch.preserve_format)
    transform = part(darker_by_call if by_sample else darker, by_sample)
    first = transform(given, 1)
    assert (first.dtype, first.stride(), first.shape) == (dtype, given.stride(), given.shape)
    assert torch.equal(transform(given, 1), first) and torch.equal(given, kept)
    assert not torch.equal(transform(given, 2), first)
    factors = (first / given).double().mean((1, 2, 3))
    assert len(factors.round(decimals=2).unique()) > 30  # samples differ
    assert torch.equal(transform(given[:1], 1), first[:1])
    assert torch.equal(torch.get_rng_state(), before)
    assert transform(given[:0], 1).shape == (0, 3, 8, 6)
    transform_checks.check_part(transform, images(), 1)


def test_normal_noise_is_accepted_for_images_of_any_size():
    """torch draws the last 16 numbers otherwise if they are not a multiple of 16."""
    odd = images()[:, :, :5, :5]
    noisy = part(lambda x: (x + torch.randn(x.shape) / 8).clamp(0, 1))
    assert not torch.equal(noisy(odd[:1], 5), noisy(odd, 5)[:1])
    transform_checks.check_part(noisy, odd, 5)


def test_one_that_draws_once_a_call_gives_all_samples_the_same_unless_called_by_sample():
    together = part(darker_by_call)(images(), 1) / images()
    assert torch.allclose(together, together[0, 0, 0, 0], atol=1e-6)


def test_transforms_in_a_row_have_keys_of_their_own_and_the_first_that_of_a_single_one():
    function = own(brighten)
    alone = transforms.Transforms([function])(images(), 7)
    key = transforms.key_of_step(7, 0)
    assert torch.equal(alone, transforms.augment_by(function, images(), key))
    twice = transforms.Transforms([part(darker), part(darker), function])(images(), 7)
    first = part(darker)(images(), key)
    second = part(darker)(first, transforms.key_of_step(7, 1))
    third = transforms.augment_by(function, second, transforms.key_of_step(7, 2))
    assert torch.equal(twice, third)
    factors = (first / images(), second / first)
    assert not torch.allclose(*factors, atol=1e-2)


def test_values_outside_0_to_1_are_refused_by_name_where_they_are_given():
    row = transforms.Transforms([own(lambda x, generator: x - 0.2), part(darker)])
    with pytest.raises(hp.UsageError, match="was given values from -0.0"):
        row(images(), 1)
    loud = part(lambda x: x * 2)  # as the last, what it returns is for the network
    assert transforms.Transforms([loud])(images(), 1).max() > 1.5
    with pytest.raises(hp.UsageError, match="takes values in .0, 1., and was given values"):
        transforms.Transforms([loud, part(darker)])(images(), 1)
    assert transforms.Transforms([own(lambda x, generator: x * 9)])(images(), 1).max() > 5


def test_values_of_damaged_samples_are_not_given_to_parts():
    """The loader names these samples, and the step does not count."""
    damaged = images()
    damaged[3, 0, 0, 0] = torch.nan
    damaged[4, 0, 0, 0] = torch.inf
    assert transforms.Transforms([part(darker)])(damaged, 1).isfinite().all()


# Stored values with a range of their own

LOW = torch.tensor([-5.0, 1000.0, 3.0], dtype=torch.float64)
WIDTH = torch.tensor([10.0, 0.5, 1.0], dtype=torch.float64)
RANGE = transforms.UnitRange(LOW, WIDTH)


def stored(n=9):
    """Images (n, H, W, C) that have the whole range in each channel."""
    values = np.random.default_rng(2).random((n, 6, 5, 3))
    values[0, 0, 0] = 0
    values[0, 0, 1] = 1
    return torch.from_numpy(values * WIDTH.numpy() + LOW.numpy())


@pytest.mark.parametrize("normalization", [None, ((0.0, 1000.2, 3.5), (3.0, 0.2, 0.3)), "image"])
@pytest.mark.parametrize("nodata", [None, -5.0])
def test_transforms_see_the_range_as_0_to_1_and_it_is_undone(normalization, nodata):
    seen = []

    def look(x):
        seen.append(x.clone())
        return x.flip(3)

    settings = {"normalization": normalization, "nodata": nodata}
    if nodata is not None and normalization is None:
        low = torch.minimum(LOW, torch.zeros(3))  # 0, which stands for missing data, is in it
        unit_range = transforms.UnitRange(low, LOW + WIDTH - low)
    else:
        unit_range = RANGE
    row = transforms.Transforms([part(look)], unit_range)
    pipeline = hp.Pipeline(**settings, transform=row, unit_range=unit_range)
    found = pipeline.inputs(stored(), 1, 1.0)
    plain = hp.Pipeline(**settings).inputs(stored(), 1, 1.0)
    torch.testing.assert_close(found, plain.flip(3), rtol=1e-5, atol=2e-4)
    assert seen[0].min() >= 0 and seen[0].max() <= 1
    expected = (stored().permute(0, 3, 1, 2) - unit_range.low[:, None, None]) / unit_range.width[
        :, None, None
    ]
    is_there = torch.ones_like(expected, dtype=torch.bool)
    if nodata is not None:
        is_there = stored().permute(0, 3, 1, 2) != nodata
        assert (found.flip(3)[~is_there] == 0).all() and not is_there.all()
    torch.testing.assert_close(seen[0].double()[is_there], expected[is_there], rtol=0, atol=1e-7)


def test_the_users_own_functions_are_given_divided_values_between_parts():
    seen = []

    def look(x, generator):
        seen.append(x.clone())
        return x

    row = transforms.Transforms([own(look), part(lambda x: x), own(look)], RANGE)
    pipeline = hp.Pipeline(dtype=torch.float64, transform=row, unit_range=RANGE)
    found = pipeline.inputs(stored(), 1, 1.0)
    expected = stored().permute(0, 3, 1, 2)
    for values in (*seen, found):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_an_evaluation_is_without_transforms_and_their_range():
    row = transforms.Transforms([part(darker)], RANGE)
    pipeline = hp.Pipeline(transform=row, unit_range=RANGE)
    assert torch.equal(pipeline.plain().inputs(stored(), 1), hp.Pipeline().inputs(stored()))
