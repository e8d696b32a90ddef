"""Networks by name: ``build("resnet50", image_shape, classes)``, or the user's own function.

``timm:NAME`` is a network of timm, where it is installed, for the images of the pack, with random
weights. Nothing is downloaded: published weights are a file for ``--init``. Its attribute
`pretrained_cfg` holds the size and the normalization of images for them.

Any other ``package.module:function`` is imported and called as
``function(image_shape=(H, W, C), classes=K)``; it returns a torch module that maps images
(N, C, H, W) to scores (N, K), or to images (N, C, H, W) for a task that restores images.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.config.imports import Imported, import_function, is_of_timm, one_line
from hpctrain.errors import UsageError
from hpctrain.models.resnet import resnet18, resnet34, resnet50
from hpctrain.models.small import autoencoder, digits
from hpctrain.models.weights import check_type

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "autoencoder": autoencoder,
    "digits": digits,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
}
STEMS = tuple(name for name in NETWORKS if name.startswith("resnet"))


def build(
    name: str, image_shape: tuple[int, int, int], classes: int, small_stem: bool = False
) -> nn.Module:
    """Build the network `name` for images of (H, W, C), with weights drawn from torch's generator.

    Raises UsageError if there is no such network, or if the user's function fails or returns
    anything but a module with parameters.
    """
    if small_stem and name not in STEMS:
        raise UsageError(f"--small-stem is for {', '.join(STEMS)}; --model is {name}")
    if ":" in name:
        own = timm_function(name) if is_of_timm(name) else import_function(name, "--model")
        return _call(own, image_shape, classes)
    if name not in NETWORKS:
        raise UsageError(f"--model {name}: no such network{_hint(name)}")
    if small_stem:
        return NETWORKS[name](image_shape, classes, small_stem=True)
    return NETWORKS[name](image_shape, classes)


def check_forward(
    model: nn.Module, image_shape: tuple[int, int, int], output: tuple[int, ...]
) -> None:
    """Pass two black images (H, W, C) through `model` in evaluation mode.

    Raises UsageError if that fails, and as `checked_output` and `check_names` do. Torch's
    generator is restored; lazy layers get their shapes.
    """
    height, width, channels = image_shape
    weight = next(model.parameters())
    images = torch.zeros((2, channels, height, width), dtype=weight.dtype, device=weight.device)
    names = set(model.state_dict())
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            scores = model(images)
        check_names(model, names)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the network cannot take images of {width}x{height}x{channels} (width, height,"
            f" channels): {one_line(error)}{size_hint(model, image_shape)}"
        ) from error
    checked_output(scores, 2, output, "evaluation")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode in the block, and each back to its own mode after it.

    A network's own `train` is called for both; it may do more than set the mode.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])
        for module, training in modes.items():
            module.training = training


def check_names(model: nn.Module, before: Iterable[str]) -> None:
    """Raise UsageError if the state dict has gained a name that is not in `before`.

    A weight file with a tensor created in the first forward pass could not be loaded again.
    """
    for name in sorted(set(model.state_dict()).difference(before)):
        raise UsageError(
            f"{name} of the network is not there before its first forward pass, so its weights"
            " could not be read again: make it in __init__ (a buffer with persistent=False may"
            " come later)"
        )


def checked_output(found: Any, rows: int, output: tuple[int, ...], mode: str) -> Tensor:
    """Return a network's output for `rows` images if it is a tensor of shape (rows, *output).

    `output` is (classes,) for classification and (C, H, W) for the restoration of images. Raises
    UsageError otherwise.
    """
    if not isinstance(found, Tensor):
        raise UsageError(f"the network must return a tensor, not {_kind(found)}, in {mode} mode")
    if found.shape != (rows, *output):
        needs = f"the data has {output[0]} classes" if len(output) == 1 else "an image is learnt"
        raise UsageError(
            f"the network gives an output of shape {tuple(found.shape)} for {rows} images in"
            f" {mode} mode; {needs}, so it must give {(rows, *output)}"
        )
    return found


def _call(imported: Imported, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    given = {"image_shape": image_shape, "classes": classes}
    imported.check_arguments("function(image_shape=(H, W, C), classes=K)", **given)
    model = imported.call(lambda: imported.function(**given))
    if not isinstance(model, nn.Module):
        raise UsageError(f"{imported.setting} must return a torch.nn.Module, not {_kind(model)}")
    if next(model.parameters(), None) is None:
        raise UsageError(
            f"{imported.setting} returned a {_kind(model)} without parameters to train"
        )
    for name, value in (*model.state_dict().items(), *model.named_buffers()):
        check_type(f"{imported.setting}: {name}", value)
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_lazy(tensor) and 0 in tensor.stride():  # expanded: torch refuses to write into it
            tensor.data = tensor.data.clone()
    return model


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), NETWORKS, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    own = "timm:NAME, or package.module:function of your own"
    return f"; there are {', '.join(NETWORKS)}, {own}"


def _kind(thing: object) -> str:
    return type(thing).__name__


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
