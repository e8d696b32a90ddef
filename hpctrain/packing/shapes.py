"""The shapes: generated images of 64 x 64 pixels with 16 channels, float32 values in [0, 1].

Each image shows one to six discs, squares and triangles that do not touch, the triangles rare. An
area has the spectrum of all shapes, a little of its kind's and a little of its own. Around the
shapes are clouds and bars, of which nothing is to be learnt; each image has its own gain, each
value its own noise. The first shape is the largest. One set, three targets: the kind of the largest
shape, the kinds that are present, and the number of shapes of each kind.

The bytes are equal on every machine, for the reasons that ``digits.py`` gives: raw PCG64 output,
rounded sines, and elementwise arithmetic. No sum is left to a library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from hpctrain.data.pack import SPLITS
from hpctrain.data.partition import random_key
from hpctrain.data.strata import divide_by_shares
from hpctrain.packing.digits import turns
from hpctrain.watchdog import doing

SIDE = 64  # pixels
CHANNELS = 16
IMAGES = 560  # 147 MB
SHARES = (Fraction(5, 7), Fraction(1, 7), Fraction(1, 7))  # 400, 80 and 80 images
SOURCE = "hpctrain.packing.shapes"  # in the provenance

KINDS = ("disc", "square", "triangle")
COUNTS = ("discs", "squares", "triangles")  # columns of values
FIRST = (0.4, 0.8, 1.0)  # of the largest shape: what a uniform number of each kind is below
OTHERS = (0.55, 0.96, 1.0)
#: Of shapes as large as a disc of radius 1: half a square's side, a triangle's distance from its
#: centre to a side, and the distance of each kind to its corners.
HALF_SIDE = 0.88623
INNER = 0.77756
REACH = (1.0, 1.25331, 1.55512)
SLOPE = 0.86603  # half the square root of 3

MOST_SHAPES = 6
LARGEST = (6.0, 9.0)  # radius of a disc as large as the first shape, pixels
LEAST = 3.5
SMALLER = 0.7  # largest radius of the other shapes, relative to the first
GAP = 2.0  # pixels between two shapes, at least
TRIES = 12  # places at which a shape may find room; without any, it is left out
MOST_BARS = 3
CLOUDS = 2
CELL = 8  # pixels between the points of a cloud

LEVEL = 0.4  # of the background
CONTRAST = 0.11  # of all shapes against it
KIND_CONTRAST = 0.18
OWN_CONTRAST = 0.06
CLOUD_CONTRAST = 0.12
NOISE = 0.2  # largest change of a value


class Scene(NamedTuple):
    """The S shapes of an image, the largest first."""

    kinds: np.ndarray  # (S,) int64, indices into KINDS
    radii: np.ndarray  # (S,) float64, pixels: of discs as large
    centres: np.ndarray  # (S, 2) float64: x and y, pixels
    turns: np.ndarray  # (S, 2) float64: cosine and sine

    def counts(self) -> np.ndarray:
        """Return the number of shapes of each kind, (3,) int64."""
        return np.bincount(self.kinds, minlength=len(KINDS))


class Sample(NamedTuple):
    """An image of the set, and what it shows."""

    image: np.ndarray  # (64, 64, 16) float32 in [0, 1]
    mask: np.ndarray  # (64, 64) uint8: 0 = background, 1 ... 3 = kinds of shapes
    scene: Scene


class Draws:
    """Uniform numbers in [0, 1), from raw output of PCG64."""

    def __init__(self, *key: int | str) -> None:
        """Begin the numbers of this key."""
        self._words = np.random.PCG64(random_key("shapes", *key))

    def uniform(self, *shape: int) -> np.ndarray:
        """Return the next numbers, float64 of this shape."""
        return (self._words.random_raw(shape) >> np.uint64(11)) * 2.0**-53

    def between(self, low: float, high: float) -> float:
        """Return the next number, between two bounds."""
        return low + (high - low) * float(self.uniform(1)[0])

    def noise(self, *shape: int) -> np.ndarray:
        """Return the next numbers in [-1, 1], float32 of this shape: sums of two bytes."""
        size = int(np.prod(shape))
        grains = self._words.random_raw(size // 4).astype("<u8").view(np.uint8)
        pairs = grains.reshape(2, *shape).astype(np.int32)
        return (pairs[0] + pairs[1] - 255).astype(np.float32) * np.float32(1 / 256)


def generate(
    task: str, seed: int = 0, shares: Sequence[Fraction] = SHARES
) -> dict[str, tuple[Iterator[np.ndarray], np.ndarray]]:
    """Generate the splits by name, each (images, targets), with what `task` learns.

    images: an iterator of (64, 64, 16) float32; targets: `TARGETS`; shares: of the images in train,
    validation and test. Scenes do not depend on each other, so that their order is random as it is.
    """
    scenes = [draw_scene(seed, number) for number in range(IMAGES)]
    targets = np.array([TARGETS[task](scene) for scene in scenes])
    splits = {}
    first = 0
    for name, count in zip(SPLITS, divide_by_shares(IMAGES, tuple(shares)), strict=True):
        rows = range(first, first + count)
        first += count
        if count:
            splits[name] = (draw_images(seed, rows), targets[rows.start : rows.stop])
    return splits


#: What a task learns of a scene: a class; whether each kind is present; how many there are.
TARGETS: dict[str, Callable[[Scene], Any]] = {
    "classify": lambda scene: int(scene.kinds[0]),
    "multilabel": lambda scene: (scene.counts() > 0).astype(np.uint8),
    "regress": lambda scene: scene.counts().astype(np.float32),
}


def draw_images(seed: int, rows: range) -> Iterator[np.ndarray]:
    """Yield the images of these numbers, (64, 64, 16) float32 each."""
    for row in rows:
        doing(f"drawing the shapes of image {row:,}")
        yield draw_sample(seed, row).image


def draw_sample(seed: int, number: int) -> Sample:
    """Draw the image of a number, and its mask."""
    scene = draw_scene(seed, number)
    areas = draw_areas(scene)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for kind, inside in zip(scene.kinds.tolist(), areas, strict=True):
        mask[inside] = 1 + kind
    image = draw_image(scene.kinds.tolist(), areas, Draws(seed, number, "image"))
    return Sample(image, mask, scene)


def draw_scene(seed: int, number: int) -> Scene:
    """Draw which shapes the image of this number shows, and where."""
    draws = Draws(seed, number, "scene")
    largest = draws.between(*LARGEST)
    kinds = list[int]()
    radii = list[float]()
    centres = list[tuple[float, float]]()
    reaches = list[float]()  # from centres to corners
    for place in range(1 + int(draws.between(0, MOST_SHAPES))):
        bounds = FIRST if place == 0 else OTHERS
        share = draws.between(0, 1)
        kind = next(kind for kind, bound in enumerate(bounds) if share < bound)
        radius = largest
        if place:
            radius = draws.between(LEAST, SMALLER * largest)
        reach = radius * REACH[kind]
        for x, y in (draws.uniform(TRIES, 2) * (SIDE - 2 * reach) + reach).tolist():
            if has_room(x, y, reach, centres, reaches):
                kinds.append(kind)
                radii.append(radius)
                centres.append((x, y))
                reaches.append(reach)
                break
    return Scene(
        kinds=np.array(kinds),
        radii=np.array(radii),
        centres=np.array(centres),
        turns=np.stack(turns(draws.uniform(len(kinds))), axis=1),
    )


def has_room(
    x: float,
    y: float,
    reach: float,
    centres: Sequence[tuple[float, float]],
    reaches: Sequence[float],
) -> bool:
    """Whether a shape at (x, y) is `GAP` away from the shapes at these centres."""
    for (other_x, other_y), other in zip(centres, reaches, strict=True):
        right = x - other_x
        down = y - other_y
        apart = reach + other + GAP
        if right * right + down * down <= apart * apart:
            return False
    return True


def draw_areas(scene: Scene) -> list[np.ndarray]:
    """Return for each shape which pixels are inside it, (64, 64) bool."""
    areas = []
    for kind, radius, centre, turn in zip(*scene, strict=True):
        right, down = turned(centre, turn)
        areas.append(INSIDE[kind](right, down, radius))
    return areas


def turned(centre: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates of the pixels, (64, 64) each, from a centre along two turned axes."""
    x = (np.arange(SIDE) + 0.5 - centre[0])[None, :]
    y = (np.arange(SIDE) + 0.5 - centre[1])[:, None]
    cosine, sine = turn
    return cosine * x + sine * y, cosine * y - sine * x


def in_disc(right: np.ndarray, down: np.ndarray, radius: float) -> np.ndarray:
    """Whether pixels are in a disc of this radius."""
    return right * right + down * down <= radius * radius


def in_square(right: np.ndarray, down: np.ndarray, radius: float) -> np.ndarray:
    """Whether pixels are in a square as large as a disc of this radius."""
    return np.maximum(np.abs(right), np.abs(down)) <= radius * HALF_SIDE


def in_triangle(right: np.ndarray, down: np.ndarray, radius: float) -> np.ndarray:
    """Whether pixels are in an equilateral triangle as large as a disc of this radius."""
    return np.maximum(down, SLOPE * np.abs(right) - 0.5 * down) <= radius * INNER


INSIDE = (in_disc, in_square, in_triangle)  # by kind


def draw_image(kinds: list[int], areas: list[np.ndarray], draws: Draws) -> np.ndarray:
    """Draw the image of S shapes, (64, 64, 16) float32 in [0, 1].

    kinds: of the shapes, S indices into KINDS; areas: the pixels inside each, (64, 64) bool.
    """
    image = np.zeros((SIDE, SIDE, CHANNELS), np.float32)
    image += spectrum(draws, LEVEL, CLOUD_CONTRAST)
    for _ in range(CLOUDS):
        image += draw_cloud(draws)[..., None] * spectrum(draws, 0, CLOUD_CONTRAST)
    of_shapes = Draws("spectra")  # those of shapes are the same with any seed
    common = spectrum(of_shapes, CONTRAST, CONTRAST)
    of_kinds = [spectrum(of_shapes, 0, KIND_CONTRAST) for _ in KINDS]
    shown = np.zeros((SIDE, SIDE), bool)
    for kind, inside in zip(kinds, areas, strict=True):
        image[inside] += common + of_kinds[kind] + spectrum(draws, 0, OWN_CONTRAST)
        shown |= inside
    for _ in range(int(draws.between(0, 1 + MOST_BARS))):
        bar = draw_bar(draws) & ~shown
        image[bar] += common + spectrum(draws, 0, OWN_CONTRAST)
    image *= np.float32(draws.between(0.8, 1.25))
    image += draws.noise(*image.shape) * np.float32(NOISE)
    return np.clip(image, 0, 1)


def spectrum(draws: Draws, level: float, contrast: float) -> np.ndarray:
    """Draw a value for each channel, (16,) float32, at most `contrast` away from `level`."""
    values = level + contrast * (2 * draws.uniform(CHANNELS) - 1)
    return values.astype(np.float32)


def draw_cloud(draws: Draws) -> np.ndarray:
    """Draw values in [-1, 1], (64, 64) float32, bilinear between points `CELL` pixels apart."""
    points = 2 * draws.uniform(SIDE // CELL + 1, SIDE // CELL + 1) - 1
    cell, place = np.divmod(np.arange(SIDE), CELL)
    share = place / CELL
    rows = points[cell] * (1 - share)[:, None] + points[cell + 1] * share[:, None]
    return (rows[:, cell] * (1 - share) + rows[:, cell + 1] * share).astype(np.float32)


def draw_bar(draws: Draws) -> np.ndarray:
    """Draw which pixels are in a bar, (64, 64) bool."""
    cosine, sine = turns(draws.uniform(1))
    centre = draws.uniform(2) * SIDE
    right, down = turned(centre, np.concatenate([cosine, sine]))
    if draws.between(0, 1) < 0.5:
        right, down = down, right
    is_long = np.abs(right) <= draws.between(8, 20)
    return is_long & (np.abs(down) <= draws.between(0.8, 2))
