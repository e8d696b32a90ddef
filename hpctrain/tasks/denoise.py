"""Restore images: the network gets them with noise, and learns them without, by squared error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.data.partition import random_key
from hpctrain.tasks.tally import Tally, two_sums
from hpctrain.tasks.task import Task


@dataclass(frozen=True)
class Denoise(Task):
    """Restore images: targets and outputs are images (n, C, H, W) in [0, 1]."""

    noise: str = "salt-pepper"
    level: float = 0.1

    output: ClassVar[str] = "restored"
    gives_images: ClassVar[bool] = True

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], names: Sequence[str], like: Tensor, **fields: Any
    ) -> Self:
        return cls(
            noise=settings["noise"],
            level=settings["noise_level"],
            unrecorded=() if settings.get("balanced_sampling") else ("balanced_accuracy",),
            **fields,
        )

    @classmethod
    def output_shape(cls, image_shape: tuple[int, int, int], count: int) -> tuple[int, ...]:
        height, width, channels = image_shape
        return channels, height, width

    @property
    def tracked(self) -> tuple[str, ...]:
        return "accuracy", *super().tracked

    # Learning

    def stage(self, inputs: Tensor, targets: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return images with noise, and without."""
        return add_noise(inputs, self.noise, self.level, random_key(key, "noise")), inputs

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets, reduction="none").flatten(1).mean(1)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss:
            return super().loss_sum(outputs, targets)
        return F.mse_loss(outputs, targets, reduction="sum") / targets[0].numel()

    def step_figures(self, sums: Mapping[str, float], rows: float) -> dict[str, float | None]:
        return {"accuracy": None}  # the chain of figures holds it as null

    # Evaluating

    def figure_sums(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums of the loss, and of that of the images with noise."""
        return {
            "loss": two_sums(self.loss_sum(outputs, targets), len(targets)),
            "noisy": two_sums(self.loss_sum(inputs, targets), len(targets)),
        }

    def tallies(self, mistakes: int = 0) -> list[Tally]:
        return [*super().tallies(), NoClasses()]

    def describe(self, figures: Mapping[str, Any]) -> str:
        texts = [f"{figures[name]:.5f}" for name in ("loss", "noisy")]
        if self.loss:
            return f"loss {texts[0]}, of the noisy images {texts[1]}"
        # On [0, 1]: the peak signal-to-noise ratio is known
        ratios = [decibels(figures[name]) for name in ("loss", "noisy")]
        text = f"{self.facts.loss} {texts[0]} ({ratios[0]:.1f} dB)"
        return f"{text}, of the noisy images {texts[1]} ({ratios[1]:.1f} dB)"

    # Answering

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the restored images (n, H, W, C)."""
        return outputs.permute(0, 2, 3, 1).float()


class NoClasses(Tally):
    """Figures of classes, which the records of this task hold as null."""

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {}

    def add(self, block: object, measured: object) -> None:
        pass

    def merge(self, parts: object, comm: object) -> None:
        pass

    def figures(self) -> dict[str, float | None]:
        return {"accuracy": None, "balanced_accuracy": None}


def decibels(error: float) -> float:
    """Return the peak signal-to-noise ratio of a mean squared error of values in [0, 1]."""
    return -10 * math.log10(error) if error else math.inf


def add_noise(images: Tensor, kind: str, level: float, key: int) -> Tensor:
    """Return a copy of images (n, C, H, W) in [0, 1] with noise.

    "salt-pepper": every value becomes 0 or 1, each with probability level / 2. "gaussian": a
    normal deviate of standard deviation `level` is added and the sum clamped to [0, 1]. The noise
    depends on `key`, shape and model of the device alone.
    """
    generator = torch.Generator(images.device).manual_seed(key)
    draw = torch.randn if kind == "gaussian" else torch.rand
    drawn = draw(images.shape, generator=generator, device=images.device).to(images.dtype)
    noisy = images.clone()  # keeps the strides
    if kind == "gaussian":
        # Not add_(drawn, alpha=level): some devices round its sum only, not its product.
        return noisy.add_(drawn.mul_(level)).clamp_(0, 1)
    return noisy.masked_fill_(drawn < level / 2, 0).masked_fill_(drawn >= 1 - level / 2, 1)
