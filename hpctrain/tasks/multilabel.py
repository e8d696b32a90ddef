"""Find all classes of an image: K decisions of their own, learned by binary cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.data.split import Split
from hpctrain.data.targets import UNKNOWN
from hpctrain.errors import UsageError
from hpctrain.plan import Measured
from hpctrain.report.results import answer_columns
from hpctrain.tasks.class_weights import check_present, given_weights
from hpctrain.tasks.entries import EntriesTask
from hpctrain.tasks.mistakes import WrongEntries
from hpctrain.tasks.scores import Scores, logit, sigmoid
from hpctrain.tasks.tally import Block, Tally, find_tally, two_sums
from hpctrain.tasks.task import Caption
from hpctrain.text import brief, counted, listed

DEFAULT_THRESHOLD = 0.5
MOST_WEIGHT = 100.0  # of a rare class with --class-weights balanced


@dataclass(frozen=True)
class Multilabel(EntriesTask):
    """Find all classes of an image: targets are 0, 1 or NaN (n, K), outputs are logits (n, K)."""

    label_smoothing: float = 0.0
    class_weights: Tensor | None = None  # (K,) of present classes in the loss; None = 1
    #: (K,) probabilities from which classes count as present; () = those of the largest F1.
    thresholds: tuple[float, ...] = ()

    output: ClassVar[str] = "scores"
    has_mistakes: ClassVar[bool] = True
    worst: ClassVar[str] = "most confident of {total} wrong entries"
    plotted: ClassVar[str] = "ROC, and precision and recall, by class"

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], names: Sequence[str], like: Tensor, **fields: Any
    ) -> Self:
        weights = settings["class_weights"]
        threshold = settings.get("threshold", DEFAULT_THRESHOLD)
        thresholds = (float(threshold),) * len(names) if threshold else ()
        return cls(
            names=tuple(names),
            label_smoothing=settings.get("label_smoothing", 0.0),
            class_weights=like.new_tensor(weights) if weights else None,
            thresholds=tuple(settings.get("thresholds", thresholds)),
            **fields,
        )

    @classmethod
    def find_weights(cls, settings: Mapping[str, Any], train: Split) -> tuple[float, ...]:
        """Return the weight of each class where it is present, which --class-weights asks for.

        "balanced" stands for the number of images without the class / that of images with it, at
        most `MOST_WEIGHT`, as is usual for `pos_weight` of torch. Raises UsageError, also for a
        class that is unknown in all training images.
        """
        weights = settings["class_weights"]
        names = train.pack.targets.names
        absent, present = count_entries(train)
        images = counted(len(train), "training image")
        train.pack.targets.check_known(train.pack.path, absent + present, images)
        if weights != ():
            return given_weights(weights, names)
        check_present(names, present)
        if full := [names[k] for k in np.flatnonzero(absent == 0)]:
            raise UsageError(
                f"--class-weights balanced: no training image is without class {listed(full, 3)},"
                " whose weight would be 0; give a number for each class, or leave it out"
            )
        return tuple(np.minimum(absent / present, MOST_WEIGHT).tolist())

    @classmethod
    def measured_note(cls, settings: Mapping[str, Any], measured: Measured) -> str:
        """Return a note on classes that are so rare that their weight is the largest one."""
        weights = measured["class_weights"]
        rare = sum(weight == MOST_WEIGHT for weight in weights)
        if settings["class_weights"] or not rare:  # numbers, or none
            return ""
        return (
            f"--class-weights balanced: the weight of {rare} of {len(weights)} classes, which fewer"
            f" than 1 image in {MOST_WEIGHT:g} has, is {MOST_WEIGHT:g}, the most"
        )

    @classmethod
    def check_metadata(cls, metadata: Mapping[str, Any]) -> None:
        super().check_metadata(metadata)
        thresholds = metadata["thresholds"]
        is_number = [type(threshold) in (float, int) for threshold in thresholds]
        if len(thresholds) != len(metadata["classes"]) or not all(is_number):
            raise ValueError(f"thresholds is {brief(thresholds, 40)}")

    # Learning

    def stage(self, inputs: Tensor, targets: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return the inputs, and targets (n, K) in their dtype: 0, 1, or NaN where unknown."""
        return inputs, targets.to(inputs.dtype).masked_fill(targets == UNKNOWN, math.nan)

    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            outputs, targets, pos_weight=self.class_weights, reduction="none"
        )

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of known entries, with label smoothing.

        A smoothed target is (1 - s) y + s / 2, as with two classes in torch's cross_entropy.
        """
        if self.label_smoothing:
            targets = targets.lerp(torch.full_like(targets, 0.5), self.label_smoothing)
        return super().loss_sum(outputs, targets)

    # What a validation chooses

    def choose(self, tallies: Sequence[Tally]) -> dict[str, Any]:
        """Return the thresholds of the largest F1, if they are not given."""
        scores = find_tally(tallies, Scores)
        if self.thresholds or scores is None:
            return {}
        return {"thresholds": [sigmoid(threshold) for threshold in scores.best_thresholds]}

    def with_chosen(self, chosen: Mapping[str, Any]) -> Self:
        """Return it with these thresholds, or before the first validation with 0.5."""
        if self.thresholds:
            return self
        usual = (DEFAULT_THRESHOLD,) * len(self.names)
        return replace(self, thresholds=tuple(chosen.get("thresholds", usual)))

    def metadata(self) -> dict[str, Any]:
        return {"thresholds": list(self.thresholds)}

    # Evaluating

    def figure_sums(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums of the loss without label smoothing, weighted and not."""
        count = self.weights(targets).sum()
        sums = {"loss": two_sums(super().loss_sum(outputs, targets), count)}
        if self.class_weights is None or self.loss:
            return sums
        unweighted = replace(self, class_weights=None).known_losses(outputs, targets)
        return {**sums, "unweighted_loss": two_sums(unweighted.sum(), count)}

    def predictions(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the probability (n, K) of each class."""
        return {"predictions": outputs.double().sigmoid()}

    def tallies(self, mistakes: int = 0) -> list[Tally]:
        thresholds = [*map(logit, self.thresholds)]
        tallies = [*super().tallies(), Scores(self.names, thresholds or None)]
        if mistakes:
            tallies.append(WrongEntries(self.is_present, mistakes))
        return tallies

    def mistakes(self, tallies: Sequence[Tally]) -> tuple[list[Caption], int]:
        tally = find_tally(tallies, WrongEntries)
        if tally is None:
            return super().mistakes(tallies)
        captions = []
        for entry in tally.worst:
            name = self.names[entry.number]
            truth = f"not {name}" if entry.is_present else name
            answer = name if entry.is_present else f"not {name}"
            lines = (f"true: {truth}", f"answer: {answer}", f"{100 * entry.probability:.1f} %")
            captions.append(Caption(entry.row, lines, is_wrong=True))
        return captions, tally.total

    def plot_tallies(self) -> list[Tally]:
        from hpctrain.tasks.curves import Curves  # which training does not need

        return [Curves(self.names)]

    def plot(self, tallies: Sequence[Tally], title: str) -> Any:
        """Return a figure of the ROC and precision-recall curves of the classes."""
        from hpctrain.tasks.curves import plot_classes

        return plot_classes(tallies, title)

    # Answering

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the probability (n, K) of each class."""
        return outputs.sigmoid().float()

    def columns(self) -> tuple[str, ...]:
        return "prediction", *answer_columns(self.names)

    def cells(self, answer: np.ndarray) -> list[str]:
        return [self.chosen(answer), *(f"{probability:.6f}" for probability in answer)]

    def table(self, answers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the classes that are present, as "a;b", then the probability of each."""
        chosen = np.array([*map(self.chosen, answers)], str)
        return {
            "prediction": chosen,
            **dict(zip(answer_columns(self.names), answers.T, strict=True)),
        }

    def arrays(self, answers: np.ndarray) -> dict[str, np.ndarray]:
        return {"probabilities": answers, "prediction": self.is_present(answers).astype(np.uint8)}

    def is_present(self, answers: np.ndarray) -> np.ndarray:
        """Return which probabilities (..., K) reach the thresholds of their classes."""
        present: np.ndarray = answers >= np.array(self.thresholds, np.float32)
        return present

    def chosen(self, answer: np.ndarray) -> str:
        """Return the classes with probabilities (K,) from their thresholds on, as "a;b"."""
        is_present = self.is_present(answer)
        return ";".join(name for name, is_in in zip(self.names, is_present, strict=True) if is_in)

    def target_columns(self) -> tuple[str, ...]:
        return ("labels",)

    def target_cells(self, target: Any) -> list[str]:
        """Return the classes of a stored target (K,), as in a table of labels: "a;?b"."""
        marks = {1: "", UNKNOWN: "?"}
        pairs = zip(self.names, target.tolist(), strict=True)
        return [";".join(f"{marks[value]}{name}" for name, value in pairs if value in marks)]

    def captions(self, block: Block, answers: np.ndarray, chosen: np.ndarray) -> list[Caption]:
        """Return the true classes, if they are known, and those that are answered."""
        captions = []
        for number in np.flatnonzero(chosen).tolist():
            lines = [f"answer: {self.chosen(answers[number]) or 'none'}"]
            is_wrong = False
            if block.targets is not None:
                target = block.targets[number]
                lines.insert(0, f"true: {self.target_cells(target)[0] or 'none'}")
                is_present = self.is_present(answers[number])
                is_wrong = bool(((target != is_present) & (target != UNKNOWN)).any())
            captions.append(Caption(int(block.rows[number]), tuple(lines), is_wrong))
        return captions


def count_entries(train: Split) -> np.ndarray:
    """Return how many training images lack and have each class, (2, K) int64."""
    counts = np.zeros((2, len(train.pack.targets.names)), np.int64)
    for targets in train.read_all_targets():
        counts += [(targets == value).sum(0) for value in (0, 1)]
    return counts
