"""What tasks share whose targets have several entries a sample, of which some may be unknown.

Targets are floats (n, K), NaN where unknown. The loss of a sample is the mean over its known
entries, and its weight is their number: the loss of a batch is a mean over all known entries,
whichever samples they belong to. With losses l_ik of sample i and entry k, and k known in i,

    loss = sum_ik l_ik / sum_i n_i,    n_i = number of known entries of sample i

The divisor is known only after the sum over ranks. Until then gradients are divided by all entries
of the global batch, known or not, so that they are of the size that they will have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hpctrain.parallel.message import WEIGHT_BLOCK, WEIGHT_BLOCKS
from hpctrain.tasks.task import Task


def is_known(targets: Tensor) -> Tensor:
    """Return which entries (n, K) of targets are known, as bool."""
    return ~targets.isnan()


@dataclass(frozen=True)
class EntriesTask(Task):
    """Base class of tasks with targets (n, K), NaN where unknown, and outputs (n, K)."""

    names: tuple[str, ...] = ()  # of the K entries

    sums: ClassVar[Mapping[str, type]] = {WEIGHT_BLOCKS: int}
    has_unknown: ClassVar[bool] = True

    @property
    def is_weighted(self) -> bool:
        return True

    @property
    def entries(self) -> int:
        return len(self.names)

    @abstractmethod
    def entry_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (n, K) of entries, for targets without NaN."""

    def known_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (n, K) of entries, 0 where they are unknown, and so is the gradient."""
        known = is_known(targets)
        losses = self.entry_losses(outputs, torch.where(known, targets, 0))
        return torch.where(known, losses, 0)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the known entries of each sample, (n,); 0 without any."""
        total = self.known_losses(outputs, targets).sum(1)
        return total / self.weights(targets).clamp(min=1)

    def weights(self, targets: Tensor) -> Tensor:
        """Return the number of known entries of each sample, (n,) int64."""
        return is_known(targets).sum(1)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss:
            return super().loss_sum(outputs, targets)
        return self.known_losses(outputs, targets).sum()

    def own_targets(self, targets: Tensor) -> Tensor:
        """Return the targets; those of samples of which nothing is known are 0.

        Such a sample has no weight in the loss. With NaN in all entries, a mean over the known ones
        would be 0 / 0, whose gradient is NaN whatever its weight.
        """
        return torch.where(is_known(targets).any(1, keepdim=True), targets, 0)

    def weight_sum(self, weights: Tensor) -> Tensor:
        """Return the sum of the weights modulo `WEIGHT_BLOCK`, which float32 holds exactly."""
        return weights.sum() % WEIGHT_BLOCK

    def named_sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {WEIGHT_BLOCKS: is_known(targets).sum() // WEIGHT_BLOCK}
