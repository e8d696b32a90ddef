"""--worker-load auto: shards move from slow ranks to fast ones, between epochs.

Every step's message tells all ranks how many seconds each of them computed. All see the same
numbers, so all come to the same decision without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.parallel.shards import carried

GAIN = 0.05  # of a step's time, below which nothing moves


class Balance:
    """Who carries what, and the seconds that each rank computed since shards last moved."""

    def __init__(self, runs: Sequence[range]) -> None:
        self.runs = list(runs)
        self._seconds = [0.0] * len(runs)
        self._steps = 0

    def add(self, compute: Sequence[float]) -> None:
        """One step's seconds, by rank."""
        self._seconds = [a + b for a, b in zip(self._seconds, compute, strict=True)]
        self._steps += 1

    def better(self) -> list[range] | None:
        """How ranks carry the shards from now on, if that saves time; starts to measure anew."""
        runs, seconds, steps = self.runs, self._seconds, self._steps
        self._seconds, self._steps = [0.0] * len(seconds), 0
        if not steps or min(seconds) <= 0:
            return None
        cost = [total / len(run) for total, run in zip(seconds, runs, strict=True)]  # of a shard
        found = carried(runs[-1].stop, len(runs), [1 / each for each in cost])
        if _slowest(cost, found) >= (1 - GAIN) * _slowest(cost, runs):
            return None
        self.runs = found
        return found


def _slowest(cost: Sequence[float], runs: Sequence[range]) -> float:
    return max(each * len(run) for each, run in zip(cost, runs, strict=True))
