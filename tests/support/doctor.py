"""The command `doctor` on machines that are made up."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.support.api import RankDevice, doctor, mpi
from tests.support.ranks import alone

GIB = 2**30
VERSIONS = {"hpctrain": "0.1.0", "Python": "3.11.4", "MPI": "Open MPI v5.0.11", "torch": "2.13.0"}
LAPTOP: dict[str, Any] = {
    "host": "node1",
    "versions": {**VERSIONS, "h5py": "3.16.0"},
    "problem": "",
    "path": "/usr/lib/libmpi.so.40",
    "bundled": False,
    "in_job": False,
    "launcher": "none",
    "started": None,
    "cores": {0, 1, 2, 3},
    "host_cores": 4,
    "threads": 4,
    "quota": math.inf,
    "variables": {},
    "torch_error": "",
    "built_for": "",
    "key": "torch 2.13.0, A CPU, AVX512",
    "gpus": [],
    "gpu_nodes": [],
    "gpu_problem": "",
    "place": RankDevice("node1"),
    "memory": "computes on the CPU",
    "directory": "/home/me",
    "file_system": "ext4",
    "free_disk": 100 * GIB,
}
Facts = dict[str, Any]  # of one rank


def laptop(**changes: Any) -> list[Facts]:
    """One process on a laptop of 4 cores."""
    return [LAPTOP | changes]


def job(ranks: int, launcher: str = "mpirun (Open MPI)", **changes: Any) -> list[Facts]:
    """Ranks of one job on one host of 4 cores, one core's worth each, not bound."""
    own = {"launcher": launcher, "started": ranks, "threads": 4 // ranks}
    return [LAPTOP | own | changes for _ in range(ranks)]


def by_rank(*own: Facts, **changes: Any) -> list[Facts]:
    """Ranks of one job, each with the changes of its own."""
    return [facts | each for facts, each in zip(job(len(own), **changes), own, strict=True)]


def with_gpus(ranks: int, gpus: int, numbered: bool = False) -> list[Facts]:
    """Ranks that see the same GPUs and take them in turn; or `numbered`, each one, as number 0."""
    seen = [("H200, 139 GiB", f"GPU-{n}") for n in range(gpus)]
    common = {"built_for": "CUDA 12.8", "memory": "no CuPy"}
    places = [RankDevice("node1", f"GPU-{n}", "NCCL 2.23.4", f"bus {n}") for n in range(gpus)]
    own = [
        {"gpus": seen, "gpu": rank % gpus, "place": places[rank % gpus]} for rank in range(ranks)
    ]
    if numbered:
        own = [facts | {"gpus": [seen[facts["gpu"]]], "gpu": 0} for facts in own]
    return by_rank(*own, gpu_nodes=["nvidia0"], **common)


def report(
    ranks: Sequence[Facts], timings: Sequence[tuple[int, float, bool]] = ()
) -> tuple[dict[str, str], str]:
    """What `doctor` prints of these ranks, and its verdicts: by what was checked, or by the size
    of an Allreduce.

    `timings` are those of Allreduce: bytes, seconds, whether the sum was right.
    """
    timed = {size: ([seconds], right) for size, seconds, right in timings}
    made = [own | {"timings": timed} for own in ranks]
    comm = SimpleNamespace(rank=0, size=len(made), gather=lambda own: made, bcast=lambda own: own)
    checks = [(lambda mpi, comm: made[0], judge) for _, judge in doctor.CHECKS]
    with (
        mock.patch.object(mpi, "start_mpi", lambda: comm),
        mock.patch.object(doctor, "CHECKS", checks),
    ):
        ended = alone("doctor")
    rows = re.findall(r"^(ok|note|warn|fail) +(\S+(?: \S+)*)  ", ended.out, re.MULTILINE)
    verdicts = {name: verdict for verdict, name in rows}
    assert (ended.code, ended.err) == (int("fail" in verdicts.values()), "")
    return verdicts, ended.out
