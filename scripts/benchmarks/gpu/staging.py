"""What the way through pinned host memory costs: a staged Allreduce of one rank, which sums
nothing, against one copy of the same bytes down and one up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from scripts.benchmarks.gpu.case import Case
from scripts.benchmarks.gpu.peers import rounds
from scripts.benchmarks.gpu.result import Result, judged

NUMBERS = 25_000_000  # float32: 100 MB, as the message of ResNet-50
TARGET = 0.8


def measure(case: Case) -> Iterator[Result]:
    """One line: the speed of the copies that the staged Allreduce reaches."""
    from hpctrain.parallel.device import pinned
    from hpctrain.parallel.memory import plain_zeros
    from hpctrain.parallel.mpi import start_mpi
    from hpctrain.parallel.transport import Pinned

    device, numbers = torch.device(case.device), case.size(NUMBERS, NUMBERS // 100)
    vector = plain_zeros(numbers, torch.float32, device)
    host = pinned(numbers, torch.float32, device)
    transport = Pinned(start_mpi())

    def copies(number: int) -> None:
        host.copy_(vector, non_blocking=True)
        vector.copy_(host, non_blocking=True)

    ways = {"staged": lambda number: transport.allreduce(vector), "copies": copies}
    seconds = rounds(ways, case.size(10, 2))
    staged, copied = (statistics.median(seconds[name]) / case.size(10, 2) for name in ways)
    moved = 2 * vector.nbytes
    remark = f"{moved / staged / 1e9:.1f} GB/s against {moved / copied / 1e9:.1f} GB/s"
    what = f"staged Allreduce of {vector.nbytes / 1e6:g} MB / pinned copies down and up"
    yield judged(what, copied / staged, least=TARGET, n=len(seconds["staged"]), remark=remark)
