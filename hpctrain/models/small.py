"""Two small networks, with torch's default initialisation.

Convolutions that are followed by batch norm have no bias: batch norm would subtract it again.

digits        three convolutions, each with batch norm and ReLU, and one linear layer:
              conv 5x5x20 without padding, conv 3x3x20 with padding 1 (twice), fully connected
autoencoder   images at half the size, at a quarter, and back. Strided convolutions instead of
              pooling, and transposed convolutions instead of interpolation: all have deterministic
              gradients on GPUs. Images are padded to multiples of 4 and the output is cropped.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.errors import UsageError


class DigitsNet(nn.Module):
    """Images (N, C, H, W) -> scores (N, classes).

    Raises UsageError for images smaller than the first kernel, 5 x 5 pixels.
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        height, width, channels = image_shape
        if min(height, width) < 5:
            raise UsageError(f"the digits network needs 5x5 pixels at least, not {width}x{height}")
        self.conv1 = nn.Conv2d(channels, 20, kernel_size=5, bias=False)
        self.bn1 = nn.BatchNorm2d(20)
        self.conv2 = nn.Conv2d(20, 20, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(20)
        self.conv3 = nn.Conv2d(20, 20, kernel_size=3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(20)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(20 * (height - 4) * (width - 4), classes)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W)
        x = self.relu(self.bn1(self.conv1(x)))  # (N, 20, H - 4, W - 4)
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.relu(self.bn3(self.conv3(x)))
        weight = self.fc.weight  # (classes, C * H * W), in any case
        if x.stride(1) == 1:
            # For channels-last x, reordering the weights instead of the activations, which are
            # larger, saves a sixth of a step on a CPU.
            weight = weight.unflatten(1, x.shape[1:]).permute(0, 2, 3, 1).flatten(1)
            x = x.permute(0, 2, 3, 1)
        return F.linear(x.flatten(1), weight, self.fc.bias)  # (N, classes)


class Autoencoder(nn.Module):
    """Images (N, C, H, W) -> images of the same shape; `classes` is not used."""

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels = image_shape[2]
        half = 32  # channels at half the size
        quarter = 64  # channels at a quarter of it
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
