"""How two runs differ: tensor by tensor, and from which step of their records on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# What two equal runs record alike; seconds, speed and time of day differ in any case.
FIGURES = {
    "step": ("loss", "accuracy", "learning_rate", "rows"),
    "evaluation": ("split", "loss", "noisy", "accuracy", "rows"),
    "digest": ("digest",),
}


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
UNSIGNED = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)  # no number with a sign bit of its own


@dataclass(frozen=True)
class Difference:
    """Two tensors of one name, bit by bit."""

    name: str
    values: int  # of each
    differing: int  # values whose bits differ
    largest: float  # |a - b|; NaN where one side alone is not finite
    relative: float  # largest |a - b| / max(|a|, |b|)
    ulps: int | None  # largest distance in units in the last place; None for other than floats


def compare_tensors(name: str, a: Tensor, b: Tensor) -> Difference:
    """Compare two tensors of one shape and dtype; NaN equals NaN of the same bits."""
    x, y = _bits(a), _bits(b)
    differ = (x != y).any(1)
    if not differ.any():
        return Difference(name, len(differ), 0, 0.0, 0.0, 0)
    x, y, one, other = x[differ], y[differ], values(a)[differ], values(b)[differ]
    distance = (one - other).abs()
    relative = (distance / torch.maximum(one.abs(), other.abs())).nan_to_num()
    ulps = None
    if (a.is_floating_point() or a.is_complex()) and a.dtype not in UNSIGNED:
        ulps = int(np.abs(_ordered(x.numpy()) - _ordered(y.numpy())).max())
    largest = float(distance.max()), float(relative.max())
    return Difference(name, len(differ), len(one), *largest, ulps)


def values(tensor: Tensor) -> Tensor:
    """The values of a tensor of any dtype and shape: (n,) float64, or complex128."""
    tensor = _flat(tensor)
    if not tensor.is_complex():
        return tensor.to(torch.float64)
    return torch.view_as_complex(torch.view_as_real(tensor).to(torch.float64))


def _flat(tensor: Tensor) -> Tensor:
    """(n,); of numbers of 4 bits, with which torch does not compute, their bytes."""
    tensor = tensor.contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor


def _bits(tensor: Tensor) -> Tensor:
    """The bits of each value as whole numbers, (n, 1), of complex ones (n, 2)."""
    tensor = _flat(tensor)
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor[:, None]
    return parts.view(WORDS[parts.itemsize])


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

    Looks at the figures that equal runs share: losses, accuracies, learning rates, digests of the
    steps of which both have one (--digest-every may differ), and last the digest with which both
    ended.
    """
    a, b = list(a), list(b)
    shared = _digest_steps(a) & _digest_steps(b)
    one, other = (list(_figures(records, shared)) for records in (a, b))
    for left, right in itertools.zip_longest(one, other):
        if left == right:
            continue
        if left is None or right is None or left[:2] != right[:2]:
            step = min(item[0] for item in (left, right) if item is not None)
            return step, f"one has {_name(left)}, the other {_name(right)}"
        names = FIGURES[left[1]]
        number = next(i for i, (x, y) in enumerate(zip(left[2], right[2], strict=True)) if x != y)
        return left[0], f"{left[1]}: {names[number]} {left[2][number]} and {right[2][number]}"
    (step, left_end), (_, right_end) = _end(a), _end(b)
    if left_end and right_end and left_end != right_end:
        return step, f"end: digest {left_end} and {right_end}"
    return None


def _end(records: Iterable[Mapping[str, Any]]) -> tuple[int, Any]:
    """The steps and the digest of the last end that has one: launches that left have none."""
    ends = [(r.get("steps") or 0, r["digest"]) for r in records if _has_digest(r)]
    return ends[-1] if ends else (0, None)


def _has_digest(record: Mapping[str, Any]) -> bool:
    return record["kind"] == "end" and record.get("digest") is not None


Figure = tuple[int, str, tuple[Any, ...]]  # step, kind of record, values


def _digest_steps(records: Iterable[Mapping[str, Any]]) -> set[int]:
    return {record["step"] for record in records if record["kind"] == "digest"}


def _figures(records: Iterable[Mapping[str, Any]], digests: set[int]) -> Iterable[Figure]:
    """The figures of all records; of digests, those of these steps."""
    for record in records:
        if record["kind"] == "digest" and record["step"] not in digests:
            continue
        if names := FIGURES.get(record["kind"]):
            yield record["step"], record["kind"], tuple(record.get(name) for name in names)


def _name(figure: Figure | None) -> str:
    return f"{figure[1]} {figure[0]}" if figure else "ended"
