"""One job of the case ``tree`` (cases.py): time the ways to sum a message, alternating.

    mpirun -n 2 python -m scripts.benchmarks.allreduce LENGTH OUTPUT.json

Rank 0 writes the median seconds of the slowest rank for MPI's Allreduce of LENGTH float32 numbers,
for the sum in tree order (one shard per rank) and for gradients in bfloat16. All run on the same
ranks.
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

from hpctrain.parallel.device import empty
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import Comm, start_mpi
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.reduce import Bfloat16Reduce
from hpctrain.parallel.transport import HostMemory
from hpctrain.parallel.tree import TreeAllreduce

SECONDS = 3.0  # total time of the sums in tree order, at least
LEAST, MOST = 11, 2000  # repetitions; MOST has precedence over SECONDS


def time_call(function: Callable[[], object], comm: Comm) -> float:
    """Return the seconds of one call on the slowest rank. Collective."""
    comm.Barrier()
    began = time.perf_counter()
    function()
    return max(comm.allgather(time.perf_counter() - began))


def measure_sums(comm: Comm, length: int) -> dict[str, float]:
    """Return the median seconds of each way to sum. Collective."""
    vector = empty((length,), torch.float32, torch.device("cpu"))
    transport = HostMemory(comm)
    exchange = TreeAllreduce(transport, assign_shards(comm.size, comm.size), vector)
    message = Message(Linear(1, length, bias=False), 0, comm.rank, comm.size)
    ways: dict[str, Callable[[], object]] = {
        "Allreduce": lambda: transport.allreduce(vector),
        "tree order": lambda: exchange([vector]),
        "gradients in bf16": Bfloat16Reduce(
            transport, message.gradients, message.tensor[message.layout.length :]
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    done = 0
    while done <= LEAST or (done < MOST and sum(times["tree order"]) < SECONDS):
        for name, way in ways.items():
            for tensor in (vector, message.tensor):
                tensor.fill_(1)
            times[name].append(time_call(way, comm))
        done += 1
    # The first call, which opens connections and touches pages, is not counted.
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main(length: int, output: Path) -> None:
    """Measure, and write the figures as JSON (rank 0). Collective."""
    comm = start_mpi()
    torch.set_num_threads(1)  # per rank, as in training on CPUs
    figures = measure_sums(comm, length)
    if comm.rank == 0:
        output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
