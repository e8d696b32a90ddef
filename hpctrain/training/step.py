"""One update of the weights, with the one communication of a step in it; its state.

    forward and backward of this rank's shards -> message -> sum over ranks -> update of the weights

What is added to the message of a step comes from its shards alone. After the sum all ranks hold the
same message, and each makes the same update. Gradients are added divided by the samples of the
global batch, or by the entries of their targets; where the task weighs samples, they are divided by
the sum of the weights once that is known, after the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
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
from hpctrain.training.average import Average
from hpctrain.training.checksum import tensor_checksum
from hpctrain.training.compute import make_backward
from hpctrain.training.library_optimizer import LibraryUpdate, Maker
from hpctrain.training.optimizer import FusedUpdate, clip_gradient, parameter_groups
from hpctrain.watchdog import waiting


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
        optimizer: Maker | None = None,
    ) -> None:
        """Lay out the message, compare layouts, and broadcast rank 0's weights. Collective.

        `shards` are those of each rank, `optimizer` that of --optimizer, if it is not a fused one.
        Raises UsageError, the same on all ranks, if they differ in what they compute with.
        """
        comm = transport.comm
        model = norms.model
        self.model = model
        self.norms = norms
        self.task = task
        with on_all(comm):
            groups = parameter_groups(model, config)
            message = Message(model, norms.channels, comm.rank, comm.size, groups, task.sums)
        self.message = message
        alike: dict[str, object] = {
            "hpctrain": __version__,
            "torch": torch.__version__,
            "the layout of the parameters": message.layout.digest(),
        }
        fixed = (pair for pair in model.named_parameters() if not pair[1].requires_grad)
        for name, tensor in (*model.named_buffers(), *fixed):
            alike[f"the model's {name}"] = int(tensor_checksum(tensor))
        is_fused = optimizer is None
        if config.deterministic or not is_fused:
            alike["the kind of hardware"] = hardware_key(message.device)
        if not is_fused:  # sums over a parameter are rounded by them
            alike["--threads"] = torch.get_num_threads()
        check_equal_on_all(comm, alike)
        with on_all(comm):
            self.backward = make_backward(model, task, message, config.compile, config.cuda_graphs)
        broadcast(comm, message.weights)
        in_order = shards if config.deterministic else None
        with on_all(comm):
            self.reduce = choose_reduce(
                comm, message, in_order, config.comm_dtype, transport, config.overlap
            )
        self.update: FusedUpdate | LibraryUpdate  # of the weights
        if optimizer is None:
            self.update = FusedUpdate(plan.optimizer, plan.learning_rate, config, message.groups)
        else:
            with on_all(comm):
                self.update = LibraryUpdate(optimizer, plan.learning_rate, message)
        self.clip_norm = config.clip_norm
        #: Number of steps that are started before the totals of one are read.
        self.in_flight = IN_FLIGHT[message.device.type]
        self.average: Average | None = None  # of --ema
        if config.ema:
            self.average = Average(message.weights.data, norms, config.ema)
        self.clock = Clock(message.device)

    def step(
        self,
        batches: list[Batch],
        total: int,
        rate: float | None = None,
        waited: float = 0.0,
        requests: Sequence[str] = (),
    ) -> Snapshot:
        """Update the weights from this rank's shards of a global batch. Collective.

        `total`: number of samples in the global batch. `rate`: learning rate (None = the
        optimizer's). The seconds that this rank `waited` for data and its `requests` are sent in
        the message, of which the totals are returned, being copied to the host. If the task weighs
        samples, the gradients are rescaled to the sum of the weights, by which torch's
        cross_entropy divides.

        A step with a nonfinite loss or gradient leaves weights and statistics unchanged, and so do
        the steps that follow before its totals are read. A step in which no entry of a target is
        known changes nothing either: no weight, no state of the optimizer, no running statistic.
        """
        message = self.message
        norms = self.norms
        clock = self.clock
        if rate is not None:
            self.update.set_rate(rate)
        clock.begin()
        divisor = total * self.task.entries
        message.zero()
        self.reduce.begin([batch.shard for batch in batches])
        for batch in batches:
            seed_torch(batch.key, message.device)  # dropout depends on the shard, not on the rank
            sums = self.backward(batch.images, batch.targets, divisor)
            rows = len(batch.targets)
            irregular = norms.collect(message.moments, rows, total)
            message.add_sums(rows, irregular, **sums)
            self.reduce.accumulate(batch.shard)
        message.request(*requests)
        clock.mark()
        message.set_seconds(clock.compute, waited)

        with waiting():
            self.reduce()  # the one communication of a step
        clock.mark()

        finite = message.finite(lasting=self.in_flight > 0)
        skipped = message.skipped
        if self.task.is_weighted:
            message.weigh_gradients(divisor)
        if self.task.has_unknown:
            finite &= message.weight() > 0
            skipped = torch.logical_not(finite).to(skipped.dtype)
        norms.merge(message.moments, total, finite)
        if self.clip_norm is not None:
            clip_gradient(message.gradients, self.clip_norm)
        self.update(skipped)
        reported = message.report()
        if self.average:
            self.average.update(skipped)
        return reported

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a run resumes from, by name, without copying.

        These are weights, optimizer state, running statistics and the average; and, prefixed with
        "model.", buffers other than running statistics, and frozen parameters.
        """
        tensors = {"weights": self.message.weights.data}
        tensors |= self.update.state()
        for name in ("running", "shift", "updates"):
            tensors[f"norms.{name}"] = getattr(self.norms, name)
        if self.average:
            tensors["ema.weights"] = self.average.weights
            tensors["ema.running"] = self.average.running
        for name, buffer in self.model.named_buffers():
            if not self.norms.owns(buffer):
                tensors[f"model.{name}"] = buffer
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                tensors[f"model.{name}"] = parameter.data
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `state` into those of the run, in place where there are such.

        Raises ValueError if one is missing, unknown, or of another shape or type.
        """
        restored = self.update.load(tensors)
        state = {name: held for name, held in self.state().items() if name not in restored}
        for name, tensor in tensors.items():
            if name in restored:
                continue
            mine = state.pop(name, None)
            if mine is None or (mine.shape, mine.dtype) != (tensor.shape, tensor.dtype):
                has = f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ValueError(f"the model has no place for the tensor {name!r}, {has}")
            mine.copy_(tensor)
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
        for name, tensor in self.state().items():
            if not name.startswith(held_twice):
                tensors[name] = tensor
        checksums = torch.stack([tensor_checksum(tensor) for tensor in tensors.values()])
        return dict(zip(tensors, checksums.tolist(), strict=True))

    def digest(self, figures: str) -> str:
        """Return the digest of a run (hex): model and optimizer state, chain of `figures`."""
        digest = hashlib.sha256()
        for name, tensor in self.state().items():
            if name.startswith("optimizer."):
                digest.update(as_bytes(tensor).numpy().data)
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(hashlib.sha256(as_bytes(tensor).numpy().data).digest())
        digest.update(figures.encode())
        return digest.hexdigest()

    def swap_average(self) -> None:
        """Exchange the average, if there is one, with the network in the model."""
        if self.average:
            self.average.swap()
        self.norms.restore()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the model be the average, if there is one, in the block."""
        self.swap_average()
        try:
            yield
        finally:
            self.swap_average()
