"""Judge the networks of segmentation-models-pytorch: each trains one step on small images."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from hpctrain.models.library import make_of_smp
from scripts.parts import Verdict, part_of

CHANNELS = 2
SIDE = 64  # pixels
SIDES = {"PAN": 128}  # of networks that need more
ENCODER = {"encoder_name": "resnet18"}
#: Arguments of networks that take other encoders: transformers, for images of any size.
ARGUMENTS = {"DPT": {"encoder_name": "tu-vit_tiny_patch16_224", "dynamic_img_size": True}}


def candidates() -> dict[str, Any]:
    """Return the classes of networks by name."""
    smp = importlib.import_module("segmentation_models_pytorch")

    return {f"smp:{name}": kind for name, kind in vars(smp).items() if inspect.isclass(kind)}


def judge(name: str) -> Verdict:
    """Judge a network "smp:Name": it returns images like its inputs, with gradients."""
    try:
        sample(name)
    except Exception as error:
        return Verdict(refused=f"it fails on small images: {type(error).__name__}")
    return Verdict()


def sample(name: str) -> None:
    """Make a network, and pass two images forward and backward."""
    bare = name.partition(":")[2]
    side = SIDES.get(bare, SIDE)
    part = part_of("model", name, ARGUMENTS.get(bare, ENCODER))
    images = torch.rand(2, CHANNELS, side, side)
    outputs = make_of_smp(part, (side, side, CHANNELS), CHANNELS)(images)
    if outputs.shape != images.shape:
        raise ValueError(f"outputs of shape {tuple(outputs.shape)}")
    outputs.square().mean().backward()
