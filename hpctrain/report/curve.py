"""A curve of bounded size: means, minima and maxima over equal intervals of steps."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 800  # points of a curve; where there are more, two neighbours become one


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Some neighbouring steps: the mean of their numbers and values, and the values' range."""

    step: float
    mean: float
    min: float
    max: float
    count: int  # of values

    def merged(self, other: CurvePoint) -> CurvePoint:
        """Both in one."""
        count = self.count + other.count
        return CurvePoint(
            (self.step * self.count + other.step * other.count) / count,
            (self.mean * self.count + other.mean * other.count) / count,
            min(self.min, other.min),
            max(self.max, other.max),
            count,
        )


class Curve:
    """Values by step, added in any number and kept as at most `MOST` points, in order."""

    def __init__(self) -> None:
        self.points: list[CurvePoint] = []  # in order of steps
        self._width = 1  # steps that share a point

    def add(self, step: int, value: float) -> None:
        """Add one value. Later steps are dropped: a run that went back records them again."""
        while self.points and self.points[-1].step > step:
            self.points.pop()
        _append(self.points, CurvePoint(step, value, value, value, 1), self._width)
        while len(self.points) > MOST:
            self._width *= 2
            merged: list[CurvePoint] = []
            for point in self.points:
                _append(merged, point, self._width)
            self.points = merged


def _append(points: list[CurvePoint], new: CurvePoint, width: int) -> None:
    """Add a point behind others, or merge it into the last where both share their interval."""
    if points and points[-1].step // width == new.step // width:
        points[-1] = points[-1].merged(new)
    else:
        points.append(new)
