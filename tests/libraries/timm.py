"""Stands in for timm: its registry, and networks of one family."""

from types import SimpleNamespace

import torch
from torch import nn

__version__ = "0.0"
TAGS = {"tiny_vit": {"tiny_vit": 0.5, "tiny_vit.clip": 0.25}}


class Net(nn.Module):
    """Images of any size."""

    def __init__(self, classes, channels):
        super().__init__()
        self.head = nn.Linear(6, classes)  # not the last one to be registered
        self.stem = nn.Conv2d(channels, 6, 4, stride=4, bias=False)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).relu().mean((2, 3)))


class Vit(nn.Module):
    """Images of the size that is given to the constructor."""

    def __init__(self, classes, channels, img_size=(16, 16)):
        super().__init__()
        assert all(side % 4 == 0 for side in img_size), "img_size is no multiple of the patches"
        self.pos_embed = nn.Parameter(torch.randn(1, 6, *(side // 4 for side in img_size)) * 0.02)
        self.stem = nn.Conv2d(channels, 6, 4, stride=4)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head((self.stem(x) + self.pos_embed).relu().mean((2, 3)))


NETWORKS = {
    "tiny_net": Net,
    "tiny_vit": Vit,
    "tiny_fixed": lambda classes, channels, **ignored: Vit(classes, channels),
    "tiny_rigid": lambda classes, channels: Vit(classes, channels),
}


def list_models():
    return list(NETWORKS)


def get_pretrained_cfg(name):
    base, _, tag = name.partition(".")
    if tag and name not in TAGS.get(base, {}):
        raise RuntimeError(f"Invalid pretrained tag ({tag}) for {base}.")
    mean = TAGS.get(base, {}).get(name, 0.125)
    return SimpleNamespace(
        input_size=(3, 16, 16),
        fixed_input_size=base != "tiny_net",
        mean=(mean, 0.5, 0.75),
        std=(0.25, 0.5, 1.0),
        classifier="head",
    )


def create_model(name, num_classes=1000, in_chans=3, **options):
    model = NETWORKS[name.partition(".")[0]](num_classes, in_chans, **options)
    model.pretrained_cfg = vars(get_pretrained_cfg(name))
    return model
