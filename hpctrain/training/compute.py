"""The computation of a step: gradients by forward and backward, added to the message.

Eager     kernels launched one by one
Compiled  the same with the kernels of torch.compile (--compile)
Graphs    the kernels of either recorded once per shape and then launched together
          (--cuda-graphs): with small batches, a GPU otherwise waits for the host
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from hpctrain.errors import OwnCodeError, RunError, UsageError, first_line
from hpctrain.parallel.message import Message
from hpctrain.streams import GraphRecorder
from hpctrain.tasks.forward import explain_network
from hpctrain.tasks.task import ShardSums, Task

# inputs (n, C, H, W), targets, number of samples in the global batch times entries of a target;
# returns the sums of a shard, and adds the gradients of its loss / that number to the message
Backward = Callable[[Tensor, Tensor, int], ShardSums]
WARM = 3  # batches of a shape before it is recorded, in which libraries choose their algorithms


class Eager:
    """A `Backward` that launches its kernels one by one."""

    def __init__(self, model: nn.Module, task: Task, message: Message) -> None:
        self._model = model
        self._task = task
        self._message = message
        self._shares: dict[int, Tensor] = {}  # 1 / total, for the two totals that a run has

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> ShardSums:
        sums = self._task(self._model, inputs, targets)
        loss = sums["loss"]
        if total not in self._shares:
            self._shares[total] = torch.full_like(loss, 1 / total, requires_grad=False)
        # Same as the gradient of loss / total, which would take two operations. Passing it to
        # backward() would import the compiler's symbolic shapes.
        share = self._shares[total]
        loss.register_hook(lambda ones: share)
        with explain_network(self._model, len(inputs), "failed in backward"):
            loss.backward()
        self._message.add_gradients()
        return {**sums, "loss": loss.detach()}


class Compiled(Eager):
    """A `Backward` of a model that torch.compile compiles for every shape separately.

    The code that runs thus does not depend on which shape came first. Raises RunError if compiling
    fails.
    """

    def __init__(self, model: nn.Module, task: Task, message: Message) -> None:
        # This also sets the compiler's own switch; torch_flags does not, as it would import it.
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
        # No CUDA graphs of the compiler, even if the environment asks: --cuda-graphs decides.
        compiled = torch.compile(model, dynamic=False, options={"triton.cudagraphs": False})
        super().__init__(cast(nn.Module, compiled), task, message)

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> ShardSums:
        try:
            return super().__call__(inputs, targets, total)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = first_line(getattr(error, "inner_exception", error))
            raise RunError(f"--compile: torch cannot compile this model here: {cause}") from error


class Recorded(NamedTuple):
    """A graph of one shape."""

    inputs: Tensor  # which it reads
    targets: Tensor
    sums: ShardSums  # which it writes
    launch: Callable[[], None]


class Graphs:
    """A `Backward` that records another as a graph for every shape, and replays it.

    The next call overwrites the results. Raises RunError if a step cannot be recorded, for example
    because it reads a number from the device.
    """

    def __init__(self, backward: Backward, record: GraphRecorder) -> None:
        self._backward = backward
        self._record = record
        self._seen: Counter[tuple] = Counter()
        self._graphs: dict[tuple, Recorded] = {}  # by shape

    def __call__(self, inputs: Tensor, targets: Tensor, total: int) -> ShardSums:
        shape = *((t.shape, t.stride(), t.dtype) for t in (inputs, targets)), total
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= WARM:
                return self._record.warm_up(partial(self._backward, inputs, targets, total))
            graph_inputs = inputs.clone()  # strides are kept
            graph_targets = targets.clone()
            try:
                graph = self._record(partial(self._backward, graph_inputs, graph_targets, total))
            except (RuntimeError, OwnCodeError) as error:
                # The error at the end of a recording hides that of the operation which failed.
                failed = error.__context__ or error
                if isinstance(failed, OwnCodeError):
                    failed = failed.__context__ or failed
                words = f"cannot be recorded: {first_line(failed)}; do without"
                raise RunError(f"--cuda-graphs: this network's step {words}") from error
            self._graphs[shape] = Recorded(graph_inputs, graph_targets, *graph)
        recorded = self._graphs[shape]
        recorded.inputs.copy_(inputs)
        recorded.targets.copy_(targets)
        recorded.launch()
        return recorded.sums


def make_backward(
    model: nn.Module, task: Task, message: Message, compiled: bool, graphs: bool
) -> Backward:
    """Make the function with which a run computes gradients.

    Raises UsageError for graphs without a GPU, and for compiling on CPUs without a C++ compiler.
    """
    device = message.device
    compiler = os.environ.get("CXX", "g++")  # as torch.compile looks for it
    if graphs and device.type != "cuda":
        raise UsageError("--cuda-graphs is for GPUs: this rank computes on the CPU")
    if compiled and device.type == "cpu" and shutil.which(compiler) is None:
        raise UsageError(f"--compile needs a C++ compiler on CPUs; CXX={compiler} is not there")
    backward = (Compiled if compiled else Eager)(model, task, message)
    return Graphs(backward, GraphRecorder(device)) if graphs else backward
