"""How two runs differ: tensor by tensor, and from which step of their records on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# What two equal runs record alike; seconds, speed and time of day differ in any case.
FIGURES = {
    "step": ("loss", "accuracy", "learning_rate", "rows"),
    "evaluation": ("split", "loss", "noisy", "accuracy", "rows"),
    "digest": ("digest",),
}


@dataclass(frozen=True)
class Difference:
    """Two tensors of one name, bit by bit."""

    name: str
    values: int  # of each
    differing: int  # values whose bits differ
    largest: float  # |a - b|; NaN where one side alone is not finite
    relative: float  # largest |a - b| / max(|a|, |b|)
    ulps: int | None  # largest distance in units in the last place; None for other than floats


def compare_tensors(name: str, a: np.ndarray, b: np.ndarray) -> Difference:
    """Compare two arrays of one shape and type; NaN equals NaN of the same bits."""
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    bits = f"i{a.dtype.itemsize}"
    differ = a.view(bits) != b.view(bits)
    if not differ.any():
        return Difference(name, a.size, 0, 0.0, 0.0, 0)
    a, b = a[differ], b[differ]
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        relative = distance / np.maximum(np.abs(x), np.abs(y))
    ulps = int(np.abs(_ordered(a) - _ordered(b)).max()) if a.dtype.kind == "f" else None
    return Difference(
        name, differ.size, a.size, float(distance.max()), float(np.nan_to_num(relative).max()), ulps
    )


def _ordered(values: np.ndarray) -> np.ndarray:
    """Floats as whole numbers in the same order, neighbours one apart (both zeros at 0).

    An IEEE 754 number without its sign, read as a whole number, grows with its value.
    """
    bits = values.view(f"i{values.dtype.itemsize}").astype(
        object if values.itemsize > 4 else np.int64
    )
    lowest = -(1 << 8 * values.dtype.itemsize - 1)
    return np.where(bits < 0, lowest - bits, bits)


def first_difference(
    a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]]
) -> tuple[int, str] | None:
    """The first step at which two records differ, and in what; None where they do not.

    Looks at the figures that equal runs share: losses, accuracies, learning rates, digests.
    """
    one, other = map(list, (_figures(a), _figures(b)))
    for left, right in itertools.zip_longest(one, other):
        if left == right:
            continue
        if left is None or right is None or left[:2] != right[:2]:
            step = min(item[0] for item in (left, right) if item is not None)
            return step, f"one has {_name(left)}, the other {_name(right)}"
        names = FIGURES[left[1]]
        number = next(i for i, (x, y) in enumerate(zip(left[2], right[2], strict=True)) if x != y)
        return left[0], f"{left[1]}: {names[number]} {left[2][number]} and {right[2][number]}"
    return None


Figure = tuple[int, str, tuple[Any, ...]]  # step, kind of record, values


def _figures(records: Iterable[Mapping[str, Any]]) -> Iterable[Figure]:
    for record in records:
        if names := FIGURES.get(record["kind"]):
            yield record["step"], record["kind"], tuple(record.get(name) for name in names)


def _name(figure: Figure | None) -> str:
    return f"{figure[1]} {figure[0]}" if figure else "ended"
