"""hpctrain's step against a plain torch loop and against DDP, alternating in one process.

All use the same network, precision, memory format, fused SGD and the same batches, which are on the
GPU; cuDNN chooses its algorithms by timing for all. A round is a number of steps and a
synchronization with the device at its end. Ratios are of medians over rounds, in which all
alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.loader import Batch
from hpctrain.errors import UsageError
from hpctrain.models import build
from hpctrain.parallel.device import place, torch_settings, zeros_for_messages
from hpctrain.parallel.mpi import start_mpi
from hpctrain.parallel.transport import Pinned
from hpctrain.training.run import Run
from scripts.benchmarks.gpu.case import (
    CLASSES,
    Case,
    Result,
    first_batches,
    judged,
    made_pack,
    not_run,
    ready,
)
from scripts.benchmarks.peers import plain_step

TARGET = 0.98
BATCHES, ROUNDS = 4, 5
NUMBERS = 25_000_000  # float32: 100 MB, as the message of ResNet-50
STAGED_TARGET = 0.8  # of the speed of copies


class Work(NamedTuple):
    """The workload of all contestants."""

    network: str
    shape: tuple[int, int, int]
    precision: str
    batch: int
    steps: int  # per round


REAL = (
    Work("digits", (28, 28, 1), "fp32", 128, 200),
    Work("resnet50", (100, 100, 3), "bf16", 128, 30),
)
TINY = (Work("digits", (28, 28, 1), "fp32", 8, 3), Work("resnet18", (32, 32, 3), "bf16", 4, 2))


def measure(case: Case) -> Iterator[Result]:
    """Compare hpctrain's step, without and with --cuda-graphs, with the plain loop and DDP."""
    backend = case.size("nccl", "gloo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for work in case.size(REAL, TINY):
            yield from compared(case, work)
    finally:
        dist.destroy_process_group()


def compared(case: Case, work: Work) -> Iterator[Result]:
    """Compare hpctrain's steps with the others' on one network."""
    name = f"{work.network} at {work.shape[0]}, {work.precision}: hpctrain's step"
    flags = ["--data", made_pack(case, work.batch * BATCHES, work.shape), "--model", work.network]
    flags += ["--batch-size", str(work.batch), "--precision", work.precision]
    with torch_settings(work.precision):
        job = ready(case, *flags)
        batches = first_batches(job, BATCHES)
        own = {name: stepping(job, batches)}
        try:
            own[f"{name}, --cuda-graphs"] = stepping(ready(case, *flags, "--cuda-graphs"), batches)
        except UsageError as error:
            yield not_run(f"{name}, --cuda-graphs", str(error))
        others = {
            "plain torch": plain(case, work, batches, lambda model: model),
            f"DDP over {case.size('NCCL', 'gloo')}": plain(
                case, work, batches, DistributedDataParallel
            ),
        }
        seconds = rounds(own | others, work.steps)
    rates = {name: [work.batch * work.steps / s for s in found] for name, found in seconds.items()}
    for ours in own:
        for other in others:
            yield ratio(ours, other, rates)


def stepping(job: Run, batches: list[list[Batch]]) -> Callable[[int], object]:
    """Return a function that runs hpctrain's n-th step."""

    def step(number: int) -> None:
        batch = batches[number % BATCHES]
        job.trainer.step(batch, len(batch[0].targets))

    return step


def plain(
    case: Case, work: Work, batches: list[list[Batch]], wrap: Callable[[nn.Module], nn.Module]
) -> Callable[[int], object]:
    """Return a function that runs the n-th step of plain torch on the network wrapped by `wrap`."""
    model = build(work.network, work.shape, CLASSES)
    place(model, torch.device(case.device), channels_last=True)
    train = plain_step(wrap(model.train()), work.precision)

    def step(number: int) -> None:
        (batch,) = batches[number % BATCHES]
        train(batch.images, batch.targets)

    return step


def rounds(ways: Mapping[str, Callable[[int], object]], steps: int) -> dict[str, list[float]]:
    """Return the seconds of each way's rounds of `steps`, alternating; the first is not counted."""
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
    """Synchronize with the GPU, if CUDA is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ratio(ours: str, other: str, rates: dict[str, list[float]]) -> Result:
    """Compare the ratio of the median speeds with the target; the remark has both speeds."""
    own, theirs = (statistics.median(rates[name]) for name in (ours, other))
    remark = f"{own:,.0f} against {theirs:,.0f} images/s"
    n = len(rates[other])
    return judged(f"{ours} / {other}", own / theirs, least=TARGET, n=n, remark=remark)


def staging(case: Case) -> Iterator[Result]:
    """Measure the cost of the path through pinned host memory.

    A staged Allreduce of one rank, which sums nothing, is compared with one copy of the same bytes
    to the host and one back.
    """
    device, numbers = torch.device(case.device), case.size(NUMBERS, NUMBERS // 100)
    vector = zeros_for_messages(numbers, torch.float32, device)
    host = torch.zeros(numbers, pin_memory=device.type == "cuda")
    transport = Pinned(start_mpi())

    def copies(number: int) -> None:
        host.copy_(vector, non_blocking=True)
        vector.copy_(host, non_blocking=True)

    ways = {"staged": lambda number: transport.allreduce(vector), "copies": copies}
    seconds = rounds(ways, case.size(10, 2))
    staged, copied = (statistics.median(seconds[name]) / case.size(10, 2) for name in ways)
    moved = 2 * vector.nbytes
    remark = f"{moved / staged / 1e9:.1f} GB/s against {moved / copied / 1e9:.1f} GB/s"
    what = f"staged Allreduce of {vector.nbytes / 1e6:g} MB / pinned copies down and up"
    yield judged(
        what, copied / staged, least=STAGED_TARGET, n=len(seconds["staged"]), remark=remark
    )
