"""Time the reductions of a message in turn, for the case ``tree``.

    mpirun -n 2 python -m scripts.benchmarks.allreduce LENGTH OUTPUT.json

LENGTH is that of a message in float32 numbers. Rank 0 writes the median seconds of the slowest rank
for the Allreduce of MPI, for the sum in tree order (one shard per rank) and for gradients in
bfloat16. Each sum is verified.
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

from hpctrain.errors import RunError
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import Comm, agreed, conclude, start_mpi
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.reduce import Bfloat16Reduce
from hpctrain.parallel.transport import HostMemory, Transport
from hpctrain.parallel.tree import TreeAllreduce

SECONDS = 3.0  # total time of the sums in tree order, at least
LEAST, MOST = 11, 2000  # repetitions; MOST has precedence over SECONDS


def time_call(function: Callable[[], object], comm: Comm) -> float:
    """Return the seconds of one call on the slowest rank. Collective."""
    comm.Barrier()
    began = time.perf_counter()
    function()
    return max(comm.allgather(time.perf_counter() - began))


def measure_sums(transport: Transport, length: int) -> dict[str, float]:
    """Return the median seconds of each reduction. Raises RunError for a wrong sum. Collective."""
    comm = transport.comm
    vector = torch.empty(length)
    exchange = TreeAllreduce(transport, assign_shards(comm.size, comm.size), vector)
    model = Linear(1, length, bias=False)
    message = Message(model, 0, comm.rank, comm.size)
    ways: dict[str, tuple[torch.Tensor, Callable[[], object]]] = {
        "Allreduce": (vector, lambda: transport.allreduce(vector)),
        "tree order": (vector, lambda: exchange([vector])),
        "gradients in bf16": (
            message.gradients,
            Bfloat16Reduce(transport, message.gradients, message.tensor[message.layout.length :]),
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    done = 0
    while done <= LEAST or (done < MOST and sum(times["tree order"]) < SECONDS):
        for name, (summed, way) in ways.items():
            for tensor in (vector, message.tensor):
                tensor.fill_(1)
            times[name].append(time_call(way, comm))
            error = float((summed - comm.size).abs().max())
            if max(comm.allgather(error)) > (comm.size / 256 if "bf16" in name else 0):
                raise agreed(RunError(f"{name} of {length:,} ones: a sum is not {comm.size}"))
        done += 1
    # The first call, which opens connections and touches pages, is not counted.
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main(length: str, output: str) -> int:
    """Measure, and write the figures as JSON (rank 0); return the exit code. Collective."""
    try:
        comm = start_mpi()
        figures = measure_sums(HostMemory(comm), int(length))
        if comm.rank == 0:
            Path(output).write_text(json.dumps(figures))
    except BaseException as error:
        return conclude(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
