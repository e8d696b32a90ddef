"""Single steps: a run of hpctrain up to its first step, and the step of a plain torch loop.

Benchmarks and tests compare the two in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpctrain.cli import parse
from hpctrain.data.loader import Batch
from hpctrain.numerics import torch_flags
from hpctrain.parallel.mpi import start_mpi
from hpctrain.training.setup import set_up
from hpctrain.training.state import Run

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # images, labels -> loss


@contextmanager
def ready(*flags: object) -> Iterator[Run]:
    """Set up ``train`` with these flags up to its first step, in this process alone.

    In the block, torch has the settings of the run.
    """
    _, config = parse(["train", *map(str, flags)])
    config.check_conflicts()
    with (
        torch_flags(config.precision, config.deterministic),
        closing(set_up(config, start_mpi())) as run,
    ):
        yield run


def first_batches(run: Run, count: int = 1) -> list[list[Batch]]:
    """Return the batches of the first `count` steps, on the device of the network."""
    return list(itertools.islice(run.loader.epoch(0), count))


def plain_step(model: nn.Module, precision: str, **settings: Any) -> Step:
    """Return a step of SGD with momentum, and other `settings`, on `model`, maybe wrapped in DDP.

    `precision` is "fp32", "tf32" or "bf16". TF32 must be enabled in the process by the caller.
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, **settings)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, precision == "bf16"):
            scores = model(images)
        loss = F.cross_entropy(scores.float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step
