"""Exponential moving average of the network, ``--ema``.

    average <- decay average + (1 - decay) weights

after every update of the weights (Polyak and Juditsky 1992; Tarvainen and Valpola
2017, arXiv:1703.01780). It begins with the weights before the first step and sends no message:
equal weights on all ranks have equal averages. Running statistics of batch norm are averaged in the
same way, as in timm's ModelEmaV3. Other buffers are those of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.message import Message


class Average:
    """The average of the weights and running statistics of one trainer."""

    def __init__(self, message: Message, norms: BatchNorms, decay: float) -> None:
        self._message, self._norms, self._decay = message, norms, decay
        self.weights, self.running = (tensor.clone() for tensor in self._network())

    def _network(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._message.weights.data, self._norms.running

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step; nothing changes if that step was skipped."""
        share = (1 - self._decay) * (1 - self._message.skipped)
        for own, current in zip((self.weights, self.running), self._network(), strict=True):
            own.lerp_(current, share)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average with the network in the model."""
        for own, current in zip((self.weights, self.running), self._network(), strict=True):
            kept = current.clone()
            current.copy_(own)
            own.copy_(kept)
        self._norms.restore()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Let the model be the average in the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
