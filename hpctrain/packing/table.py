"""The table of a pack: how many images of each class its splits have, or the ranges of values."""

from __future__ import annotations

import numpy as np
from rich.table import Column, Table

from hpctrain.data.pack import Pack
from hpctrain.data.split import Split
from hpctrain.data.targets import Targets
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
    """Return a table by class or column, and split. Reads all targets once.

    A class has its number of images, of several classes those that are known to have it; a column
    of values has their range and mean. Unknown entries are counted in a column of their own, if
    there are some.
    """
    total = TargetCounts(pack.targets)
    columns: dict[str, list[str]] = {}
    for name in pack.splits:
        counts = TargetCounts(pack.targets)
        with Split(pack, name, threads=1) as split:
            for targets in split.read_all_targets():
                counts.add(targets)
        columns[name] = counts.cells()
        total.merge(counts)
    columns["all"] = total.cells()
    if pack.targets.kind == "values":
        columns["mean"] = total.means()
    if total.unknown.any():
        columns["unknown"] = [f"{count:,}" for count in total.unknown.tolist()]
    samples = [info.samples for info in pack.splits.values()]
    totals = [f"{count:,}" for count in (*samples, sum(samples))]
    totals += [""] * (len(columns) - len(totals))
    table = Table(pack.targets.noun, *(Column(name, justify="right") for name in columns))
    if len(pack.targets.names) < NAMES_SHOWN:
        for row in zip(pack.targets.names, *columns.values(), strict=True):
            table.add_row(*row)
    table.add_row("total" if pack.targets.kind == "class" else "images", *totals)
    return table


class TargetCounts:
    """How many images have each class, or the known values of each column, and what is unknown."""

    def __init__(self, targets: Targets) -> None:
        count = len(targets.names)
        self._targets = targets
        self._known = np.zeros(count, np.int64)  # of a class, images that have it
        self.unknown = np.zeros(count, np.int64)
        self._low = np.full(count, np.nan)
        self._high = np.full(count, np.nan)
        self._sums = np.zeros(count)

    def add(self, targets: np.ndarray) -> None:
        """Add the targets (n, ...) of some images."""
        self._known += self._targets.count_known(targets)
        if self._targets.kind == "class":
            return
        self.unknown += self._targets.is_unknown(targets).sum(axis=0)
        if self._targets.kind == "values":
            self._low = np.fmin(self._low, np.fmin.reduce(targets, initial=np.nan))
            self._high = np.fmax(self._high, np.fmax.reduce(targets, initial=np.nan))
            self._sums += np.nansum(targets, axis=0, dtype=np.float64)

    def merge(self, other: TargetCounts) -> None:
        """Add those of another split."""
        self._known += other._known
        self.unknown += other.unknown
        self._low = np.fmin(self._low, other._low)
        self._high = np.fmax(self._high, other._high)
        self._sums += other._sums

    def cells(self) -> list[str]:
        """Return the number of each class, or the range of each column, as text."""
        if self._targets.kind != "values":
            return [f"{count:,}" for count in self._known.tolist()]
        return [
            "unknown" if np.isnan(low) else f"{low:g} to {high:g}"
            for low, high in zip(self._low, self._high, strict=True)
        ]

    def means(self) -> list[str]:
        """Return the mean of the known values of each column, as text."""
        return [f"{mean:g}" for mean in self._sums / np.maximum(self._known, 1)]
