"""A model of the time of a training step on P ranks, and published runs to compare it with.

The computation of a step takes c seconds on average, normally distributed over the ranks. All ranks
wait for the slowest one, whose time is the expected maximum of P such times. A message of b bytes
takes latency + b / bandwidth, and a rank sends its messages one after another (R. W. Hockney, "The
communication challenge for MPP", Parallel Computing 20, 1994). With overlap, only the part of the
communication that `exposed` returns is added to the computation. The
efficiency is c divided by the time of the step.

The model ignores topology, other jobs and the file system.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

from hpctrain.parallel.halving import schedule, sent
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.reduce import block_bytes

NUMBER = 4  # bytes of a float32
GAIN = 0.03  # of a step's time; for less, one Allreduce is assumed
BACKWARD = 2 / 3  # of forward and backward: each product in forward takes two in backward
SEGMENTS = (2, 4, 8, 16)


class Link(NamedTuple):
    """The link over which a rank sends."""

    latency: float  # seconds per message
    bandwidth: float  # bytes/s


class Computation(NamedTuple):
    """The computation of a rank in a step."""

    seconds: float  # mean
    spread: float  # standard deviation divided by the mean


class Times(NamedTuple):
    """The times of a step without overlap, in seconds."""

    step: float
    compute: float  # of the slowest rank
    reduce: float


class Traffic(NamedTuple):
    """What one rank sends in a step."""

    messages: int
    bytes: int

    def seconds(self, link: Link) -> float:
        """Return the time to send it over a link."""
        return self.messages * link.latency + self.bytes / link.bandwidth


def ring(numbers: int, ranks: int) -> Traffic:
    """Return the traffic of a ring Allreduce, as in NCCL, and in MPI for long messages."""
    return Traffic(2 * (ranks - 1), 2 * (ranks - 1) * numbers * NUMBER // ranks)


def tree(numbers: int, ranks: int) -> Traffic:
    """Return the traffic of rank 0 for a sum in tree order, with one shard on each rank."""
    messages, count = sent(schedule(0, assign_shards(ranks, ranks), numbers), ranks)
    return Traffic(messages, count * NUMBER)


def bfloat16(gradients: int, rest: int, ranks: int) -> Traffic:
    """Return the traffic of an Alltoall and an Allgather that send one block to each rank."""
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


def exposed(times: Times, segments: int) -> float:
    """Return the seconds of the reduction that remain after backward.

    Segment k of n is complete k / n of the way through backward, each takes reduce / n, and one is
    summed at a time.
    """
    backward = BACKWARD * times.compute
    return max(times.reduce / segments, times.reduce - backward * (segments - 1) / segments)


def best_segments(times: Times) -> int:
    """Return the smallest number of segments that hides about as much of the reduction as any.

    Returns 0 if segments would save less than GAIN of a step.
    """
    least = min(exposed(times, segments) for segments in SEGMENTS)
    if times.reduce - least < GAIN * times.step:
        return 0
    near = least + GAIN * times.step
    return next(segments for segments in SEGMENTS if exposed(times, segments) <= near)


def efficiency(
    computation: Computation, link: Link, traffic: Traffic, ranks: int, segments: int = 0
) -> float:
    """Return the efficiency; `segments` of the gradients overlap with backward, 0 = no overlap."""
    times = step_times(computation, link, traffic, ranks)
    step = times.compute + exposed(times, segments) if segments else times.step
    return computation.seconds / step


class PublishedMachine(NamedTuple):
    """The machine of published runs. Only `spread` is fitted, to one run of the machine."""

    name: str
    link: Link  # of a node: its ranks are neighbours in the ring, or are reduced there first
    spread: float  # as in `Computation`
    buffer: float  # bytes of gradients per reduction
    way: Callable[[int, int], Traffic]


class PublishedRun(NamedTuple):
    """A published efficiency, and the inputs with which the model predicts it."""

    machine: PublishedMachine
    network: str
    ranks: int
    published: float
    seconds: float  # of a step on one rank
    parameters: int
    fitted: bool = False  # the spread of the machine was fitted to this run

    def predict(self, ranks: int | None = None) -> float:
        """Return the efficiency by the model, by default on the published number of ranks."""
        ranks, machine = ranks or self.ranks, self.machine
        segments = math.ceil(self.parameters * NUMBER / machine.buffer)
        messages, size = machine.way(self.parameters, ranks)
        computation = Computation(self.seconds, machine.spread)
        traffic = Traffic(segments * messages, size)
        return efficiency(computation, machine.link, traffic, ranks, segments)


# From the sources: 25 Gbit/s per 4 GPUs, one ring through all GPUs, the buffer, batches of 64
# (Horovod, docs/benchmarks and docs/tensor-fusion); 142 and 154 images/s on one P100 (TensorFlow,
# performance/benchmarks). Estimated: ResNet-101, the mean of the times of ResNet-50 and ResNet-152
# (219 and 91.8 images/s there); the latency, 9.6 us between nodes and 5.7 us within a node (NCCL,
# graph/tuning.cc, which is more recent than the runs).
HOROVOD = PublishedMachine(
    "Horovod", Link((9.6e-6 + 3 * 5.7e-6) / 4, 25e9 / 8), 0.007, 64 * 2**20, ring
)
# From the source: ranks and efficiency (arXiv:1810.01993). Estimated: a step of 1 s, 40 M
# parameters, two rails of 100 Gbit/s per node, 5 us. These hardly matter: nearly all of the
# communication overlaps with backward.
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
