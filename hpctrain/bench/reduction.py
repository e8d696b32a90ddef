"""One job of ``hpctrain bench tree``: both ways to sum a vector, in turn, in the same processes.

    mpirun -n 2 python -m hpctrain.bench.reduction LENGTH SHARDS OUTPUT.json

Rank 0 writes, for the plain Allreduce, for tree order and for gradients in bfloat16, the median
seconds of the slowest rank, and the bytes that a rank sends (of the Allreduce: those of a ring).
Every rank has added up its shards already: it is the exchange that is timed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import Linear

from hpctrain.parallel.device import room
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import Comm, start_mpi
from hpctrain.parallel.reduce import NarrowWire
from hpctrain.parallel.shards import carried
from hpctrain.parallel.transport import HostMemory
from hpctrain.parallel.tree import Exchange, subtrees

SECONDS = 3.0  # in tree order, at least, and
LEAST, MOST = 11, 2000  # repetitions


def seconds_of(function: Callable[[], None], comm: Comm) -> float:
    """The time of one call on the slowest rank. Collective."""
    comm.Barrier()
    began = time.perf_counter()
    function()
    return max(comm.allgather(time.perf_counter() - began))


def measure(comm: Comm, length: int, shards: int) -> dict[str, float]:
    """Medians of both, in turn. Collective."""
    spans = [subtrees(run, (0, shards)) for run in carried(shards, comm.size)]
    cpu = torch.device("cpu")
    sums = [room((length,), torch.float32, cpu).fill_(1) for _ in spans[comm.rank]]
    transport = HostMemory(comm)
    exchange = Exchange(transport, spans, sums[0])
    message = Message(Linear(1, length, bias=False), 0, comm.rank, comm.size)
    narrow = NarrowWire(transport, message.gradients, message.tensor[message.layout.length :])
    ways: dict[str, Callable[[], None]] = {
        "allreduce": lambda: transport.allreduce(sums[-1]),
        "tree": lambda: exchange(sums),
        "bf16": narrow,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # connections and first-touched pages
    while (done := len(times["tree"])) < LEAST or (done < MOST and sum(times["tree"]) < SECONDS):
        for name, way in ways.items():
            sums[-1].fill_(1)
            message.tensor.fill_(1)
            times[name].append(seconds_of(way, comm))
    ring = 2 * length * (comm.size - 1) / comm.size
    sent = max(comm.allgather(exchange.sent))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, "sent": 4 * sent, "ring": 4 * ring, "n": len(times["tree"])}


def main(length: int, shards: int, output: Path) -> None:
    """Measure, and write the figures as JSON (rank 0). Collective."""
    comm = start_mpi()
    torch.set_num_threads(1)  # a rank, as in training on CPUs
    figures = measure(comm, length, shards)
    if comm.rank == 0:
        output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
