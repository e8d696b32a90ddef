"""How two runs differ: tensor by tensor, and from which step of their records on; as a table and as
a figure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from hpctrain.report.fields import Record, deterministic_fields
from hpctrain.report.figures import BLUE, empty_figure, save
from hpctrain.report.tables import make_console
from hpctrain.text import printable

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_TENSORS, MOST_PROBLEMS = 30, 6  # lines of a comparison
MOST_BARS = 1000
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
    return parts.view(INTEGERS[parts.itemsize])


def _ordered(values: np.ndarray) -> np.ndarray:
    """Floats as whole numbers in the same order, neighbours one apart (both zeros at 0).

    An IEEE 754 number without its sign, read as a whole number, grows with its value.
    """
    bits = values.view(f"i{values.dtype.itemsize}").astype(
        object if values.itemsize > 4 else np.int64
    )
    lowest = -(1 << 8 * values.dtype.itemsize - 1)
    return np.where(bits < 0, lowest - bits, bits)


Compared = tuple[int, str, dict[str, Any]]  # step, kind of record, deterministic fields


def first_difference(a: Iterable[Record], b: Iterable[Record]) -> tuple[int, str] | None:
    """The first step at which two records differ, and in what; None where they do not.

    Looks at the fields that equal runs record alike: losses, accuracies, learning rates, digests of
    the steps of which both have one (--digest-every may differ), and last the digest with which
    both ended.
    """
    a, b = list(a), list(b)
    shared = _digest_steps(a) & _digest_steps(b)
    one, other = (list(_compared(records, shared)) for records in (a, b))
    for left, right in itertools.zip_longest(one, other):
        if left == right:
            continue
        if left is None or right is None or left[:2] != right[:2]:
            step = min(item[0] for item in (left, right) if item is not None)
            return step, f"one has {_name(left)}, the other {_name(right)}"
        step, kind, values = left
        name = next(name for name, value in values.items() if value != right[2][name])
        return step, f"{kind}: {name} {values[name]} and {right[2][name]}"
    (step, left_end), (_, right_end) = _last_digest(a), _last_digest(b)
    if left_end and right_end and left_end != right_end:
        return step, f"end: digest {left_end} and {right_end}"
    return None


def _last_digest(records: Iterable[Record]) -> tuple[int, Any]:
    """The steps and the digest of the last end that has one: preempted launches have none."""
    ends = [r for r in records if r["kind"] == "end" and r.get("digest") is not None]
    return (ends[-1].get("steps") or 0, ends[-1]["digest"]) if ends else (0, None)


def _digest_steps(records: Iterable[Record]) -> set[int]:
    return {record["step"] for record in records if record["kind"] == "digest"}


def _compared(records: Iterable[Record], digests: set[int]) -> Iterable[Compared]:
    """What is compared of all records; of digests, those of these steps."""
    for record in records:
        kind = record["kind"]
        names = deterministic_fields(kind)
        if names and (kind != "digest" or record["step"] in digests):
            yield record["step"], kind, {name: record.get(name) for name in names}


def _name(item: Compared | None) -> str:
    return f"{item[1]} {item[0]}" if item else "ended"


def print_differences(
    differences: Sequence[Difference],
    problems: Sequence[str],
    records: tuple[int, str] | None,
    notes: Sequence[str],
) -> None:
    """Print how two runs differ: tensors that do, then their records, then these lines."""
    console = make_console()
    apart = [d for d in differences if d.differing]
    if apart:
        console.print(_difference_table(apart[:MOST_TENSORS]))
    if len(apart) > MOST_TENSORS:
        console.print(f"and {len(apart) - MOST_TENSORS} more tensors")
    console.print(f"tensors: {len(differences) - len(apart)} equal, {len(apart)} different")
    for line in problems[:MOST_PROBLEMS]:
        console.print(f"tensors: {line}")
    if len(problems) > MOST_PROBLEMS:
        console.print(f"tensors: and {len(problems) - MOST_PROBLEMS} more like that")
    console.print(
        f"records: {f'differ at step {records[0]}, {records[1]}' if records else 'equal'}"
    )
    for line in notes:
        console.print(line)


def _difference_table(differences: Sequence[Difference]) -> Table:
    table = Table(title="Tensors that differ")
    for name in ("tensor", "values", "differing", "largest", "relative", "ulp"):
        table.add_column(name, justify="left" if name == "tensor" else "right")
    for d in differences:
        cells = (f"{d.values:,}", f"{d.differing:,}", f"{d.largest:.3g}", f"{d.relative:.3g}")
        table.add_row(d.name, *cells, "" if d.ulps is None else f"{d.ulps:,}")
    return table


def largest_of_neighbours(values: np.ndarray, count: int) -> np.ndarray:
    """Of every `count` neighbours in (n,) the one farthest from zero, with its sign."""
    padded = np.pad(values, (0, -values.size % count)).reshape(-1, count)
    return np.take_along_axis(padded, np.abs(padded).argmax(1)[:, None], 1)[:, 0]


def plot_differences(path: Path, name: str, differences: np.ndarray, title: str) -> None:
    """A bar for each value's difference, (n,), in the order in which they lie in the tensor; of
    a large tensor a bar for the largest of several neighbours.
    """
    figure = empty_figure(8, 3.5)
    axes = figure.subplots()
    step = -(-differences.size // MOST_BARS)
    bars = largest_of_neighbours(differences, step)
    axes.bar((np.arange(bars.size) + 0.5) * step - 0.5, bars, width=step, color=BLUE)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(-0.5, differences.size - 0.5)
    label = f"value of {printable(name, newlines=False)} (0 to {differences.size - 1:,})"
    axes.set_xlabel(label, parse_math=False)
    axes.set_ylabel("difference" if step == 1 else f"largest difference among {step:,} values")
    axes.set_title(printable(title, newlines=False), fontsize=10, parse_math=False)
    save(figure, path)
