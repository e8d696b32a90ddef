"""The trainer: one update of the weights, with the one communication of a step in it; its state.

A digest identifies all bits of a run's state. Before each checkpoint and validation, and at the
end, each rank reduces each of its tensors to a 64-bit checksum on its device, and all ranks compare
a hash of these (`compare_ranks`).

The figures of all steps and evaluations are chained into a hash; together with the saved network
they give the digest at the end of a run. These hashes are SHA-256 (FIPS 180-4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain import __version__
from hpctrain.config import Config
from hpctrain.data.loader import Batch
from hpctrain.models import as_bytes
from hpctrain.numerics import seed_torch
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.device import hardware_key
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import check_equal_on_all, on_all
from hpctrain.parallel.overlap import choose_reduce
from hpctrain.parallel.reduce import broadcast
from hpctrain.parallel.transport import Transport
from hpctrain.plan import Plan
from hpctrain.streams import IN_FLIGHT, Clock, Snapshot
from hpctrain.tasks.task import Task
from hpctrain.training.compute import make_backward
from hpctrain.training.optimizer import (
    clip_gradient,
    gate_update,
    make_optimizer,
    parameter_groups,
)

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by element size; others: int64
FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd; 2^64 / golden ratio, so that multiples look random
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # words: 512 KiB of int64 stay in a core's cache


class Trainer:
    """The model, and everything that is allocated once for its training steps."""

    def __init__(
        self,
        norms: BatchNorms,
        task: Task,
        config: Config,
        plan: Plan,
        transport: Transport,
        shards: Sequence[range],
    ) -> None:
        """Lay out the message, compare layouts, and broadcast rank 0's weights. Collective.

        `shards` are those of each rank. Raises UsageError, the same on all ranks, if they differ in
        what they compute with.
        """
        comm, model = transport.comm, norms.model
        self.model = model
        self.norms = norms
        self.task = task
        with on_all(comm):
            groups = parameter_groups(model, config)
            self.message = message = Message(
                model, norms.channels, comm.rank, comm.size, groups, task.sums
            )
        alike: dict[str, object] = {
            "hpctrain": __version__,
            "torch": torch.__version__,
            "the layout of the parameters": message.layout.digest(),
        }
        fixed = (pair for pair in model.named_parameters() if not pair[1].requires_grad)
        for name, tensor in (*model.named_buffers(), *fixed):
            alike[f"the model's {name}"] = int(tensor_checksum(tensor))
        if config.deterministic:
            alike["the kind of hardware"] = hardware_key(message.device)
        check_equal_on_all(comm, alike)
        with on_all(comm):
            self.backward = make_backward(model, task, message, config.compile, config.cuda_graphs)
        broadcast(comm, message.weights)
        in_order, dtype = shards if config.deterministic else None, config.comm_dtype
        with on_all(comm):
            self.reduce = choose_reduce(comm, message, in_order, dtype, transport, config.overlap)
        self.optimizer = make_optimizer(plan.optimizer, plan.learning_rate, config, message.groups)
        self.clip_norm = config.clip_norm
        #: Number of steps that are started before the totals of one are read.
        self.in_flight = IN_FLIGHT[message.device.type]
        self.decay, network = config.ema or 0.0, (message.weights.data, norms.running)
        #: Averages of --ema, and what they are averages of: weights, running statistics.
        self.averages = tuple((t.clone(), t) for t in network) if config.ema else ()
        self.clock = Clock(message.device)

    def step(
        self,
        batches: list[Batch],
        total: int,
        rate: float | None = None,
        waited: float = 0.0,
        requests: Sequence[str] = (),
        before_waiting: Callable[[], None] = lambda: None,
    ) -> Snapshot:
        """Update the weights from this rank's shards of a global batch. Collective.

        `total`: number of samples in the global batch. `rate`: learning rate (None = the
        optimizer's). The seconds that this rank `waited` for data and its `requests` are sent in
        the message, of which the totals are returned, being copied to the host. `before_waiting` is
        called when this rank has finished its part. If the task weighs samples, the gradients are
        rescaled to the sum of the weights, by which torch's cross_entropy divides.

        A step with a nonfinite loss or gradient leaves weights and statistics unchanged, and so do
        the steps that follow before its totals are read.
        """
        message, norms, clock = self.message, self.norms, self.clock
        if rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_scale"]
        clock.begin()
        message.zero()
        self.reduce.begin([batch.shard for batch in batches])
        for batch in batches:
            seed_torch(batch.key, message.device)  # dropout depends on the shard, not on the rank
            sums = self.backward(batch.images, batch.targets, total)
            rows = len(batch.targets)
            irregular = norms.collect(message.moments, rows, total)
            message.add_sums(rows, irregular, **sums)
            weights = self.task.weights(batch.targets)
            if weights is not None:
                message.scalar["weight"].add_(weights.sum())
            self.reduce.accumulate(batch.shard)
        message.request(*requests)
        clock.mark()
        message.set_seconds(clock.compute, waited)

        before_waiting()
        self.reduce()  # the one communication of a step
        clock.mark()

        finite = message.finite(lasting=self.in_flight > 0)
        if self.task.is_weighted:
            message.weigh_gradients(total)
        norms.merge(message.moments, total, finite)
        if self.clip_norm is not None:
            clip_gradient(message.gradients, self.clip_norm)
        gate_update(self.optimizer, message.skipped)
        self.optimizer.step()
        reported = message.report()
        if self.averages:
            self.update_averages()
        return reported

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a run resumes from, by name, without copying.

        These are weights, optimizer state, running statistics and the average; and, prefixed with
        "model.", buffers other than running statistics, and frozen parameters.
        """
        found = {"weights": self.message.weights.data}
        for number, (weights, _) in enumerate(self.message.groups):
            group = f"{number}." if len(self.message.groups) > 1 else ""
            for name, value in sorted(self.optimizer.state[weights].items()):
                found[f"optimizer.{group}{name}"] = value
        found |= {f"norms.{n}": getattr(self.norms, n) for n in ("running", "shift", "updates")}
        if self.averages:
            found["ema.weights"], found["ema.running"] = (own for own, _ in self.averages)
        model = {n: b for n, b in self.model.named_buffers() if not self.norms.owns(b)}
        model |= {n: p.data for n, p in self.model.named_parameters() if not p.requires_grad}
        return found | {f"model.{name}": tensor for name, tensor in model.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `state` into those of the run, in place.

        Raises ValueError if one is missing, unknown, or of another shape or type.
        """
        state = self.state()
        for name, tensor in tensors.items():
            own = state.pop(name, None)
            if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                has = f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ValueError(f"the model has no place for the tensor {name!r}, {has}")
            own.copy_(tensor)
        if state:
            raise ValueError(f"it lacks the tensor {next(iter(state))!r}")
        self.norms.restore()

    def checksums(self) -> dict[str, int]:
        """Return the checksum of each tensor that must be equal on all ranks, by name.

        These are parameters, buffers, optimizer state and the average. Waits for the device.
        """
        self.norms.restore()  # the buffers may hold the statistics of an earlier step
        tensors = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        held_twice = ("weights", "norms.running", "norms.updates", "model.")
        tensors |= {n: t for n, t in self.state().items() if not n.startswith(held_twice)}
        found = torch.stack([tensor_checksum(tensor) for tensor in tensors.values()])
        return dict(zip(tensors, found.tolist(), strict=True))

    def digest(self, figures: str) -> str:
        """Return the digest of a run (hex): model and optimizer state, chain of `figures`."""
        found = hashlib.sha256()
        for name, tensor in self.state().items():
            if name.startswith("optimizer."):
                found.update(as_bytes(tensor).numpy().data)
        for name, tensor in sorted(self.model.state_dict().items()):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(hashlib.sha256(as_bytes(tensor).numpy().data).digest())
        found.update(figures.encode())
        return found.hexdigest()

    @torch.no_grad()
    def update_averages(self) -> None:
        """Average the network exponentially, ``--ema``; nothing changes if the step was skipped.

            average <- decay average + (1 - decay) weights

        after every update of the weights (Polyak and Juditsky 1992; Tarvainen and Valpola 2017,
        arXiv:1703.01780). The average begins with the weights before the first step and sends no
        message: equal weights on all ranks have equal averages. Running statistics are averaged in
        the same way, as in timm's ModelEmaV3. Other buffers are those of the network.
        """
        share = (1 - self.decay) * (1 - self.message.skipped)
        for average, current in self.averages:
            average.lerp_(current, share)

    @torch.no_grad()
    def swap_averages(self) -> None:
        """Exchange the average, if there is one, with the network in the model."""
        for average, current in self.averages:
            kept = current.clone()
            current.copy_(average)
            average.copy_(kept)
        self.norms.restore()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model be the average, if there is one, in the block."""
        self.swap_averages()
        try:
            yield
        finally:
            self.swap_averages()


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return the sum over i of word i x ((i x FACTOR) | 1), modulo 2^64, as an int64 on the device.

    The words are the bits of the elements, in the order of `flatten`. The order of additions does
    not matter, since they are integers. The factors are odd, so a single word that differs always
    changes the sum; several cancel with a probability of about 2^-64.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    words = flat.view(WORDS.get(flat.element_size(), torch.int64))
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = AT_ONCE[tensor.device.type]
    for start in range(0, len(words), step):
        part = words[start : start + step]
        places = torch.arange(start, start + len(part), device=tensor.device)
        found += places.mul_(FACTOR).bitwise_or_(1).mul_(part).sum()
    return found
