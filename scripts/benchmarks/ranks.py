"""Count costs that grow with the number of ranks: message length, CPU time, bytes at the start.

    python -m scripts.benchmarks.ranks [--ranks 1 4 64 1024 16384]

One process simulates rank 0 of that many ranks, without MPI. For each number of ranks it prints

* numbers: the length of a message without gradients and moments;
* ms per step: the CPU time in which a rank sets these numbers, reads the totals and finds the
  slowest rank (smallest of several rounds); subtract the first line, of a single rank, for the cost
  of many ranks;
* bytes at the start: the most that any rank receives before the first step, without the weights.
  Host names, which rank 0 collects, are counted for 8 ranks per host.
"""

from __future__ import annotations

import argparse
import math
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch import nn

from hpctrain.config import Config
from hpctrain.data.pack import write_pack
from hpctrain.parallel.message import Message
from hpctrain.parallel.placement import crowd
from hpctrain.training.steps import time_shares
from hpctrain.training.train import run_training

STEPS, ROUNDS = 256, 7
PER_HOST = 8
WEIGHTS, INSIDE = "weights", "inside MPI"  # excluded from the bytes at the start


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


class PlayedComm:
    """A simulated communicator of `size` ranks that all pass the same values as this one, rank 0.

    `received` counts, by function, the most bytes that any rank receives, as pickles or buffers.
    Objects are reduced along a binomial tree.
    """

    rank = 0

    def __init__(self, size: int, received: Counter[str] | None = None) -> None:
        self.size, self.received = size, Counter() if received is None else received
        self._levels = max(1, math.ceil(math.log2(size)))
        self._attributes: dict[int, Any] = {}

    def _count(self, name: str, value: object, times: int = 1) -> None:
        self.received[name] += times * len(pickle.dumps(value))

    def bcast(self, value: Any, root: int = 0) -> Any:
        self._count("bcast", value)
        return value

    def allgather(self, value: Any) -> list[Any]:
        name = "allgather" if self.size > PER_HOST else "allgather of a host"
        self._count(name, value, self.size)
        return [value] * self.size

    def gather(self, value: Any, root: int = 0) -> list[Any]:
        self._count("gather", value, self.size)
        return [value] * self.size

    def reduce(self, value: Any, op: Callable[[Any, Any], Any]) -> Any:
        self._count("reduce", value, self._levels)
        return value

    def allreduce(self, value: Any, op: Callable[[Any, Any], Any] | None = None) -> Any:
        self._count("allreduce", value, self._levels + 1)
        return value if op else value * self.size

    def Allreduce(self, sendbuf: object, recvbuf: Any, op: object = None) -> None:
        self.received["Allreduce"] += self._levels * memoryview(recvbuf).nbytes

    def Bcast(self, buffer: Any) -> None:
        self.received[WEIGHTS] += buffer[0].nbytes

    def Split(self, color: int = 0, key: int = 0) -> PlayedComm:
        self.received[INSIDE] += 8 * self.size
        return PlayedComm(min(self.size, PER_HOST), self.received)

    Split_type = Split

    def Barrier(self) -> None:
        pass

    Free = Barrier

    def Get_attr(self, key: int) -> Any:
        return self._attributes.get(key)

    def Set_attr(self, key: int, value: Any) -> None:
        self._attributes[key] = value


class StartedError(BaseException):
    """Raised in place of the first step."""


def bytes_at_start(ranks: int, folder: Path, **settings: Any) -> Counter[str]:
    """Return the most bytes that a rank receives before its first step, by function."""
    images = np.zeros((2 * ranks, 12, 12, 1), np.uint8)
    labels = np.arange(2 * ranks) % 10
    names = tuple(f"class{number}" for number in range(10))
    write_pack(folder / "pack.h5", {"train": (images, labels)}, names, {"source": "ranks"})
    given: dict[str, Any] = {"model": "digits", "batch_size": ranks, "threads": 1} | settings
    config = Config(
        data=str(folder / "pack.h5"), runs_dir=str(folder / "runs"), progress="none", **given
    )
    comm: Any = PlayedComm(ranks)
    with mock.patch("hpctrain.training.train.train_epochs", side_effect=StartedError):
        try:
            run_training(config, comm)
        except StartedError:
            comm.received["names of hosts"] = bytes_of_names(ranks)
            return comm.received
    raise RuntimeError("the run ended before its first step")


def bytes_of_names(ranks: int) -> int:
    """Return what rank 0 receives as the names of all hosts are merged along a binomial tree."""
    total, level = 0, 1
    while level < ranks:
        hosts = {rank // PER_HOST for rank in range(level, min(2 * level, ranks))}
        names = {f"node{host:06}" for host in hosts}
        total, level = total + len(pickle.dumps((names, crowd([255] * 8)))), 2 * level
    return total


def main() -> None:
    """Print a table, one line per number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 64, 1024, 16384])
    print(f"{'ranks':>8}{'numbers':>10}{'ms per step':>13}{'bytes at the start':>20}")
    for ranks in parser.parse_args().ranks:
        message = Message(nn.Linear(3, 2), 5, ranks // 2, ranks)
        numbers = len(message.tensor) - message.layout.length - message.moments.numel()
        print(f"{ranks:8,}{numbers:10,}{1000 * seconds_per_step(message):13.3f}", end="")
        with tempfile.TemporaryDirectory(prefix="hpctrain-ranks-") as folder:
            received = bytes_at_start(ranks, Path(folder))
        started = sum(n for name, n in received.items() if name not in (WEIGHTS, INSIDE))
        parts = ", ".join(f"{name} {n:,}" for name, n in received.most_common())
        print(f"{started:20,}  {parts}", flush=True)


if __name__ == "__main__":
    main()
