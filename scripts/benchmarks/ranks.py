"""Count what grows with the number of ranks in a step: numbers in the message, and Python's time.

    python -m scripts.benchmarks.ranks [--ranks 1 4 64 1024 16384]

One process plays one rank of so many, without MPI. It prints the numbers of a message behind
gradients and moments, and the CPU time per step in which the rank sets them, reads the totals and
finds the slowest rank: the smallest of several rounds. What a step costs beyond one of a single
rank is the difference to the first line.
"""

from __future__ import annotations

import argparse
import time

from torch import nn

from hpctrain.parallel.message import Message
from hpctrain.training.steps import time_shares

STEPS, ROUNDS = 256, 7


def play_step(message: Message) -> None:
    """Do what the host does in a step for the part of the message behind the moments."""
    message.set_flags(False)
    message.set_digest(None)
    message.set_seconds(1.0, 0.5)
    time_shares(message.totals(), 0.25)


def seconds_per_step(message: Message) -> float:
    """Return the CPU seconds of one step: the smallest mean of several rounds."""
    found = []
    for _ in range(ROUNDS):
        message.zero()
        start = time.process_time()
        for _ in range(STEPS):
            play_step(message)
        found.append((time.process_time() - start) / STEPS)
    return min(found)


def main() -> None:
    """Print a table, one line per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 64, 1024, 16384])
    print(f"{'ranks':>8}{'numbers':>10}{'ms per step':>13}")
    for ranks in parser.parse_args().ranks:
        message = Message(nn.Linear(3, 2), 5, ranks // 2, ranks)
        numbers = len(message.tensor) - message.layout.length - message.moments.numel()
        print(f"{ranks:8,}{numbers:10,}{1000 * seconds_per_step(message):13.3f}", flush=True)


if __name__ == "__main__":
    main()
