"""Networks of four kinds: for any size of images, for one that is given, and for one alone."""

from functools import partial

import torch
from torch import nn


class Net(nn.Module):
    """Images of any size."""

    def __init__(self, classes, channels, width=6):
        super().__init__()
        self.head = nn.Linear(width, classes)  # not the last one to be registered
        self.stem = nn.Conv2d(channels, width, 4, stride=4, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).relu().mean((2, 3)))


class Vit(nn.Module):
    """Images of the size that is given to the constructor."""

    def __init__(self, classes, channels, img_size=(16, 16)):
        super().__init__()
        assert all(side % 4 == 0 for side in img_size), "img_size is no multiple of the patches"
        self.size = tuple(side // 4 for side in img_size)
        self.pos_embed = nn.Parameter(torch.randn(1, 6, *self.size) * 0.02)
        self.stem = nn.Conv2d(channels, 6, 4, stride=4)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head((self.stem(x) + self.pos_embed).relu().mean((2, 3)))


class Fixed(Vit):
    """Images of one size: the argument is ignored."""

    def __init__(self, classes, channels, **ignored):
        super().__init__(classes, channels)


class Rigid(Vit):
    """Images of one size: there is no argument for it."""

    def __init__(self, classes, channels):
        super().__init__(classes, channels)


NETWORKS = {
    "tiny_net": Net,
    "tiny_net_wide": partial(Net, width=12),
    "tiny_vit": Vit,
    "tiny_fixed": Fixed,
    "tiny_rigid": Rigid,
}
