"""Areas under curves, and F1, of the scores of classes.

A score is a logit, the logarithm of p / (1 - p), of which a sigmoid gives the probability p: unlike
p it is not rounded to 1. A class is answered where its score reaches its threshold, a logit, too.

Areas are those of scikit-learn's `roc_auc_score` and `average_precision_score`: among equal scores
no sample comes before another. They follow from integers, counts of samples above each score, so
that the order of samples has no effect.

Rank 0 gathers the scores of all ranks as float32, up to `LARGEST` bytes of them. Larger splits are
counted in `BINS` intervals of equal width from -`END` to `END`, of which the outer ones also hold
what is beyond. Then samples in one interval have equal scores, and figures are called "binned".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from hpctrain.tasks.tally import Block, Tally
from hpctrain.text import listed
from hpctrain.watchdog import waiting

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.parallel.mpi import Comm

LARGEST = 1 << 30  # bytes of the scores that rank 0 gathers
BINS = 1024
END = 16.0  # the sigmoid of larger logits is 1 in float32
#: The lowest and the highest threshold that is chosen: float32 holds other probabilities coarsely.
LOWEST = -80.0
HIGHEST = 12.0
MARGIN = 0.1  # of a threshold below all scores
EDGES = np.linspace(-END, END, BINS, endpoint=False)  # lower ends of the intervals
PRINTED = 40  # most classes of a table


class Ranked(NamedTuple):
    """Samples in ascending order of their scores, those of equal scores together."""

    scores: np.ndarray  # (g,) distinct
    counts: np.ndarray  # (g,) int64
    width: float = 0.0  # of the intervals above `scores` in which the samples are

    @property
    def total(self) -> int:
        """The number of samples."""
        return int(self.counts.sum())

    def below(self, limits: np.ndarray, side: Any = "left") -> np.ndarray:
        """Return how many scores are less than each limit; with side "right", or equal to it."""
        sums = np.concatenate([[0], self.counts.cumsum()])
        numbers: np.ndarray = sums[self.scores.searchsorted(limits, side)]
        return numbers


class ClassFigures(NamedTuple):
    """The figures of one class; NaN: undefined, or a score is NaN."""

    known: int  # samples of which it is known whether they are of the class
    positives: int  # those that are
    auroc: float = math.nan
    average_precision: float = math.nan
    f1: float = math.nan  # at `threshold`
    threshold: float = 0.0  # of scores
    best_threshold: float = 0.0  # that of the largest F1, of equal ones the highest
    right: int = 0  # positives whose scores reach `threshold`
    answered: int = 0  # samples whose scores do
    is_nan: bool = False  # whether a score is NaN

    @property
    def has_both(self) -> bool:
        """Whether it has samples that are of the class, and others: else no area is defined."""
        return 0 < self.positives < self.known


class Scores(Tally):
    """Figures by class of scores (n, K): areas under curves, and F1 at a threshold.

    Targets are (n, K): 1 of the class, 0 not, any other number unknown; or (n,), the one class of
    each sample (`is_exclusive`). Means over classes ("macro") leave out those without samples of
    both kinds.
    """

    #: Figures: names, and fields of `ClassFigures` of which they are means.
    means: ClassVar[Mapping[str, str]] = {"mAP": "average_precision", "auroc": "auroc"}
    #: Whether each sample is of one class.
    is_exclusive: ClassVar[bool] = False

    def __init__(
        self,
        classes: Sequence[str],
        thresholds: Sequence[float] | None = None,
        largest: int = LARGEST,
    ) -> None:
        """`thresholds` of scores (K,) are given, or those with the largest F1 are chosen.

        More than `largest` bytes of scores are counted in intervals.
        """
        self._classes = classes
        self._thresholds = thresholds
        self._largest = largest
        self._scores: list[np.ndarray] = []  # of blocks, (n, K) float32
        self._targets: list[np.ndarray] = []
        self._samples = 0
        self._counts: np.ndarray | None = None  # (2, K, BINS) int64: not of the class, of it
        self._nans = np.zeros(len(classes), np.int64)  # scores that have no interval
        self.by_class: list[ClassFigures] = []  # once it is merged

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"scores": outputs.float()}

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        assert block.targets is not None
        self._scores.append(measured["scores"])
        self._targets.append(block.targets)
        self._samples += len(block.targets)
        if self._counts is not None or self._is_large(self._samples):
            self._count()

    def _is_large(self, samples: int) -> bool:
        return 4 * samples * len(self._classes) > self._largest

    def _count(self) -> None:
        """Count the scores that are held in intervals, and forget them."""
        if self._counts is None:
            self._counts = np.zeros((2, len(self._classes), BINS), np.int64)
        for scores, targets in zip(self._scores, self._targets, strict=True):
            is_nan = np.isnan(scores)
            positive = targets == 1
            negative = targets == 0
            if self.is_exclusive:
                positive = targets[:, None] == np.arange(len(self._classes))
                negative = ~positive
            self._nans += (is_nan & (positive | negative)).sum(0)
            intervals = interval_of(np.where(is_nan, 0, scores))
            for counts, chosen in zip(self._counts, (negative, positive), strict=True):
                rows, classes = np.nonzero(chosen & ~is_nan)
                np.add.at(counts, (classes, intervals[rows, classes]), 1)
        self._scores.clear()
        self._targets.clear()

    def part(self) -> int:
        return self._samples

    def merge(self, parts: Sequence[int], comm: Comm) -> None:
        if self._is_large(sum(parts)):
            self._count()
            self._add_counts(comm)
        else:
            self._gather(parts, comm)
        with waiting("rank 0"):
            if comm.rank == 0:
                self.by_class = self._measure_classes()
            self.by_class = comm.bcast(self.by_class, 0)
        self._scores.clear()
        self._targets.clear()

    def _add_counts(self, comm: Comm) -> None:
        from hpctrain.parallel.mpi import MPI

        with waiting():
            for counts in (self._counts, self._nans):
                comm.Allreduce(MPI.IN_PLACE, counts)

    def _gather(self, samples: Sequence[int], comm: Comm) -> None:
        """Let rank 0 hold the scores and targets of all ranks, in the order of the samples."""
        classes = len(self._classes)
        self._scores = gather(comm, self._scores, samples, np.float32, (classes,))
        if self.is_exclusive:
            self._targets = gather(comm, self._targets, samples, np.int32, ())
        else:
            self._targets = gather(comm, self._targets, samples, np.uint8, (classes,))

    def _measure_classes(self) -> list[ClassFigures]:
        """Return the figures of all classes, on rank 0."""
        by_class = []
        for number, (positives, negatives, is_nan) in enumerate(self._rank_classes()):
            threshold = None
            if self._thresholds is not None:
                threshold = self._thresholds[number]
            by_class.append(measure_class(positives, negatives, is_nan, threshold))
        return by_class

    def _rank_classes(self) -> Iterator[tuple[Ranked, Ranked, bool]]:
        """Yield the samples of each class, those that are not, and whether a score is NaN."""
        for number in range(len(self._classes)):
            if self._counts is not None:
                negative, positive = self._counts[:, number]
                yield rank_counts(positive), rank_counts(negative), bool(self._nans[number])
                continue
            scores = self._scores[0][:, number]
            if self.is_exclusive:
                positive = scores[self._targets[0] == number]
                negative = scores[self._targets[0] != number]
            else:
                positive = scores[self._targets[0][:, number] == 1]
                negative = scores[self._targets[0][:, number] == 0]
            is_nan = bool(np.isnan(positive).any() or np.isnan(negative).any())
            yield rank_scores(positive), rank_scores(negative), is_nan

    # What follows from it

    @property
    def is_binned(self) -> bool:
        """Whether the scores were counted in intervals."""
        return self._counts is not None

    @property
    def left_out(self) -> list[str]:
        """The classes that the means over classes leave out."""
        pairs = zip(self._classes, self.by_class, strict=True)
        return [name for name, figures in pairs if not figures.has_both]

    @property
    def best_thresholds(self) -> tuple[float, ...]:
        """The thresholds (K,) of scores with the largest F1; 0 for classes without both kinds."""
        return tuple(figures.best_threshold for figures in self.by_class)

    def mean(self, name: str) -> float:
        """Return the mean over classes of a field of `ClassFigures`; NaN if it has no class."""
        values = [getattr(figures, name) for figures in self.by_class if figures.has_both]
        if not values:
            return math.nan
        return math.fsum(values) / len(values)

    def areas(self) -> dict[str, float | None]:
        """Return the mean areas by name."""
        suffix = "_binned" if self.is_binned else ""
        return {f"{name}{suffix}": self.mean(field) for name, field in self.means.items()}

    def figures(self) -> dict[str, float | None]:
        """Return the mean areas, the mean F1, and F1 of all entries together ("micro")."""
        right = sum(figures.right for figures in self.by_class)
        total = sum(figures.answered + figures.positives for figures in self.by_class)
        micro = math.nan
        if total and not any(figures.is_nan for figures in self.by_class):
            micro = 2 * right / total
        return {
            **self.areas(),
            "f1_macro": self.mean("f1"),
            "f1_micro": micro,
        }

    def as_json(self) -> dict[str, Any]:
        """Return "per_class", the figures of each class, thresholds as probabilities."""
        rows = []
        for name, figures in zip(self._classes, self.by_class, strict=True):
            rows.append(
                {
                    "class": name,
                    "known": figures.known,
                    "positives": figures.positives,
                    "auroc": figures.auroc,
                    "average_precision": figures.average_precision,
                    "f1": figures.f1,
                    "threshold": sigmoid(figures.threshold),
                    "best_threshold": sigmoid(figures.best_threshold),
                }
            )
        return {"per_class": rows}

    def tables(self) -> Iterator[Table]:
        """Yield a table of the classes, of many those with the smallest average precisions."""
        from rich.table import Table

        title = "By class"
        shown = [*range(len(self._classes))]
        if len(shown) > PRINTED:
            title = f"The {PRINTED} classes of the smallest AP (all: --output FILE.json)"
            areas = np.array([figures.average_precision for figures in self.by_class])
            shown = areas.argsort(kind="stable").tolist()  # NaN last
            del shown[PRINTED:]
        caption = None
        if self.left_out:
            caption = f"without both kinds, not in the means: {listed(self.left_out, 5)}"
        table = Table("class", title=title, caption=caption)
        for name in ("known", "positive", "AUROC", "AP", "F1", "threshold"):
            table.add_column(name, justify="right")
        for number in shown:
            figures = self.by_class[number]
            table.add_row(
                self._classes[number],
                f"{figures.known:,}",
                f"{figures.positives:,}",
                as_cell(figures.auroc),
                as_cell(figures.average_precision),
                as_cell(figures.f1),
                as_cell(sigmoid(figures.threshold)),
            )
        yield table


class OneVersusRest(Scores):
    """The area of each class against all others, of a classifier's outputs (n, K)."""

    means: ClassVar[Mapping[str, str]] = {"auroc": "auroc"}
    is_exclusive: ClassVar[bool] = True

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"scores": log_odds(outputs)}

    def figures(self) -> dict[str, float | None]:
        return self.areas()

    def as_json(self) -> dict[str, Any]:
        return {}

    def tables(self) -> Iterator[Table]:
        yield from ()


def gather(
    comm: Comm,
    blocks: Sequence[np.ndarray],
    rows: Sequence[int],
    dtype: type,
    shape: tuple[int, ...],
) -> list[np.ndarray]:
    """Return the rows of all ranks as one block on rank 0, an empty one on others. Collective.

    Each rank has so many `rows` of this dtype and shape in its `blocks`.
    """
    mine: np.ndarray = np.concatenate([np.empty((0, *shape), dtype), *blocks], dtype=dtype)
    if comm.size == 1:
        return [mine]
    width = math.prod(shape)
    gathered: np.ndarray = np.empty((0, *shape), dtype)
    receive = None
    if comm.rank == 0:
        gathered = np.empty((sum(rows), *shape), dtype)
        receive = (gathered, [width * count for count in rows])
    with waiting():
        comm.Gatherv(mine, receive)
    return [gathered]


def interval_of(scores: np.ndarray) -> np.ndarray:
    """Return the interval of each score, an integer from 0 to `BINS` - 1."""
    scaled = (scores.astype(np.float64) + END) * (BINS / (2 * END))
    return np.clip(np.floor(scaled), 0, BINS - 1).astype(np.intp)


def rank_scores(scores: np.ndarray) -> Ranked:
    """Return the samples of these scores (n,) in order."""
    return Ranked(*np.unique(scores, return_counts=True))


def rank_counts(counts: np.ndarray) -> Ranked:
    """Return samples by their numbers (BINS,) in the intervals, as if of the lowest scores."""
    return Ranked(EDGES[counts > 0], counts[counts > 0], 2 * END / BINS)


def measure_class(
    positives: Ranked,
    negatives: Ranked,
    is_nan: bool = False,
    threshold: float | None = None,
) -> ClassFigures:
    """Return the figures of a class by its samples and the others; threshold None: the best one.

    AUROC is the share of pairs, of a sample and another, in which the sample has the higher score;
    of pairs with equal scores, half. The average precision is the mean, over the samples, of the
    precision where a sample's score is the threshold.
    """
    figures = ClassFigures(
        known=positives.total + negatives.total,
        positives=positives.total,
        is_nan=is_nan,
    )
    if is_nan:
        return figures
    if not figures.has_both:
        return at_threshold(figures, positives, negatives, threshold or 0.0)
    lower = negatives.below(positives.scores)
    lower_twice = lower + negatives.below(positives.scores, "right")
    pairs = 2 * positives.total * negatives.total
    right = positives.total - positives.below(positives.scores)
    answered = right + negatives.total - lower
    f1 = 2 * right / (answered + positives.total)
    reached = f1[: int(positives.scores.searchsorted(HIGHEST)) + 1]
    best = len(reached) - 1 - int(reached[::-1].argmax())
    best_threshold = midpoint_below(float(positives.scores[best]), positives, negatives)
    best_threshold = max(LOWEST, min(best_threshold, HIGHEST))
    figures = figures._replace(
        auroc=int((positives.counts * lower_twice).sum()) / pairs,
        average_precision=float((positives.counts * (right / answered)).sum()) / positives.total,
        best_threshold=best_threshold,
    )
    if threshold is None:
        threshold = best_threshold
    return at_threshold(figures, positives, negatives, threshold)


def at_threshold(
    figures: ClassFigures, positives: Ranked, negatives: Ranked, threshold: float
) -> ClassFigures:
    """Return the figures with F1 at a threshold, undefined without samples of the class."""
    limit = np.array(threshold)
    right = positives.total - int(positives.below(limit))
    answered = right + negatives.total - int(negatives.below(limit))
    f1 = math.nan
    if positives.total:
        f1 = 2 * right / (answered + positives.total)
    return figures._replace(f1=f1, threshold=threshold, right=right, answered=answered)


def midpoint_below(score: float, *ranked: Ranked) -> float:
    """Return the middle between a score and the next lower one, so that rounding has no effect.

    It is `MARGIN` below the score if there is no lower one, and the score itself if there is no
    float64 between them.
    """
    lower = -math.inf
    for samples in ranked:
        position = int(samples.scores.searchsorted(score))
        if position:
            lower = max(lower, float(samples.scores[position - 1]) + samples.width)
    if lower == -math.inf:
        return score - MARGIN
    middle = lower / 2 + score / 2
    if lower < middle:
        return middle
    return score


def log_odds(outputs: Tensor) -> Tensor:
    """Return the logit of each class's probability, by softmax of outputs (n, K), float32.

    It is an output minus the logarithm of the sum of exp of all others.
    """
    values = outputs.double()
    highest, top = values.max(1, keepdim=True)
    weights = (values - highest).exp()
    others = (weights.sum(1, keepdim=True) - weights).log() + highest
    of_top = values.scatter(1, top, -math.inf).logsumexp(1, keepdim=True)
    return (values - others.scatter(1, top, of_top)).float()


def sigmoid(score: float) -> float:
    """Return the probability of a logit."""
    if score < 0:
        return math.exp(score) / (1 + math.exp(score))
    return 1 / (1 + math.exp(-score))


def logit(probability: float) -> float:
    """Return the score of a probability in (0, 1)."""
    return math.log(probability / (1 - probability))


def as_cell(value: float) -> str:
    """Return a figure as the cell of a table."""
    if math.isnan(value):
        return "-"
    return f"{value:.4f}"
