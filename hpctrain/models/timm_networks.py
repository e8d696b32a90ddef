"""Networks of timm, where it is installed: ``--model timm:NAME``.

A network is made for the images of the pack, with random weights. Nothing is downloaded: published
weights are a file for ``--init``. Its attribute `pretrained_cfg` holds the size and the
normalization of images for published weights.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hpctrain.config.imports import Imported, one_line
from hpctrain.errors import UsageError

# What constructors raise for a size of images that they cannot take, and converters for files of
# other networks.
UNFIT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError),
    ValueError,
)


def timm_function(name: str) -> Imported:
    """Return the function that makes the network "timm:NAME" for an image shape and classes.

    Raises UsageError if timm is not installed or has no such network.
    """
    own = name.partition(":")[2]
    timm = _import_timm(name)
    known = timm.list_models()
    if (base := own.partition(".")[0]) not in known:  # NAME.TAG
        near = difflib.get_close_matches(base, known, n=3, cutoff=0.5)
        hint = f"; nearest: {', '.join(f'timm:{each}' for each in near)}" if near else ""
        raise UsageError(f"--model {name}: timm {timm.__version__} has no such network{hint}")
    return Imported(f"--model {name}", partial(_make, timm, own), "")


def _import_timm(name: str) -> Any:
    spec = importlib.util.find_spec("timm")
    if spec is None:
        raise UsageError(f"--model {name} needs timm: pip install 'hpctrain[timm]'")
    place = Path(spec.origin or "").resolve()
    if Path.cwd() in place.parents[:2]:  # a file of weights may name timm, not a module here
        raise UsageError(f"--model {name}: {place} is not the installed timm: move it away")
    try:
        return importlib.import_module("timm")
    except (ImportError, OSError, RuntimeError) as error:  # made for another torch
        raise UsageError(f"--model {name}: importing timm failed: {one_line(error)}") from error


def _make(timm: Any, name: str, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    height, width, channels = image_shape
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # its tag
        tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
        raise UsageError(f"--model timm:{name}: there are {', '.join(tags)}") from error
    size = {}
    if config and config.fixed_input_size and config.input_size[1:] != (height, width):
        size["img_size"] = (height, width)
    create = partial(timm.create_model, name, num_classes=classes, in_chans=channels)
    try:
        model: nn.Module = create(**size)
    except UNFIT as error:
        if not size:
            raise
        raise UsageError(
            f"--model timm:{name} cannot be made for images of {width}x{height}:"
            f" {one_line(error)}{pack_again(config.input_size[1:])}"
        ) from error
    return model


def pack_again(size: tuple[int, int]) -> str:
    """Return the size (H, W) of published weights, and how to pack for it."""
    return f"; published for {size[1]}x{size[0]}: pack with --size {size[1]}x{size[0]}"


def own_input(model: nn.Module) -> Mapping[str, Any]:
    """Return `architecture`, `input_size` (C, H, W), `mean` and `std`; empty if not known."""
    found = getattr(model, "pretrained_cfg", None)
    return found if isinstance(found, dict) and found.get("mean") else {}


def size_hint(model: nn.Module, image_shape: tuple[int, int, int]) -> str:
    """Return which size to pack with, if a network refuses images that have another size."""
    size = own_input(model).get("input_size")
    return pack_again(size[1:]) if size and size[1:] != image_shape[:2] else ""


def convert(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Convert tensors of earlier names, or for other sizes of images, as timm does.

    Returns None if `model` is not of timm, or timm cannot convert them.
    """
    home = sys.modules[type(model).__module__]
    converter = getattr(home, "checkpoint_filter_fn", None)
    if converter is None or not home.__name__.startswith("timm."):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how it resizes
            converted: dict[str, Tensor] = converter(tensors, model)
            return converted
    except UNFIT:
        return None
