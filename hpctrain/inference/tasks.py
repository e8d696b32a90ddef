"""Tasks: the input, the target and the loss with which a network is trained.

    pair(images, labels, key)          input and target of a batch: images (n, C, H, W) in the
                                       network's scale, labels (n,)
    task(model, inputs, targets)       differentiable loss of a batch, and its number of correct
                                       predictions
    evaluate(model, inputs, targets)   the sums of a batch for each figure, and the class predicted
                                       for each sample (n,) with its probability (n,), if any

All results are sums over samples, so that the parts of a batch or a split add up. A figure is the
quotient of two sums: of values, and of their weights, which are 1 unless the figure is weighted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.data.partition import random_key
from hpctrain.inference.own import NONE, Functions, Sums, compute_losses, sum_metric

Answers = tuple[Tensor, Tensor]  # predicted classes (n,) and their probabilities (n,)


def network_output(model: Callable[[Tensor], Tensor], inputs: Tensor, precision: str) -> Tensor:
    """Return the model's output for inputs (n, C, H, W), never as bfloat16.

    With precision "bf16" it is computed under autocast; parallel/device.py describes the others.
    """
    with torch.autocast(inputs.device.type, torch.bfloat16, precision == "bf16"):
        output: Tensor = model(inputs)
    return output.float() if output.dtype == torch.bfloat16 else output


@dataclass(frozen=True)
class Classification:
    """Cross-entropy over classes; the target of an image is its label."""

    precision: str = "fp32"
    label_smoothing: float = 0.0
    classes: int = 0  # of the confusion matrix
    weights: Tensor | None = None  # (classes,) of the classes in the loss; None = all alike
    own: Functions = NONE  # the user's

    def pair(self, images: Tensor, labels: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return the images and their labels."""
        return images, labels

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return loss sum and number of correct predictions of a batch, both on the device."""
        scores = network_output(model, inputs, self.precision)  # (n, classes)
        loss = self._loss(scores, targets, self.weights, self.label_smoothing)
        return loss, (scores.detach().argmax(1) == targets).sum()

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Sums, Answers]:
        """Return the sums of the loss, without smoothing, and the answers."""
        scores = network_output(model, inputs, self.precision)
        loss = self._loss(scores, targets, None)
        sums = {"loss": (loss, loss.new_full((), len(targets)))}
        if self.weights is not None:
            weighted = self._loss(scores, targets, self.weights), self.weights[targets].sum()
            sums = {"loss": weighted, "unweighted_loss": sums["loss"]}
        if self.own.metric:
            sums |= sum_metric(self.own.metric, scores, targets)
        answers = scores.argmax(1)
        return sums, (answers, scores.softmax(1).gather(1, answers[:, None]).squeeze(1))

    def _loss(
        self, scores: Tensor, targets: Tensor, weights: Tensor | None, smoothing: float = 0.0
    ) -> Tensor:
        """Return the sum of the samples' losses, weighted by class if there are `weights`."""
        if self.own.loss:
            losses = compute_losses(self.own.loss, scores, targets)
            return (losses if weights is None else losses * weights[targets]).sum()
        return F.cross_entropy(scores, targets, weights, reduction="sum", label_smoothing=smoothing)


@dataclass(frozen=True)
class Denoising:
    """Mean squared error of the image that the network restores from a noisy one."""

    precision: str = "fp32"
    noise: str = "salt-pepper"
    level: float = 0.1
    own: Functions = NONE  # the user's
    classes, weights = 0, None  # no confusion matrix, nothing to weigh

    def pair(self, images: Tensor, labels: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return the images with noise drawn by `key`, and the clean images."""
        return add_noise(images, self.noise, self.level, random_key(key, "noise")), images

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the samples' losses; no prediction counts as correct."""
        restored = network_output(model, inputs, self.precision)
        return self._loss(restored, targets), inputs.new_zeros((), dtype=torch.int64)

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Sums, None]:
        """Return the sums of losses after and before restoration, and no classes."""
        restored = network_output(model, inputs, self.precision)
        losses = {"loss": self._loss(restored, targets), "noisy": self._loss(inputs, targets)}
        sums = {name: (loss, loss.new_full((), len(targets))) for name, loss in losses.items()}
        if self.own.metric:
            sums |= sum_metric(self.own.metric, restored, targets)
        return sums, None

    def _loss(self, images: Tensor, clean: Tensor) -> Tensor:
        """Return the sum of the samples' losses, by default their mean squared errors."""
        if self.own.loss:
            return compute_losses(self.own.loss, images, clean).sum()
        return F.mse_loss(images, clean, reduction="sum") / clean[0].numel()


Task = Classification | Denoising


def add_noise(images: Tensor, kind: str, level: float, key: int) -> Tensor:
    """Return a copy of images (n, C, H, W) in [0, 1] with noise.

    "salt-pepper": every value becomes 0 or 1, each with probability level / 2. "gaussian": a
    normal deviate of standard deviation `level` is added and the sum clamped to [0, 1].

    The noise depends on `key`, shape and device alone. GPUs draw other numbers than CPUs, and those
    of another model may draw others, too.
    """
    generator = torch.Generator(images.device).manual_seed(key)
    draw = torch.randn if kind == "gaussian" else torch.rand
    drawn = draw(images.shape, generator=generator, device=images.device).to(images.dtype)
    noisy = images.clone()  # with the same strides
    if kind == "gaussian":
        # Not add_(drawn, alpha=level): some devices round its sum only, not its product.
        return noisy.add_(drawn.mul_(level)).clamp_(0, 1)
    return noisy.masked_fill_(drawn < level / 2, 0).masked_fill_(drawn >= 1 - level / 2, 1)


def make_task(settings: dict[str, Any], classes: int, like: Tensor, own: Functions = NONE) -> Task:
    """Make the task for `classes` classes, as a plan or a saved network's metadata describe it.

    The task computes on the device and in the dtype of `like`, a parameter of the network. Its
    loss is hpctrain's unless `own` has another, whatever the settings name.
    """
    precision = settings["precision"]
    if settings.get("task", "classify") == "denoise":
        return Denoising(precision, settings["noise"], settings["noise_level"], own)
    weights = like.new_tensor(given) if (given := settings.get("class_weights")) else None
    return Classification(precision, settings.get("label_smoothing", 0.0), classes, weights, own)


def output_shape(task: str, image_shape: tuple[int, int, int], classes: int) -> tuple[int, ...]:
    """Return the output shape for one image (H, W, C): (classes,), or (C, H, W) to restore it."""
    height, width, channels = image_shape
    return (channels, height, width) if task == "denoise" else (classes,)
