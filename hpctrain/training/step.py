"""train_step: one update of the weights, with the one communication of a step in it.

The README shows a training loop of one's own on the same parts.

A digest stands for all bits of a run. Every `--digest-every` steps each rank
sums its weights, optimizer state and running statistics up to 64 bits, on its device, so that
nothing waits; a 24-bit part of that crosses in its slot of the next step's message, and a rank that
differs is named. Rank 0 records its digest.

The figures of all steps and evaluations are chained into a hash; together with the saved network
that is the digest at the end of a run. These are SHA-256 (FIPS 180-4).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hpctrain.data.loader import Batch
from hpctrain.errors import RunError
from hpctrain.models import as_bytes
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.device import seed_torch
from hpctrain.parallel.message import Message, Report
from hpctrain.parallel.reduce import Reduce
from hpctrain.streams import Clock
from hpctrain.training.compute import (
    Backward,
    UnusedParameters,
    clip_gradient,
    gate_update,
    set_learning_rate,
)
from hpctrain.training.control import StepFlags

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
    in_flight: int = 0  # steps that are begun before the totals of one are read
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
    message.set_flags(flags.stop, flags.preempted, flags.save)
    message.set_digest(flags.digest)
    message.set_seconds(clock.computed(), flags.waited)

    before_waiting()
    trainer.reduce()  # the one communication of a step
    clock.reduced()

    finite = message.finite(lasting=trainer.in_flight > 0)
    counted = message.rescale(total) if trainer.skips_rows else total
    norms.merge(message.moments, counted, finite)
    if trainer.clip_norm is not None:
        clip_gradient(message.gradients, trainer.clip_norm)
    gate_update(trainer.optimizer, message.skipped)
    with trainer.unused.untouched(finite):
        trainer.optimizer.step()
    return message.report()


SLOT_VALUES = 2**24 - 1  # whole numbers above zero that a float32 slot holds exactly
CHANGED = 2**24
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd; 2^64 / golden ratio, so that multiples look random
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # words: 512 KiB of int64 stay in a core's cache


def hash_tensors(tensors: Iterable[torch.Tensor]) -> Any:
    """SHA-256 of their bytes, one after another."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(as_bytes(tensor).numpy().data)
    return found


def rank_digest(trainer: Trainer) -> torch.Tensor:
    """Of what all ranks must hold alike, weights, optimizer, running statistics, buffers and frozen
    parameters: an int64 on the device.
    """
    own = own_tensors(trainer)
    found = torch.zeros((), dtype=torch.int64, device=trainer.message.device)
    for name, tensor in trainer.state().items():
        if name not in own:
            found = found * FACTOR + checksum(tensor)
    return found


def own_tensors(trainer: Trainer) -> set[str]:
    """Names of what a rank may hold of its own, in `Trainer.state` and among all buffers."""
    norms, own = trainer.norms, set()
    if norms.mode == "local":
        own = {"norms.running", "norms.shift", "norms.updates"}
    for name, buffer in trainer.model.named_buffers():
        may_differ = norms.mode == "local" if norms.owns(buffer) else trainer.local_buffers
        if may_differ or name not in trainer.buffers:
            own.add(f"model.{name}")
    return own


def tensor_digests(trainer: Trainer) -> dict[str, int]:
    """The same tensor by tensor, weights by their parameters; waits for the device."""
    model, tensors = trainer.model, trainer.tensors()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in NETWORK}
    named = (*model.named_parameters(), *model.named_buffers())
    tensors |= {f"model.{name}": tensor for name, tensor in named}
    own = own_tensors(trainer)
    return {name: int(checksum(t)) for name, t in tensors.items() if name not in own}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over i of word i x ((i x FACTOR) | 1), modulo 2^64, of the tensor's words as they lie: an
    int64 on its device. Integers, so the order of addition does not matter; the factors are odd, so
    a single word that differs always shows, and several cancel by a chance of about 2^-64.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    words = flat.view(WORDS[flat.element_size()])
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = AT_ONCE[tensor.device.type]
    for start in range(0, len(words), step):
        part = words[start : start + step]
        places = torch.arange(start, start + len(part), device=tensor.device)
        found += places.mul_(FACTOR).bitwise_or_(1).mul_(part).sum()
    return found


def slot_value(digest: torch.Tensor, changed: torch.Tensor | None = None) -> torch.Tensor:
    """The part of a digest that crosses in a slot: 1 ... 2^24 - 1; 0 is "none in this step", and
    CHANGED means that a rank's replay found what must not change, a bool.
    """
    value = digest.remainder(SLOT_VALUES) + 1
    return value if changed is None else torch.where(changed, CHANGED, value)


def as_hex(digest: int) -> str:
    """A digest as it is recorded: 16 digits."""
    return f"{digest % 2**64:016x}"


def check_digests(values: list[int], step: int) -> None:
    """RunError that names the ranks whose digest after `step` is not that of most ranks."""
    (usual, count), *others = Counter(values).most_common()
    if not others:
        return
    cause = "a fault of memory or GPU there, or something that changes the model outside the step"
    if 2 * count <= len(values):
        found = ", ".join(f"{value:06x}" for value in values)
        raise RunError(
            f"after step {step} the ranks did not hold the same weights (digests by rank: {found}),"
            f" and no more than half agree: {cause}"
        )
    odd = [rank for rank, value in enumerate(values) if value != usual]
    names = ", ".join(map(str, odd))
    raise RunError(
        f"after step {step} rank{'s' if len(odd) > 1 else ''} {names} of {len(values)} held"
        f" other weights than the rest (digest {values[odd[0]]:06x}, not {usual:06x}): {cause}"
    )


def chain(before: str, figures: Mapping[str, Any]) -> str:
    """The next link of the chain over a run's figures: hash of the last link and of `figures`."""
    return hashlib.sha256(f"{before}{json.dumps(figures, sort_keys=True)}".encode()).hexdigest()


def run_digest(trainer: Trainer, figures: str) -> str:
    """Of a whole run (hex): weights and buffers by name, optimizer state, the chain of figures."""
    memory = (t for name, t in trainer.tensors().items() if name.startswith("optimizer."))
    found = hash_tensors(memory)
    for name, tensor in sorted(trainer.model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(hash_tensors([tensor]).digest())
    found.update(figures.encode())
    return str(found.hexdigest())
