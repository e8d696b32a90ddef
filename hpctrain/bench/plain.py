"""The peer's training step, in plain torch: what hpctrain's step is measured against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # images, labels -> loss


def plain_step(
    model: nn.Module,
    precision: str,
    fused: bool | None = True,
    foreach: bool | None = None,
    weight_decay: float = 0.0,
) -> Step:
    """A step of SGD with momentum on `model`, wrapped or not, in "fp32", "tf32" or "bf16"; TF32 is
    a setting of the process.
    """
    optimizer = torch.optim.SGD(
        model.parameters(), 0.01, 0.9, weight_decay=weight_decay, fused=fused, foreach=foreach
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, precision == "bf16"):
            scores = model(images)
        loss = F.cross_entropy(scores.float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step
