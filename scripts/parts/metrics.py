"""Judge the metrics of torchmetrics: those of which figures of a split can be computed exactly.

A metric is accepted if for one kind of targets at least, with several numbers of classes, it gives
a number, or one for each class; if the figures do not depend on the blocks of a split; and if the
prediction for an unknown entry has no effect.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpctrain.config.parts import MODULES, Part
from hpctrain.errors import UsageError
from hpctrain.tasks.library_metrics import LibraryMetric, make_metrics
from hpctrain.tasks.metric_inputs import IGNORED, Sample, make_sample
from scripts.parts import Verdict, part_of

LIBRARY = "torchmetrics"
#: Arguments without a default
ARGUMENTS: dict[str, Any] = {
    "beta": 0.5,
    "min_recall": 0.5,
    "min_precision": 0.5,
    "min_specificity": 0.5,
    "min_sensitivity": 0.5,
    "p": 3.0,
    "threshold": 0.5,
}
#: Kinds of targets, and numbers of classes or columns
KINDS = (("class", (2, 3, 5)), ("classes", (1, 3, 5)), ("values", (1, 2)), ("", (0,)))
#: Patterns of names, and why these are refused
REASONS = {
    r"(|Binary|Multiclass|Multilabel)(ROC|PrecisionRecallCurve)": "it gives a curve",
    r".*At(Fixed)?[A-Z][a-z]+": "it gives a value with its threshold",
    r".*ConfusionMatrix": "it gives a matrix: evaluate prints that of a classifier",
    r".*StatScores": "it gives counts",
    r"Binary(Fairness|GroupStatRates)": "it compares groups of samples",
    r"CosineSimilarity": "it compares vectors",
    r"MultilabelRankingLoss": "an unknown entry counts as a right one in it",
    r"MultilabelCoverageError": "an unknown entry counts as a class that is present in it",
    r".*Divergence|ContinuousRankedProbabilityScore": "it compares distributions",
}
#: Modules of which no metric is accepted, and why
OTHERS = {"segmentation": "it compares masks", "image": "metrics of images are not accepted"}
#: Directions that torchmetrics leaves open, by the ends of names
DIRECTIONS = {"Specificity": "max", "NegativePredictiveValue": "max", "EER": "min"}
DIRECTION_OF = {True: "max", False: "min", None: ""}


def candidates() -> dict[str, Any]:
    """Return the classes of the modules from which metrics are taken, and of `OTHERS`."""
    classes: dict[str, Any] = {}
    for name in (*MODULES["metric"][LIBRARY], f"{LIBRARY}.image"):
        module = importlib.import_module(name)
        classes |= {f"{LIBRARY}:{bare}": getattr(module, bare) for bare in module.__all__}
    return classes


def judge(name: str) -> Verdict:
    """Judge the class of this name, for all kinds of targets."""
    bare = name.partition(":")[2]
    module = candidates()[name].__module__
    for kind, why in OTHERS.items():
        if module.startswith(f"{LIBRARY}.{kind}"):
            return Verdict(why)
    for pattern, why in REASONS.items():
        if re.fullmatch(pattern, bare):
            return Verdict(why)
    metrics = [*make_all(name)]
    if not metrics:
        return Verdict("it can be made for no task")
    try:
        for kind, metric in metrics:
            try_metric(kind, metric)
    except UsageError as error:
        return Verdict(str(error).partition(f"{name} ")[2] or str(error))
    (is_higher,) = {metric.metrics[0].higher_is_better for _, metric in metrics}
    others = [word for end, word in DIRECTIONS.items() if name.endswith(end)]
    return Verdict(direction=DIRECTION_OF[is_higher] or "".join(others))


def sample(name: str) -> None:
    """Make the metric of this name for all that it is for, and compute its figures."""
    for kind, metric in make_all(name):
        metric.of_parts(next(samples(kind, len(metric.parts))), (slice(None),))


def make_all(name: str) -> Iterator[tuple[str, LibraryMetric]]:
    """Yield a metric made for each kind of targets and number of classes that it is for."""
    for kind, counts in KINDS:
        for count in counts:
            names = [f"class {number}" for number in range(count)]
            try:
                (metric,) = make_metrics({name: with_arguments(name)}, kind, names)
            except UsageError:
                continue
            yield kind, metric


def try_metric(kind: str, metric: LibraryMetric) -> None:
    """Test a metric with samples. Raises UsageError."""
    for drawn in samples(kind, len(metric.parts)):
        metric.check(drawn)
        values = metric.named(metric.of_parts(drawn, (slice(None),)))
        if kind != "classes":
            continue
        others = metric.named(metric.of_parts(with_others(drawn), (slice(None),)))
        if not np.allclose([*values.values()], [*others.values()], 1e-12, 1e-12, True):
            raise UsageError("entries that are unknown count in it")


def with_arguments(name: str) -> Part:
    """Return the part of a class with the arguments that it needs."""
    kwargs = {}
    for argument in inspect.signature(candidates()[name]).parameters.values():
        if argument.default is inspect.Parameter.empty and argument.name in ARGUMENTS:
            kwargs[argument.name] = ARGUMENTS[argument.name]
    return part_of("metric", name, kwargs)


def samples(kind: str, count: int) -> Iterator[Sample]:
    """Yield samples: good and bad predictions, few and many of them, with unknown entries."""
    random = np.random.default_rng(0)
    for rows, noise in ((5, 1.0), (40, 0.1), (200, 0.5), (301, 1e3), (300, 1e3)):
        width = max(count, 1)
        drawn = random.standard_normal((rows, width)) * noise
        if kind == "class":
            targets = random.integers(0, count, rows)
            scores = drawn + np.eye(count)[targets]
            powers = np.exp(scores - scores.max(1, keepdims=True))
            yield make_sample(powers / powers.sum(1, keepdims=True), targets, kind)
        elif kind == "classes":
            present = random.choice(np.array([0, 1, 255], np.uint8), (rows, width))
            scores = drawn + (present == 1)
            yield make_sample(np.exp(-np.logaddexp(0, -scores)), present, kind)
        else:
            values = random.random((rows, width)) + 0.5
            yield make_sample(values + 0.1 * np.abs(drawn), values, kind)


def with_others(sample: Sample) -> Sample:
    """Return samples with other predictions for entries that are unknown."""
    is_unknown = sample.targets == IGNORED
    return sample._replace(predictions=sample.predictions.where(~is_unknown, 0.5))
