"""How the images of a run are scaled: --normalize, or what its first weights expect."""

from __future__ import annotations

from torch import nn

from hpctrain.config import Config
from hpctrain.data.augment import IMAGENET_MEAN, IMAGENET_STD, normalization
from hpctrain.data.pack_format import Pack
from hpctrain.models import InitialWeights, own_input
from hpctrain.plan import Plan

Scaling = tuple[tuple[float, ...], ...]  # mean and std by channel; () = images in [0, 1]


def choose_scaling(
    config: Config, earlier: Plan | None, pack: Pack, model: nn.Module, init: InitialWeights | None
) -> tuple[Scaling, str]:
    """Return the scaling of a run, and a note on it if it follows from the network or its weights.

    A resumed run keeps that of its `earlier` plan. Raises UsageError as `normalization` does.
    """
    if earlier and earlier.scaling:
        return earlier.scaling, ""
    given = normalization(config.normalize, pack.mean, pack.std)
    if earlier or config.normalize != "auto" or config.task == "denoise":
        return given, ""
    channels, own = pack.image_shape[2], own_input(model)
    if init and init.named:
        found, whose = init.statistics or (), "as in the training of --init"
    elif own:
        found, whose = (tuple(own["mean"]), tuple(own["std"])), f"as published for {config.model}"
        _, height, width = own["input_size"]
        if (height, width) != pack.image_shape[:2]:
            whose += f" and images of {width}x{height}"
    elif init and (channels == 3 or init.adapted):
        found, whose = (IMAGENET_MEAN, IMAGENET_STD), "those of ImageNet, as --init does not say"
    else:
        return (), ""
    scaling = tuple(_for_channels(values, channels) for values in found)
    if not scaling:
        return (), ""
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in scaling)
    return scaling, f"--normalize auto: mean {mean} and std {std}, {whose}"


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return the values, or their mean for each channel if there are as many as in no image."""
    if len(values) != channels:
        return (sum(values) / len(values),) * channels
    return tuple(map(float, values))
