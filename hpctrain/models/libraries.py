"""Networks of timm and torchvision, where they are installed: ``--model timm:NAME``.

A network is made for the images of the pack, with random weights. Nothing is downloaded: published
weights are a file for ``--init``. Its attribute `pretrained_cfg`, which timm defines and networks
of torchvision get here, holds the size and the normalization of images for published weights.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.config.imports import Imported, one_line
from hpctrain.errors import UsageError

MOST_RELATIVES = 50  # networks that a file is compared with: 3 to 10 s
# What constructors raise for a size of images that they cannot take, and converters for files of
# other networks.
UNFIT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError),
    ValueError,
)
SIZES = {"vit": "image_size", "maxvit": "input_size"}  # arguments of torchvision, by family
WITH_AUXILIARIES = ("googlenet", "inception_v3")  # which return several outputs in training
AUXILIARIES = ("AuxLogits.", "aux1.", "aux2.")  # their classifiers, in files of torchvision
EARLIER_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")  # names in its files


def library_function(name: str) -> Imported:
    """Return the function that makes "timm:NAME" or "torchvision:NAME" for image shape and classes.

    Raises UsageError if the library is not installed or has no such network.
    """
    library, _, own = name.partition(":")
    make = _make_timm if library == "timm" else _make_torchvision
    home = _import(library, name)
    known = home.list_models() if library == "timm" else _torchvision_names(home)
    base = own.partition(".")[0] if library == "timm" else own  # timm: NAME.TAG
    if base not in known:
        near = difflib.get_close_matches(base, known, n=3, cutoff=0.5)
        hint = f"; nearest: {', '.join(f'{library}:{each}' for each in near)}" if near else ""
        raise UsageError(f"--model {name}: {library} {home.__version__} has no such network{hint}")
    return Imported(f"--model {name}", partial(make, home, own), "")


def library_with(name: str) -> str:
    """Return "torchvision:NAME" or "timm:NAME" if an installed library has this network, or ""."""
    for library in ("torchvision", "timm"):
        try:
            library_function(f"{library}:{name}")
        except UsageError:
            continue
        return f"{library}:{name}"
    return ""


def _import(library: str, name: str) -> Any:
    spec = importlib.util.find_spec(library)
    if spec is None:
        raise UsageError(f"--model {name} needs {library}: pip install 'hpctrain[{library}]'")
    place = Path(spec.origin or "").resolve()
    if Path.cwd() in place.parents[:2]:  # a file of weights may name the library, not a module here
        raise UsageError(f"--model {name}: {place} is not the installed {library}: move it away")
    try:
        return importlib.import_module(library)
    except (ImportError, OSError, RuntimeError) as error:  # made for another torch
        raise UsageError(
            f"--model {name}: importing {library} failed: {one_line(error)}"
        ) from error


def _torchvision_names(torchvision: Any) -> list[str]:
    names: list[str] = torchvision.models.list_models(module=torchvision.models)
    return names


def _make_timm(timm: Any, name: str, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
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


def _make_torchvision(
    torchvision: Any, name: str, image_shape: tuple[int, int, int], classes: int
) -> nn.Module:
    height, width, channels = image_shape
    if channels != 3:
        raise UsageError(
            f"--model torchvision:{name} takes images of 3 channels, and these have {channels}:"
            " pack with --channels 3, or use timm:NAME"
        )
    published = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    own = published.crop_size[0]
    options: dict[str, Any] = {}
    if argument := SIZES.get(name.partition("_")[0]):
        if argument == "image_size" and height != width:
            raise UsageError(
                f"--model torchvision:{name} takes square images, and these have {width}x{height}"
                f" pixels{pack_again((own, own))}"
            )
        options[argument] = height if argument == "image_size" else (height, width)
    if name in WITH_AUXILIARIES:
        options |= {"aux_logits": False, "init_weights": True}
    try:
        model: nn.Module = torchvision.models.get_model(name, num_classes=classes, **options)
    except UNFIT as error:
        if not argument:
            raise
        raise UsageError(
            f"--model torchvision:{name} cannot be made for images of {width}x{height}:"
            f" {one_line(error)}{pack_again((own, own))}"
        ) from error
    statistics = {"mean": tuple(published.mean), "std": tuple(published.std)}
    known = {"architecture": name, "input_size": (3, own, own), **statistics}
    vars(model)["pretrained_cfg"] = known
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
    """Convert tensors of earlier names, or for other sizes of images, by the library of `model`.

    Returns None if `model` is of no library, or the library cannot convert them.
    """
    home = sys.modules[type(model).__module__]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about how the library resizes
        return _convert(home, model, tensors)


def _convert(home: Any, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    try:
        if home.__name__.startswith("timm."):
            converter = getattr(home, "checkpoint_filter_fn", None)
            return converter(tensors, model) if converter else None
        if not home.__name__.startswith("torchvision."):
            return None
        found = {
            EARLIER_DENSENET.sub(r"\1\2.", name): tensor
            for name, tensor in tensors.items()
            if not name.startswith(AUXILIARIES)
        }
        if "encoder.pos_embedding" in found:
            size, patch = model.image_size, model.patch_size
            found = dict(home.interpolate_embeddings(size, patch, found))
        return found
    except UNFIT:
        return None


def relatives(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield networks of the family of `model`, and their names, without memory for weights.

    These are networks of timm for one of timm; otherwise those of torchvision, if installed.
    """
    home = type(model).__module__
    if home.startswith("timm."):
        library = "timm"
        names = sys.modules[library].list_models(module=home.rpartition(".")[2])
    else:
        library = "torchvision"
        try:
            names = _torchvision_names(_import(library, library))
        except UsageError:  # not installed, or for another torch
            return
    like = own_input(model).get("architecture") or type(model).__name__
    for name in difflib.get_close_matches(like.lower(), names, MOST_RELATIVES, cutoff=0):
        try:
            with torch.device("meta"):
                other = library_function(f"{library}:{name}").function((224, 224, 3), 1000)
        except (*UNFIT, UsageError):  # one that cannot be made without memory
            continue
        yield f"{library}:{name}", other
