"""Networks by name: ``build("resnet50", image_shape, classes)``, or the user's own function.

``timm:NAME`` is a network of timm, where it is installed, for the images of the pack, with random
weights. Nothing is downloaded: published weights are a file for ``--init``. Its attribute
`pretrained_cfg` holds the size and the normalization of images for them.

Any other ``package.module:function`` is imported and called as
``function(image_shape=(H, W, C), classes=K)``; it returns a torch module that maps images
(N, C, H, W) to scores (N, K), or to images (N, C, H, W) for a task that restores images.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.config.functions import Imported, import_function, one_line
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.models.resnet import resnet18, resnet34, resnet50
from hpctrain.models.small import Autoencoder, DigitsNet
from hpctrain.models.weights import TYPES

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "autoencoder": Autoencoder,
    "digits": DigitsNet,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
}


def build(
    name: str, image_shape: tuple[int, int, int], classes: int, small_stem: bool = False
) -> nn.Module:
    """Build the network `name` for images of (H, W, C), with weights drawn from torch's generator.

    Raises UsageError if there is no such network, or if the user's function fails or returns
    anything but a module with parameters.
    """
    if small_stem and not name.startswith("resnet"):
        raise UsageError(f"--small-stem is for resnet18, resnet34, resnet50; --model is {name}")
    if name in NETWORKS:
        return NETWORKS[name](image_shape, classes, **({"small_stem": True} if small_stem else {}))
    if name.startswith("timm:"):
        model = make_of_timm(name, image_shape, classes)
    elif ":" in name:
        model = call(import_function(name, "--model"), image_shape, classes)
    else:
        known = f"; there are {', '.join(NETWORKS)}, timm:NAME and package.module:function"
        raise UsageError(f"--model {name}: no such network{did_you_mean(name, NETWORKS) or known}")
    for key, value in (*model.state_dict().items(), *model.named_buffers()):
        dense = isinstance(value, Tensor) and value.layout is torch.strided
        if not dense or value.dtype not in TYPES:
            text = f"{key} is no dense tensor of a type that weight files can hold"
            raise UsageError(f"--model {name}: {text}")
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_lazy(tensor) and 0 in tensor.stride():  # expanded: torch refuses to write into it
            tensor.data = tensor.data.clone()
    return model


def call(own: Imported, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Call the user's function. Raises UsageError unless it returns a module with parameters."""
    given = {"image_shape": image_shape, "classes": classes}
    own.check_arguments("function(image_shape=(H, W, C), classes=K)", **given)
    model = own(**given)
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(f"{own.setting} must return a torch.nn.Module, not {kind}")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{own.setting} returned a {kind} without parameters to train")
    return model


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
            checked_output(model, images, output)
    except UsageError:
        raise
    except Exception as error:
        hint = size_hint(own_input(model).get("input_size"), image_shape)
        raise UsageError(
            f"the network cannot take images of {width}x{height}x{channels} (width, height,"
            f" channels): {one_line(error)}{hint}"
        ) from error
    check_names(names, model.state_dict())


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


def check_names(before: Iterable[str], after: Iterable[str]) -> None:
    """Raise UsageError if a forward pass has made tensors: names `after` that are not in `before`.

    Other ranks might not have them, and a weight file with one could not be loaded again.
    """
    if made := sorted({*after}.difference(before)):
        raise UsageError(
            f"{made[0]} of the network is not there before its first forward pass, so other ranks"
            " and weight files could lack it: make it in __init__"
        )


def checked_output(model: nn.Module, images: Tensor, output: tuple[int, ...]) -> Tensor:
    """Return the output for `images` (n, C, H, W) if it is a tensor of shape (n, *output).

    `output` is (classes,) for classification and (C, H, W) for the restoration of images. Raises
    UsageError otherwise.
    """
    found, n, mode = model(images), len(images), "training" if model.training else "evaluation"
    if not isinstance(found, Tensor):
        kind = type(found).__name__
        raise UsageError(f"the network must return a tensor, not {kind}, in {mode} mode")
    if found.shape != (n, *output):
        needs = f"the data has {output[0]} classes" if len(output) == 1 else "an image is learnt"
        raise UsageError(
            f"the network gives an output of shape {tuple(found.shape)} for {n} images in {mode}"
            f" mode; {needs}, so it must give {(n, *output)}"
        )
    return found


def make_of_timm(name: str, image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Make the network "timm:NAME", for this size of images where it can be chosen.

    Raises UsageError if timm is not installed, has no such network, or cannot make it.
    """
    spec, config, options = importlib.util.find_spec("timm"), None, {}
    if spec is None:
        raise UsageError(f"--model {name} needs timm: pip install timm")
    place = Path(spec.origin or "").resolve()
    if Path.cwd() in place.parents[:2]:  # a file of weights may name timm, not a module here
        raise UsageError(f"--model {name}: {place} is not the installed timm: move it away")
    own, (height, width, channels) = name.partition(":")[2], image_shape
    try:
        timm = importlib.import_module("timm")
        known, base = timm.list_models(), own.partition(".")[0]  # NAME.TAG
        if base not in known:
            near = did_you_mean(base, known)
            raise UsageError(f"--model {name}: timm {timm.__version__} has no such network{near}")
        config = timm.get_pretrained_cfg(own)
        if config and config.fixed_input_size and config.input_size[1:] != (height, width):
            options["img_size"] = (height, width)
        return timm.create_model(own, num_classes=classes, in_chans=channels, **options)
    except UsageError:
        raise
    except Exception as error:  # also of a timm for another torch
        raise UsageError(
            f"--model {name} cannot be made for images of {width}x{height}:"
            f" {one_line(error)}{size_hint(config and config.input_size, image_shape)}"
        ) from error


def size_hint(size: tuple[int, int, int] | None, image_shape: tuple[int, int, int]) -> str:
    """Return how to pack for the published input size (C, H, W), if images have another."""
    if size is None or size[1:] == image_shape[:2]:
        return ""
    return f"; published for {size[2]}x{size[1]}: pack with --size {size[2]}x{size[1]}"


def own_input(model: nn.Module) -> Mapping[str, Any]:
    """Return `architecture`, `input_size` (C, H, W), `mean` and `std`; empty if not known."""
    found = getattr(model, "pretrained_cfg", None)
    return found if isinstance(found, dict) and found.get("mean") else {}
