"""How the images of a run are normalized: --normalize, or what its first weights expect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from hpctrain.config import Config
from hpctrain.data.pack import Pack
from hpctrain.data.scale import FULL, LARGEST_OF_FLOAT64, LARGEST_WHOLE, UNLIKE, Scale, is_unit
from hpctrain.data.standardize import IMAGE
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

    A resumed run keeps that of its `earlier` plan. `pack` has the mean and std of its training
    images, if --normalize pack needs them. Raises UsageError for --normalize pack if a channel is
    constant, for --normalize imagenet if there are not three channels, and for values that need
    another normalization.
    """
    if earlier:
        return earlier.scaling, ""
    channels = pack.image_shape[2]
    if config.normalize == "image":
        return IMAGE, ""
    if config.normalize == "pack":
        if not all(std > 0 for std in pack.std):
            raise UsageError(
                "--normalize pack needs channels that vary; the standard deviations of"
                f" {pack.path} are {', '.join(f'{std:g}' for std in pack.std)}: use unit or image"
            )
        return (pack.mean, pack.std), ""
    if config.normalize == "imagenet":
        if channels != 3:
            text = f"--normalize imagenet needs 3 channels, not {channels}"
            raise UsageError(f"{text}: --normalize pack, or pack again with --channels 3")
        check_range(config, pack)
        check_normalized(pack)
        return (IMAGENET_MEAN, IMAGENET_STD), ""
    expected: Normalization = ()
    whose = ""
    if config.normalize == "auto" and not FACTS[config.task].is_unit:
        expected, whose = expected_normalization(config, pack, model, init)
    if isinstance(expected, str):
        return expected, f"--normalize auto: {expected}, {whose}"
    if not (expected and init and is_of_like_images(init, pack)):
        check_range(config, pack)
        if expected:
            check_normalized(pack)
    if not expected:
        return (), ""
    normalization = tuple(for_channels(values, channels) for values in expected)
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in normalization)
    return normalization, f"--normalize auto: mean {mean} and std {std}, {whose}"


def is_of_like_images(init: InitialWeights, pack: Pack) -> bool:
    """Whether the normalization of --init is of images that have the scale of these."""
    if init.normalization is None or init.stored is None:
        return False
    return Scale(**init.stored).is_like(pack.scale)


def check_range(config: Config, pack: Pack) -> None:
    """Raise UsageError for values beyond [0, 1] of which nothing says what stands for 1."""
    scale = pack.scale
    low = scale.low / scale.divisor
    high = scale.high / scale.divisor
    if pack.max_value is not None or is_unit(low, high):
        return
    ways = ["--max-value 1, which takes them as they are"]
    if scale.low >= 0:
        full = [most for most in FULL.values() if most / 2 < scale.high <= most]
        likely = [*full, scale.high][0]
        ways.insert(0, f"--max-value {likely:.10g}, which divides them by that")
    if not FACTS[config.task].is_unit:
        ways.append("--normalize pack or image, by mean and std")
    text = (
        f"{pack.path}: {pack.splits['train'].images.dataset} has values from {scale.low:g} to"
        f" {scale.high:g}, not from 0 to 1: train with {', or '.join(ways)}"
    )
    fill_values = [note for note in pack.provenance.get("notes", ()) if "--nodata=" in note]
    raise UsageError("; ".join([text, *fill_values]))


def check_normalized(pack: Pack) -> None:
    """Raise UsageError for mean and std, which are of images in [0, 1], of far other images."""
    if pack.scale.low < 0 or pack.scale.reach > UNLIKE:
        raise UsageError(
            f"mean and std are of images in [0, 1], and {pack.path} holds {pack.scale}: give"
            " another --max-value, or --normalize unit, pack or image"
        )


def rounding_note(config: Config, normalization: Normalization, pack: Pack) -> str:
    """Return a note if integers are rounded before their mean is subtracted, or ""."""
    largest = pack.scale.extreme
    if np.dtype(pack.splits["train"].images.dtype).kind not in "iu":
        return ""
    if normalization and not config.augment:
        if largest <= LARGEST_OF_FLOAT64:
            return ""
        return (
            f"values up to {largest:,.0f} are rounded: float64, in which mean and std are applied,"
            f" has whole numbers to {LARGEST_OF_FLOAT64:,} alone"
        )
    if largest <= LARGEST_WHOLE:
        return ""
    text = (
        f"values up to {largest:,.0f} are rounded: float32 has whole numbers to"
        f" {LARGEST_WHOLE:,} alone"
    )
    if config.augment:
        return f"{text}, and --augment gets float32"
    return f"{text}; --normalize pack or image subtracts the mean before"


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
