"""The task of a network: its loss and figures, with the functions of the user's own.

Losses and figures are sums over samples, so that the parts of a batch or a split add up. A figure
is the quotient of two sums: of values, and of their weights, 1 unless the figure is weighted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.functions import Imported
from hpctrain.data.partition import random_key
from hpctrain.errors import UsageError
from hpctrain.models import evaluating
from hpctrain.numerics import fork_rng
from hpctrain.tasks.forward import network_output
from hpctrain.tasks.functions import check_values, compute_losses, compute_metric

ANSWERS = ""  # in the results of `evaluate`; no figure has this name
TAKEN = ("loss", "unweighted_loss", "noisy", "accuracy", "balanced_accuracy", "rows")  # figures
# By figure: the sums of its values and weights, (2,); under ANSWERS: the predicted classes and
# their probabilities, (2, n). All are float64.
Sums = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """Classify images by cross-entropy, or restore noisy ones by mean squared error."""

    precision: str = "fp32"
    classes: int = 0  # of the confusion matrix; 0: images are restored
    label_smoothing: float = 0.0
    weights: Tensor | None = None  # (classes,) of the classes in the loss; None = all alike
    noise: str = "salt-pepper"
    level: float = 0.1
    loss: Imported | None = None  # the user's own
    metric: Imported | None = None  # the user's own

    def stage(self, images: Tensor, labels: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a batch with this `key`, as the last stage of a pipeline.

        They are images (n, C, H, W) in the network's scale and labels (n,), or these images with
        noise and without.
        """
        if self.classes:
            return images, labels
        return add_noise(images, self.noise, self.level, random_key(key, "noise")), images

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of losses and of correct predictions of a batch, both on the device."""
        outputs = network_output(model, inputs, self.precision)  # (n, classes) or (n, C, H, W)
        loss = self._loss(outputs, targets, self.weights, self.label_smoothing)
        if self.classes:
            return loss, (outputs.detach().argmax(1) == targets).sum()
        return loss, inputs.new_zeros((), dtype=torch.int64)

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """Return the sums of a batch for each figure, and a classifier's answers."""
        outputs = network_output(model, inputs, self.precision)
        sums = {"loss": _sums(self._loss(outputs, targets), len(targets))}
        if self.weights is not None:
            weighted = self._loss(outputs, targets, self.weights)
            sums["unweighted_loss"] = sums["loss"]
            sums["loss"] = _sums(weighted, self.weights[targets].sum())
        if not self.classes:
            sums["noisy"] = _sums(self._loss(inputs, targets), len(targets))
        if self.metric:
            found = compute_metric(self.metric, outputs, targets)
            sums |= {name: figure.sum(1) for name, figure in found.items()}
        if self.classes:
            answers = outputs.argmax(1)
            probabilities = outputs.softmax(1).gather(1, answers[:, None]).squeeze(1)
            sums[ANSWERS] = torch.stack([answers.double(), probabilities.double()])
        return sums

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the probabilities (n, classes), or the restored images (n, H, W, C)."""
        outputs = network_output(model, inputs, self.precision)
        return (outputs.softmax(1) if self.classes else outputs.permute(0, 2, 3, 1)).float()

    def _loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, smooth: float = 0.0
    ) -> Tensor:
        """Return the sum of the samples' losses, weighted by class if there are `weights`."""
        if self.loss:
            losses = compute_losses(self.loss, outputs, targets)
            return (losses if weights is None else losses * weights[targets]).sum()
        if not self.classes:
            return F.mse_loss(outputs, targets, reduction="sum") / targets[0].numel()
        return F.cross_entropy(outputs, targets, weights, reduction="sum", label_smoothing=smooth)


def _sums(values: Tensor, weights: Tensor | int) -> Tensor:
    """Return two sums as one tensor (2,) float64; a number of weights 1 is their sum."""
    total = weights if isinstance(weights, Tensor) else values.new_full((), weights)
    return torch.stack([values.double(), total.double()])


def add_noise(images: Tensor, kind: str, level: float, key: int) -> Tensor:
    """Return a copy of images (n, C, H, W) in [0, 1] with noise.

    "salt-pepper": every value becomes 0 or 1, each with probability level / 2. "gaussian": a
    normal deviate of standard deviation `level` is added and the sum clamped to [0, 1]. The noise
    depends on `key`, shape and model of the device alone.
    """
    generator = torch.Generator(images.device).manual_seed(key)
    draw = torch.randn if kind == "gaussian" else torch.rand
    drawn = draw(images.shape, generator=generator, device=images.device).to(images.dtype)
    noisy = images.clone()  # with the same strides
    if kind == "gaussian":
        # Not add_(drawn, alpha=level): some devices round its sum only, not its product.
        return noisy.add_(drawn.mul_(level)).clamp_(0, 1)
    return noisy.masked_fill_(drawn < level / 2, 0).masked_fill_(drawn >= 1 - level / 2, 1)


def make_task(
    settings: Mapping[str, Any],
    classes: int,
    like: Tensor,
    loss: Imported | None = None,
    metric: Imported | None = None,
) -> Task:
    """Make the task for `classes` classes, as a configuration or a file's metadata describe it.

    The task computes on the device and in the dtype of `like`, a parameter of the network. Its
    loss is hpctrain's unless another is given, whatever the settings name.
    """
    return Task(
        precision=settings["precision"],
        classes=0 if settings["task"] == "denoise" else classes,
        label_smoothing=settings.get("label_smoothing", 0.0),
        weights=like.new_tensor(given) if (given := settings["class_weights"]) else None,
        noise=settings["noise"],
        level=settings["noise_level"],
        loss=loss,
        metric=metric,
    )


def output_shape(task: str, image_shape: tuple[int, int, int], classes: int) -> tuple[int, ...]:
    """Return the output shape for one image (H, W, C): (classes,), or (C, H, W) to restore it."""
    height, width, channels = image_shape
    return (channels, height, width) if task == "denoise" else (classes,)


def check_task(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Test the loss and the metric of `task` with samples (n, C, H, W) and their targets.

    Raises UsageError that names the function. Model and torch's generators are restored.
    """
    loss, metric = task.loss, task.metric
    if not loss and not metric:
        return
    with evaluating(model), torch.no_grad(), fork_rng(inputs.device):
        outputs = network_output(model, inputs, task.precision)
        if not outputs.isfinite().all():
            return  # a first step will report it
        if metric:
            check_values(metric, compute_metric, outputs, targets)
        if loss:
            check_values(loss, lambda *given: {"": compute_losses(*given)}, outputs, targets)
            leaf, gradient = outputs.clone().requires_grad_(), None
            with torch.enable_grad():
                total = compute_losses(loss, leaf, targets).sum()
            if total.requires_grad:
                (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
            if gradient is None or not gradient.isfinite().all():
                raise UsageError(f"{loss.setting} has no finite gradient for the outputs")
