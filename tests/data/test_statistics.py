"""Statistics by channel: exact, whatever the type of the values, their order, blocks and ranks."""

import math
import pickle
import sys
from fractions import Fraction

import numpy as np
import pytest

from hpctrain.data.statistics import ChannelStatistics

SHAPE = (7, 5, 3, 3)  # (n, H, W, C)
INTEGERS = ["bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
FLOATS = ["f2", "f4", "f8"]


def whole_range(dtype, seed=0, shape=SHAPE):
    """Values of all magnitudes that a type has, without NaN and infinity; and its two limits."""
    rng = np.random.default_rng(seed)
    raw = np.frombuffer(rng.bytes(math.prod(shape) * np.dtype(dtype).itemsize), dtype).copy()
    if np.dtype(dtype).kind == "b":
        return (rng.random(shape) < 0.3).astype(bool)
    if np.dtype(dtype).kind == "f":
        raw[~np.isfinite(raw)] = 0.5
        limits = np.finfo(dtype)
        raw[:4] = limits.max, -limits.max, limits.smallest_subnormal, limits.tiny
    else:
        raw[:2] = np.iinfo(dtype).min, np.iinfo(dtype).max
    return np.random.default_rng(seed).permutation(raw).reshape(shape)


def exact(values, divisor=1.0):
    """Mean, and variance as a fraction, of one channel, by rational numbers."""
    numbers = [Fraction(value) for value in values.ravel().tolist()]
    mean = sum(numbers) / len(numbers)
    variance = sum(number**2 for number in numbers) / len(numbers) - mean**2
    return mean / Fraction(divisor), variance / Fraction(divisor) ** 2


def statistics_of(images, nodata=None):
    found = ChannelStatistics(images.shape[-1], nodata)
    found.add(images)
    return found


def nearly_root(std, variance):
    """Whether a float is a root but for its rounding, of numbers that floats cannot hold, too."""
    if variance == 0:
        return std == 0
    if math.isinf(std):
        return variance > Fraction(sys.float_info.max) ** 2
    low, high = (Fraction(std) * (1 + Fraction(sign, 2**51)) for sign in (-1, 1))
    return low**2 <= variance <= high**2


@pytest.mark.parametrize("divisor", [1.0, 255.0, 0.1])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_mean_and_deviation_are_those_of_rational_numbers(dtype, divisor):
    images = whole_range(dtype)
    if dtype == "f8":
        images = np.ldexp(images, -8)  # else a mean of values / 0.1 may be too large for a float
    statistics = statistics_of(images)
    assert statistics.count.tolist() == [105] * 3
    assert statistics.low.tolist() == images.min(axis=(0, 1, 2)).astype(float).tolist()
    assert statistics.high.tolist() == images.max(axis=(0, 1, 2)).astype(float).tolist()
    means, stds = statistics.mean_and_std(divisor)
    for channel in range(3):
        mean, variance = exact(images[..., channel], divisor)
        assert means[channel] == float(mean)
        assert nearly_root(stds[channel], variance)


@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "f4", "f8", "i8"])
def test_neither_order_nor_blocks_nor_ranks_change_them(dtype):
    """Of more values than are added at a time."""
    images = whole_range(dtype, seed=3, shape=(5, 60, 40, 3))
    whole = statistics_of(images)
    backwards = statistics_of(images[::-1, ::-1])
    parts = [statistics_of(images[:2]), statistics_of(images[2:2]), statistics_of(images[2:])]
    merged = pickle.loads(pickle.dumps(parts[2]))
    merged.merge(parts[0])
    merged.merge(parts[1])
    assert whole == backwards == merged != parts[0]
    assert whole.mean_and_std(3.0) == merged.mean_and_std(3.0)


@pytest.mark.parametrize("seed", range(8))
def test_sums_that_cancel_leave_what_is_left(seed):
    """Where a plain sum in float64 loses all digits."""
    rng = np.random.default_rng(seed)
    large = rng.normal(size=50_000) * 10.0 ** rng.integers(0, 30, 50_000)
    values = np.concatenate([large, -large, [1e-5]])
    rng.shuffle(values)
    images = values.reshape(-1, 1, 1, 1)
    assert statistics_of(images).mean_and_std()[0] == (1e-5 / len(values),)
    single = values.astype("f4").reshape(-1, 1, 1, 1)
    assert statistics_of(single).mean_and_std()[0] == (float(np.float32(1e-5)) / len(values),)


def test_bytes_have_the_bits_of_sums_of_integers():
    """The formula of packs: their mean and deviation must never change."""
    images = np.random.default_rng(1).integers(0, 256, (61, 31, 29, 3), np.uint8)
    wide = images.reshape(-1, 3).astype(object)
    count = len(wide)
    means, stds = statistics_of(images).mean_and_std(255.0)
    for channel, value in enumerate(wide.sum(axis=0)):
        square = (wide[:, channel] ** 2).sum()
        assert means[channel] == value / (255 * count)
        assert stds[channel] == math.sqrt(count * square - value**2) / (255 * count)


@pytest.mark.parametrize(
    ("dtype", "nodata"),
    [("u1", 255), ("i2", -9999), ("f4", -9999.5), ("f4", math.nan), ("f8", 0.1), ("f4", 0.1)],
)
def test_nodata_does_not_count(dtype, nodata):
    rng = np.random.default_rng(2)
    images = rng.integers(0, 200, SHAPE).astype(dtype)
    is_missing = rng.random(SHAPE) < 0.3
    is_missing[..., 2] = True
    images[is_missing] = nodata
    statistics = statistics_of(images, nodata)
    assert statistics.count.tolist() == (~is_missing).sum(axis=(0, 1, 2)).tolist()
    for channel in range(2):
        kept = images[..., channel][~is_missing[..., channel]]
        mean, variance = exact(kept)
        assert statistics.low[channel] == kept.min() and statistics.high[channel] == kept.max()
        assert statistics.mean_and_std()[0][channel] == float(mean)
        assert nearly_root(statistics.mean_and_std()[1][channel], variance)
    assert [of[2] for of in statistics.mean_and_std()] == [0, 0]
    assert ChannelStatistics.from_json(statistics.as_json(), nodata) == statistics


def test_a_value_that_the_type_does_not_have_is_not_missing():
    for dtype, nodata in (("u1", -1), ("u1", 256), ("i2", 0.5), ("u1", math.nan), ("f4", 1e39)):
        images = whole_range(dtype)
        assert statistics_of(images, nodata) == statistics_of(images)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value):
    images = np.zeros(SHAPE, "f4")
    images[3, 2, 1, 0] = value
    with pytest.raises(ValueError, match="not finite"):
        statistics_of(images, 0.0)


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8"])
def test_they_are_kept_in_json(dtype):
    statistics = statistics_of(whole_range(dtype))
    again = ChannelStatistics.from_json(statistics.as_json())
    assert again == statistics
    assert again.mean_and_std(7.0) == statistics.mean_and_std(7.0)
