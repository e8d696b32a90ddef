"""Networks of other libraries: ``timm:NAME(arguments)`` and ``smp:Unet(arguments)``.

They are made for the images of the data, with random weights: nothing is downloaded, as published
weights are a file for ``--init``. A network of timm has the attribute `pretrained_cfg`, which holds
the size and the normalization of images for its published weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hpctrain.config.installed import import_installed, installed_only
from hpctrain.config.parts import EXTRAS, Part, build_part, check_filled, find_part, parameters_of
from hpctrain.errors import UsageError, did_you_mean, one_line


def make_of_library(
    name: str, image_shape: tuple[int, int, int], output: tuple[int, ...]
) -> nn.Module:
    """Make the network "LIBRARY:NAME(arguments)" for images (H, W, C), with random weights.

    Its output for an image is `output`: (classes,), or images (C, H, W). Raises UsageError if its
    library is not installed, has no such network, or cannot make it.
    """
    part = find_part("model", name)
    if part.library == "timm":
        return make_of_timm(part, image_shape, output[0])
    return make_of_smp(part, image_shape, output[0])


def make_of_timm(part: Part, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Make a network of timm, for this size of images where it can be chosen."""
    height, width, channels = image_shape
    if part.args:
        raise UsageError(f"{part.flag}: give arguments by name, as in {part.name}(drop_rate=0.1)")
    timm = import_installed("timm", part.flag, EXTRAS["timm"])
    networks = timm.list_models()
    base = part.name.partition(".")[0]  # NAME.TAG
    if base not in networks:
        near = did_you_mean(base, networks)
        raise UsageError(f"{part.flag}: timm {timm.__version__} has no such network{near}")
    config = None
    filled: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    try:
        with installed_only():
            config = timm.get_pretrained_cfg(part.name)
            if config and config.fixed_input_size and config.input_size[1:] != (height, width):
                filled["img_size"] = (height, width)
            check_filled(part, part.kwargs, filled)
            return timm.create_model(part.name, **part.kwargs, **filled)
    except UsageError:
        raise
    except Exception as error:
        hint = ""
        if "img_size" in filled:
            hint = size_hint(config and config.input_size, image_shape)
        raise UsageError(
            f"{part.flag} cannot be made for images of {width}x{height}: {one_line(error)}{hint}"
        ) from error


def make_of_smp(part: Part, image_shape: tuple[int, int, int], channels: int) -> nn.Module:
    """Make a network of segmentation-models-pytorch, which returns images (channels, H, W).

    With an encoder of timm, "tu-NAME", further arguments are those of the encoder; with others they
    would have no effect.
    """
    parameters = parameters_of(part)
    encoder = part.kwargs.get("encoder_name", next(iter(part.args), ""))
    for name in part.kwargs:
        if name not in parameters and not str(encoder).startswith("tu-"):
            raise UsageError(
                f"{part.flag}: it has no argument {name}{did_you_mean(name, parameters)}"
            )
    return build_part(
        part,
        encoder_weights=None,
        in_channels=image_shape[2],
        classes=channels,
    )


def size_hint(size: tuple[int, int, int] | None, image_shape: tuple[int, int, int]) -> str:
    """Return how to pack for the published input size (C, H, W), if images have another."""
    if size is None or size[1:] == image_shape[:2]:
        return ""
    return f"; published for {size[2]}x{size[1]}: pack with --size {size[2]}x{size[1]}"


def own_input(model: nn.Module) -> Mapping[str, Any]:
    """Return `architecture`, `input_size` (C, H, W), `mean` and `std`; empty if not known."""
    config = getattr(model, "pretrained_cfg", None)
    if isinstance(config, dict) and config.get("mean"):
        return config
    return {}
