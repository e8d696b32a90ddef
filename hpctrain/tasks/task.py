"""The contract of a task: what a network learns, how it is measured, and what it answers.

A task is one file of this package, with a class of its name: `Classify` in ``classify.py``. Its
defaults and the names of its figures are in ``facts.py``. Nothing else knows it.

Losses and figures are sums over samples, so that the parts of a batch or a split add up. A figure
is the quotient of two sums, or follows from a tally of its own (``tally.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.config.functions import Imported
from hpctrain.config.metrics import metric_directions
from hpctrain.data.pack import Pack
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.models import evaluating
from hpctrain.numerics import fork_rng
from hpctrain.plan import Measured, listed_numbers
from hpctrain.tasks.facts import FACTS, KINDS, TaskFacts, best_by, task_that_learns
from hpctrain.tasks.forward import network_output
from hpctrain.tasks.functions import (
    Loss,
    check_names,
    check_values,
    compute_losses,
    compute_metric,
    losses_by_name,
)
from hpctrain.tasks.measures import Measures
from hpctrain.tasks.tally import Block, Means, MetricFigures, Tally, two_sums
from hpctrain.text import short_number

if TYPE_CHECKING:
    from hpctrain.tasks.library_metrics import LibraryMetric

# Sums of a shard, () each on the device: "loss", that of the samples' losses; "weight", that of
# their weights, if they have any; and the task's own
ShardSums = dict[str, Tensor]


class Caption(NamedTuple):
    """The caption of an image in a picture of answers."""

    row: int  # in the split, or in the list of files
    lines: tuple[str, ...]  # below the image's name
    is_wrong: bool  # the last two lines are red


@dataclass(frozen=True)
class Task(ABC):
    """Base class of all tasks: a task defines what a network learns from samples.

    Outputs are those of the network for inputs (n, C, H, W), and targets what `stage` returns.
    """

    precision: str = "fp32"
    loss: Loss | None = None  # that of --loss, in place of `losses`
    metrics: tuple[Imported, ...] = ()  # the user's own, beside the task's figures
    library_metrics: tuple[LibraryMetric, ...] = ()  # of libraries, beside them
    unrecorded: tuple[str, ...] = ()  # figures that the records of validations leave out
    best_by: str = ""  # figure that --best-by names
    has_all_figures: bool = False  # those that only evaluations after the training have, too

    #: Sums of a step that are sent in the message beside the loss, and their types; int: counts.
    sums: ClassVar[Mapping[str, type]] = {}
    #: Name of an exported network's output, and of a single number that is answered.
    output: ClassVar[str] = "output"
    #: Whether entries of targets may be unknown: a step in which none is known changes nothing.
    has_unknown: ClassVar[bool] = False
    #: Whether answers are images, and not rows of a table.
    gives_images: ClassVar[bool] = False
    #: Whether `tallies` finds the worst answers.
    has_mistakes: ClassVar[bool] = False
    #: What these are called, of "{total}".
    worst: ClassVar[str] = "most confident of {total} mistakes"
    #: What `plot` draws of an evaluation; "" = nothing.
    plotted: ClassVar[str] = ""

    @classmethod
    def name(cls) -> str:
        """Return its name, that of its module."""
        return cls.__module__.rpartition(".")[2]

    @property
    def facts(self) -> TaskFacts:
        """Its entry in the table of all tasks."""
        return FACTS[self.name()]

    @property
    def is_weighted(self) -> bool:
        """Whether samples have `weights` in the loss."""
        return False

    @property
    def entries(self) -> int:
        """Number of entries of a target: an upper limit of a sample's weight, if it is an integer.

        Gradients are divided by it before they are summed, so that they are of equal size.
        """
        return 1

    @property
    def ranked_by(self) -> str:
        """The figure by which runs are ranked."""
        return self.best_by or next(iter(self.facts.figures))

    @property
    def tracked(self) -> tuple[str, ...]:
        """The figures of evaluations that are saved with a network."""
        return tuple(dict.fromkeys([*self.facts.figures, self.best_by or self.facts.chooses]))

    def needs(self, figure: str) -> bool:
        """Whether an evaluation has a figure that is left out in training."""
        return self.has_all_figures or figure == self.best_by

    # Making it

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], names: Sequence[str], like: Tensor, **fields: Any
    ) -> Self:
        """Make it as a configuration or a file's metadata describe it; `fields` are of `Task`.

        `names` are those of the classes, or of the columns of values. It computes on the device and
        in the dtype of `like`, a parameter of the network.
        """
        return cls(**fields)

    @classmethod
    def check_data(cls, pack: Pack) -> None:
        """Raise UsageError if it cannot be learned from a pack."""
        name = cls.name()
        kind = pack.targets.kind
        if FACTS[name].targets not in ("", kind):
            raise UsageError(
                f"--task {name} learns {KINDS[FACTS[name].targets]}, and {pack.path} holds"
                f" {KINDS[kind]}: give --task {task_that_learns(kind)}"
            )
        scale = pack.scale
        low = scale.low / scale.divisor
        high = scale.high / scale.divisor
        if FACTS[name].is_unit and not 0 <= low <= high <= 1:
            text = f"{FACTS[name].use} in [0, 1], and {pack.path} holds {scale}"
            raise UsageError(f"--task {name} {text}: give another --max-value")

    # What is measured of the training targets

    @classmethod
    def measure(cls, settings: Mapping[str, Any], train: Split, begun: Measured | None) -> Measured:
        """Return what follows from the settings and the targets of the training split.

        The plan keeps it, and `from_settings` finds it among the settings. "class_weights" are the
        weights of classes in the loss, () = none. A run that is resumed, which was `begun` with
        other values, cannot go on: it returns those of `begun` that are not measured again.
        Raises UsageError for targets that cannot be learned.
        """
        return {"class_weights": cls.find_weights(settings, train)}

    @classmethod
    def find_weights(cls, settings: Mapping[str, Any], train: Split) -> tuple[float, ...]:
        """Return the weights of classes in the loss, that --class-weights asks for, () = none.

        Raises UsageError as `measure`.
        """
        return ()

    @classmethod
    def measured_note(cls, settings: Mapping[str, Any], measured: Measured) -> str:
        """Return a note on what `measure` returned, "" if there is nothing to say."""
        return ""

    @classmethod
    def init_note(cls, metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Return a note if outputs of a network, kept by --init, were in other units, or "".

        metadata: of its file, a network of this task for the same names; settings: those of this
        run, with what is measured.
        """
        return ""

    @classmethod
    def describe_measured(cls, measured: Measured) -> dict[str, str]:
        """Return what `measure` returned as lines of the plan, by their names."""
        return {"class weights": listed_numbers(measured["class_weights"]) or "none"}

    @classmethod
    def check_metadata(cls, metadata: Mapping[str, Any]) -> None:
        """Raise KeyError, TypeError or ValueError if a network's file is not one of this task."""
        weights = metadata["class_weights"]
        count = len(metadata["classes"])
        if weights and len(weights) != count:
            raise ValueError(f"class_weights has {len(weights)} values, not {count}")

    @classmethod
    def outputs(cls, count: int) -> int:
        """Return the outputs of a network for data with `count` classes, or columns of values."""
        return count

    @classmethod
    def output_shape(cls, image_shape: tuple[int, int, int], count: int) -> tuple[int, ...]:
        """Return the shape of the network's output for one image (H, W, C)."""
        return (cls.outputs(count),)

    # Learning

    def stage(self, inputs: Tensor, targets: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the network, those of the pipeline or others.

        Inputs (n, C, H, W) are augmented and normalized; targets are those of the pack: classes
        (n,) int64, (n, K) uint8 or values (n, T) float32. Random numbers must depend on `key`
        alone.
        """
        return inputs, targets

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, (n,), for outputs (n, ...) of `output_shape`."""

    def weights(self, targets: Tensor) -> Tensor | None:
        """Return the weight of each sample in the loss, (n,); None, of all: 1 (`is_weighted`)."""
        return None

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the samples' losses times their weights, which a step minimizes."""
        losses = self.own_losses(outputs, targets)
        if losses is None:
            losses = self.losses(outputs, targets)
        weights = self.weights(targets)
        return losses.sum() if weights is None else (losses * weights).sum()

    def own_losses(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return the losses (n,) of --loss; None if there is none."""
        return compute_losses(self.loss, outputs, self.own_targets(targets)) if self.loss else None

    def own_targets(self, targets: Tensor) -> Tensor:
        """Return the targets that the loss of --loss is given."""
        return targets

    def in_units(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets in the units of the data, in which figures are."""
        return outputs, targets

    def named_sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums over a shard of which `sums` has the names, () each."""
        return {}

    def step_figures(self, sums: Mapping[str, float], rows: float) -> dict[str, float | None]:
        """Return the figures of a step or an epoch from its named sums over `rows` samples."""
        return {}

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> ShardSums:
        """Return the sums of a shard in training."""
        outputs = network_output(model, inputs, self.precision)
        sums = {"loss": self.loss_sum(outputs, targets), **self.named_sums(outputs, targets)}
        weights = self.weights(targets)
        if weights is not None:
            sums["weight"] = self.weight_sum(weights)
        return sums

    def weight_sum(self, weights: Tensor) -> Tensor:
        """Return the sum of the samples' weights (n,) that is sent as "weight", ()."""
        return weights.sum()

    # What a validation chooses

    def choose(self, tallies: Sequence[Tally]) -> dict[str, Any]:
        """Return fields that follow from a validation's merged tallies, as values of JSON.

        They are those of the network that was validated, and kept with it.
        """
        return {}

    def with_chosen(self, chosen: Mapping[str, Any]) -> Self:
        """Return the task of a network, of which `choose` returned what is `chosen`, or {}."""
        return self

    def metadata(self) -> dict[str, Any]:
        """Return what a network's file holds of its own, for `from_settings`.

        Exported networks have it, too.
        """
        return {}

    # Evaluating

    def figure_sums(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the two sums of a block for each figure that is a mean, (2,) float64.

        "loss" is one of them: it chooses the best network.
        """
        weights = self.weights(targets)
        total = len(targets) if weights is None else weights.sum()
        return {"loss": two_sums(self.loss_sum(outputs, targets), total)}

    def tallies(self, mistakes: int = 0) -> list[Tally]:
        """Return new tallies for an evaluation, with the `mistakes` worst answers."""
        tallies: list[Tally] = [Means(self.figure_sums)]
        for metric in self.metrics:
            tallies.append(MetricFigures(partial(self._metric_sums, metric), metric.setting))
        if self.library_metrics:
            from hpctrain.tasks.library_metrics import LibraryMetrics

            kind = self.facts.targets
            tallies.append(LibraryMetrics(self.library_metrics, kind, self.predictions))
        return tallies

    def _metric_sums(
        self, metric: Imported, outputs: Tensor, inputs: Tensor, targets: Tensor
    ) -> dict[str, Tensor]:
        figures = compute_metric(metric, *self.in_units(outputs, targets))
        return {name: values_and_weights.sum(1) for name, values_and_weights in figures.items()}

    def predictions(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return "predictions" (n, ...) float64, which metrics of libraries are given.

        They are probabilities of classes, or values in the units of the data. If targets are not
        those of the pack, they are "targets" beside them.
        """
        return {"predictions": outputs.double(), "targets": targets.double()}

    def plot_tallies(self) -> list[Tally]:
        """Return the tallies that `plot` needs beside those of `tallies`."""
        return []

    def plot(self, tallies: Sequence[Tally], title: str) -> Any:
        """Return a figure of merged tallies; None if there is nothing to draw, as by default."""
        return None

    def mistakes(self, tallies: Sequence[Tally]) -> tuple[list[Caption], int]:
        """Return captions of the worst answers in merged tallies, and how many are wrong.

        There are none by default (`has_mistakes`).
        """
        return [], 0

    def describe(self, figures: Mapping[str, Any]) -> str:
        """Return the figures of an evaluation as text."""
        return ", ".join(
            f"{name.replace('_', ' ')} {short_number(value)}" for name, value in figures.items()
        )

    # Answering

    def answers(self, outputs: Tensor) -> Tensor:
        """Return answers of float32: numbers (n, K), or images (n, H, W, C) if `gives_images`."""
        return outputs.float()

    def columns(self) -> tuple[str, ...]:
        """Return the K columns of a table of answers, in a file."""
        return (self.output,)

    def cells(self, answer: np.ndarray) -> list[str]:
        """Return the cells of an answer (K,) in these columns."""
        return [f"{value:.6f}" for value in answer]

    def table(self, answers: np.ndarray) -> dict[str, np.ndarray]:
        """Return answers (n, K) as columns (n,) by name, in Python."""
        return dict(zip(self.columns(), answers.T, strict=True))

    def arrays(self, answers: np.ndarray) -> dict[str, np.ndarray]:
        """Return answers (n, K) as the datasets of an HDF5 file, (n, ...) by name.

        Types are floats, where NaN is no answer, signed integers (-1) and uint8 (255).
        """
        return {self.output: answers}

    def target_columns(self) -> tuple[str, ...]:
        """Return the columns of what the pack holds as target, in a table of answers."""
        return ()

    def target_cells(self, target: Any) -> list[str]:
        """Return the cells of a sample's target, as it is stored, in these columns."""
        return []

    def exported(self) -> nn.Module | None:
        """Return what an exported network computes of the outputs; None: nothing."""
        return None

    def captions(self, block: Block, answers: np.ndarray, chosen: np.ndarray) -> list[Caption]:
        """Return captions of the `chosen` images (n,) bool of a block with these answers (n, K)."""
        captions = []
        for row, answer in zip(block.rows[chosen].tolist(), answers[chosen], strict=True):
            cells = zip(self.columns(), self.cells(answer), strict=True)
            lines = tuple(f"{column}: {cell}" for column, cell in cells)
            captions.append(Caption(row, lines, is_wrong=False))
        return captions

    # What --loss and --metric name

    def check(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        """Test the loss of --loss, and metrics, with samples (n, C, H, W) and their targets.

        Raises UsageError that names it. Model and torch's generators are restored.
        """
        if not self.loss and not self.metrics and not self.library_metrics:
            return
        with evaluating(model), torch.no_grad(), fork_rng(inputs.device):
            outputs = network_output(model, inputs, self.precision)
            if not outputs.isfinite().all():
                return  # a first step will report it
            figures = [name for metric in self.library_metrics for name in metric.figures]
            for metric in self.metrics:
                check_values(metric, compute_metric, *self.in_units(outputs, targets))
                figures += compute_metric(metric, *self.in_units(outputs, targets))
            check_names(figures)
            self.check_library_metrics(outputs, targets)
            if self.loss:
                targets = self.own_targets(targets)
                check_values(self.loss, losses_by_name, outputs, targets)
                check_gradient(self.loss, outputs, targets)

    def check_library_metrics(self, outputs: Tensor, targets: Tensor) -> None:
        """Test that metrics of libraries can be computed block by block. Raises UsageError."""
        if not self.library_metrics:
            return
        from hpctrain.tasks.metric_inputs import make_sample

        _, in_units = self.in_units(outputs, targets)
        given = {"targets": in_units, **self.predictions(outputs, targets)}
        predictions = given["predictions"].cpu().numpy()
        stored = given["targets"].cpu().numpy()
        sample = make_sample(predictions, stored, self.facts.targets)
        for metric in self.library_metrics:
            metric.check(sample)


def check_gradient(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    """Raise UsageError unless the user's loss has a finite gradient for the outputs."""
    leaf = outputs.clone().requires_grad_()
    gradient = None
    with torch.enable_grad():
        total = compute_losses(loss, leaf, targets).sum()
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    if gradient is None or not gradient.isfinite().all():
        raise UsageError(f"{loss.setting} has no finite gradient for the outputs")


def task_class(name: str) -> type[Task]:
    """Return the class of a task. Raises ValueError if there is none of this name."""
    if name not in FACTS:
        raise ValueError(f"there is no task {name!r}")
    module = import_module(f"hpctrain.tasks.{name}")
    task: type[Task] = getattr(module, name.title().replace("_", ""))
    return task


NO_MEASURES = Measures()


def make_task(
    settings: Mapping[str, Any],
    names: Sequence[str],
    like: Tensor,
    measures: Measures = NO_MEASURES,
) -> Task:
    """Make a task as a configuration or a file's metadata describe it; see `Task.from_settings`.

    Its loss is hpctrain's unless another is given, whatever the settings name.
    """
    make = task_class(settings["task"]).from_settings
    task = make(settings, names, like, precision=settings["precision"], **measures._asdict())
    if not settings.get("best_by"):
        return task
    directions = metric_directions(settings["metric"])
    figure = best_by(settings["best_by"], task.name(), directions).figure
    recorded = (figure, f"{figure}_binned")
    unrecorded = tuple(name for name in task.unrecorded if name not in recorded)
    return replace(task, best_by=figure, unrecorded=unrecorded)
