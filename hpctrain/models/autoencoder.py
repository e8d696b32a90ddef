"""A convolutional autoencoder for images: twice half the size, and back.

Strided convolutions instead of pooling, and transposed convolutions instead of interpolation: all
have deterministic gradients on GPUs. Images are padded to multiples of 4 and the output is cut.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (32, 64)  # channels at 1/2 and 1/4 of the size


class Autoencoder(nn.Module):
    """Images (N, C, H, W) -> images of the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half, quarter = WIDTHS
        self.encoder = nn.Sequential(
            *_normalized(nn.Conv2d(channels, half, 4, stride=2, padding=1, bias=False)),
            *_normalized(nn.Conv2d(half, quarter, 4, stride=2, padding=1, bias=False)),
        )
        self.decoder = nn.Sequential(
            *_normalized(nn.ConvTranspose2d(quarter, half, 4, stride=2, padding=1, bias=False)),
            nn.ConvTranspose2d(half, channels, 4, stride=2, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W)
        height, width = x.shape[2:]
        x = self.encoder(F.pad(x, (0, -width % 4, 0, -height % 4)))  # (N, 64, H / 4, W / 4)
        return self.decoder(x)[:, :, :height, :width]


def _normalized(layer: nn.Conv2d | nn.ConvTranspose2d) -> tuple[nn.Module, ...]:
    return layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU(inplace=True)


def autoencoder(image_shape: tuple[int, int, int], classes: int) -> Autoencoder:
    """The network for images of (H, W, C), whatever their classes."""
    return Autoencoder(image_shape[2])
