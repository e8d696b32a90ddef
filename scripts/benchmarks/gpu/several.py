"""What needs several GPUs: the same bits through NCCL, what overlap gains, how speed grows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from scripts.benchmarks.gpu import digests, speed
from scripts.benchmarks.gpu.case import Case
from scripts.benchmarks.gpu.result import Result, attempt, judged, not_run

GROWTH = 0.9  # of the speed of one GPU times their number
SIDE, BF16 = 100, ("--precision", "bf16")


def measure(case: Case) -> Iterator[Result]:
    """On all GPUs of this host, one rank each; on two ranks in a rehearsal."""
    ranks = torch.cuda.device_count() if case.on_gpu else 2
    if ranks < 2:
        yield not_run("NCCL, overlap and scaling on several GPUs", "needs 2 GPUs")
        return
    many = f"{ranks} {'GPUs' if case.on_gpu else 'ranks'}"
    nccl = ("--reduce", "nccl") if case.on_gpu else ()
    flags = digests.workload(case)
    first = digests.digest(case, *flags)
    what = f"digest on {many}, {'NCCL' if case.on_gpu else 'MPI'}, against one through the host"
    same = partial(digests.compared, case, what, first, *flags, *nccl, ranks=min(4, ranks))
    yield attempt(what, same)
    side = case.size(SIDE, 28)
    alone, _ = speed.rate(case, side, *BF16)
    together, steps = speed.rate(case, side, *BF16, *nccl, ranks=ranks)
    network = f"{speed.network(case)} at {side}, bf16, {many}"
    yield judged(
        f"{network} / {ranks} times one", together / (ranks * alone), least=GROWTH, n=steps
    )
    what = f"{network}, --overlap 3 / without"
    yield attempt(what, partial(gain, case, what, together, *BF16, *nccl, ranks=ranks))


def gain(case: Case, what: str, together: float, *flags: str, ranks: int) -> Result:
    """What overlap makes of the speed."""
    found, steps = speed.rate(case, case.size(SIDE, 28), *flags, "--overlap", "3", ranks=ranks)
    return judged(what, found / together, least=speed.NO_SLOWER, n=steps)
