"""The computation of a step: gradients by forward and backward, and the update of the weights.

    Eager     kernels launched one by one
    Compiled  the same with the kernels of torch.compile (--compile)
    Graphs    the kernels of either recorded once per shape and then launched together (--graphs):
              with small batches, a GPU otherwise waits for the host

Each of them adds the gradients of loss / total to the message.

The optimizers are torch's fused ones: one kernel for the whole vector, and an update that can be
skipped on the device. If ``optimizer.found_inf``, a zero-dimensional float32 tensor, is 1, ``step``
leaves weights, momenta and step counters unchanged, without synchronizing with the host. Only the
value 1 skips the update.

Parameters that have not received a gradient yet are not updated. torch skips a parameter whose
`.grad` is None. Here all parameters are one vector with one gradient, in which weight decay would
shrink parameters that no loss depends on. A parameter therefore counts as used from the first step
in which its gradient, summed over all ranks, is not zero. It then stays used, so that layers which
are left out of some steps (stochastic depth) are updated in those steps too. Until then its weights
are restored after each step and its optimizer state is zero.

Usage is determined on the device and copied to the host asynchronously. Parameters that the host
knows to be used need no further work; after the first steps of most networks these are all.
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

Pair = tuple[Tensor, Tensor]  # sum of the samples' losses, number of correct ones, on the device
# model, inputs (n, C, H, W), targets
Loss = Callable[[nn.Module, Tensor, Tensor], Pair]
# inputs, targets and number of samples in the global batch; adds the gradients to the message
Backward = Callable[[Tensor, Tensor, int], Pair]

WARM = 3  # batches of a shape before it is recorded, in which libraries choose their algorithms
MOST_GRAPHS = 8  # shapes; a run has few: full batches, and the last ones of an epoch


class Eager:
    """Launches forward and backward kernel by kernel."""

    def __init__(self, model: nn.Module, loss: Loss, message: Message) -> None:
        self._model, self._loss, self._message = model, loss, message
        self._shares: dict[int, Tensor] = {}  # 1 / total, for the two totals that a run has

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """Compute the gradients; see `Backward`."""
        loss, correct = self._loss(self._model, inputs, targets)
        if total not in self._shares:
            self._shares[total] = torch.full_like(loss, 1 / total, requires_grad=False)
        # Same as the gradient of loss / total, which would take two operations. Passing it to
        # backward() would import the compiler's symbolic shapes.
        share = self._shares[total]
        loss.register_hook(lambda ones: share)
        loss.backward()
        self._message.add_gradients()
        return loss.detach(), correct


class Compiled(Eager):
    """Runs the model compiled by torch.compile, separately for every shape.

    The code that runs thus does not depend on which shape came first.
    """

    def __init__(self, model: nn.Module, loss: Loss, message: Message) -> None:
        # This also sets the compiler's own switch; torch_settings does not, as it would import it.
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
        # No CUDA graphs of the compiler, even if the environment asks for them: --graphs decides.
        made = torch.compile(model, dynamic=False, options={"triton.cudagraphs": False})
        super().__init__(cast(nn.Module, made), loss, message)

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """Compute the gradients; see `Backward`. Raises RunError if compiling the model fails."""
        try:
            return super().__call__(inputs, targets, total)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            text = f"--compile: torch cannot compile this model here: {first_line(cause)}"
            raise RunError(text) from error


class Graphs:
    """Records forward and backward as a graph for every frequent shape, and replays it."""

    def __init__(self, backward: Backward, record: GraphRecorder) -> None:
        self._backward, self._record = backward, record
        self._seen: Counter[tuple] = Counter()
        # by shape: the inputs and targets that the graph reads, its results, its launch function
        self._graphs: dict[tuple, tuple[Pair, Pair, Callable[[], None]]] = {}

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """Compute the gradients; see `Backward`. The next call overwrites the results.

        Raises RunError if a step cannot be recorded, for example because it reads a number from
        the device.
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
                # The error at the end of a recording hides that of the operation which failed.
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
    """Make the function with which a run computes gradients.

    Raises UsageError for graphs without a GPU, and for compiling on CPUs without a C++ compiler.
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
    """Make the optimizer `name` with learning rate `lr` and the other settings of `config`.

    sgdm: v <- momentum v + g + weight_decay w, w <- w - lr v. adam and adamw: torch's defaults
    for betas (0.9, 0.999) and eps (1e-8). `set_learning_rate` changes the learning rate.
    """
    common = {"lr": lr, "weight_decay": config.weight_decay, "fused": True}
    if name == "adam":
        return _without_compiler(Adam)(parameters, **common)
    if name == "adamw":
        return _without_compiler(AdamW)(parameters, **common)
    optimizer = _without_compiler(SGD)(parameters, momentum=config.momentum, **common)
    if config.momentum:
        # Without this, a skipped first step leaves torch's new momentum buffer uninitialised, and
        # the second step adds it to the weights.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _without_compiler(kind: type[Optimizer]) -> type[Any]:
    """Return the optimizer class without torch's decorators.

    They import the compiler on each rank even if nothing is compiled, which takes longer than
    importing torch itself.
    """
    step, add = torch.no_grad()(inspect.unwrap(kind.step)), inspect.unwrap(kind.add_param_group)
    return type(kind.__name__, (kind,), {"step": step, "add_param_group": add})


def learning_rate(config: Config, plan: Plan, step: int) -> float:
    """Return the learning rate of global step 0, 1, ...

    It is the plan's rate times the schedule's factor times a warm-up factor, which rises linearly
    from `warmup_from` to 1.
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
    """Make the next `step` change nothing if `skipped`, a scalar tensor on the device, is 1."""
    # torch's own GradScaler sets this attribute; its type stubs do not declare it.
    optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]


def clip_gradient(flat_gradient: Tensor, max_norm: float) -> Tensor:
    """Scale the gradient in place to at most `max_norm` (L2) and return its norm before that.

    Nothing is copied to the host. Partial norms of 4096 values are summed in float64: one float32
    sum over the 25 million gradients of a ResNet-50 is off by 1e-3.
    """
    even = flat_gradient.numel() // 4096 * 4096
    parts = torch.linalg.vector_norm(flat_gradient[:even].view(-1, 4096), dim=1)
    rest = torch.linalg.vector_norm(flat_gradient[even:])
    norm = torch.linalg.vector_norm(torch.cat([parts, rest[None]]), dtype=torch.float64)
    norm = norm.to(flat_gradient.dtype)
    flat_gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


class UnusedParameters:
    """Keeps each parameter of one message unchanged until it receives a gradient."""

    def __init__(self, message: Message, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` updates the weights of `message`."""
        self._message, self._optimizer = message, optimizer
        segments = message.layout.segments
        self._spans = [segment.span for segment in segments]
        self.used = torch.zeros(len(segments), dtype=torch.bool, device=message.device)
        self._flags = self.used.unbind()
        self._left = list(range(len(segments)))  # those that the host does not know to be used
        self._sent: Snapshot | None = None  # asynchronous copy of `used` to the host

    @contextmanager
    def untouched(self, finite: torch.Tensor) -> Iterator[None]:
        """Undo what an update in the block does to parameters without a gradient so far.

        The message holds the gradient of this step, summed over all ranks; `finite`, a bool on the
        device, is whether this step counts.
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
        """Names of the parameters without a gradient so far (synchronizes with the device)."""
        segments = zip(self._message.layout.segments, self.used.tolist(), strict=True)
        return [segment.name for segment, used in segments if not used]
