"""A model of the time of a training step on P ranks, and the published runs that it is tried on.

The computation of a step takes c seconds on a rank, with a normal distribution. All ranks wait for
the slowest one, whose time is the expected maximum of P such times. A message of b bytes takes
latency + b / bandwidth, and a rank sends its messages one after another (R. W. Hockney, "The
communication challenge for MPP", Parallel Computing 20, 1994). With overlap, what remains after
backward is `exposed` (parallel/overlap.py). The efficiency is c divided by the time of the step.

The model knows no topology, no other jobs and no file system.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

from hpctrain.parallel.halving import schedule, sent
from hpctrain.parallel.overlap import Times, exposed
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.reduce import block_bytes

NUMBER = 4  # bytes of a float32


class Link(NamedTuple):
    """How a rank sends."""

    latency: float  # seconds of a message, however short
    bandwidth: float  # bytes/s


class Computation(NamedTuple):
    """What a rank computes in a step."""

    seconds: float
    spread: float  # standard deviation, as a share of the seconds


class Traffic(NamedTuple):
    """What one rank sends in a step."""

    messages: int
    bytes: int

    def seconds(self, link: Link) -> float:
        """Return the time to send it over a link."""
        return self.messages * link.latency + self.bytes / link.bandwidth


def ring(numbers: int, ranks: int) -> Traffic:
    """Return the traffic of an Allreduce in a ring, as of NCCL, and of MPI for long messages."""
    return Traffic(2 * (ranks - 1), 2 * (ranks - 1) * numbers * NUMBER // ranks)


def tree(numbers: int, ranks: int) -> Traffic:
    """Return the traffic of rank 0 for a sum in tree order, with one shard on each rank."""
    messages, count = sent(schedule(0, assign_shards(ranks, ranks), numbers), ranks)
    return Traffic(messages, count * NUMBER)


def bfloat16(gradients: int, rest: int, ranks: int) -> Traffic:
    """Return the traffic of an Alltoall and an Allgather of blocks, sent one to each rank."""
    many = 2 * (ranks - 1)
    return Traffic(many, many * block_bytes(gradients, rest, ranks))


def slowest(computation: Computation, ranks: int) -> float:
    """Return the expected seconds of the slowest rank (G. Blom's approximation, 1958)."""
    deviations = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return computation.seconds * (1 + computation.spread * deviations)


def step_times(computation: Computation, link: Link, traffic: Traffic, ranks: int) -> Times:
    """Return the times of a step without overlap."""
    slow, reduce = slowest(computation, ranks), traffic.seconds(link)
    return Times(slow + reduce, slow, reduce)


def efficiency(
    computation: Computation, link: Link, traffic: Traffic, ranks: int, segments: int = 0
) -> float:
    """Return the efficiency, with gradients summed in `segments` during backward; 0 = after it."""
    times = step_times(computation, link, traffic, ranks)
    step = times.compute + exposed(times, segments) if segments else times.step
    return computation.seconds / step


class PublishedMachine(NamedTuple):
    """A published machine. Its only fitted number is `spread`, to one of its runs."""

    name: str
    link: Link  # of a node: its ranks are neighbours in the ring, or are summed within it first
    spread: float  # as in `Computation`
    buffer: float  # bytes of gradients that are summed at once
    way: Callable[[int, int], Traffic]


class PublishedRun(NamedTuple):
    """A published efficiency, and what the model needs for its own."""

    machine: PublishedMachine
    network: str
    ranks: int
    published: float
    seconds: float  # of a step on one rank
    parameters: int
    fitted: bool = False  # the spread of the machine was fitted to this run

    def predict(self, ranks: int | None = None) -> float:
        """Return the efficiency by the model, on as many ranks unless another number is given."""
        ranks, machine = ranks or self.ranks, self.machine
        segments = math.ceil(self.parameters * NUMBER / machine.buffer)
        messages, size = machine.way(self.parameters, ranks)
        computation = Computation(self.seconds, machine.spread)
        traffic = Traffic(segments * messages, size)
        return efficiency(computation, machine.link, traffic, ranks, segments)


# Read in the sources: 25 Gbit/s for 4 GPUs, in one ring through all GPUs; the buffer; batches of 64
# (Horovod, docs/benchmarks and docs/tensor-fusion); 142 and 154 images/s of one P100 (TensorFlow,
# performance/benchmarks). Estimated: ResNet-101, half-way between the times of ResNet-50 and
# ResNet-152 there (219 and 91.8 images/s); the latency, 9.6 us to another node and 5.7 us within it
# (NCCL, graph/tuning.cc, later than the runs).
HOROVOD = PublishedMachine(
    "Horovod", Link((9.6e-6 + 3 * 5.7e-6) / 4, 25e9 / 8), 0.007, 64 * 2**20, ring
)
# Read: ranks and efficiency (arXiv:1810.01993). Estimated: a step of 1 s, 40 M parameters, nodes
# with two rails of 100 Gbit/s, 5 us. They hardly matter: nearly all of the sum is hidden.
SUMMIT = PublishedMachine("Summit", Link(5e-6, 2 * 100e9 / 8), 0.024, 64 * 2**20, tree)
RESNET_101 = 64 * (1 / 219 + 1 / 91.8) / 2
PUBLISHED = (
    PublishedRun(HOROVOD, "ResNet-101", 128, 0.90, RESNET_101, 44_549_160),
    PublishedRun(HOROVOD, "ResNet-101", 512, 0.90, RESNET_101, 44_549_160, fitted=True),
    PublishedRun(HOROVOD, "Inception V3", 128, 0.90, 64 / 142, 23_834_568),
    PublishedRun(HOROVOD, "Inception V3", 512, 0.90, 64 / 142, 23_834_568),
    PublishedRun(HOROVOD, "VGG-16", 128, 0.79, 64 / 154, 138_357_544),
    PublishedRun(HOROVOD, "VGG-16", 512, 0.68, 64 / 154, 138_357_544),
    PublishedRun(SUMMIT, "DeepLabv3+", 27_360, 0.907, 1.0, 40_000_000, fitted=True),
)
