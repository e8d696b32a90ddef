"""The weights of classes that --class-weights gives, one for each class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.text import brief, listed


def given_weights(weights: Sequence[float] | None, classes: Sequence[str]) -> tuple[float, ...]:
    """Return weights that are given as numbers, () if none are. Raises UsageError."""
    if weights is None:
        return ()
    if len(weights) != len(classes):
        raise UsageError(
            f"--class-weights {brief(weights)}: {len(weights)} weights for {len(classes)} classes,"
            f" {listed(classes)}"
        )
    return tuple(weights)


def check_present(classes: Sequence[str], images: np.ndarray) -> None:
    """Raise UsageError if no training image is of a class; `images` (K,) are those of each."""
    empty = [name for name, count in zip(classes, images, strict=True) if not count]
    if empty:
        raise UsageError(
            f"--class-weights balanced: no training image is of class {listed(empty, 3)}; give a"
            " number for each class"
        )
