"""Gradients of a step against the same step in float64 on the CPU.

The error is |g - g64| / |g64| over the whole gradient vector, after one train_step from the same
weights on the same images. The networks are smooth: softplus in place of ReLU, averages in place of
maxima. With ReLU a value near zero that rounds to the other side switches a whole path of the
gradient, and what is measured is luck: float32 on a CPU is off by 8e-4 on the digits network, by
9e-3 on ResNet-18, bfloat16 by 0.4. Smooth ones are off by 4e-6 to 7e-6 and by 5e-3 to 1.4e-2
there, which the bounds follow with room for other orders of summation: TF32 keeps three bits more
than bfloat16 does, so an eighth of its error or more. Each also has a least error: below it, the
arithmetic is not the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hpctrain.models import build
from hpctrain.parallel.device import torch_settings
from hpctrain.training.step import train_step
from scripts.benchmarks.gpu.case import (
    Case,
    Result,
    attempt,
    first_batches,
    judged,
    made_pack,
    not_run,
    ready,
)

BOUNDS = {"fp32": (None, 2e-5), "tf32": (1e-4, 1e-2), "bf16": (1e-3, 5e-2)}
NETWORKS = {"digits": (28, 28, 1), "resnet18": (64, 64, 3)}
ROWS = 32


def measure(case: Case) -> Iterator[Result]:
    """A line per network and precision."""
    for name, shape in NETWORKS.items():
        pack = made_pack(case, ROWS, case.size(shape, (32, 32, shape[2])), smooth=True)
        exact = gradient(case, pack, f"{name}_float64", "fp32", "cpu")
        for precision in BOUNDS:
            what = f"gradient of {name}, {precision}, against float64"
            if precision == "tf32" and case.rehearsal:
                yield not_run(what, "only a real GPU computes in TF32")
                continue
            yield attempt(what, compared, case, pack, name, precision, exact)


def compared(
    what: str, case: Case, pack: str, name: str, precision: str, exact: torch.Tensor
) -> Result:
    """One line."""
    found = gradient(case, pack, name, precision, case.device)
    least, most = BOUNDS[precision]
    return judged(what, distance(found, exact), least=least, most=most, n=ROWS)


def gradient(case: Case, pack: str, network: str, precision: str, device: str) -> torch.Tensor:
    """The gradient vector of one step, in float64 on the CPU."""
    flags = ["--data", pack, "--model", f"{__name__}:{network}", "--precision", precision]
    with torch_settings(precision):
        job = ready(case, *flags, "--batch-size", str(ROWS), "--normalize", "pack", device=device)
        train_step(job.trainer, first_batches(job)[0], ROWS)
        return job.trainer.message.gradients.double().cpu()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of two vectors, relative to the second."""
    return float((found - exact).norm() / exact.norm())


def smooth(module: nn.Module) -> nn.Module:
    """The network without kinks: its gradient changes as little as its numbers do."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU):
            setattr(module, name, nn.Softplus())
        elif isinstance(child, nn.MaxPool2d):
            setattr(module, name, nn.AvgPool2d(child.kernel_size, child.stride, child.padding))
        else:
            smooth(child)
    return module


def digits(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The digits network, smooth."""
    return smooth(build("digits", image_shape, classes))


def resnet18(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """ResNet-18, smooth."""
    return smooth(build("resnet18", image_shape, classes))


def digits_float64(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The same weights as `digits`, as float64."""
    return digits(image_shape, classes).double()


def resnet18_float64(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The same weights as `resnet18`, as float64."""
    return resnet18(image_shape, classes).double()
