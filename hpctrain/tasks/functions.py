"""The functions of the user's own: --loss, --metric and --augment, and tests of them.

They are described in docs/networks.md. Batches are cut into shards, and splits into blocks: the
value of a sample must not depend on the others, nor a call on earlier ones. `check_values` and
`check_augment` test this before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.config.functions import Imported, import_function
from hpctrain.data.partition import random_key
from hpctrain.errors import UsageError
from hpctrain.numerics import fork_rng, seed_torch

RESERVED = ("", "loss", "unweighted_loss", "noisy", "accuracy", "balanced_accuracy", "rows")
RELATIVE, ABSOLUTE = 1e-3, 1e-5  # of a sample's value in a part of a batch: kernels round otherwise


def import_own(name: str | None, flag: str) -> Imported | None:
    """Import the function of the user's own that a setting names, if any. Raises UsageError."""
    if name is None:
        return None
    own = import_function(name, flag)
    arguments = ("images", "generator") if flag == "--augment" else ("outputs", "targets")
    own.check_arguments(f"function({', '.join(arguments)})", *arguments)
    return own


def compute_losses(own: Imported, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of samples."""
    return _per_sample(own(outputs, targets), len(outputs), own.setting)


def compute_metric(own: Imported, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the metric's figures of n samples: values and weights, (2, n) float64, by name."""
    n, found, figures = len(outputs), own(outputs, targets), {}
    if not isinstance(found, Mapping):
        found = {own.setting.rpartition(":")[2]: found}
    for name, value in found.items():
        if not isinstance(name, str) or not name.isprintable() or name in RESERVED:
            raise UsageError(f"{own.setting} named a figure {name!r}: give it another name")
        is_pair = isinstance(value, tuple) and len(value) == 2
        both = value if is_pair else (value, torch.ones(n, device=outputs.device))
        parts = [_per_sample(part, n, f"{own.setting}: {name}").double() for part in both]
        figures[name] = torch.stack(parts)
    if not figures:
        raise UsageError(f"{own.setting} gave no figure")
    return figures


def _per_sample(found: Any, n: int, what: str) -> Tensor:
    """Return what a function has `found` for n samples. Raises UsageError if that is not (n,)."""
    is_tensor = isinstance(found, Tensor)
    if is_tensor and found.shape == (n,):
        return found
    got = f"a tensor of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
    raise UsageError(
        f"{what} returned {got} for {n} sample{'s' * (n > 1)}: return one value a sample, a tensor"
        f" of shape ({n},), not their mean or sum (torch's losses: reduction='none')"
    )


@torch.no_grad()
def augment_by(own: Imported, images: Tensor, key: int) -> Tensor:
    """Return images (n, C, H, W) augmented by `own`, with numbers of the batch's `key` alone."""
    generator = torch.Generator(images.device).manual_seed(random_key(key, "own augmentation"))
    wanted, strides = (images.shape, images.dtype, images.device), images.stride()
    found = own(images, generator)
    if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != wanted:
        text = f"{wanted[1]} on {wanted[2]}, shape {tuple(wanted[0])}"
        raise UsageError(f"{own.setting} must return images like those that it is given: {text}")
    # Convolutions read the memory format of the network.
    return found if found.stride() == strides else torch.empty_like(images).copy_(found)


# Tests of these functions before their first use


def check_values(
    own: Imported,
    compute: Callable[[Imported, Tensor, Tensor], dict[str, Tensor]],
    outputs: Tensor,
    targets: Tensor,
) -> None:
    """Test that the value of a sample depends on its output and target alone.

    `compute` returns the values of samples, (..., n) by name. It is called for all samples, again
    with torch's generator in another state, and for parts, one of which is a single sample.
    """
    n, before = len(outputs), (outputs.clone(), targets.clone())
    whole = compute(own, outputs, targets)
    if not torch.equal(before[0], outputs) or not torch.equal(before[1], targets):
        raise UsageError(f"{own.setting} changed its outputs or targets: compute with copies")
    if not all(values.isfinite().all() for values in whole.values()):
        raise UsageError(f"{own.setting} returned a value that is not finite")
    for seed, part in enumerate((slice(n), slice(1), slice(n // 2, n))):
        seed_torch(seed, outputs.device)
        found = compute(own, outputs[part], targets[part])
        within = (RELATIVE, ABSOLUTE) if seed else (0, 0)
        if found.keys() != whole.keys() or not all(
            torch.allclose(found[name].double(), values[..., part].double(), *within)
            for name, values in whole.items()
        ):
            raise UsageError(
                f"{own.setting} gave other values {'for a part of the batch' * bool(seed)}"
                f"{'in a second call' * (not seed)}: the value of a sample must depend on its"
                " output and target alone, because batches are cut into shards"
            )


def check_augment(own: Imported, images: Tensor, key: int) -> None:
    """Test that images (n, C, H, W) are augmented by the generator alone. Raises UsageError."""
    found = []
    with fork_rng(images.device):
        for seed, part in enumerate((images, images, images[:1])):
            seed_torch(seed, images.device)
            found.append(augment_by(own, part.clone(), key))
    if images.isfinite().all() and not found[0].isfinite().all():
        raise UsageError(f"{own.setting} returned an image with NaN or infinity")
    if not torch.equal(found[0], found[1]):
        raise UsageError(
            f"{own.setting} returned other images for the same images and a generator of the same"
            " seed: all random numbers must come from the generator"
        )
