"""The job that ``hpctrain bench scale`` starts: time steps, and messages between ranks.

    mpirun -n 2 python -m hpctrain.bench.network_job OUTPUT.json STEPS

All ranks time STEPS training steps of ResNet-50 simultaneously, without communication. Then they
time messages over the transport that training would use. All ranks send simultaneously, rank r to
rank (r + size // 2) % size, as in a sum in tree order. Rank 0 writes a `Measured` as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from hpctrain.bench import IMAGE_SHAPE
from hpctrain.bench.peers import plain_step
from hpctrain.models import build
from hpctrain.parallel.choose import open_device, open_transport
from hpctrain.parallel.device import empty, place
from hpctrain.parallel.hosts import local_ranks
from hpctrain.parallel.mpi import Comm, conclude, start_mpi
from hpctrain.parallel.transport import Transport
from hpctrain.streams import current_stream

IMAGES = {"cpu": 8, "cuda": 64}  # per rank and step
CLASSES = 1000
WARM = 2  # steps that are not timed
SHORT, LONG = 1, 1 << 22  # float32 numbers per message
CALLS, LOOPS = {SHORT: 100, LONG: 2}, 5
QUARTILES = 1.349  # interquartile range of a normal distribution, in standard deviations


class Measured(NamedTuple):
    """The results of a job; 0 if not measured (no steps, or no messages on one rank)."""

    ranks: int = 0
    hosts: int = 0
    seconds: float = 0.0  # median of a step on one rank
    spread: float = 0.0  # standard deviation divided by the median
    latency: float = 0.0  # seconds per short message
    bandwidth: float = 0.0  # bytes/s


def time_steps(device: torch.device, steps: int) -> list[float]:
    """Return the seconds of each training step of ResNet-50 on this rank."""
    model = place(build("resnet50", IMAGE_SHAPE, CLASSES).train(), device, channels_last=True)
    step, count = plain_step(model, "fp32"), IMAGES[device.type]
    images = torch.rand(count, 3, *IMAGE_SHAPE[:2], device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(count, device=device)
    times = []
    for _ in range(WARM + steps):
        began = time.perf_counter()
        step(images, labels)
        current_stream(device).synchronize()
        times.append(time.perf_counter() - began)
    return times[WARM:]


def time_link(transport: Transport, device: torch.device) -> tuple[float, float]:
    """Return the latency in seconds, and the bandwidth in bytes/s. Collective."""
    comm = transport.comm
    half = comm.size // 2
    after, before = (comm.rank + half) % comm.size, (comm.rank - half) % comm.size

    def once(length: int) -> float:
        sent, received = (empty((length,), torch.float32, device).zero_() for _ in range(2))

        def send() -> None:
            transport.exchange([(after, [sent])], [(before, [received])])
            current_stream(device).synchronize()

        return min(time_calls(comm, send, CALLS[length]) for _ in range(LOOPS))

    short, long = once(SHORT), once(LONG)
    return short, 4 * (LONG - SHORT) / max(long - short, 1e-9)


def time_calls(comm: Comm, call: Callable[[], None], calls: int) -> float:
    """Return the seconds per call on the slowest rank, after one call to warm up. Collective."""
    call()
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return max(comm.allgather(time.perf_counter() - began)) / calls


def measure(comm: Comm, steps: int) -> Measured:
    """Time steps and messages, and return the same on all ranks. Collective."""
    device, _ = open_device(comm, "auto", lambda share: share)
    transport, _, _ = open_transport(comm, device, "auto")
    hosts = sum(rank == 0 for rank in comm.allgather(local_ranks(comm)[0]))
    found = Measured(comm.size, hosts)
    if steps:
        every = [seconds for rank in comm.allgather(time_steps(device, steps)) for seconds in rank]
        low, median, high = statistics.quantiles(every)  # robust against single slow steps
        found = found._replace(seconds=median, spread=(high - low) / QUARTILES / median)
    if comm.size > 1:
        latency, bandwidth = time_link(transport, device)
        found = found._replace(latency=latency, bandwidth=bandwidth)
    return found


def main(output: Path, steps: int) -> int:
    """Measure, and write the result (rank 0). Collective."""
    comm = start_mpi()
    try:
        measured = measure(comm, steps)
        if comm.rank == 0:
            output.write_text(json.dumps(measured._asdict()))
    except BaseException as error:
        return conclude(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
