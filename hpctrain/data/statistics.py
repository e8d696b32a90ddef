"""Exact statistics of images, by channel: number of values, range, mean and standard deviation.

The sums of values and of their squares are integers, in units of the smallest float64 and of its
square, so they do not depend on the order in which images are added, or on the blocks and the
ranks that add them.

A value is the sum of parts of at most 26 bits, so the product of two parts is an exact float64.
Floats of a block are summed by extraction: adding a power of two and subtracting it rounds all of
them to multiples of one unit, which sum exactly in any order, and what this leaves is summed in the
same way (ExtractVector in Rump, Ogita and Oishi, "Accurate Floating-Point Summation", SIAM Journal
on Scientific Computing 31, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np

from hpctrain.data.scale import can_hold, is_nodata
from hpctrain.text import counted

BLOCK_BYTES = 1 << 17  # of values added at a time: in float64, they stay in a core's cache
UNIT = 1074  # sums are integers, in units of 2 ** -UNIT, and sums of squares in its square
BYTE_VALUES = np.arange(256)
BITS = 53  # of the significand of float64
PART_BITS = 26  # the product of two parts has at most 52
LIMB_BITS = 22  # of parts of integers: three are 64 bits
SPLITTER = 2.0**27 + 1  # splits a float64 into two parts (Veltkamp, see Dekker 1971)
BAND = 256  # exponents of floats whose squares, and products of whose parts, are normal float64


class ChannelStatistics:
    """Statistics of the channels of images, exact in any order. They can be pickled and merged.

    `count`, (C,) int64, is the number of values of each channel. `low` and `high`, (C,) float64,
    are its smallest and largest value as stored; inf and -inf if there is none.
    """

    def __init__(self, channels: int, nodata: float | None = None) -> None:
        """Begin without images. Values equal to `nodata`, or NaN if it is NaN, do not count."""
        self.nodata = nodata
        self.count = np.zeros(channels, np.int64)
        self.low = np.full(channels, np.inf)
        self.high = np.full(channels, -np.inf)
        self._sums = [0] * channels
        self._squares = [0] * channels

    def add(self, images: np.ndarray) -> None:
        """Add images (n, H, W, C) of an integer type, bool, float16, float32 or float64.

        Raises ValueError for values that are not finite, unless they are `nodata`.
        """
        channels = len(self.count)
        pixels = images.reshape(-1, channels)
        if pixels.dtype == np.uint8:
            self._add_bytes(pixels)
            return
        step = max(1, BLOCK_BYTES // (channels * pixels.itemsize))
        for start in range(0, len(pixels), step):
            self._add_block(np.ascontiguousarray(pixels[start : start + step].T))

    def merge(self, other: ChannelStatistics) -> None:
        """Add the values of `other`, of as many channels."""
        self.count += other.count
        self.low = np.minimum(self.low, other.low)
        self.high = np.maximum(self.high, other.high)
        self._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        self._squares = [a + b for a, b in zip(self._squares, other._squares, strict=True)]

    def mean_and_std(self, divisor: float = 1.0) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the mean and standard deviation of each channel, (C,), of values / `divisor`.

        Means are exactly rounded; a deviation is the root of the exact variance (of all values, not
        an estimate), exact but for three roundings. Both are 0 for a channel without values.
        """
        mean = []
        std = []
        counts = self.count.tolist()
        for count, total, square in zip(counts, self._sums, self._squares, strict=True):
            if count == 0:
                mean.append(0.0)
                std.append(0.0)
                continue
            mean.append(float(Fraction(total, count << UNIT) / Fraction(divisor)))
            std.append(_root(count * square - total**2, divisor * count))
        return tuple(mean), tuple(std)

    def as_json(self) -> dict[str, Any]:
        """Return the content as JSON can hold it: sums are texts of whole numbers or fractions."""
        has_values = self.count > 0
        return {
            "count": self.count.tolist(),
            "low": np.where(has_values, self.low, 0.0).tolist(),
            "high": np.where(has_values, self.high, 0.0).tolist(),
            "sum": [str(Fraction(total, 1 << UNIT)) for total in self._sums],
            "sum_of_squares": [str(Fraction(total, 1 << 2 * UNIT)) for total in self._squares],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], nodata: float | None = None) -> Self:
        """Return the statistics of which `content` was made by `as_json`."""
        statistics = cls(len(content["count"]), nodata)
        statistics.count += np.array(content["count"], np.int64)
        for channel, count in enumerate(content["count"]):
            if count:
                statistics.low[channel] = content["low"][channel]
                statistics.high[channel] = content["high"][channel]
        statistics._sums = [int(Fraction(text) * 2**UNIT) for text in content["sum"]]
        squares = content["sum_of_squares"]
        statistics._squares = [int(Fraction(text) * 4**UNIT) for text in squares]
        return statistics

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelStatistics) and self.as_json() == other.as_json()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def _add_bytes(self, pixels: np.ndarray) -> None:
        """Add bytes (n, C), by the number of each of the 256."""
        from PIL import Image  # its histogram is faster than any of NumPy

        for channel, plane in enumerate(pixels.T):
            histogram = Image.fromarray(np.ascontiguousarray(plane)[None]).histogram()
            if self.nodata is not None and can_hold(pixels.dtype, self.nodata):
                histogram[int(self.nodata)] = 0
            counts = np.array(histogram, np.int64)
            present = np.flatnonzero(counts)
            if len(present):
                self.low[channel] = min(self.low[channel], present[0])
                self.high[channel] = max(self.high[channel], present[-1])
            self.count[channel] += counts.sum()
            self._sums[channel] += int(counts @ BYTE_VALUES) << UNIT
            self._squares[channel] += int(counts @ BYTE_VALUES**2) << 2 * UNIT

    def _add_block(self, values: np.ndarray) -> None:
        """Add values (C, n), contiguous and not many."""
        self.count += values.shape[1]
        low = values
        high = values
        if self.nodata is not None:
            is_missing = is_nodata(values, self.nodata)
            self.count -= is_missing.sum(axis=1)
            low = np.where(is_missing, np.inf, values)
            high = np.where(is_missing, -np.inf, values)
            values = np.where(is_missing, values.dtype.type(0), values)
        lowest = low.min(axis=1)
        highest = high.max(axis=1)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError("images hold values that are not finite")
        self.low = np.minimum(self.low, lowest)
        self.high = np.maximum(self.high, highest)
        if values.dtype.itemsize <= 2 and values.dtype.kind != "f":
            wide = values.astype(np.float64)  # a sum of squares is less than 2 ** 53
            _accumulate(self._sums, wide.sum(axis=1), UNIT)
            _accumulate(self._squares, np.einsum("cn,cn->c", wide, wide), 2 * UNIT)
            return
        for scaled, exponent in _bands(values):
            parts = _split(scaled)
            for part in parts:
                for sums in _exact_sums(part):
                    _accumulate(self._sums, sums, UNIT + exponent)
            for number, part in enumerate(parts):
                for other in parts[number:]:
                    power = 2 * (UNIT + exponent) + (other is not part)  # twice its product
                    for sums in _exact_sums(part * other):
                        _accumulate(self._squares, sums, power)


@dataclass
class BeyondMaximum:
    """How many stored values become more than 1, or less than -1, and in how many images."""

    values: int = 0
    images: int = 0

    def add(self, images: np.ndarray, max_value: float | None, nodata: float | None) -> None:
        """Count those of images (n, H, W, C), but for `nodata`. `max_value` becomes 1."""
        if max_value is None:
            return
        is_beyond = (images > max_value) | (images < -max_value)
        if nodata is not None:
            is_beyond &= ~is_nodata(images, nodata)
        in_image = np.count_nonzero(is_beyond, axis=(1, 2, 3))
        self.values += int(in_image.sum())
        self.images += int(np.count_nonzero(in_image))

    def merge(self, other: BeyondMaximum) -> None:
        """Add the counts of `other`."""
        self.values += other.values
        self.images += other.images

    def note(self, option: str) -> str:
        """Return a note on them, "" if there are none. `option` is what set the maximum."""
        if not self.values:
            return ""
        return (
            f"{counted(self.values, 'value')} in {counted(self.images, 'image')} are beyond"
            f" {option}: they become more than 1, or less than -1"
        )


def _bands(values: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yield arrays like `values` and exponents e: the values are the sum of all arrays x 2 ** e.

    The squares of their elements neither overflow nor underflow.
    """
    if values.dtype != np.float64:
        yield values, 0
        return
    bands = np.frexp(values)[1] // BAND
    first = int(bands.min())
    last = int(bands.max())
    if first >= -1 and last <= 0:
        yield values, 0
        return
    for band in range(first, last + 1):
        chosen = np.where(bands == band, values, 0.0)
        if chosen.any():
            yield np.ldexp(chosen, -BAND * band), BAND * band


def _split(values: np.ndarray) -> list[np.ndarray]:
    """Return float64 arrays of elements of at most 26 bits, whose sum is `values`.

    These are floats, or integers of 32 or 64 bits.
    """
    dtype = values.dtype
    if dtype == np.float64:
        product = SPLITTER * values
        high = product - (product - values)
        return [high, values - high]
    if dtype.kind == "f":
        return [values.astype(np.float64)]
    if int(values.min()) >= -(1 << PART_BITS) and int(values.max()) <= 1 << PART_BITS:
        return [values.astype(np.float64)]
    parts = []
    for shift in range(0, 8 * dtype.itemsize, LIMB_BITS):
        limb = values >> dtype.type(shift)
        if shift + LIMB_BITS < 8 * dtype.itemsize:
            limb &= dtype.type((1 << LIMB_BITS) - 1)
        parts.append(np.ldexp(limb.astype(np.float64), shift))
    return parts


def _exact_sums(terms: np.ndarray) -> Iterator[np.ndarray]:
    """Yield arrays (C,) float64 whose exact sum is that of terms (C, n) along n."""
    room = terms.shape[1].bit_length() + 1  # bits by which a sum is larger than its terms
    rest = terms.copy()
    rounded = np.empty_like(rest)
    while True:
        largest = max(float(rest.max()), -float(rest.min()))
        if largest == 0:
            return
        sigma = math.ldexp(1.0, math.frexp(largest)[1] + room)
        np.add(rest, sigma, out=rounded)
        rounded -= sigma
        rest -= rounded
        yield rounded.sum(axis=1)


def _accumulate(totals: list[int], values: np.ndarray, exponent: int) -> None:
    """Add values (C,) x 2 ** exponent, which are whole numbers, to the totals (C,)."""
    for channel, value in enumerate(values.tolist()):
        fraction, power = math.frexp(value)
        whole = int(math.ldexp(fraction, BITS))
        shift = power - BITS + exponent
        totals[channel] += whole << shift if shift >= 0 else whole >> -shift


def _root(square: int, divisor: float) -> float:
    """Return the square root of `square`, in units of sums of squares, divided by `divisor`."""
    excess = max(0, square.bit_length() - 1000)  # a float has at most 1,024 bits before the point
    excess += excess % 2
    root = math.sqrt(square / (1 << excess))
    return math.ldexp(root / divisor, excess // 2 - UNIT)
