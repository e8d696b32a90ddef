"""Functions of the user's own: --loss, --metric and --augment, and what they must return.

    loss(outputs, targets)       one value a sample, (n,), differentiable
    metric(outputs, targets)     one value a sample, (n,), or a dict of these by the name of the
                                 figure, which is their mean; a pair of such tensors, values and
                                 weights, for the quotient of their sums
    augment(images, generator)   images (n, C, H, W) of the same shape and dtype, random by
                                 `generator` alone

`outputs` (n, ...) are those of the network, and `targets` the labels (n,) or clean images. Batches
are cut into shards, and splits into blocks. The value of a sample must therefore not depend on the
other samples, and the result of a call not on earlier ones. ``own_check.py`` tests this at the
start of a run; shapes are tested in every call, which does not synchronize with a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.config.functions import Imported, import_function
from hpctrain.data.loader import Prepare
from hpctrain.data.partition import random_key
from hpctrain.errors import UsageError
from hpctrain.text import listed

MOST_FIGURES = 32  # of a metric
TAKEN = ("loss", "unweighted_loss", "noisy", "accuracy", "balanced_accuracy", "rows")  # figures
Sums = dict[str, tuple[Tensor, Tensor]]  # by figure: the sums of its values and of their weights
Figures = dict[str, tuple[Tensor, Tensor | None]]  # values (n,), and their weights if not all 1


class Functions(NamedTuple):
    """The functions of a task that are the user's own."""

    loss: Imported | None = None
    metric: Imported | None = None


NONE = Functions()


def import_functions(loss: str | None, metric: str | None) -> Functions:
    """Import the functions that --loss and --metric name. Raises UsageError."""
    return Functions(
        import_own(loss, "--loss", "outputs", "targets") if loss else None,
        import_own(metric, "--metric", "outputs", "targets") if metric else None,
    )


def import_own(name: str, flag: str, *arguments: str) -> Imported:
    """Import a function of these positional arguments. Raises UsageError."""
    own = import_function(name, flag)
    if isinstance(own.function, type):
        last = name.rpartition(":")[2]
        raise UsageError(
            f"{own.setting}: {last} is a class: name a function, or an object that a module of"
            f" yours makes, such as {flag.lstrip('-')} = {last}()"
        )
    own.check_arguments(f"function({', '.join(arguments)})", *arguments)
    return own


def call(own: Imported, *given: Any) -> Any:
    """Call the function. Raises UsageError, with the line of its file, if it fails."""
    try:
        return own.function(*given)
    except (UsageError, MemoryError, torch.OutOfMemoryError):  # which may be no fault of it
        raise
    except (Exception, SystemExit) as error:
        raise own.failure(error) from error


def compute_losses(own: Imported, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of samples. Raises UsageError if the function gives no such tensor."""
    return read_loss(own, call(own, outputs, targets), len(outputs))


def read_loss(own: Imported, found: Any, n: int) -> Tensor:
    """Return the losses (n,) that the function returned. Raises UsageError if they are not."""
    return _per_sample(found, n, own.setting)


def read_metric(own: Imported, found: Any, n: int) -> Figures:
    """Return the figures that the function returned for n samples. Raises UsageError."""
    if not isinstance(found, Mapping):
        found = {own.setting.rpartition(":")[2]: found}
    figures: Figures = {}
    for name, value in found.items():
        if not isinstance(name, str) or not name.isprintable() or name in ("", *TAKEN):
            raise UsageError(f"{own.setting} named a figure {name!r}: give it another name")
        where = f"{own.setting}: {name}"
        values, weights = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        if weights is not None:
            weights = _per_sample(weights, n, where)
        figures[name] = _per_sample(values, n, where), weights
    if not 0 < len(figures) <= MOST_FIGURES:
        raise UsageError(f"{own.setting} gave {len(figures)} figures, not 1 to {MOST_FIGURES}")
    return figures


def _per_sample(found: Any, n: int, what: str) -> Tensor:
    if not isinstance(found, Tensor):
        raise UsageError(
            f"{what} must return a tensor of one value a sample, not {type(found).__name__}"
        )
    if found.shape != (n,):
        hint = f"shape ({n},)"
        if found.ndim == 0:
            hint = "not their mean or sum (torch's losses: reduction='none')"
            hint = hint if n > 1 else "shape (1,): does it call squeeze()?"
        raise UsageError(
            f"{what} returned a tensor of shape {tuple(found.shape)} for {n} sample{'s' * (n > 1)}:"
            f" return one value a sample, {hint}"
        )
    return found


def refuse_names(
    own: Imported | None, names: Collection[str], others: Collection[str]
) -> UsageError | None:
    """Return the error to raise if a metric named other figures for another batch."""
    if own is None or not (differ := sorted(set(names) ^ set(others))):
        return None
    return UsageError(
        f"{own.setting} gave {listed(differ, 3)} for one batch and not for another: it must give"
        " the same figures for each"
    )


def sum_metric(own: Imported, outputs: Tensor, targets: Tensor) -> Sums:
    """Return the sums of the figures that the metric gives for a block of samples."""
    found = read_metric(own, call(own, outputs, targets), len(outputs))
    count = torch.full((), len(outputs), dtype=torch.float64, device=outputs.device)
    return {
        name: (values.double().sum(), count if weights is None else weights.double().sum())
        for name, (values, weights) in found.items()
    }


@torch.no_grad()
def augment_by(own: Imported, images: Tensor, key: int) -> Tensor:
    """Return images (n, C, H, W) augmented by the function, with random numbers of `key` alone.

    It may change `images`. Raises UsageError if the result has another shape, dtype or device.
    """
    generator = torch.Generator(images.device).manual_seed(random_key(key, "own augmentation"))
    shape, strides = images.shape, images.stride()
    found = call(own, images, generator)
    if not isinstance(found, Tensor):
        raise UsageError(f"{own.setting} must return images, not {type(found).__name__}")
    for what, had, has in (
        ("shape", tuple(shape), tuple(found.shape)),
        ("dtype", images.dtype, found.dtype),
        ("device", images.device, found.device),
    ):
        if had != has:
            raise UsageError(f"{own.setting} returned images of {what} {has}, not {had} as it got")
    if found.stride() != strides:  # convolutions read the memory format of the network
        found = torch.empty_strided(shape, strides, dtype=found.dtype, device=found.device).copy_(
            found
        )
    return found


def with_augment(own: Imported, prepare: Prepare) -> Prepare:
    """Return a function that prepares images by `prepare` and then augments them by `own`."""
    return lambda images, key: augment_by(own, prepare(images, key), key)
