"""Optimizers and learning-rate schedules by name, for one flat parameter.

The optimizers are torch's fused ones: one kernel for the whole vector, and an update that is gated
on the device. Where ``optimizer.found_inf``, a float32 tensor of no dimensions, is 1, ``step``
leaves weights, momenta and step counters as they were, and nothing waits for the host. Only the
value 1 closes the gate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hpctrain.config import Config


def make_optimizer(
    name: str, lr: float, config: Config, parameters: list[nn.Parameter]
) -> Optimizer:
    """The optimizer `name` at learning rate `lr`, the rest by `config`; see `set_learning_rate`.

    sgdm: v <- momentum v + g + weight_decay w, w <- w - lr v. adam and adamw: torch's defaults
    for the two decays (0.9, 0.999) and epsilon (1e-8).
    """
    decay = config.weight_decay
    if name == "adam":
        return Adam(parameters, lr=lr, weight_decay=decay, fused=True)
    if name == "adamw":
        return AdamW(parameters, lr=lr, weight_decay=decay, fused=True)
    optimizer = SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=decay, fused=True)
    if config.momentum:
        # Without this, a gated first step leaves torch's new momentum buffer uninitialised, and
        # the second step adds it to the weights.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def learning_rate(config: Config, lr: float, step: int, steps_per_epoch: int, epochs: int) -> float:
    """The learning rate of global step 0, 1, ... when the schedule starts from `lr`."""
    if config.schedule == "cosine":
        progress = min(step / (steps_per_epoch * epochs), 1.0)
        return lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "step":
        return lr * config.step_factor ** (step // steps_per_epoch // config.step_epochs)
    return lr


def warm_up(step: int, steps: int, first: float) -> float:
    """The share of the learning rate in global step 0, 1, ...: from `first` to 1 in `steps`."""
    return 1.0 if step >= steps else first + (1 - first) * step / steps


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gate_update(optimizer: Optimizer, skipped: Tensor) -> None:
    """Let the next `step` change nothing where `skipped`, a number on the device, is 1."""
    # torch's own GradScaler sets this attribute; its type stubs do not know it.
    optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]


def clip_gradient(flat_gradient: Tensor, max_norm: float) -> Tensor:
    """Scale the gradient in place to at most `max_norm` (L2) and return the norm it had.

    Both stay on the device. Partial norms of 4096 values are summed in float64: one float32 sum
    over the 25 million gradients of a ResNet-50 is off by 1e-3.
    """
    even = flat_gradient.numel() // 4096 * 4096
    parts = torch.linalg.vector_norm(flat_gradient[:even].view(-1, 4096), dim=1)
    rest = torch.linalg.vector_norm(flat_gradient[even:])
    norm = torch.linalg.vector_norm(torch.cat([parts, rest[None]]), dtype=torch.float64)
    norm = norm.to(flat_gradient.dtype)
    flat_gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
