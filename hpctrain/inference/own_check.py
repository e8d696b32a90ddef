"""Tests of the user's own functions before their first use; what breaks a rule is named.

A loss and a metric are called with the network's outputs for a few samples: for all of them, in
parts, one of which is a single sample, and again for all. An augmentation is called with one key,
with another, with the first again, and with a single image.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.config.functions import Imported
from hpctrain.errors import UsageError
from hpctrain.inference.own import augment_by, call, read_loss, read_metric, refuse_names
from hpctrain.inference.tasks import Task, network_output
from hpctrain.models import evaluating
from hpctrain.parallel.device import fork_rng

RELATIVE, ABSOLUTE = 1e-3, 1e-5  # of a value in a part: kernels may round differently
Values = dict[str, Tensor]  # what a function returned: one value a sample, by name


def check_task(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Test the loss and the metric of `task` with samples (n, C, H, W) of the training split.

    Raises UsageError that names the function. Model and random generators are restored.
    """
    if not any(task.own):
        return
    with evaluating(model), torch.no_grad(), fork_rng(inputs.device):
        outputs = network_output(model, inputs, task.precision)
    if not outputs.isfinite().all():
        return  # a first step will report it
    if loss := task.own.loss:

        def read(found: Any, n: int) -> Values:
            return {"the loss": read_loss(loss, found, n)}

        check_values(loss, read, outputs, targets)
        check_gradient(loss, outputs, targets)
    if metric := task.own.metric:

        def read_figures(found: Any, n: int) -> Values:
            pairs = read_metric(metric, found, n).items()
            both = {name: values for name, (values, _) in pairs}
            return both | {f"the weight of {n}": w for n, (_, w) in pairs if w is not None}

        check_values(metric, read_figures, outputs, targets)


def check_values(
    own: Imported, read: Callable[[Any, int], Values], outputs: Tensor, targets: Tensor
) -> None:
    """Test that a function returns one value a sample, which depends on that sample alone.

    `read` turns its result for n samples into named tensors (n,).
    """
    n = len(outputs)
    ends = sorted({0, min(1, n), n // 2, n})  # of the parts
    held, goals = outputs.clone(), targets.clone()

    def values(outputs: Tensor, first: int = 0, end: int = n) -> Values:
        return read(call_quietly(own, outputs[first:end], goals[first:end]), end - first)

    def parts(outputs: Tensor) -> list[Values]:
        return [values(outputs, *bounds) for bounds in pairwise(ends)]

    with torch.no_grad():
        whole = values(held)
        for what, before, after in (("outputs", outputs, held), ("targets", targets, goals)):
            if not torch.equal(before, after):
                raise UsageError(
                    f"{own.setting} changed the {what} that it was given: compute without in-place"
                    " operations on them"
                )
        compare_parts(own, whole, parts(held))
        again = values(held)
        for name, found in whole.items():
            if not found.isfinite().all():
                raise UsageError(f"{own.setting} returned a value that is not finite ({name})")
            if name not in again or not torch.equal(found, again[name]):
                raise UsageError(
                    f"{own.setting} returned other values when it was called again with the same"
                    f" samples ({name}): they must depend on outputs and targets alone"
                )
        # A network with its first weights often gives all samples nearly the same outputs.
        varied = vary(outputs)
        try:
            whole, again_apart = values(varied), parts(varied)
        except UsageError:  # it cannot take these, such as the logarithm of a negative number
            return
        compare_parts(own, whole, again_apart)


def compare_parts(own: Imported, whole: Values, parts: list[Values]) -> None:
    """Raise UsageError if samples have other values (n,) in `parts` of the batch."""
    for part in parts:
        if error := refuse_names(own, whole, part):
            raise error
    for name, found in whole.items():
        apart = torch.cat([part[name] for part in parts])
        close = torch.isclose(apart.double(), found.double(), RELATIVE, ABSOLUTE)
        if close.logical_or(~found.isfinite()).all():
            continue
        raise UsageError(
            f"{own.setting} gave samples other values in a part of the batch ({name}): the value of"
            " a sample must not depend on the others, because batches are cut into shards, nor on"
            " earlier calls"
        )


def vary(outputs: Tensor) -> Tensor:
    """Return outputs at random, equal in every run; probabilities if `outputs` may be some."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype)
    if outputs.min() >= 0 and outputs.max() <= 1:
        drawn = drawn.softmax(1) if drawn.ndim == 2 else drawn.sigmoid()
    return drawn.to(outputs.device)


def check_gradient(own: Imported, outputs: Tensor, targets: Tensor) -> None:
    """Test that a loss has a finite gradient with respect to the outputs."""
    leaf = outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = read_loss(own, call_quietly(own, leaf, targets), len(outputs))
    if not losses.is_floating_point() or not losses.requires_grad:
        raise UsageError(
            f"{own.setting} is not differentiable: its result does not depend on the outputs by"
            " operations that torch can differentiate"
        )
    (gradient,) = torch.autograd.grad(losses.sum(), leaf, allow_unused=True)
    if gradient is None or not gradient.isfinite().all():
        what = "no gradient" if gradient is None else "a gradient that is not finite"
        raise UsageError(f"{own.setting} has {what} with respect to the outputs")


def check_augment(own: Imported, images: Tensor, key: int) -> None:
    """Test that images (n, C, H, W) are augmented by the generator alone. Raises UsageError."""

    def augmented(key: int, images: Tensor = images) -> Tensor:
        return watch_generators(own, lambda: augment_by(own, images.clone(), key))

    first, _, again = (augmented(each) for each in (key, key + 1, key))
    augmented(key, images[:1])
    if images.isfinite().all() and not first.isfinite().all():
        raise UsageError(f"{own.setting} returned an image with NaN or infinity")
    if not torch.equal(first, again):
        raise UsageError(
            f"{own.setting} returned other images when it was called again with the same images and"
            " a generator of the same seed: all random numbers must come from the generator"
        )


def call_quietly(own: Imported, *tensors: Tensor) -> Any:
    """Call a function that must not draw random numbers. Raises UsageError if it fails."""
    return watch_generators(own, lambda: call(own, *tensors))


def watch_generators(own: Imported, work: Callable[[], Any]) -> Any:
    """Return `work()`. Raises UsageError if it changes a global random generator."""
    before = _generator_states()
    found = work()
    for name, state in _generator_states().items():
        if state != before[name]:
            raise UsageError(
                f"{own.setting} draws random numbers from {name}: the result would depend on the"
                " number of ranks. An augmentation draws from the generator that it is given; a"
                " loss or a metric draws none"
            )
    return found


def _generator_states() -> dict[str, Any]:
    """Return the state of each global generator, by name."""
    drawn = np.random.get_state(legacy=False)
    states = {
        "Python's random": random.getstate(),
        "numpy.random": (drawn["state"]["key"].tobytes(), drawn["state"]["pos"], drawn["gauss"]),
        "torch's global generator": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch's global generator of the GPU"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states
