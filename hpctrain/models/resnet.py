"""ResNet-18, -34 and -50 with the parameter names and shapes of torchvision.

Weights published for torchvision can be loaded, and torchvision can load the weights trained here.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, table 1. As in
torchvision, the stride of a bottleneck is in its 3x3 convolution ("v1.5"), not in the first 1x1 as
in the paper. Convolutions are initialised with N(0, 2 / fan_out) (He et al., "Delving Deep into
Rectifiers", ICCV 2015), batch norm with weight 1 and bias 0, the linear layer with torch's default.
With 1000 classes of RGB images, the networks have 11,689,512, 21,797,672 and 25,557,032 parameters.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: C -> width -> width channels."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut: C -> width -> width -> 4 width channels."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Images (N, C, H, W) -> scores (N, classes).

    With `small_stem`, the first layers are a 3x3 convolution of stride 1 instead of a 7x7 one of
    stride 2 and a max-pooling: images of 32x32 then keep their resolution until ``layer2``.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        image_shape: tuple[int, int, int],
        classes: int,
        small_stem: bool = False,
    ) -> None:
        super().__init__()
        channels = image_shape[2]
        out = block.expansion
        if small_stem:
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = stage(block, 64 * out, 128, depths[1], stride=2)
        self.layer3 = stage(block, 128 * out, 256, depths[2], stride=2)
        self.layer4 = stage(block, 256 * out, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * out, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:  # (N, C, H, W)
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))  # (N, 64, H / 4, W / 4)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (N, 512 k, H / 32, W / 32)
        return self.fc(self.avgpool(x).flatten(1))  # (N, classes)


def shortcut(channels: int, width: int, stride: int) -> nn.Sequential | None:
    """Make the projection of a block's shortcut, or None if the input passes unchanged."""
    if stride == 1 and channels == width:
        return None
    convolution = nn.Conv2d(channels, width, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


def stage(
    block: type[BasicBlock] | type[Bottleneck],
    channels: int,
    width: int,
    depth: int,
    stride: int,
) -> nn.Sequential:
    """Make `depth` blocks; the first has the stride and changes the number of channels."""
    blocks = [block(channels, width, stride)]
    blocks += [block(width * block.expansion, width, 1) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
