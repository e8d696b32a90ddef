"""The digits: synthetic images of 0-9, white on black, 28 x 28 pixels, 1,000 images per class.

Each image is one glyph of ``glyphs.toml`` (its strokes in a style), bent, slanted, stretched,
scaled, rotated by up to 45 degrees either way, shifted and drawn with round strokes of random
width, with a little noise.

The bytes are equal on every machine and with every NumPy: random numbers are raw PCG64 output,
sines come from a table rounded far more coarsely than mathematical libraries differ, and all else
is elementwise arithmetic that IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpctrain.data.partition import random_key
from hpctrain.packing.glyphs import read_styles, segments
from hpctrain.watchdog import doing

SIDE = 28  # pixels
PER_CLASS = 1000
TEST_PER_CLASS = 100
UNSEEN_PER_CLASS = 100
CLASSES = tuple("0123456789")
SOURCE = "hpctrain.data.digits"  # in the provenance; another one would change the pack's UUID

MARGIN = 13.0  # largest distance of ink from the centre, pixels
BOX = 100.0  # height of a glyph in its own units
LARGEST_TURN = 45  # degrees
TURN_STEPS = 1440  # of the whole range: angles are 1/16 degree apart
# For each image, one uniform number between the two bounds is drawn for each of these.
RANGES = {
    "turn": (0.0, 1.0),
    "height": (16.0, 19.0),  # pixels
    "aspect": (0.92, 1.08),  # width over height, relative to the glyph's own
    "slant": (-0.05, 0.05),  # x per y
    "bow": (-3.0, 3.0),  # glyph units: offset in x of top and bottom against the middle
    "sway": (-3.0, 3.0),  # glyph units: offset in y of both sides against the middle
    "half_width": (1.0, 1.4),  # of the stroke, pixels
    "right": (-1.0, 1.0),  # sign: direction of the shift; magnitude: its size between the limits
    "down": (-1.0, 1.0),
    "ink": (0.85, 1.0),  # brightness of the stroke
    "noise": (0.0, 12.0),  # largest change of a pixel, out of 255
    "order": (0.0, 1.0),
}
LARGEST_SHIFT = 1.4  # pixels off the centre in x and in y, if there is room
SHIFT_VARIES = 0.5  # how much smaller it may be: centred digits are easy for a linear classifier

ImagesAndLabels = tuple[np.ndarray, np.ndarray]


class DrawnDigits(NamedTuple):
    """The digits of some styles, in order of digit, style and angle."""

    images: np.ndarray  # (N, 28, 28, 1) uint8
    labels: np.ndarray  # (N,) int64
    order: np.ndarray  # (N,) float64, by which they are shuffled

    def take(self, rows: np.ndarray) -> ImagesAndLabels:
        """Return the images and labels of these rows."""
        return self.images[rows], self.labels[rows]


def generate(seed: int = 0) -> tuple[dict[str, ImagesAndLabels], tuple[str, ...], dict[str, Any]]:
    """Generate the whole set: (splits, classes, provenance).

    splits: "train" (9,000 images), "test" (1,000) and "unseen" (1,000, in styles that the other
    two never use), each (images (N, 28, 28, 1) uint8, labels (N,) int64), shuffled.
    """
    styles = read_styles("seen")
    unseen_styles = read_styles("unseen")
    seen = draw_digits([*styles.values()], PER_CLASS, "seen", seed)
    unseen = draw_digits([*unseen_styles.values()], UNSEEN_PER_CLASS, "unseen", seed)
    # Every tenth image in order of digit, style and angle; the first one differs between styles.
    number = np.arange(len(seen.labels))
    is_test = (number + number * len(styles) // PER_CLASS) % (PER_CLASS // TEST_PER_CLASS) == 0
    shuffled = np.argsort(seen.order, kind="stable")
    splits = {
        "train": seen.take(shuffled[~is_test[shuffled]]),
        "test": seen.take(shuffled[is_test[shuffled]]),
        "unseen": unseen.take(np.argsort(unseen.order, kind="stable")),
    }
    provenance = {
        "source": SOURCE,
        "seed": seed,
        "styles": [*styles],
        "unseen_styles": [*unseen_styles],
    }
    return splits, CLASSES, provenance


def draw_digits(
    styles: Sequence[Sequence[str]],
    per_class: int,
    name: str,
    seed: int,
) -> DrawnDigits:
    """Draw `per_class` images of each digit, equally many in each style, in order of angle."""
    edges = [per_class * number // len(styles) for number in range(len(styles) + 1)]
    draws_by_glyph = list[dict[str, np.ndarray]]()
    inks = list[np.ndarray]()
    for digit in range(len(CLASSES)):
        for number, glyphs in enumerate(styles):
            doing(f"drawing digit {digit} in style {number}")
            key = random_key("digits", seed, name, digit, number)
            draws_of_glyph = spread(key, edges[number + 1] - edges[number])
            lines = transform_strokes(segments(glyphs[digit]), draws_of_glyph)
            draws_by_glyph.append(draws_of_glyph)
            inks.append(coverage(lines, draws_of_glyph["half_width"]))
    draws = {
        field: np.concatenate([draws_of_glyph[field] for draws_of_glyph in draws_by_glyph])
        for field in RANGES
    }
    light = np.concatenate(inks) * (255 * draws["ink"]).astype(np.float32)[:, None, None]
    # Noise: multiples of 1/128 in [-1, 1) from the bytes of PCG64.
    words = np.random.PCG64(random_key("digits", seed, name, "noise")).random_raw(light.size // 8)
    grains = words.astype("<u8").view(np.uint8).reshape(light.shape).astype(np.float32)
    grains = (grains - np.float32(128)) * np.float32(1 / 128)
    light += grains * draws["noise"].astype(np.float32)[:, None, None]
    pixels = np.clip(np.floor(light + np.float32(0.5)), 0, 255).astype(np.uint8)
    return DrawnDigits(
        images=pixels[..., None],
        labels=np.repeat(np.arange(len(CLASSES), dtype=np.int64), per_class),
        order=draws["order"],
    )


def transform_strokes(strokes: np.ndarray, draws: dict[str, np.ndarray]) -> np.ndarray:
    """Transform the segments (S, 4) of a glyph to pixels, (n, S, 4): one set per row of `draws`.

    The centre of the image is (0, 0). The glyph is shrunk if its strokes would leave the image.
    """
    points = strokes.reshape(-1, 2).T  # x and y, (2, 2 S)
    x, y = (points - (points.min(axis=1) + points.max(axis=1))[:, None] / 2) / BOX
    column = {key: values[:, None] for key, values in draws.items()}  # (n, 1)
    bent_x = x + column["bow"] / BOX * (4 * y * y)  # (n, 2 S)
    bent_y = y + column["sway"] / BOX * (4 * x * x)
    wide = (bent_x * column["aspect"] + column["slant"] * bent_y) * column["height"]
    high = bent_y * column["height"]
    cosine, sine = turns(column["turn"])
    turned = np.stack([cosine * wide - sine * high, sine * wide + cosine * high])  # (2, n, 2 S)
    turned -= (turned.min(axis=2) + turned.max(axis=2))[..., None] / 2
    reach = MARGIN - column["half_width"]
    turned *= np.minimum(1, reach / turned.max(axis=(0, 2))[:, None])
    room = np.minimum(LARGEST_SHIFT, reach - turned.max(axis=2)[..., None])
    shift = np.stack([column["right"], column["down"]])  # (2, n, 1)
    away = np.maximum(room - (1 - np.abs(shift)) * SHIFT_VARIES, 0)
    turned += np.where(shift < 0, -away, away)
    return turned.transpose(1, 2, 0).reshape(len(wide), len(strokes), 4)


def coverage(lines: np.ndarray, half_width: np.ndarray) -> np.ndarray:
    """Return the ink of each pixel, (n, 28, 28) float32 in [0, 1], for segments (n, S, 4).

    Relative to a segment of length L from a, pixel p has the coordinate u = (p - a) . direction
    along it and v across it. Its squared distance to the segment is v^2 + (u - clip(u, 0, L))^2.
    The edge of the ink is a ramp one pixel wide.
    """
    ax, ay, bx, by = (lines[:, :, i, None].astype(np.float32) for i in range(4))  # (n, S, 1)
    dx = bx - ax
    dy = by - ay
    length = np.sqrt(dx * dx + dy * dy)
    safe = np.maximum(length, np.float32(1e-6))
    dx = np.where(length > 0, dx / safe, np.float32(1))  # a point: along x
    dy = dy / safe
    centres = np.arange(SIDE, dtype=np.float32) - np.float32((SIDE - 1) / 2)
    along_x = (centres - ax) * dx  # (n, S, 28)
    along_y = (centres - ay) * dy
    beside_x = (centres - ax) * dy
    beside_y = (centres - ay) * dx
    nearest = np.full((len(lines), SIDE, SIDE), np.inf, dtype=np.float32)
    for s in range(lines.shape[1]):
        along = along_y[:, s, :, None] + along_x[:, s, None, :]  # (n, 28, 28)
        beside = beside_y[:, s, :, None] - beside_x[:, s, None, :]
        along -= np.minimum(np.maximum(along, 0), length[:, s, :, None])
        along *= along
        beside *= beside
        along += beside
        np.minimum(nearest, along, out=nearest)
    edge = half_width.astype(np.float32) + np.float32(0.5)
    return np.clip(edge[:, None, None] - np.sqrt(nearest), 0, 1)


def turns(uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of random angles within +-LARGEST_TURN, from a rounded table."""
    angles = [math.radians(LARGEST_TURN * (2 * i / TURN_STEPS - 1)) for i in range(TURN_STEPS + 1)]
    fine = 1 << 20
    cosines = np.array([round(math.cos(angle) * fine) for angle in angles]) / fine
    sines = np.array([round(math.sin(angle) * fine) for angle in angles]) / fine
    step = (uniform * (TURN_STEPS + 1)).astype(np.int64)
    return cosines[step], sines[step]


def spread(key: int, rows: int) -> dict[str, np.ndarray]:
    """Draw (rows,) float64 for each name of RANGES, evenly distributed between its bounds.

    This is a Latin hypercube: each range is divided into `rows` equal parts, one number is drawn
    from each part, and the parts are in random order (of "turn", in ascending order).
    """
    raw = np.random.PCG64(key).random_raw((2, len(RANGES), rows))
    within = (raw[0] >> np.uint64(11)) * 2.0**-53
    part = np.argsort(raw[1], axis=1, kind="stable")
    part[list(RANGES).index("turn")] = np.arange(rows)
    unit = (part + within) / rows
    return {
        name: low + (high - low) * unit[i] for i, (name, (low, high)) in enumerate(RANGES.items())
    }
