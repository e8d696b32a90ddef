"""Recognize a value that may mark missing data, which nobody named: -9999 among temperatures.

Mean and standard deviation, and what a network learns, would be those of such values. They are
proposed, not applied: only the user knows. So that lines on ordinary images are rare, a value must
be the smallest or the largest of its channel, occur as often as its neighbour and at least twice,
and be further from all others than those are from each other; a tenth of that is enough for the
only negative value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.data.pack import Pack
from hpctrain.data.scale import present_values
from hpctrain.data.split import Split, probe_rows
from hpctrain.text import brief, listed

FAR = 1.0  # distance from all other values, in units of their range
FAR_IF_NEGATIVE = 0.1  # likewise of the only negative value
LEAST = 2  # times that it occurs


class Outlier(NamedTuple):
    """A value that may mark missing data."""

    value: np.generic
    share: float  # of all values of its channel
    low: float  # smallest and largest of the others
    high: float

    def note(self, option: str) -> str:
        """Return a note. `option` is what sets nodata: "--nodata=", or "nodata=" in Python."""
        value = str(self.value).removesuffix(".0")
        return (
            f"{100 * self.share:.2g} % of the values read are {value}, far from all others"
            f" ({self.low:g} to {self.high:g}): if they mark missing data, give {option}{value}"
        )


def find_outlier(images: np.ndarray, nodata: float | None) -> Outlier | None:
    """Return the first value of images (n, H, W, C) that may mark missing data, besides `nodata`.

    Values are finite. There is none in bytes, whose range is narrow.
    """
    if images.dtype == np.uint8:
        return None
    for channel in range(images.shape[3]):
        outlier = _find(present_values(images[..., channel].reshape(-1), nodata))
        if outlier is not None:
            return outlier
    return None


def target_notes(columns: Sequence[str], targets: np.ndarray, remedy: str) -> list[str]:
    """Return a note on values that may stand for unknown among targets (N, T), or none.

    NaN is unknown; `remedy` says how to mark it, as "write NaN". The only negative value need not
    be far from the others: -1 among ages.
    """
    texts = list[str]()
    for name, column in zip(columns, targets.T, strict=True):
        outlier = _find(column[~np.isnan(column)], far_if_negative=0)
        if outlier is not None:
            share = f"{100 * outlier.share:.2g} % of its values"
            others = f"others {outlier.low:g} to {outlier.high:g}"
            texts.append(f"{brief(name)} is {outlier.value:g} in {share} ({others})")
    if not texts:
        return []
    return [f"{listed(texts)}: if this stands for unknown, {remedy}"]


def _find(values: np.ndarray, far_if_negative: float = FAR_IF_NEGATIVE) -> Outlier | None:
    """Return the smallest or largest of `values` (n,) that may mark missing data, or None."""
    if not values.size:
        return None
    for value in (values.min(), values.max()):
        outlier = _compare(value, values, far_if_negative)
        if outlier is not None:
            return outlier
    return None


def _compare(value: np.generic, values: np.ndarray, far_if_negative: float) -> Outlier | None:
    """Return the outlier that `value`, the smallest or largest of `values` (n,), is; or None."""
    number = float(value)
    others = values[values != value]
    count = len(values) - len(others)
    if count < LEAST or not others.size:
        return None
    low = float(others.min())
    high = float(others.max())
    neighbour = low if number < low else high
    far = FAR
    if number < 0 <= low:
        far = far_if_negative
    if low == high or abs(neighbour - number) <= far * (high - low):
        return None
    if count < np.count_nonzero(others == neighbour):
        return None
    return Outlier(value, count / len(values), low, high)


def outlier_of_pack(pack: Pack) -> Outlier | None:
    """Return the value of some training images of a pack that may mark missing data."""
    if pack.dtype == np.uint8:
        return None
    with Split(pack, "train") as split:
        rows = probe_rows(len(split))
        images = split.gather(rows, np.empty((len(rows), *split.image_shape), split.dtype))
    return find_outlier(images, pack.scale.nodata)
