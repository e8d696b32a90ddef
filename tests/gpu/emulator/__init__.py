"""hpctrain on the emulated GPU, for tests: whether this is one, and runs on several of them.

Tests that need it run in its environment: tests/gpu/emulator/run python -m pytest tests/gpu
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Mapping, Sequence

from tests.support.launch import run_cli, run_mpi

EMULATED = importlib.util.find_spec("emulated_gpu") is not None
#: When the devices do their work, see queue.c; a program that is right has the same results in all.
REPORT = "emulated GPU: cuda"  # begins what check_device and use_context of device.c print
ORDERS = ("early", "late", "1", "2")


def launch(
    args: Sequence[str],
    ranks: int = 1,
    gpus: int | None = None,
    order: str = "free",
    timeout: float = 100,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python -m hpctrain ARGS` on `ranks` ranks with `gpus` emulated GPUs, by default one each (4
    at most), that do their work in an order of ORDERS or, "free", beside the host. Every thread of
    a rank uses its GPU alone.
    """
    variables = {
        "HPCTRAIN_EMULATED_GPUS": str(gpus or min(ranks, 4)),
        "HPCTRAIN_EMULATED_GPU_ORDER": order,
        **(env or {}),
    }
    if ranks == 1:
        done = run_cli(args, timeout, variables)
    else:
        done = run_mpi(ranks, ["-m", "hpctrain", *args], timeout, variables)
    assert REPORT not in done.stderr, done.stderr
    return done
