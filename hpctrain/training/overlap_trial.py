"""--overlap auto: whether gradients are summed in segments while backward runs, by measurement.

The first STEPS steps of a launch run with one Allreduce. From the medians of their computation and
reduction follows how many segments could hide most of the reduction (`best_segments`); where they
could save GAIN of a step, the next STEPS steps run with them, and they stay if those were shorter
by as much. All ranks share what they measured, once after each of the two: all choose the same.

With --deterministic the bits are the same either way. Ranks and machines may be others after a
resume, so each launch measures for itself, and its record says what it chose.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

STEPS, SKIPPED = 12, 4  # of a phase, and those of them in which libraries still warm up
GAIN = 0.03  # of a step's time, below which one Allreduce stays
BACKWARD = 2 / 3  # of forward and backward: a product forward makes two backward
SEGMENTS = (2, 4, 8, 16)


class Times(NamedTuple):
    """Medians of a phase, in seconds."""

    step: float
    compute: float  # of the slowest rank: forward and backward
    reduce: float  # on this rank, waiting for the others included


def exposed(times: Times, segments: int) -> float:
    """Seconds of the reduction that are left after backward. Segment k of n is complete k / n of
    the way through backward, each takes reduce / n, and one is summed at a time.
    """
    backward = BACKWARD * times.compute
    return max(times.reduce / segments, times.reduce - backward * (segments - 1) / segments)


def best_segments(times: Times) -> int:
    """The fewest segments that leave little more of the reduction than any number; 0 where they
    would save less than GAIN of a step.
    """
    least = min(exposed(times, segments) for segments in SEGMENTS)
    if times.reduce - least < GAIN * times.step:
        return 0
    near = least + GAIN * times.step
    return next(segments for segments in SEGMENTS if exposed(times, segments) <= near)


class OverlapTrial:
    """What a launch has measured, and what follows."""

    def __init__(self, first: int) -> None:
        """After `first` steps of earlier launches."""
        self._due = first + STEPS  # the step after which there is something to decide
        self._measured: list[Times] = []
        self._without: Times | None = None
        self.segments = 0

    def add(self, step: float, compute: float, reduce: float) -> None:
        """One step's seconds."""
        self._measured.append(Times(step, compute, reduce))

    def follows(self, step: int) -> bool:
        """Whether something is decided after this step, as all ranks know beforehand."""
        return step == self._due

    def times(self) -> Times:
        """The medians of this phase."""
        columns = zip(*self._measured[SKIPPED:], strict=True)
        return Times(*(statistics.median(column) for column in columns))

    def decide(self, by_rank: list[Times]) -> str | None:
        """Choose `segments` from what all ranks measured in this phase; what it came to, where that
        stays.
        """
        # Who computed longest waited least: the shortest reduction is the one without waiting.
        found = by_rank[0]._replace(reduce=min(times.reduce for times in by_rank))
        self._measured.clear()
        if self._without is None:
            self._without, self.segments = found, best_segments(found)
            self._due += STEPS
            if self.segments:
                return None
            self._due = -1
            return f"{_without(found)}: segments could save less than {GAIN:.0%}"
        self._due, tried, before = -1, self.segments, self._without
        gain = 1 - found.step / before.step
        self.segments = tried if gain >= GAIN else 0
        kept = f"{tried} segments" if self.segments else "one Allreduce"
        return f"{_without(before)}, {_ms(found.step)} with {tried} segments ({gain:+.0%}): {kept}"


def _without(times: Times) -> str:
    return (
        f"--overlap auto: a step took {_ms(times.step)} with one Allreduce (computation"
        f" {_ms(times.compute)}, reduction {_ms(times.reduce)})"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
