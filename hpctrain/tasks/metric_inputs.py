"""What metrics of torchmetrics are given: predictions and targets, by the kind of targets.

A metric is for one kind of targets. Of several classes it is given all, or of two the last one, if
it is a binary one; of columns of values, one after the other, the known entries; of images all
values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpctrain.config.parts import Part, accepted_names, load_class
from hpctrain.errors import UsageError
from hpctrain.tasks.facts import KINDS

IGNORED = -1  # an entry of classes that is unknown, for torchmetrics
#: By the kinds of targets that are classes: how torchmetrics names its metrics, their argument
#: `task`, and what says how many classes there are.
FAMILIES = {
    "class": ("Multiclass", "multiclass", "num_classes"),
    "classes": ("Multilabel", "multilabel", "num_labels"),
}
TRIED = 64  # drawn samples by which the figures of a metric are named


class Sample(NamedTuple):
    """What metrics are given of some samples."""

    predictions: Tensor  # float64: probabilities (n, K), values (n, T), or images
    targets: Tensor  # int64: (n,), or (n, K) with IGNORED; float64: (n, T) with NaN, or images

    def take(self, chosen: Any) -> Sample:
        """Return the `chosen` samples."""
        return Sample(self.predictions[chosen], self.targets[chosen])


def make_sample(predictions: np.ndarray, targets: np.ndarray, kind: str) -> Sample:
    """Return predictions of targets of a kind, as they are stored or as the task has them."""
    wide = targets.astype(np.int64 if kind == "class" else np.float64)
    if kind == "classes":
        is_known = (wide == 0) | (wide == 1)
        wide = np.where(is_known, wide, IGNORED).astype(np.int64)
    return Sample(torch.from_numpy(predictions), torch.from_numpy(wide))


def is_binary(part: Part, kind: str, count: int) -> bool:
    """Whether a metric of two classes is that of one of `count`: the second, or the only one."""
    return part.name.startswith("Binary") and (kind, count) in (("class", 2), ("classes", 1))


def choose_input(part: Part, kind: str, count: int) -> Callable[[Sample], list[Sample]]:
    """Return what selects the input of a metric from samples.

    Raises UsageError if the metric is for other targets.
    """
    prefix, _, _ = FAMILIES.get(kind, ("", "", ""))
    if is_binary(part, kind, count):
        return last_class
    others = ["Binary", *(of_kind for of_kind, _, _ in FAMILIES.values() if of_kind != prefix)]
    is_of_classes = ".classification" in load_class(part).__module__
    if is_of_classes != bool(prefix) or part.name.startswith(tuple(others)):
        raise UsageError(
            f"{part.flag} is not for {KINDS.get(kind, 'images')}{other_name(part, prefix)}"
        )
    if kind in FAMILIES:
        return all_classes
    return by_column if kind else all_pixels


def other_name(part: Part, prefix: str) -> str:
    """Return the name of the metric for classes of the kind with this prefix, "" without one."""
    for before in ("Binary", *(of_kind for of_kind, _, _ in FAMILIES.values())):
        name = part.name.replace(before, prefix, 1)
        if prefix and name != part.name and name in accepted_names("metric", part.library):
            return f": {name} is"
    return ""


def all_classes(sample: Sample) -> list[Sample]:
    """Return the probabilities of all classes, and the targets.

    Of several classes, samples of which none is known are left out: torchmetrics counts them.
    """
    if sample.targets.dim() == 1:
        return [sample]
    return [sample.take((sample.targets != IGNORED).any(1))]


def last_class(sample: Sample) -> list[Sample]:
    """Return the probability of the last class, and whether it is that of the sample."""
    targets = sample.targets
    return [Sample(sample.predictions[:, -1], targets if targets.dim() == 1 else targets[:, -1])]


def all_pixels(sample: Sample) -> list[Sample]:
    """Return all values of images."""
    return [Sample(sample.predictions.flatten(), sample.targets.flatten())]


def by_column(sample: Sample) -> list[Sample]:
    """Return the known values of each column."""
    samples = []
    for predictions, targets in zip(sample.predictions.T, sample.targets.T, strict=True):
        is_known = ~targets.isnan()
        samples.append(Sample(predictions[is_known], targets[is_known]))
    return samples


def draw_sample(kind: str, count: int) -> Sample:
    """Return samples in which each of `count` classes is predicted and, if they are few, true."""
    drawn = np.random.default_rng(0).random((TRIED, max(count, 1)))
    if kind == "class":
        targets = np.arange(TRIED) % count
        return make_sample(drawn / drawn.sum(1, keepdims=True), targets, kind)
    if kind == "classes":
        return make_sample(drawn, (np.arange(TRIED)[:, None] + np.arange(count)) % 2, kind)
    return make_sample(drawn + 0.5, drawn[::-1] + 0.5, kind)
