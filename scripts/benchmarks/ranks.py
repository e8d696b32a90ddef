"""Count costs of a step that grow with the number of ranks: message length and CPU time.

    python -m scripts.benchmarks.ranks [--ranks 1 4 64 1024 16384]

One process does the work of rank 0 of that many ranks, without MPI. For each number it prints

* numbers: the length of a message without gradients and moments;
* ms per step: the CPU time in which a rank sets these numbers, reads the totals and finds the
  slowest rank (smallest of several rounds); subtract the first line, of a single rank, for the cost
  of many ranks.
"""

from __future__ import annotations

import argparse
import time

from torch import nn

from hpctrain.parallel.message import Message
from hpctrain.training.steps import time_shares

STEPS, ROUNDS = 256, 7


def play_step(message: Message) -> None:
    """Do the host's work of a step for the part of the message after the moments."""
    message.set_flags(False)
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
