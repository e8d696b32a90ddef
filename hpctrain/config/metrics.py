"""The names of the figures of --metric, before anything is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpctrain.config.parts import Part, find_part, is_part
from hpctrain.errors import UsageError


def name_metrics(texts: Sequence[str]) -> dict[str, Part]:
    """Return the metrics of libraries that --metric names, by the names of their figures.

    The name is that of the class, or the whole text where several metrics are of this class. A
    metric that has a figure of each class, or column, adds " of " and its name. Raises UsageError.
    """
    for text, count in Counter(texts).items():
        if count > 1:
            raise UsageError(f"--metric {text} is given twice")
    parts = [find_part("metric", text) for text in texts if is_part("metric", text)]
    times = Counter(part.name for part in parts)
    return {part.name if times[part.name] == 1 else part.text: part for part in parts}


def metric_directions(texts: Sequence[str]) -> dict[str, str]:
    """Return the direction in which each of these figures is better, "" if it has none."""
    return {name: part.direction for name, part in name_metrics(texts).items()}
