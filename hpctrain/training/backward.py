"""Forward and backward of one batch: what a step spends its time on, and how it is launched.

    Eager     kernel by kernel, or as torch.compile made them (--compile)
    Graphs    the kernels of both recorded once for every shape and then launched together
              (--graphs): where a batch is small, a GPU otherwise waits for the host

All add the gradients of loss / total to the message.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import torch
from torch import nn

from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.parallel.message import Message
from hpctrain.streams import GraphRecorder

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
# model, inputs (n, C, H, W), targets -> sum of the rows' losses, number of correct rows
Loss = Callable[[nn.Module, Tensor, Tensor], Pair]

WARM = 3  # batches of a shape before it is recorded: libraries choose their algorithms in these
MOST_GRAPHS = 8  # shapes; a run has few: whole batches, and those that end an epoch


class Backward(Protocol):
    """Adds the gradients of a batch."""

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """From inputs (n, C, H, W) of a mini-batch of `total` rows: sum of the rows' losses and
        number of correct rows, on the device.
        """


class Record(Protocol):
    """What a `GraphRecorder` does."""

    def warm_up(self, work: Callable[[], Pair]) -> Pair:
        """Do what will be recorded."""

    def __call__(self, work: Callable[[], Pair]) -> tuple[Pair, Callable[[], None]]:
        """The results of `work`, always in the same memory, and what fills them anew."""


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

    def __init__(self, backward: Backward, record: Record) -> None:
        self._backward, self._record = backward, record
        self._seen: Counter[tuple] = Counter()
        self._graphs: dict[tuple, Graph] = {}

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> Pair:
        """As in Backward; the results are overwritten by the next call."""
        shape = *_form(inputs), *_form(targets), total
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= WARM or len(self._graphs) == MOST_GRAPHS:
                work = partial(self._backward, inputs, targets, total)
                return self._record.warm_up(work)
            self._graphs[shape] = Graph(self._backward, inputs, targets, total, self._record)
        return self._graphs[shape](inputs, targets)


class Graph:
    """Forward and backward of one shape."""

    def __init__(
        self, backward: Backward, inputs: Tensor, targets: Tensor, total: int, record: Record
    ) -> None:
        """RunError where the work cannot be recorded: it asks the device for a number, say."""
        self._inputs, self._targets = inputs.clone(), targets.clone()  # strides are kept
        work = partial(backward, self._inputs, self._targets, total)
        try:
            self._found, self._replay = record(work)
        except RuntimeError as error:
            # What the end of a recording says of it hides the operation that broke it.
            words = first_line(error.__context__ or error)
            raise RunError(
                f"--graphs: this network's step cannot be recorded: {words}; do without"
            ) from error

    def __call__(self, inputs: Tensor, targets: Tensor) -> Pair:
        """As in Backward."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._replay()
        return self._found


def _form(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


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
