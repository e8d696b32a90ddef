"""What a step computes: gradients by forward and backward, and the update of the weights.

    Eager     kernel by kernel, or as torch.compile made them (--compile)
    Graphs    the kernels of both recorded once for every shape and then launched together
              (--graphs): where a batch is small, a GPU otherwise waits for the host

All ways add the gradients of loss / total to the message.

The optimizers are torch's fused ones: one kernel for the whole vector, and an update that is gated
on the device. Where ``optimizer.found_inf``, a float32 tensor of no dimensions, is 1, ``step``
leaves weights, momenta and step counters as they were, and nothing waits for the host. Only the
value 1 closes the gate.

Parameters that no gradient has reached yet are left alone. torch skips a parameter whose `.grad` is
None. Here all parameters are one vector with one gradient, in which weight decay would shrink what
no loss depends on. So a parameter counts as used from the first step on whose gradient, summed over
all ranks, is not zero; then it is for good, since layers that are left out of some steps
(stochastic depth) shall not stand still in these. Until then the weights are put back after each
step and the optimizer's state of them is zero.

Which are used is found on the device. The host learns it late and without waiting: from then on
nothing is done for these any more, which after the first steps of most networks are all.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hpctrain.config import Config
from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.parallel.message import Message
from hpctrain.plan import Plan
from hpctrain.streams import GraphRecorder, Snapshot

Pair = tuple[Tensor, Tensor]  # sum of the rows' losses, number of correct rows, on the device
# model, inputs (n, C, H, W), targets
Loss = Callable[[nn.Module, Tensor, Tensor], Pair]
# inputs, targets and rows of the whole mini-batch; adds the gradients to the message
Backward = Callable[[Tensor, Tensor, int], Pair]

WARM = 3  # batches of a shape before it is recorded: libraries choose their algorithms in these
MOST_GRAPHS = 8  # shapes; a run has few: whole batches, and those that end an epoch


class Eager:
    """Launches forward and backward kernel by kernel."""

    def __init__(self, model: nn.Module, loss: Loss, message: Message) -> None:
        self._model, self._loss, self._message = model, loss, message
        self._shares: dict[int, Tensor] = {}  # 1 / total: a run has two totals

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """As in Backward."""
        loss, correct = self._loss(self._model, inputs, targets)
        if total not in self._shares:
            self._shares[total] = torch.full_like(loss, 1 / total, requires_grad=False)
        # As of loss / total, which would be two operations. As an argument of backward it would
        # import the compiler's symbolic shapes.
        share = self._shares[total]
        loss.register_hook(lambda ones: share)
        loss.backward()
        self._message.add_gradients()
        return loss.detach(), correct


class Compiled(Eager):
    """The same with what torch.compile makes of the model, for every shape on its own: what runs
    shall not depend on which shape came first.
    """

    def __init__(self, model: nn.Module, loss: Loss, message: Message) -> None:
        # The compiler has a switch of its own, which torch_settings does not import it to set.
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
        # Graphs of its own would take --graphs' place, whatever the environment says.
        made = torch.compile(model, dynamic=False, options={"triton.cudagraphs": False})
        super().__init__(cast(nn.Module, made), loss, message)

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """As in Backward. RunError where torch cannot compile the model."""
        try:
            return super().__call__(inputs, targets, total)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            text = f"--compile: torch cannot compile this model here: {first_line(cause)}"
            raise RunError(text) from error


class Graphs:
    """Records forward and backward of every shape that comes often, and replays them."""

    def __init__(self, backward: Backward, record: GraphRecorder) -> None:
        self._backward, self._record = backward, record
        self._seen: Counter[tuple] = Counter()
        # by shape: inputs and targets that the graph reads, what it computes, its launch
        self._graphs: dict[tuple, tuple[Pair, Pair, Callable[[], None]]] = {}

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """As in Backward; the results are overwritten by the next call. RunError where the work
        cannot be recorded, for example because it reads a number from the device.
        """
        shape = *((t.shape, t.stride(), t.dtype) for t in (inputs, targets)), total
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= WARM or len(self._graphs) == MOST_GRAPHS:
                return self._record.warm_up(partial(self._backward, inputs, targets, total))
            own = inputs.clone(), targets.clone()  # strides are kept
            try:
                graph = self._record(partial(self._backward, *own, total))
            except RuntimeError as error:
                # The error at the end of a recording hides the operation that broke it.
                words = first_line(error.__context__ or error)
                raise RunError(
                    f"--graphs: this network's step cannot be recorded: {words}; do without"
                ) from error
            self._graphs[shape] = (own, *graph)
        own, found, launch = self._graphs[shape]
        for buffer, tensor in zip(own, (inputs, targets), strict=True):
            buffer.copy_(tensor)
        launch()
        return found


def make_backward(
    model: nn.Module, loss: Loss, message: Message, compiled: bool, graphs: bool
) -> Backward:
    """How a run computes gradients. UsageError for graphs without a GPU, and on CPUs for compiling
    without a compiler.
    """
    device = message.device
    if graphs and device.type != "cuda":
        raise UsageError("--graphs is for GPUs: this rank computes on the CPU")
    compiler = os.environ.get("CXX", "g++")  # as torch.compile looks for it
    if compiled and device.type == "cpu" and shutil.which(compiler) is None:
        raise UsageError(
            f"--compile needs a C++ compiler on CPUs, and there is no {compiler}: install it, or"
            " name another in CXX"
        )
    backward = (Compiled if compiled else Eager)(model, loss, message)
    return Graphs(backward, GraphRecorder(device)) if graphs else backward


def make_optimizer(
    name: str, lr: float, config: Config, parameters: list[nn.Parameter]
) -> Optimizer:
    """The optimizer `name` at learning rate `lr`, the rest by `config`; see `set_learning_rate`.

    sgdm: v <- momentum v + g + weight_decay w, w <- w - lr v. adam and adamw: torch's defaults
    for the two decays (0.9, 0.999) and epsilon (1e-8).
    """
    common = {"lr": lr, "weight_decay": config.weight_decay, "fused": True}
    if name == "adam":
        return _without_compiler(Adam)(parameters, **common)
    if name == "adamw":
        return _without_compiler(AdamW)(parameters, **common)
    optimizer = _without_compiler(SGD)(parameters, momentum=config.momentum, **common)
    if config.momentum:
        # Without this, a gated first step leaves torch's new momentum buffer uninitialised, and
        # the second step adds it to the weights.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _without_compiler(kind: type[Optimizer]) -> type[Any]:
    """The optimizer without torch's decorators, which import the compiler in each rank, also where
    nothing is compiled: that takes longer than to import torch itself.
    """
    step, add = torch.no_grad()(inspect.unwrap(kind.step)), inspect.unwrap(kind.add_param_group)
    return type(kind.__name__, (kind,), {"step": step, "add_param_group": add})


def learning_rate(config: Config, plan: Plan, step: int) -> float:
    """The learning rate of global step 0, 1, ...: the plan's, times the schedule's factor, times a
    warm-up that rises linearly from `warmup_from` to 1.
    """
    factor, epoch = 1.0, step // plan.steps_per_epoch
    if config.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * min(step / plan.steps, 1.0)))
    elif config.schedule == "step":
        factor = config.step_factor ** (epoch // config.step_epochs)
    warm = 1.0
    if step < plan.warmup_steps:
        warm = plan.warmup_from + (1 - plan.warmup_from) * step / plan.warmup_steps
    return plan.learning_rate * factor * warm


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


class UnusedParameters:
    """Keeps the parameters of one message as they are until a gradient reaches them."""

    def __init__(self, message: Message, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` updates the weights of `message`."""
        self._message, self._optimizer = message, optimizer
        segments = message.layout.segments
        self._spans = [segment.span for segment in segments]
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
        if self._left:
            self._sent = self._sent or Snapshot(self.used)
        if self._sent and self._sent.arrived:
            used, self._sent = self._sent.numbers(), None
            self._left = [i for i in self._left if not used[i]]
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

    def names(self) -> list[str]:
        """The parameters that no gradient has reached (waits for the device)."""
        segments = zip(self._message.layout.segments, self.used.tolist(), strict=True)
        return [segment.name for segment, used in segments if not used]
