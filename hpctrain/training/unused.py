"""Parameters that no gradient has reached yet, and that the optimizer therefore leaves alone.

torch skips a parameter whose `.grad` is None. Here all parameters are one vector with one gradient,
in which weight decay would shrink what no loss depends on. So a parameter counts as used from the
first step on whose gradient, summed over all ranks, is not zero; then it is for good, since layers
that are left out of some steps (stochastic depth) shall not stand still in these. Until then the
weights are put back after each step and what the optimizer remembers of them is zero.

Which are used is found on the device. The host learns it late and without waiting: from then on
nothing is done for these any more, which after the first steps of most networks are all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpctrain.parallel.late import Snapshot
from hpctrain.parallel.message import Message


class UnusedParameters:
    """Keeps the parameters of one message as they are until a gradient reaches them."""

    def __init__(self, message: Message, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` updates the weights of `message`."""
        self._message, self._optimizer = message, optimizer
        segments = message.layout.segments
        self._spans = [slice(s.offset, s.offset + s.shape.numel()) for s in segments]
        self.used = torch.zeros(len(segments), dtype=torch.bool, device=message.device)
        self._flags = self.used.unbind()
        self._left = list(range(len(segments)))  # which the host does not know to be used
        self._sent: Snapshot | None = None  # of `used`

    @contextmanager
    def untouched(self, finite: torch.Tensor) -> Iterator[None]:
        """Undo what an update in the block does to parameters that no gradient reached so far. The
        message holds the sum of this step; `finite`, a bool on the device: whether it counts.
        """
        for i in self._left:
            reached = self._message.gradients[self._spans[i]].any()
            self._flags[i].logical_or_(reached.logical_and_(finite))
        self._look()
        if not self._left:
            yield
            return
        weights = self._message.weights.data
        decays = any(group["weight_decay"] for group in self._optimizer.param_groups)
        before = {i: weights[self._spans[i]].clone() for i in self._left if decays}
        yield
        state = self._optimizer.state[self._message.weights].values()
        vectors = [tensor for tensor in state if tensor.shape == weights.shape]
        for i, old in before.items():
            span, used = self._spans[i], self._flags[i]
            weights[span].copy_(torch.where(used, weights[span], old))
            for vector in vectors:
                vector[span].masked_fill_(~used, 0)

    def _look(self) -> None:
        if not self._left:
            return
        self._sent = self._sent or Snapshot(self.used)
        if self._sent.arrived:
            used, self._sent = self._sent.numbers(), None
            self._left = [i for i in self._left if not used[i]]

    def names(self) -> list[str]:
        """The parameters that no gradient has reached (waits for the device)."""
        segments = zip(self._message.layout.segments, self.used.tolist(), strict=True)
        return [segment.name for segment, used in segments if not used]
