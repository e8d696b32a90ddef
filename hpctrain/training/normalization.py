"""How the images of a run are normalized: --normalize, or what its first weights expect."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hpctrain.config import Config
from hpctrain.data.pack import Pack
from hpctrain.errors import UsageError
from hpctrain.models import InitialWeights, own_input
from hpctrain.models.init import Normalization
from hpctrain.plan import Plan
from hpctrain.tasks.facts import FACTS

# ImageNet's training images in [0, 1], red, green, blue: published ResNet weights expect these.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def choose_normalization(
    config: Config, earlier: Plan | None, pack: Pack, model: nn.Module, init: InitialWeights | None
) -> tuple[Normalization, str]:
    """Return the normalization of a run, and a note if it follows from the network or its weights.

    A resumed run keeps that of its `earlier` plan. Raises UsageError for --normalize pack if a
    channel is constant, and for --normalize imagenet if there are not three channels.
    """
    if earlier:
        return earlier.scaling, ""
    channels = pack.image_shape[2]
    if config.normalize == "imagenet":
        if channels != 3:
            text = f"--normalize imagenet needs 3 channels, not {channels}"
            raise UsageError(f"{text}: --normalize pack, or pack again with --channels 3")
        return (IMAGENET_MEAN, IMAGENET_STD), ""
    if config.normalize == "pack":
        if not all(std > 0 for std in pack.std):
            raise UsageError(
                f"--normalize pack needs channels that vary; the pack's standard deviations are"
                f" {', '.join(f'{std:g}' for std in pack.std)}: use unit"
            )
        return (pack.mean, pack.std), ""
    if config.normalize == "unit" or FACTS[config.task].is_unit:
        return (), ""
    expected, whose = expected_normalization(config, pack, model, init)
    if not expected:
        return (), ""
    normalization = tuple(for_channels(values, channels) for values in expected)
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in normalization)
    return normalization, f"--normalize auto: mean {mean} and std {std}, {whose}"


def expected_normalization(
    config: Config, pack: Pack, model: nn.Module, init: InitialWeights | None
) -> tuple[Normalization, str]:
    """Return the normalization that network or first weights expect, if any, and whose it is."""
    if init and init.normalization is not None:
        return init.normalization, "as in the training of --init"
    if published := own_input(model):
        whose = f"as published for {config.model}"
        _, height, width = published["input_size"]
        if (height, width) != pack.image_shape[:2]:
            whose += f" and images of {width}x{height}"
        return (published["mean"], published["std"]), whose
    if init and (pack.image_shape[2] == 3 or init.adapted):
        return (IMAGENET_MEAN, IMAGENET_STD), "those of ImageNet, as --init does not say"
    return (), ""


def for_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return values by channel; if there are more or fewer than `channels`, the mean for each."""
    if len(values) == channels:
        return tuple(map(float, values))
    return (sum(values) / len(values),) * channels
