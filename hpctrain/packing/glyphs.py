"""Read the glyphs of the built-in digits (``glyphs.toml``), and draw them as straight segments."""

from __future__ import annotations

import itertools
import math
import tomllib
from importlib.resources import files

import numpy as np

ARC_STEP = 24  # degrees between the points of an arc: at most 2 % of the radius off the circle
SPAN_POINTS = 4  # straight pieces per span of a smooth curve
GRID = 64  # coordinates are rounded to 1/64, far more coarsely than mathematical libraries differ


def read_styles(group: str) -> dict[str, list[str]]:
    """Return the glyphs of 0 to 9 in each style of a group: "seen", or "unseen" in training."""
    text = files("hpctrain.packing").joinpath("glyphs.toml").read_text("utf-8")
    styles: dict[str, list[str]] = tomllib.loads(text)[group]
    return styles


def segments(glyph: str) -> np.ndarray:
    """Return the strokes of a glyph as straight segments, float64 (n, 4): x and y of both ends."""
    rows: list[tuple[float, float, float, float]] = []
    for piece in glyph.split(";"):
        line = polyline(piece.strip())
        rows += [(*a, *b) for a, b in itertools.pairwise(line)]
    return np.array(rows, dtype=np.float64)


def polyline(piece: str) -> list[tuple[float, float]]:
    """Return the points of one piece, joined by straight lines; exact multiples of 1/64."""
    kind, *words = piece.split()
    points = [(float(x), float(y)) for x, y in (word.split(",") for word in words)]
    if kind == "=":
        line = [*points, points[0]]
    elif kind == "@":
        line = arc(*points)
    elif kind in "~o":
        line = spline(points, closed=kind == "o")
    else:
        line = points
    return [(round(x * GRID) / GRID, round(y * GRID) / GRID) for x, y in line]


def arc(
    centre: tuple[float, float],
    radii: tuple[float, float],
    degrees: tuple[float, float],
) -> list[tuple[float, float]]:
    """Return points along an ellipse from degrees[0] to degrees[1]."""
    first, last = degrees
    count = math.ceil((last - first) / ARC_STEP)
    angles = [math.radians(first + (last - first) * i / count) for i in range(count + 1)]
    return [
        (
            centre[0] + radii[0] * math.cos(angle),
            centre[1] + radii[1] * math.sin(angle),
        )
        for angle in angles
    ]


def spline(points: list[tuple[float, float]], closed: bool) -> list[tuple[float, float]]:
    """Return points along the uniform Catmull-Rom spline through `points`."""
    if closed:
        knots = [points[-1], *points, *points[:2]]
    else:
        knots = [points[0], *points, points[-1]]
    line = [knots[1]]
    for a, b, c, d in zip(knots, knots[1:], knots[2:], knots[3:], strict=False):
        for step in range(1, SPAN_POINTS + 1):
            t = step / SPAN_POINTS
            x, y = (cubic(a[k], b[k], c[k], d[k], t) for k in (0, 1))
            line.append((x, y))
    return line


def cubic(a: float, b: float, c: float, d: float, t: float) -> float:
    """Interpolate between b (t = 0) and c (t = 1), with neighbours a and d (Catmull-Rom)."""
    return b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
