"""Classify images: one of K classes, learned by cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.data.split import Split
from hpctrain.report.results import answer_columns
from hpctrain.tasks.class_weights import check_present, given_weights
from hpctrain.tasks.confusion import Confusion
from hpctrain.tasks.mistakes import Answer, Mistakes, answers_of
from hpctrain.tasks.scores import OneVersusRest
from hpctrain.tasks.tally import Block, Tally, find_tally, two_sums
from hpctrain.tasks.task import Caption, Task

UNRECORDED = ("top5_accuracy", "auroc", "auroc_binned", "f1_macro")


@dataclass(frozen=True)
class Classify(Task):
    """Learn the class of an image: targets are labels (n,) int64, outputs are scores (n, K)."""

    classes: tuple[str, ...] = ()  # names of the K classes
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None  # (K,) in the loss; None = all alike

    sums: ClassVar[Mapping[str, type]] = {"correct": int}
    output: ClassVar[str] = "scores"
    plotted: ClassVar[str] = "ROC, and precision and recall, by class"
    has_mistakes: ClassVar[bool] = True

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], names: Sequence[str], like: Tensor, **fields: Any
    ) -> Self:
        weights = settings["class_weights"]
        is_balanced = weights or settings.get("balanced_sampling")
        return cls(
            classes=tuple(names),
            label_smoothing=settings.get("label_smoothing", 0.0),
            class_weights=like.new_tensor(weights) if weights else None,
            unrecorded=UNRECORDED if is_balanced else ("balanced_accuracy", *UNRECORDED),
            **fields,
        )

    @classmethod
    def find_weights(cls, settings: Mapping[str, Any], train: Split) -> tuple[float, ...]:
        """Return the weight of each class that --class-weights asks for.

        "balanced" stands for n / (K n_c) as in scikit-learn, with n_c of n training samples in
        class c of K.
        """
        weights = settings["class_weights"]
        classes = train.pack.classes
        if weights != ():
            return given_weights(weights, classes)
        counts = train.count_classes()
        check_present(classes, counts)
        return tuple((counts.sum() / (len(classes) * counts)).tolist())

    @property
    def is_weighted(self) -> bool:
        return self.class_weights is not None

    # Learning

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def weights(self, targets: Tensor) -> Tensor | None:
        return None if self.class_weights is None else self.class_weights[targets]

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss:
            return super().loss_sum(outputs, targets)
        return F.cross_entropy(
            outputs,
            targets,
            self.class_weights,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def named_sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"correct": (outputs.detach().argmax(1) == targets).sum()}

    def step_figures(self, sums: Mapping[str, float], rows: float) -> dict[str, float | None]:
        return {"accuracy": sums["correct"] / rows}

    # Evaluating

    def figure_sums(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums of the loss without label smoothing, weighted and not.

        With them are those of answers of which one of the first five is right.
        """
        losses = self.own_losses(outputs, targets)
        if losses is None:
            unweighted = F.cross_entropy(outputs, targets, reduction="sum")
        else:
            unweighted = losses.sum()
        sums = {"loss": two_sums(unweighted, len(targets))}
        more = {}
        if len(self.classes) > 5 and self.needs("top5_accuracy"):
            more["top5_accuracy"] = two_sums(count_in_top(outputs, targets, 5), len(targets))
        weights = self.weights(targets)
        if weights is None:
            return {**sums, **more}
        if losses is None:
            weighted = F.cross_entropy(outputs, targets, self.class_weights, reduction="sum")
        else:
            weighted = (losses * weights).sum()
        return {
            "loss": two_sums(weighted, weights.sum()),
            "unweighted_loss": sums["loss"],
            **more,
        }

    def predictions(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the probabilities (n, K) of the classes."""
        return {"predictions": outputs.double().softmax(1)}

    def tallies(self, mistakes: int = 0) -> list[Tally]:
        tallies = [*super().tallies(), Confusion(self.classes)]
        if self.needs("auroc"):
            tallies.append(OneVersusRest(self.classes))
        if mistakes:
            tallies.append(Mistakes(mistakes))
        return tallies

    def mistakes(self, tallies: Sequence[Tally]) -> tuple[list[Caption], int]:
        tally = find_tally(tallies, Mistakes)
        if tally is None:
            return super().mistakes(tallies)
        return [*map(self.caption, tally.worst)], tally.total

    def describe(self, figures: Mapping[str, Any]) -> str:
        losses = {name: figures[name] for name in ("loss", "unweighted_loss") if name in figures}
        return super().describe(losses | {**figures})

    def plot_tallies(self) -> list[Tally]:
        from hpctrain.tasks.curves import ExclusiveCurves  # which training does not need

        return [ExclusiveCurves(self.classes)]

    def plot(self, tallies: Sequence[Tally], title: str) -> Any:
        """Return a figure of the ROC and precision-recall curves of the classes."""
        from hpctrain.tasks.curves import plot_classes

        return plot_classes(tallies, title)

    # Answering

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the probabilities (n, K)."""
        return outputs.softmax(1).float()

    def columns(self) -> tuple[str, ...]:
        return "prediction", "probability", *answer_columns(self.classes)

    def cells(self, answer: np.ndarray) -> list[str]:
        best = int(answer.argmax())
        texts = [f"{probability:.6f}" for probability in answer]
        return [answer_columns(self.classes)[best], texts[best], *texts]

    def table(self, answers: np.ndarray) -> dict[str, np.ndarray]:
        """Return the most probable class by name and number, its probability, then those of all."""
        labels = answers.argmax(1)
        columns = answer_columns(self.classes)
        return {
            "prediction": np.array(columns)[labels],
            "label": labels,
            "probability": answers.max(1),
            **dict(zip(columns, answers.T, strict=True)),
        }

    def arrays(self, answers: np.ndarray) -> dict[str, np.ndarray]:
        return {"probabilities": answers, "prediction": answers.argmax(1).astype(np.int32)}

    def target_columns(self) -> tuple[str, ...]:
        return ("class",)

    def target_cells(self, target: Any) -> list[str]:
        return [answer_columns(self.classes)[target]]

    def captions(self, block: Block, answers: np.ndarray, chosen: np.ndarray) -> list[Caption]:
        predicted = answers.argmax(1)
        return [*map(self.caption, answers_of(block, predicted, answers.max(1), chosen))]

    def caption(self, answer: Answer) -> Caption:
        """Return the true class, if it is known, the predicted one and its probability."""
        lines = [f"answer: {self.classes[answer.prediction]}", f"{100 * answer.probability:.1f} %"]
        if answer.label is not None:
            lines.insert(0, f"true: {self.classes[answer.label]}")
        is_wrong = answer.label not in (None, answer.prediction)
        return Caption(answer.row, tuple(lines), is_wrong)


def count_in_top(outputs: Tensor, targets: Tensor, most: int) -> Tensor:
    """Return how many samples have their class (n,) among those of the `most` highest outputs.

    Of equal outputs (n, K) the first are higher, as in argmax; the number is NaN if one of them is.
    """
    output = outputs.gather(1, targets[:, None])
    is_earlier = torch.arange(outputs.shape[1], device=outputs.device) < targets[:, None]
    is_higher = (outputs > output) | ((outputs == output) & is_earlier)
    is_in_top = is_higher.sum(1) < most
    return torch.where(outputs.isnan().any(1), torch.nan, is_in_top.double()).sum()
