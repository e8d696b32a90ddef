"""The table of a pack: how many images of each class its splits have, or the ranges of values."""

from __future__ import annotations

import numpy as np
from rich.table import Column, Table

from hpctrain.data.pack import Pack
from hpctrain.data.split import Split
from hpctrain.report.console import make_console
from hpctrain.text import bytes_text, counted, say

NAMES_SHOWN = 40  # classes or columns of a table; of more, only the numbers of images


def print_table(pack: Pack) -> None:
    """Print what the images of each split are, and their shape, and the pack's path and size."""
    make_console().print(make_table(pack))
    height, width, channels = pack.image_shape
    text = f"images  {width} x {height} pixels, {counted(channels, 'channel')}"
    axes = pack.provenance.get("axes")
    if axes and axes != f"C {channels}":
        text += f" (pages: {axes})"
    if not pack.scale.is_bytes:
        text += f", {pack.scale}"
    say(text)
    say(f"file    {pack.path}, {bytes_text(pack.sizes[pack.path])}")


def make_table(pack: Pack) -> Table:
    """Return a table by class or column, and split. Reads all targets.

    A class has its number of images, of several classes those that are known to have it; a column
    of values has their range and mean. Unknown entries are counted in a column of their own, if
    there are some.
    """
    cells = count_by_class
    if pack.targets.kind == "values":
        cells = ranges_of_columns
    columns = cells(pack)
    samples = [info.samples for info in pack.splits.values()]
    totals = [f"{count:,}" for count in (*samples, sum(samples))]
    unknown = count_unknown(pack)
    if unknown.any():
        columns["unknown"] = [f"{count:,}" for count in unknown.tolist()]
    totals += [""] * (len(columns) - len(totals))
    table = Table(pack.targets.noun, *(Column(name, justify="right") for name in columns))
    if len(pack.targets.names) < NAMES_SHOWN:
        for row in zip(pack.targets.names, *columns.values(), strict=True):
            table.add_row(*row)
    table.add_row("total" if pack.targets.kind == "class" else "images", *totals)
    return table


def count_by_class(pack: Pack) -> dict[str, list[str]]:
    """Return the number of images of each class, by split, and of all."""
    counts: dict[str, np.ndarray] = {}
    for name in pack.splits:
        with Split(pack, name, threads=1) as split:
            counts[name] = split.count_classes()
    counts["all"] = np.sum([*counts.values()], axis=0)
    return {name: [f"{count:,}" for count in row] for name, row in counts.items()}


def ranges_of_columns(pack: Pack) -> dict[str, list[str]]:
    """Return the range of the known values of each column, by split, and of all; and their mean."""
    ranges: dict[str, np.ndarray] = {}  # (2, T)
    sums = np.zeros(len(pack.targets.names))
    counts = np.zeros(len(pack.targets.names), np.int64)  # of known values
    for name in pack.splits:
        pieces = list[np.ndarray]()
        with Split(pack, name, threads=1) as split:
            for piece in split.read_all_targets():
                pieces.append(smallest_and_largest(piece))
                sums += np.nansum(piece, axis=0, dtype=np.float64)
                counts += np.count_nonzero(~np.isnan(piece), axis=0)
        ranges[name] = smallest_and_largest(np.concatenate(pieces))
    ranges["all"] = smallest_and_largest(np.concatenate([*ranges.values()]))
    cells: dict[str, list[str]] = {}
    for name, (low, high) in ranges.items():
        cells[name] = [
            "unknown" if np.isnan(a) else f"{a:g} to {b:g}" for a, b in zip(low, high, strict=True)
        ]
    cells["mean"] = [f"{mean:g}" for mean in sums / np.maximum(counts, 1)]
    return cells


def smallest_and_largest(values: np.ndarray) -> np.ndarray:
    """Return the smallest and the largest of values (n, T) by column, (2, T): NaN of none."""
    low = np.fmin.reduce(values, axis=0, initial=np.nan)
    high = np.fmax.reduce(values, axis=0, initial=np.nan)
    return np.array([low, high])


def count_unknown(pack: Pack) -> np.ndarray:
    """Return the number of unknown entries of each class or column, (K,) int64."""
    counts = np.zeros(len(pack.targets.names), np.int64)
    if pack.targets.kind == "class":
        return counts
    for name in pack.splits:
        with Split(pack, name, threads=1) as split:
            for piece in split.read_all_targets():
                counts += pack.targets.is_unknown(piece).sum(axis=0)
    return counts
