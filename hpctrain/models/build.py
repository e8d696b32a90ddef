"""Networks by name: ``build("resnet50", image_shape, classes)``, or the user's own function.

``timm:NAME`` and ``smp:NAME`` are networks of other libraries (``library.py``).

Any other ``package.module:function`` is imported and called as
``function(image_shape=(H, W, C), classes=K)``; it returns a torch module that maps images
(N, C, H, W) to scores (N, K), or to images (N, C, H, W) for a task that restores images.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpctrain.config.functions import Imported, import_function, own_code_error
from hpctrain.config.parts import is_part
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.models.library import make_of_library, own_input, size_hint
from hpctrain.models.resnet import resnet18, resnet34, resnet50
from hpctrain.models.small import Autoencoder, DigitsNet
from hpctrain.models.weights import TYPES
from hpctrain.text import counted

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "autoencoder": Autoencoder,
    "digits": DigitsNet,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
}

_NO_HALF = "--precision bf16 computes in bfloat16"
#: Types of parameters, and what to do instead of training them.
ADVICE = {
    "float32": "",
    "float64": "",
    "float16": _NO_HALF,
    "bfloat16": _NO_HALF,
    "complex64": "make real parameters, and torch.view_as_complex of them in forward",
}


def build(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    small_stem: bool = False,
    *,
    output: tuple[int, ...] = (),
) -> nn.Module:
    """Build the network `name` for images of (H, W, C), with weights drawn from torch's generator.

    `output` is the shape of its output for one image, (classes,) by default. Raises UsageError if
    there is no such network, or if the user's function fails or returns anything but a module with
    parameters.
    """
    if small_stem and not name.startswith("resnet"):
        raise UsageError(f"--small-stem is for resnet18, resnet34, resnet50; --model is {name}")
    if name in NETWORKS:
        options = {"small_stem": True} if small_stem else {}
        return NETWORKS[name](image_shape, classes, **options)
    if is_part("model", name):
        model = make_of_library(name, image_shape, output or (classes,))
    elif ":" in name:
        model = call_own_function(import_function(name, "--model"), image_shape, classes)
    else:
        choices = (
            f"; there are {', '.join(NETWORKS)}, timm:NAME, smp:NAME and package.module:function"
        )
        near = did_you_mean(name, NETWORKS)
        raise UsageError(f"--model {name}: no such network{near or choices}")
    for key, value in (*model.state_dict().items(), *model.named_buffers()):
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided
        if not is_dense or value.dtype not in TYPES:
            raise UsageError(
                f"--model {name}: {key} is no dense tensor of a type that weight files can hold"
            )
        if value.is_meta:
            raise UsageError(f"--model {name}: {key} is on the device meta: it holds no values")
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_lazy(tensor) and 0 in tensor.stride():  # expanded: torch refuses to write into it
            tensor.data = tensor.data.clone()
    return model


def call_own_function(
    function: Imported,
    image_shape: tuple[int, int, int],
    classes: int,
) -> nn.Module:
    """Call the user's function. Raises UsageError unless it returns a module with parameters."""
    arguments = {"image_shape": image_shape, "classes": classes}
    function.check_arguments("function(image_shape=(H, W, C), classes=K)", **arguments)
    model = function(**arguments)
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(f"{function.setting} must return a torch.nn.Module, not {kind}")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{function.setting} returned a {kind} without parameters to train")
    return model


def check_types(model: nn.Module) -> None:
    """Raise UsageError unless the parameters that are trained are all float32, or all float64."""
    first = ""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        dtype = str(parameter.dtype).removeprefix("torch.")
        advice = ADVICE.get(dtype, "another type cannot be summed")
        if advice:
            raise UsageError(
                f"parameter {name} is {dtype}: parameters are trained in float32 or float64;"
                f" {advice}"
            )
        first = first or f"{name} {dtype}"
        if not first.endswith(f" {dtype}"):
            raise UsageError(
                f"the network's parameters mix types, {first}, {name} {dtype}: use one"
            )


def input_like(model: nn.Module) -> Tensor:
    """Return an empty tensor of the type of the network's images, on its device.

    It is the type of the first parameter that is no integer; for complex numbers that of their
    parts. Raises UsageError if all are integers.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            return torch.empty(0, dtype=parameter.dtype.to_real(), device=parameter.device)
    raise UsageError("the network has no parameter of floating-point numbers to train")


def check_forward(
    model: nn.Module,
    image_shape: tuple[int, int, int],
    output: tuple[int, ...],
) -> None:
    """Pass two black images (H, W, C) through `model` in evaluation mode.

    Raises UsageError if that fails, and as `check_output_shape` and `check_names` do. Torch's
    generator and the modules' attributes are restored; lazy layers get their shapes.
    """
    height, width, channels = image_shape
    images = input_like(model).new_zeros((2, channels, height, width))
    names = set(model.state_dict())
    try:
        with (
            evaluating(model),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            restored_attributes(model),
        ):
            check_output_shape(model, model(images), len(images), output)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        hint = size_hint(own_input(model).get("input_size"), image_shape)
        raise own_code_error(
            f"the network cannot take images of {width}x{height}x{channels} (width, height,"
            " channels)",
            error,
            failing_layer(error, model),
            hint,
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


@contextmanager
def restored_attributes(model: nn.Module) -> Iterator[None]:
    """Give all modules, after the block, the attributes that they had before it.

    What was changed in place is kept, as are parameters, buffers, modes and lazy layers' shapes.
    """
    before = {module: (type(module), dict(vars(module))) for module in model.modules()}
    try:
        yield
    finally:
        for module, (kind, attributes) in before.items():
            if type(module) is kind:  # else it was a lazy layer
                mode = module.training
                for name in vars(module).keys() - attributes.keys():
                    del vars(module)[name]
                vars(module).update(attributes)
                module.training = mode


def check_names(before: Iterable[str], after: Iterable[str]) -> None:
    """Raise UsageError if a forward pass has made tensors: names `after` that are not in `before`.

    Other ranks might not have them, and a weight file with one could not be loaded again.
    """
    new = sorted({*after}.difference(before))
    if new:
        raise UsageError(
            f"{new[0]} of the network is not there before its first forward pass, so other ranks"
            " and weight files could lack it: make it in __init__"
        )


def check_output_shape(model: nn.Module, outputs: Any, n: int, shape: tuple[int, ...]) -> None:
    """Raise UsageError unless `outputs`, those for n images, is a tensor (n, *shape).

    `shape` is (classes,) for classification and (C, H, W) for the restoration of images.
    """
    check_is_tensor(model, outputs)
    if outputs.shape != (n, *shape):
        if len(shape) == 1:
            needs = f"the data has {shape[0]} classes"
            if outputs.ndim == 4:
                needs = f"networks that return images are for --task denoise, and {needs}"
        else:
            needs = "an image is learnt"
        raise UsageError(
            f"the network gives an output of shape {tuple(outputs.shape)} for {counted(n, 'image')}"
            f" in {mode_of(model)} mode; {needs}, so it must give {(n, *shape)}"
        )


def check_is_tensor(model: nn.Module, outputs: Any) -> None:
    """Raise UsageError unless the `outputs` of a network are a tensor."""
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise UsageError(f"the network must return a tensor, not {kind}, in {mode_of(model)} mode")


def mode_of(model: nn.Module) -> str:
    """Return "training" or "evaluation"."""
    if model.training:
        return "training"
    return "evaluation"


def failing_layer(error: BaseException, model: nn.Module) -> str:
    """Return "layer NAME (TYPE)", the innermost module of `model` in which an error was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    last = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        name = names.get(id(module))
        if name:
            last = f"layer {name}, {type(module).__name__}"
    return last
