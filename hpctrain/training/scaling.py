"""How the images of a run are scaled: --normalize, or what its first weights expect."""

from __future__ import annotations

from torch import nn

from hpctrain.config import Config
from hpctrain.data.pack import Pack
from hpctrain.errors import UsageError
from hpctrain.models import InitialWeights, own_input
from hpctrain.models.init import Scaling
from hpctrain.plan import Plan
from hpctrain.tasks.facts import FACTS

# Of the ImageNet training images in [0, 1], red, green, blue; published ResNet weights expect them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def choose_scaling(
    config: Config, earlier: Plan | None, pack: Pack, model: nn.Module, init: InitialWeights | None
) -> tuple[Scaling, str]:
    """Return the scaling of a run, and a note on it if it follows from the network or its weights.

    A resumed run keeps that of its `earlier` plan. Raises UsageError for --normalize pack if a
    channel is constant, and for --normalize imagenet if there are not three channels.
    """
    channels, own = pack.image_shape[2], own_input(model)
    if earlier:
        return earlier.scaling, ""
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
    found: Scaling = ()
    if init and init.scaling is not None:
        found, whose = init.scaling, "as in the training of --init"
    elif own:
        found, whose = (own["mean"], own["std"]), f"as published for {config.model}"
        _, height, width = own["input_size"]
        if (height, width) != pack.image_shape[:2]:
            whose += f" and images of {width}x{height}"
    elif init and (channels == 3 or init.adapted):
        found, whose = (IMAGENET_MEAN, IMAGENET_STD), "those of ImageNet, as --init does not say"
    if not found:
        return (), ""
    scaling = []
    for values in found:  # of another number of channels each has their mean
        repeated = (sum(values) / len(values),) * channels
        scaling.append(tuple(map(float, values)) if len(values) == channels else repeated)
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in scaling)
    return tuple(scaling), f"--normalize auto: mean {mean} and std {std}, {whose}"
