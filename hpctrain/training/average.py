"""The exponential average of a network, --ema."""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.parallel.batchnorm import BatchNorms


class Average:
    """An exponential average of the weights and of the running statistics.

        average <- decay average + (1 - decay) weights

    after every update of the weights (Polyak and Juditsky 1992; Tarvainen and Valpola 2017,
    arXiv:1703.01780). The average begins with the weights before the first step and sends no
    message: equal weights on all ranks have equal averages. Running statistics are averaged in the
    same way, as in timm's ModelEmaV3. Other buffers are those of the network.
    """

    def __init__(self, weights: Tensor, norms: BatchNorms, decay: float) -> None:
        self.weights = weights.clone()
        self.running = norms.running.clone()
        self._pairs = ((self.weights, weights), (self.running, norms.running))
        self._decay = decay

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Average the network; nothing changes if `skipped` (), of this step, is 1."""
        share = (1 - self._decay) * (1 - skipped)
        for average, current in self._pairs:
            average.lerp_(current, share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average with the network."""
        for average, current in self._pairs:
            before = current.clone()
            current.copy_(average)
            average.copy_(before)
