"""A network for ``hpctrain bench balance``: a shard takes three times as long on the last rank."""

from __future__ import annotations

import time

import torch
from torch import nn

from hpctrain.launcher import launched_rank, launched_size

SECONDS = 0.01  # for a shard of a step
TIMES = 3  # as long on the last rank


class Slowed(nn.Linear):
    """A linear classifier that sleeps first."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of images (n, C, H, W)."""
        if self.training:
            last = launched_rank() == (launched_size() or 1) - 1
            time.sleep(SECONDS * (TIMES if last else 1))
        return super().forward(images.flatten(1))


def net(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The network for images of (H, W, C)."""
    height, width, channels = image_shape
    return Slowed(height * width * channels, classes)
