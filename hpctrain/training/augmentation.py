"""The transforms of a run: made of --augment, given their range, described and tested."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from hpctrain.config import Config
from hpctrain.config.functions import Imported
from hpctrain.config.parts import Part, find_part, is_part
from hpctrain.data.augment import Augmentation
from hpctrain.data.loader import read_samples
from hpctrain.data.pack import Pack
from hpctrain.data.partition import random_key
from hpctrain.data.pipeline import Pipeline, UnitRange
from hpctrain.data.scale import FULL, Ranges
from hpctrain.data.split import Split
from hpctrain.data.transform_checks import CHECKED_ROWS, check_transforms
from hpctrain.data.transforms import (
    LibraryTransform,
    Transforms,
    always_applied,
    build_transform,
    describe_part,
)
from hpctrain.models.init import Normalization
from hpctrain.parallel.mpi import Comm, on_root
from hpctrain.plan import Plan
from hpctrain.tasks.functions import import_own
from hpctrain.text import listed
from hpctrain.training.probe import FIRST_ROWS


def parts_of(config: Config) -> dict[int, Part]:
    """Return the parts of other libraries in --augment, by place. Raises UsageError."""
    return {
        place: find_part("augment", text)
        for place, text in enumerate(config.augment)
        if is_part("augment", text)
    }


def make_transforms(config: Config) -> Transforms | None:
    """Build the parts of --augment, and import the functions; None without any.

    Raises UsageError.
    """
    if not config.augment:
        return None
    parts = parts_of(config)
    steps: list[LibraryTransform | Imported] = []
    for place, text in enumerate(config.augment):
        if place in parts:
            steps.append(build_transform(parts[place]))
        else:
            steps.append(import_own(text, "--augment"))
    return Transforms(steps)


def needs_range(config: Config, pack: Pack) -> bool:
    """Whether the range of all training images must be measured: none says that it is [0, 1]."""
    if not parts_of(config) or is_full(pack) or not pack.external:
        return False  # a pack has that range
    scale = pack.scale
    is_inside = scale.low >= 0 and scale.high <= scale.divisor
    return pack.max_value is None or not is_inside


def is_full(pack: Pack) -> bool:
    """Whether the type of stored values, all of which may occur, becomes [0, 1]."""
    return pack.scale.divisor == FULL.get(pack.scale.dtype)


def find_range(
    config: Config,
    begun: Plan | None,
    pack: Pack,
    measured: Ranges | None,
    normalization: Normalization,
) -> Ranges | None:
    """Return the stored values that transforms see as 0 and 1, by channel; None if the divided ones
    are in [0, 1].

    They are the range of all training images, which a pack has and an external file was `measured`
    for. What stands for missing data, or for what a shift uncovers, is in it. A run that was
    `begun` keeps its own.
    """
    if begun:
        return begun.augment_range
    scale = pack.scale
    if not parts_of(config) or is_full(pack):
        return None
    if measured is None:
        if pack.external:
            return None  # --max-value says it
        measured = (tuple(scale.lows), tuple(scale.highs))
    lows = np.array(measured[0])
    highs = np.array(measured[1])
    has_values = lows <= highs  # else all is missing
    lows = np.where(has_values, lows, 0.0)
    highs = np.where(has_values, highs, 0.0)
    if (lows >= 0).all() and (highs <= scale.divisor).all():
        return None
    for filling in fillings(config, pack, normalization):
        lows = np.minimum(lows, np.array(filling) * scale.divisor)
        highs = np.maximum(highs, np.array(filling) * scale.divisor)
    return tuple(lows.tolist()), tuple(highs.tolist())


def fillings(
    config: Config, pack: Pack, normalization: Normalization
) -> list[float | tuple[float, ...]]:
    """Return the divided values that the pipeline puts in place of missing ones."""
    if pack.scale.nodata is None:
        return [0.0] if config.shift else []
    if not normalization or isinstance(normalization, str):
        return [0.0]  # of an image without data, too
    return [tuple(normalization[0])]


def unit_range(stored: Ranges | None, divisor: float, device: torch.device) -> UnitRange | None:
    """Return the range of divided values that becomes [0, 1]; a constant channel becomes 0."""
    if stored is None:
        return None
    low = torch.tensor(stored[0], dtype=torch.float64) / divisor
    high = torch.tensor(stored[1], dtype=torch.float64) / divisor
    width = torch.where(high > low, high - low, 1.0)
    return UnitRange(low.to(device), width.to(device))


def range_note(stored: Ranges | None) -> str:
    """Return a note on the range that transforms see as 0 to 1, or ""."""
    if stored is None:
        return ""
    ranges = [f"{low:g} to {high:g}" for low, high in zip(*stored, strict=True)]
    return (
        f"--augment: transforms of libraries see the range of the training images,"
        f" {listed(dict.fromkeys(ranges), 4)}{' by channel' * (len(ranges) > 1)}, as 0 to 1"
    )


def describe_transforms(config: Config, augmentation: Augmentation) -> tuple[str, ...]:
    """Return how images are augmented, in order, if a part of a library takes part; else ()."""
    parts = parts_of(config)
    if not parts:
        return ()
    texts = []
    if config.random_crop:
        texts.append(f"random_crop {config.random_crop:g}")
    for name in ("flip", "flip_vertical", "rotate90", "shift"):
        value = getattr(augmentation, name)
        if value:
            texts.append(name if value is True else f"{name} {value:g}")
    for place, text in enumerate(config.augment):
        texts.append(describe_part(parts[place]) if place in parts else text)
    return tuple(texts)


def check_augmentation(
    config: Config, transforms: Transforms | None, pipeline: Pipeline, train: Split, comm: Comm
) -> None:
    """Test the transforms of a run with the first samples. Collective."""
    if transforms is None:
        return

    def check() -> None:
        always = {}
        for place, part in parts_of(config).items():
            variant = always_applied(part)
            if variant is not None:
                always[place] = build_transform(variant)
        images = first_images(pipeline, train, rows_to_check(config))
        check_transforms(transforms, always, images, random_key("own functions"))

    on_root(comm, check)


def rows_to_check(config: Config) -> int:
    """Return how many of the first samples rank 0 needs for the tests of --augment."""
    return CHECKED_ROWS if parts_of(config) else FIRST_ROWS


def first_images(pipeline: Pipeline, train: Split, rows: int) -> Tensor:
    """Return the first training images as the first transform is given them, (n, C, H, W)."""
    given = []

    def keep(images: Tensor, key: int) -> Tensor:
        given.append(images.clone(memory_format=torch.preserve_format))
        return images

    seen = dataclasses.replace(pipeline, transform=keep)
    read_samples(train, np.arange(min(rows, len(train))), seen)
    return given[0]
