"""Construction of the trainer: statistics, message, optimizer, reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hpctrain import __version__
from hpctrain.config import Config
from hpctrain.inference.tasks import Task
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.choose import choose_reduce
from hpctrain.parallel.device import hardware_key
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import Comm, call_on_all, check_equal_on_all
from hpctrain.parallel.reduce import broadcast
from hpctrain.parallel.transport import Transport
from hpctrain.plan import Plan
from hpctrain.streams import IN_FLIGHT
from hpctrain.training.average import Average
from hpctrain.training.compute import make_backward
from hpctrain.training.finetune import parameter_groups
from hpctrain.training.optimizer import make_optimizer
from hpctrain.training.step import Trainer, hash_tensors


def make_trainer(
    norms: BatchNorms,
    task: Task,
    config: Config,
    plan: Plan,
    transport: Transport,
    runs: Sequence[range],
) -> Trainer:
    """Lay out the message, compare layouts, and broadcast rank 0's weights. Collective.

    The ranks carry the shards `runs`.
    """
    comm, model = transport.comm, norms.model

    def lay_out_message() -> Message:
        groups = parameter_groups(model, config)
        return Message(model, norms.channels, comm.rank, comm.size, groups)

    message = call_on_all(comm, lay_out_message)
    check_equal_on_all(
        comm,
        {
            "hpctrain": __version__,
            "torch": torch.__version__,
            "the layout of the parameters": message.layout.digest(),
        },
    )
    if plan.deterministic:
        check_equal_on_all(comm, {"the kind of hardware": hardware_key(message.device)})
    backward = call_on_all(
        comm, lambda: make_backward(model, task, message, config.compile, config.cuda_graphs)
    )
    broadcast(comm, message.weights)
    in_order = runs if plan.deterministic else None
    reduce = call_on_all(
        comm,
        lambda: choose_reduce(comm, message, in_order, plan.comm_dtype, transport, config.overlap),
    )
    return Trainer(
        model,
        message,
        norms,
        make_optimizer(plan.optimizer, plan.learning_rate, config, message.groups),
        reduce,
        backward,
        config.clip_norm,
        IN_FLIGHT[message.device.type],
        task.weights,
        None if config.ema is None else Average(message, norms, config.ema),
    )


def check_fixed_state(model: nn.Module, comm: Comm) -> None:
    """Raise UsageError on all ranks if buffers or frozen parameters differ before the first step.

    Collective.
    """
    fixed = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
    check_equal_on_all(comm, {"the model's fixed state": hash_tensors(fixed).hexdigest()[:16]})
