"""Loss and accuracy over a split, and which of two is the better one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Metrics(NamedTuple):
    """Means over a split; None if unknown or not finite."""

    loss: float | None = None
    accuracy: float | None = None

    def score(self, by_accuracy: bool) -> float:
        """Return a score, larger is better; minus infinity if the metric is unknown."""
        if by_accuracy:
            return -math.inf if self.accuracy is None else self.accuracy
        return -math.inf if self.loss is None else -self.loss

    def is_better(self, other: Metrics, by_accuracy: bool) -> bool:
        """Whether the score is larger than that of the other."""
        return self.score(by_accuracy) > other.score(by_accuracy)


UNKNOWN = Metrics()


def metrics_of(record: Mapping[str, Any]) -> Metrics:
    """Return the loss and the accuracy of a record."""
    return Metrics(record.get("loss"), record.get("accuracy"))


def best_of(candidates: Iterable[Metrics], by_accuracy: bool) -> Metrics:
    """Return the one with the largest score, of several the first; `UNKNOWN` if there are none."""
    return max(
        candidates,
        key=lambda metrics: metrics.score(by_accuracy),
        default=UNKNOWN,
    )
