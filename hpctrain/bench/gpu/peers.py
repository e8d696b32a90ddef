"""hpctrain's step against a plain torch loop and against DDP, in one process, in turn.

All have the same network, precision, memory format, fused SGD and the same batches, which lie on
the GPU; cudnn.benchmark is on for all. A round is a number of steps and the wait for the device at
its end; ratios are of medians over rounds in which each has its turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.bench.gpu.case import CLASSES, Case, first_batches, made_pack, ready
from hpctrain.bench.gpu.result import Result, attempt, judged
from hpctrain.bench.jobs import free_port
from hpctrain.bench.plain import Step, plain_step
from hpctrain.models import build

if TYPE_CHECKING:
    from hpctrain.training.setup import Job

TARGET = 0.98
BATCHES, ROUNDS = 4, 5


class Work(NamedTuple):
    """What all of them train."""

    network: str
    shape: tuple[int, int, int]
    precision: str
    batch: int
    steps: int  # a round


REAL = (
    Work("digits", (28, 28, 1), "fp32", 128, 200),
    Work("resnet50", (100, 100, 3), "bf16", 128, 30),
)
TINY = (Work("digits", (28, 28, 1), "fp32", 8, 3), Work("resnet18", (32, 32, 3), "bf16", 4, 2))


def measure(case: Case) -> Iterator[Result]:
    """Two lines per network: against the plain loop, and against DDP."""
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    dist.init_process_group(
        case.size("nccl", "gloo"),
        init_method=f"tcp://127.0.0.1:{free_port()}",
        rank=0,
        world_size=1,
    )
    try:
        for work in case.size(REAL, TINY):
            yield from compared(case, work)
    finally:
        dist.destroy_process_group()
        torch.backends.cudnn.benchmark = benchmark


def compared(case: Case, work: Work) -> Iterator[Result]:
    """hpctrain's step against the others on one network."""
    from hpctrain.parallel.determinism import torch_settings

    what = f"{work.network} at {work.shape[0]}, {work.precision}: hpctrain's step"
    flags = ["--data", made_pack(case, work.batch * BATCHES, work.shape), "--model", work.network]
    flags += ["--batch-size", str(work.batch), "--precision", work.precision]
    with torch_settings(False):
        job = ready(case, *flags)
        seconds = rounds(contestants(case, work, job), work.steps)
    rates = {name: [work.batch * work.steps / s for s in found] for name, found in seconds.items()}
    for other in list(rates)[1:]:
        yield attempt(f"{what} / {other}", partial(ratio, f"{what} / {other}", rates, other))


def contestants(case: Case, work: Work, job: Job) -> dict[str, Callable[[int], object]]:
    """By name, hpctrain first: what does the n-th step."""
    from hpctrain.training.step import train_step

    batches = first_batches(job, BATCHES)
    device = torch.device(case.device)

    def plain(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[int], object]:
        model = build(work.network, work.shape, CLASSES).to(device)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        step: Step = plain_step(wrap(model.train()), work.precision)
        return lambda number: step(*pair(number))

    def pair(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batches[number % BATCHES][0]
        return batch.images, batch.targets

    return {
        "hpctrain": lambda number: train_step(job.trainer, batches[number % BATCHES], work.batch),
        "plain torch": plain(lambda model: model),
        f"DDP over {case.size('NCCL', 'gloo')}": plain(DistributedDataParallel),
    }


def rounds(ways: Mapping[str, Callable[[int], object]], steps: int) -> dict[str, list[float]]:
    """Seconds of each way's rounds of `steps`, in turn; the first round of each is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for counted in (False, *[True] * ROUNDS):
        for name, way in ways.items():
            wait()
            began = time.perf_counter()
            for number in range(steps):
                way(number)
            wait()
            if counted:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def wait() -> None:
    """Until the GPU has done all that was asked of it; there may be none."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ratio(what: str, rates: dict[str, list[float]], other: str) -> Result:
    """Median over median, against the target; both speeds beside it."""
    own, theirs = (statistics.median(rates[name]) for name in ("hpctrain", other))
    remark = f"{own:,.0f} against {theirs:,.0f} images/s"
    return judged(what, own / theirs, least=TARGET, n=len(rates[other]), remark=remark)
