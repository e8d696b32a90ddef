"""Axes with round labels."""

from __future__ import annotations

import math
from typing import NamedTuple


class Axis(NamedTuple):
    """From the least to the greatest value shown, with labels at some."""

    low: float
    high: float
    labels: dict[float, str]

    def share(self, value: float) -> float:
        """Where a value lies: 0 = low, 1 = high; those outside are moved to the ends."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def accuracy_axis(least: float) -> Axis:
    """Of per cent: from 0, or closer to 100 where all are high."""
    low = next((low for low in (90, 50) if least >= low), 0)
    return Axis(
        low, 100, {low + (100 - low) * i / 5: f"{low + (100 - low) * i // 5}" for i in range(6)}
    )


def loss_axis(least: float, most: float) -> Axis:
    """From 0 where that is not far below the least value, with labels at round values, two of them
    at its ends: no curve goes beyond.
    """
    low, high = (0.0 if 0 <= least < most / 2 else least), most
    if not high > low:
        low, high = low - 0.5, high + 0.5
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(step * f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [tick * step for tick in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], {tick: _label(tick, step) for tick in ticks})


def _label(value: float, step: float) -> str:
    if max(abs(value), step) >= 1e6 or step < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"
