"""Who uses which GPU, what is said of it, and which transport is taken: on faked facts."""

from __future__ import annotations

import re

import pytest

from hpctrain.errors import UsageError
from hpctrain.parallel.placement import (
    Choice,
    RankDevice,
    choose_transport,
    describe_sharing,
    which_gpu,
)

CPU = RankDevice("n1")


def gpu(host="n1", uuid="a", nccl="NCCL 2.29.7"):
    return RankDevice(host, uuid, nccl)


@pytest.mark.parametrize(
    ("places", "name", "why"),
    [
        ([CPU, CPU], "mpi", "CPUs"),
        ([gpu(uuid="a"), gpu(uuid="b"), gpu("n2", "a")], "nccl", "a GPU of its own"),
        ([gpu()], "none", "one rank"),
        ([gpu(nccl="")], "none", "one rank"),
        ([gpu(), gpu()], "host", "ranks 0 and 1 share a GPU of n1"),
        (
            [gpu(uuid="a"), gpu("n2", "b"), gpu("n2", "b")],
            "host",
            "ranks 1 and 2 share a GPU of n2",
        ),
        ([gpu(), gpu(uuid="b", nccl="")], "host", "torch on rank 1 .* without NCCL"),
        (
            [gpu(), gpu("n2", nccl="RCCL 2.29.7")],
            "host",
            "NCCL 2.29.7 on rank 0, RCCL 2.29.7 on rank 1",
        ),
    ],
)
def test_what_is_taken_and_why(places, name, why):
    choice = choose_transport(places)
    assert choice.name == name and re.search(why, choice.reason)


def test_what_is_asked_for_is_taken_or_refused_with_the_reason():
    apart, shared = [gpu(uuid="a"), gpu(uuid="b")], [gpu(), gpu()]
    assert choose_transport(apart, "nccl") == Choice("nccl", "asked for")
    assert choose_transport(apart, "host") == Choice("host", "asked for")
    assert choose_transport(shared, "mpi-gpu") == Choice("mpi-gpu", "asked for")
    assert choose_transport([CPU, CPU], "host").name == "mpi"
    for places, wanted, text in (
        (shared, "nccl", "--reduce nccl: ranks 0 and 1 share a GPU of n1"),
        ([CPU, gpu()], "nccl", r"--reduce nccl is for GPUs: rank 0 \(n1\) has none"),
        ([gpu(), CPU], "mpi-gpu", r"--reduce mpi-gpu is for GPUs: rank 1 \(n1\) has none"),
    ):
        with pytest.raises(UsageError, match=text):
            choose_transport(places, wanted)


def of_job(hosts):
    """The places of a job's ranks, from (host, UUIDs that each of its ranks sees); and their GPUs'
    numbers.
    """
    places, numbers = [], []
    for host, seen in hosts:
        for local_rank, uuids in enumerate(seen):
            number = which_gpu(local_rank, len(uuids))
            numbers.append(number)
            places.append(CPU._replace(host=host) if number is None else gpu(host, uuids[number]))
    return places, numbers


NODE = ("a", "b", "c", "d")
JOBS = {
    "a rank for each GPU of two whole nodes": (
        [("n1", [NODE] * 4), ("n2", [NODE] * 4)],
        [0, 1, 2, 3, 0, 1, 2, 3],
        "nccl",
        "",
    ),
    "each task is shown one GPU, its own": ([("n1", list(NODE))], [0, 0, 0, 0], "nccl", ""),
    "each task is shown two GPUs": ([("n1", [NODE[:2], NODE[2:]])], [0, 1], "nccl", ""),
    "fewer ranks than GPUs": ([("n1", [NODE] * 2)], [0, 1], "nccl", ""),
    "all are shown the same GPU": (
        [("n1", [NODE[:1]] * 4)],
        [0, 0, 0, 0],
        "host",
        "4 ranks share 1 GPU of n1",
    ),
    "a rank too many": (
        [("n1", [NODE] * 4), ("n2", [NODE] * 5)],
        [0, 1, 2, 3, 0, 1, 2, 3, 0],
        "host",
        "5 ranks share 4 GPUs of n2",
    ),
    "three crowded nodes": (
        [(f"n{n}", [NODE[:2]] * 4) for n in range(3)],
        [0, 1, 0, 1] * 3,
        "host",
        "4 ranks share 2 GPUs of n0",
    ),
    "none": ([("n1", [(), ()])], [None, None], "mpi", ""),
}


@pytest.mark.parametrize("name", JOBS)
def test_who_uses_which_gpu(name):
    hosts, numbers, transport, said = JOBS[name]
    places, found = of_job(hosts)
    assert (found, choose_transport(places).name, describe_sharing(places)) == (
        numbers,
        transport,
        said,
    )


def test_ranks_with_and_without_a_gpu_do_not_go_together():
    """Whatever is asked for: the weights that each updates for itself would drift apart."""
    mixed, _ = of_job([("n1", [NODE[:2]] * 2), ("n2", [(), ()])])
    for wanted in ("auto", "host"):
        with pytest.raises(UsageError, match=r"2 of 4 ranks see no GPU, such as rank 2 \(n2\): .*"):
            choose_transport(mixed, wanted)
    assert describe_sharing(mixed) == ""
