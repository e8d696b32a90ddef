"""Stands in for torchvision.models: its registry, and a few networks."""

from types import SimpleNamespace

import torch
from torch import nn


class Net(nn.Module):
    """Convolution, batch norm, and a classifier; in training also an auxiliary one, if asked."""

    _version = 2

    def __init__(self, num_classes=1000, width=6, aux_logits=False, **options):
        super().__init__()
        assert set(options) <= {"init_weights"}
        self.stem = nn.Conv2d(3, width, 4, stride=4, bias=False)
        block = nn.ModuleDict({"norm1": nn.BatchNorm2d(width)})
        self.features = nn.ModuleDict({"denselayer1": block})
        if aux_logits:
            self.aux1 = nn.Linear(width, num_classes)
        self.fc = nn.Linear(width, num_classes)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        assert local_metadata.get("version") == 2  # as MNASNet asks for it
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def forward(self, x):
        return self.fc(self.features["denselayer1"]["norm1"](self.stem(x)).mean((2, 3)))


class Vit(nn.Module):
    """For square images of `image_size`."""

    def __init__(self, num_classes=1000, image_size=16):
        super().__init__()
        assert image_size % 4 == 0, "Input shape indivisible by patch size!"
        self.image_size, self.patch_size = image_size, 4
        self.encoder = nn.Module()
        self.encoder.pos_embedding = nn.Parameter(torch.zeros((image_size // 4) ** 2))
        self.fc = nn.Linear(3, num_classes)

    def forward(self, x):
        return self.fc(x.mean((2, 3)) + self.encoder.pos_embedding.sum())


NETWORKS = {
    "net": Net,
    "net_wide": lambda **options: Net(width=12, **options),
    "googlenet": lambda aux_logits=True, **options: Net(aux_logits=aux_logits, **options),
    "vit_4": Vit,
}


def list_models(module):
    assert module.__name__ == __name__
    return list(NETWORKS)


def get_model(name, **options):
    return NETWORKS[name](**options)


def get_model_weights(name):
    transforms = SimpleNamespace(crop_size=[16], mean=[0.5, 0.25, 0.125], std=[0.25, 0.5, 1.0])
    return SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: transforms))


def interpolate_embeddings(image_size, patch_size, model_state):
    name = "encoder.pos_embedding"
    return model_state | {name: torch.ones((image_size // patch_size) ** 2)}
