"""Gradients of a step against the same step in float64 on the CPU.

The error is |g - g64| / |g64| over the whole gradient vector, after one step from the same
weights on the same images. The networks are smooth: softplus replaces ReLU, and average pooling
max pooling. With ReLU, a value near zero that rounds to the other side switches a whole path of the
gradient, and the error is arbitrary: on a CPU it is 8e-4 for float32 on the digits network and
9e-3 on ResNet-18, and 0.4 for bfloat16. For the smooth networks it is 4e-6 to 7e-6 and 5e-3 to
1.4e-2 there. The bounds follow these with a margin for other orders of summation; TF32 has three
bits more than bfloat16, so an eighth of its error or more. There is also a minimum error: below it,
the arithmetic is not the requested one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hpctrain.models import build
from hpctrain.parallel.device import torch_settings
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
    """Yield a result per network and precision."""
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
    """Compare the gradient on the case's device with the exact one."""
    found = gradient(case, pack, name, precision, case.device)
    least, most = BOUNDS[precision]
    return judged(what, distance(found, exact), least=least, most=most, n=ROWS)


def gradient(case: Case, pack: str, network: str, precision: str, device: str) -> torch.Tensor:
    """Return the gradient vector of one step on `device`, as float64 on the CPU."""
    flags = ["--data", pack, "--model", f"{__name__}:{network}", "--precision", precision]
    with torch_settings(precision):
        job = ready(case, *flags, "--batch-size", str(ROWS), "--normalize", "pack", device=device)
        job.trainer.step(first_batches(job)[0], ROWS)
        return job.trainer.message.gradients.double().cpu()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the distance of two vectors, relative to the norm of the second."""
    return float((found - exact).norm() / exact.norm())


def smooth(module: nn.Module) -> nn.Module:
    """Replace ReLU and max pooling of a network in place by smooth layers; return the network."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU):
            setattr(module, name, nn.Softplus())
        elif isinstance(child, nn.MaxPool2d):
            setattr(module, name, nn.AvgPool2d(child.kernel_size, child.stride, child.padding))
        else:
            smooth(child)
    return module


def digits(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build the smooth digits network."""
    return smooth(build("digits", image_shape, classes))


def resnet18(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build the smooth ResNet-18."""
    return smooth(build("resnet18", image_shape, classes))


def digits_float64(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build `digits` with the same weights as float64."""
    return digits(image_shape, classes).double()


def resnet18_float64(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build `resnet18` with the same weights as float64."""
    return resnet18(image_shape, classes).double()
