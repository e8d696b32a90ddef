"""The weak-scaling efficiency of training on P ranks, computed by a model of the step.

    python -m scripts.scaling --step-time 0.2 --latency 2 --bandwidth 25

The computation of a step takes c seconds on average, normally distributed over the ranks. All ranks
wait for the slowest one, whose time is the expected maximum of P such times. A message of b bytes
takes latency + b / bandwidth, and a rank sends its messages one after another (R. W. Hockney, "The
communication challenge for MPP", Parallel Computing 20, 1994). With overlap, gradients are summed
in segments while backward computes the remaining ones. The efficiency is c divided by the time of
the step. The model ignores topology, other jobs and the file system. docs/benchmarks.md says where
to measure its inputs, and compares it with published runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from statistics import NormalDist

BYTES = 4  # of a float32
BACKWARD = 2 / 3  # of forward and backward: each product in forward takes two in backward
RESNET_50 = 25_557_032 + 2 * 26_560  # parameters, and moments of batch norm
RANKS = tuple(2**power for power in range(3, 15))

Link = tuple[float, float]  # over which a rank sends: seconds per message, bytes/s
Traffic = tuple[int, float]  # what one rank sends in a step: messages, bytes


def ring(numbers: int, ranks: int) -> Traffic:
    """Return the traffic of a ring Allreduce, as in NCCL, and in MPI for long messages."""
    return 2 * (ranks - 1), 2 * (1 - 1 / ranks) * numbers * BYTES


def tree(numbers: int, ranks: int) -> Traffic:
    """Return the traffic of --deterministic with one shard per rank (parallel/tree.py).

    It is exact if the number of ranks is a power of two.
    """
    return 2 * math.ceil(math.log2(ranks)), 2 * (1 - 1 / ranks) * numbers * BYTES


def bfloat16(numbers: int, ranks: int) -> Traffic:
    """Return the traffic of --comm-dtype bf16: a slice to and from each other rank."""
    return 2 * (ranks - 1), (1 - 1 / ranks) * numbers * BYTES


def slowest(seconds: float, spread: float, ranks: int) -> float:
    """Return the expected seconds of the slowest rank (G. Blom's approximation, 1958).

    `spread` is the standard deviation of the times of the ranks, divided by their mean.
    """
    return seconds * (1 + spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)))


def exposed(reduce: float, compute: float, segments: int) -> float:
    """Return the seconds of a reduction that remain after backward.

    Segment k of n is complete k / n of the way through backward, each takes reduce / n, and one is
    summed at a time.
    """
    hidden = BACKWARD * compute * (segments - 1) / segments
    return max(reduce / segments, reduce - hidden)


def efficiency(
    seconds: float, spread: float, link: Link, traffic: Traffic, ranks: int, segments: int = 1
) -> float:
    """Return the efficiency of `ranks` that each send `traffic` in this many segments."""
    compute = slowest(seconds, spread, ranks)
    messages, size = traffic
    latency, bandwidth = link
    reduce = segments * messages * latency + size / bandwidth
    return seconds / (compute + exposed(reduce, compute, segments))


def main(words: Sequence[str] | None = None) -> None:
    """Print a table with a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--step-time", type=float, required=True, help="seconds of a step on one rank")
    add("--spread", type=float, default=1, help="standard deviation of --step-time, in percent")
    add("--parameters", type=int, default=RESNET_50, help="of the network (default: ResNet-50)")
    add("--latency", type=float, required=True, help="microseconds per message")
    add("--bandwidth", type=float, required=True, help="GB/s (10^9 bytes) per rank")
    add("--overlap", type=int, default=2, help="segments of the gradients (default: 2)")
    add("--ranks", type=int, nargs="+", default=RANKS, help="default: 8 to 16,384")
    options = parser.parse_args(words)
    if min(options.step_time, options.parameters, options.bandwidth, options.overlap) <= 0:
        parser.error("--step-time, --parameters, --bandwidth and --overlap must be above 0")
    link = (options.latency / 1e6, options.bandwidth * 1e9)
    spread = options.spread / 100
    print("Efficiency by the model (messages and bytes that a rank sends in a step)")
    heads = ["ranks", "slowest, s", "ring", "overlapped", "tree order", "overlapped", "bf16"]
    widths = (7, 12, 26, 12, 23, 12, 26)
    print("".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    overlap = options.overlap
    for ranks in options.ranks:
        cells = [f"{ranks:,}", f"{slowest(options.step_time, spread, ranks):.4g}"]
        ways = (ring, 1), (ring, overlap), (tree, 1), (tree, overlap), (bfloat16, 1)
        for way, segments in ways:
            traffic = way(options.parameters, ranks)
            share = efficiency(options.step_time, spread, link, traffic, ranks, segments)
            cell = f"{100 * share:.1f} %"
            if segments == 1:
                messages, size = traffic
                cell += f" ({messages:,}, {size / 1e6:.0f} MB)"
            cells.append(cell)
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


if __name__ == "__main__":
    main()
