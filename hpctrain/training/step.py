"""train_step: one update of the weights, with the one communication of a step in it.

The README shows a training loop of one's own on the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from hpctrain.data.loader import Batch
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.device import seed_torch
from hpctrain.parallel.late import Clock
from hpctrain.parallel.message import Message, Report
from hpctrain.parallel.reduce import Reduce
from hpctrain.training.backward import Backward
from hpctrain.training.control import StepFlags
from hpctrain.training.optim import (
    UnusedParameters,
    clip_gradient,
    gate_update,
    set_learning_rate,
)

NETWORK = ("weights", "norms.running", "norms.updates")  # tensors that make a network


@dataclass
class Trainer:
    """What a step works on: the model and everything that is allocated once for it."""

    model: nn.Module
    message: Message
    norms: BatchNorms
    optimizer: torch.optim.Optimizer
    reduce: Reduce
    backward: Backward
    clip_norm: float | None = None
    skips_rows: bool = False  # a step may have fewer rows than it was planned with
    local_buffers: bool = False  # ranks may hold other buffers than batch norm's of their own
    segments: int = 0  # in which the reduction overlaps backward
    late: int = 0  # steps that are begun before the totals of one are read
    clock: Clock = field(init=False)
    unused: UnusedParameters = field(init=False)
    buffers: frozenset[str] = field(init=False)  # names of those that there are before a step

    def __post_init__(self) -> None:
        self.clock = Clock(self.message.device)
        self.unused = UnusedParameters(self.message, self.optimizer)
        self.buffers = frozenset(name for name, _ in self.model.named_buffers())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that steps change: weights, what the optimizer remembers, running statistics,
        which parameters are used. By name, where they lie.
        """
        found = {"weights": self.message.weights.data}
        memory = self.optimizer.state[self.message.weights]
        for name in sorted(memory):
            if isinstance(memory[name], torch.Tensor):
                found[f"optimizer.{name}"] = memory[name]
        norms = {name: getattr(self.norms, name) for name in ("running", "shift", "updates")}
        found |= {f"norms.{name}": tensor for name, tensor in norms.items()}
        return found | {"used": self.unused.used}

    def constants(self) -> dict[str, torch.Tensor]:
        """What no step changes unless --local-buffers lets it: frozen parameters, and buffers that
        are not batch norm's running statistics. By name, where they lie.
        """
        found = {n: b for n, b in self.model.named_buffers() if not self.norms.owns(b)}
        return found | {n: p.data for n, p in self.model.named_parameters() if not p.requires_grad}

    def state(self) -> dict[str, torch.Tensor]:
        """Both: what a run goes on from. Names from the model have "model." before them."""
        constants = {f"model.{name}": tensor for name, tensor in self.constants().items()}
        return self.tensors() | constants

    def close(self) -> None:
        """After the last step: let the reduction's hooks and thread go."""
        self.reduce.close()


def train_step(
    trainer: Trainer,
    batches: list[Batch],
    total: int,
    flags: StepFlags = StepFlags(),  # noqa: B008
    before_waiting: Callable[[], None] = lambda: None,
    rate: float | None = None,
) -> Report:
    """Update the weights from this rank's shards of a mini-batch of `total` rows, at the learning
    `rate` (None = the optimizer's). Collective.

    `flags` travel in the message; the report gives its totals, when they are asked for.
    `before_waiting` is called when this rank has done its part. Where bad rows were left out, the
    sum is scaled to the rows that there were.
    A step with a loss or gradient that is not finite leaves weights and statistics as they were;
    so do those that follow before its totals are read. So do all steps with a parameter until one
    gives it a gradient (`UnusedParameters`).
    """
    message, norms, clock = trainer.message, trainer.norms, trainer.clock
    if rate is not None:
        set_learning_rate(trainer.optimizer, rate)
    clock.begin()
    message.zero()
    trainer.reduce.begin([batch.shard for batch in batches])
    for batch in batches:
        seed_torch(batch.key, message.device)  # dropout belongs to the shard, not to the rank
        loss, correct = trainer.backward(batch.images, batch.targets, total)
        rows = len(batch.targets)
        irregular = norms.collect(message.moments, rows, total, batch.shard)
        message.add_counts(loss, correct, rows, irregular)
        trainer.reduce.accumulate(batch.shard)
    message.set_flags(flags.stop, flags.leave, flags.save)
    message.set_digest(flags.digest)
    message.set_seconds(clock.computed(), flags.waited)

    before_waiting()
    trainer.reduce()  # the one communication of a step
    clock.reduced()

    finite = message.finite(lasting=trainer.late > 0)
    counted = message.rescale(total) if trainer.skips_rows else total
    norms.merge(message.moments, counted, finite)
    if trainer.clip_norm is not None:
        clip_gradient(message.gradients, trainer.clip_norm)
    gate_update(trainer.optimizer, message.skipped)
    with trainer.unused.untouched(finite):
        trainer.optimizer.step()
    return message.report()
