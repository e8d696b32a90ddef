"""A curve of bounded size: means, least and largest values over equal stretches of steps."""

from __future__ import annotations

from typing import NamedTuple

MOST = 800  # points of a curve; where there are more, two neighbours become one


class Point(NamedTuple):
    """Some neighbouring steps: the mean of their numbers and values, and the values' range."""

    step: float
    value: float
    least: float
    most: float
    number: int  # of values

    def merged(self, other: Point) -> Point:
        """Both in one."""
        number = self.number + other.number
        return Point(
            (self.step * self.number + other.step * other.number) / number,
            (self.value * self.number + other.value * other.number) / number,
            min(self.least, other.least),
            max(self.most, other.most),
            number,
        )


class Curve:
    """Values by step, added in any number and kept as at most `MOST` points, in order."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._width = 1  # steps that share a point

    def add(self, step: int, value: float) -> None:
        """Add one value. What stands at later steps is dropped: a run that went back tells anew."""
        points, new = self._points, Point(step, value, value, value, 1)
        while points and points[-1].step > step:
            points.pop()
        if points and points[-1].step // self._width == step // self._width:
            points[-1] = points[-1].merged(new)
            return
        points.append(new)
        while len(self._points) > MOST:
            self._halve()

    def points(self) -> list[Point]:
        """The points so far, in order of steps."""
        return list(self._points)

    def _halve(self) -> None:
        """Let twice as many steps share a point."""
        self._width *= 2
        merged: list[Point] = []
        for point in self._points:
            if merged and merged[-1].step // self._width == point.step // self._width:
                merged[-1] = merged[-1].merged(point)
            else:
                merged.append(point)
        self._points = merged
