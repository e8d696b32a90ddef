"""Networks that hpctrain must refuse, or take only when told to."""

from __future__ import annotations

import torch
from torch import nn


class Counting(nn.Module):
    """Counts its forward passes in a buffer."""

    def __init__(self, values: int, classes: int):
        super().__init__()
        self.linear = nn.Linear(values, classes)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = self.seen + self.training
        return self.linear(x.flatten(1))


def counting(image_shape, classes):
    height, width, channels = image_shape
    return Counting(height * width * channels, classes)


def too_few_outputs(image_shape, classes):
    height, width, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, classes - 1))
