"""Which ranks share a host and its cores, on hosts that Slurm's variables describe."""

from __future__ import annotations

import math
import os
import socket

import pytest

import hpctrain as hp
from tests.support.api import Quota, hosts
from tests.support.short import records, short_run

CORES = {*range(6)}  # that all ranks may use, in most of the cases
CASES = {  # ranks, ranks of a host, cores by rank, variables -> host_ranks, host_cores, threads
    "one rank": (1, 2, {}, {}, (1, 6, 6)),
    "three ranks on two hosts": (3, 2, {}, {}, (2, 6, 3)),
    "three ranks on one host": (3, 3, {}, {}, (3, 6, 2)),
    "variables of other ranks, as under mpirun": (3, 2, {}, {"SLURM_PROCID": "9"}, (2, 6, 2)),
    "each bound to cores of its own": (3, 2, {0: {0, 1}, 1: {2, 3}, 2: {4, 5}}, {}, (2, 4, 2)),
    "the last one to a single core": (3, 3, {0: {0, 1}, 1: {2, 3}, 2: {4}}, {}, (3, 5, 1)),
    "fewest cores by rank on the second host": (3, 2, {2: {0}}, {}, (1, 1, 1)),
    "more ranks than cores": (3, 3, {n: {0, 1} for n in range(3)}, {}, (3, 2, 1)),
    "as many threads as are asked for": (3, 2, {}, {"OMP_NUM_THREADS": "5,2"}, (2, 6, 5)),
    "no threads are asked for": (1, 1, {}, {"OMP_NUM_THREADS": "0"}, (1, 6, 6)),
    "more threads than cores are asked for, with blanks": (
        *(1, 1, {}, {"OMP_NUM_THREADS": " 8 "}),
        (1, 6, 8),
    ),
    "a word for a number of threads": (1, 1, {}, {"OMP_NUM_THREADS": "abc"}, (1, 6, 6)),
    "srun gave each rank fewer cores": (3, 3, {}, {"SLURM_CPUS_PER_TASK": "1"}, (3, 3, 1)),
}
QUOTAS = {  # ranks, ranks of a host, quotas by rank -> host_ranks, host_cores, threads
    "a quota of all": (3, 3, {n: [("all", 4.5)] for n in range(3)}, (3, 4, 1)),
    "one of less than a core": (3, 3, {n: [("all", 0.5)] for n in range(3)}, (3, 1, 1)),
    "one of each": (3, 3, {n: [(str(n), 1.5), ("all", 64.0)] for n in range(3)}, (3, 4, 1)),
    "one of half a rank's share": (1, 1, {0: [("own", 3.0)]}, (1, 3, 3)),
}


@pytest.fixture
def short(tmp_path):
    return short_run(tmp_path) | {"threads": None, "epochs": 1, "test": False}


def check(comm, settings, patch, case, quotas=None):
    ranks, per_host, cores, variables, expected = case
    given = [Quota(group, cores) for group, cores in (quotas or {}).get(comm.rank, [])]
    patch.setattr(hosts, "cpu_quotas", lambda: given)
    node, task = divmod(comm.rank, per_host)
    slurm = {"SLURM_PROCID": str(comm.rank), "SLURM_STEP_NUM_TASKS": str(comm.size)}
    slurm |= {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(task)}
    patch.delenv("OMP_NUM_THREADS", raising=False)
    for variable, value in (slurm | variables).items():
        patch.setenv(variable, value)
    patch.setattr(socket, "gethostname", lambda: f"n{9 - node}")
    patch.setattr(os, "sched_getaffinity", lambda pid: cores.get(comm.rank, CORES))
    hp.train(**settings)
    if comm.rank == 0:
        (facts,) = records(settings, "run")
        found = facts["host_ranks"], facts["host_cores"], facts["threads"]
        assert found == expected
        notes = " ".join(note["text"] for note in records(settings, "note"))
        assert ("start at most" in notes) == (expected[0] > expected[1])
        many = expected[2] > 1 and expected[2] * expected[0] > expected[1]
        assert ("unset OMP_NUM_THREADS, or give" in notes) == many
        assert facts["hosts"] == sorted({f"n{9 - rank // per_host}" for rank in range(ranks)})


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == 1])
def test_a_rank_alone_uses_all_cores_of_its_host(comm, short, monkeypatch, name):
    check(comm, short, monkeypatch, CASES[name])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == 3])
def test_ranks_share_the_cores_of_a_host_and_all_use_the_smallest_number_of_threads(
    comm, short, monkeypatch, name
):
    check(comm, short, monkeypatch, CASES[name])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", [name for name, case in QUOTAS.items() if case[0] == 1])
def test_a_rank_alone_follows_its_quota(comm, short, monkeypatch, name):
    ranks, per_host, quotas, expected = QUOTAS[name]
    check(comm, short, monkeypatch, (ranks, per_host, {}, {}, expected), quotas)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [name for name, case in QUOTAS.items() if case[0] == 3])
def test_ranks_share_the_quota_of_a_cgroup(comm, short, monkeypatch, name):
    ranks, per_host, quotas, expected = QUOTAS[name]
    check(comm, short, monkeypatch, (ranks, per_host, {}, {}, expected), quotas)


MANY = ("a",), 2, 2, 2, 2, math.inf, 64
NOTES: dict[
    str, tuple
] = {  # what is said of the cores of a host, threads -> what the notes begin with
    "enough": ((("a",), 2, 8, 8, 8, math.inf, 8), 4, []),
    "all there are": ((("a",), 2, 2, 2, 2, math.inf, 2), 1, []),
    "bound by the launcher": (MANY, 1, ["2 ranks may use 2 of the 64 cores of a host; reading"]),
    "crowded": (
        (("a",), 4, 2, 2, 2, math.inf, 64),
        1,
        ["4 ranks share 2 cores of a host: start at"],
    ),
    "a quota": (
        (("a",), 1, 64, 1, 64, 1.5, 64),
        1,
        ["1 rank may use the CPU time of 1.5 of 64 cores of a host: ask"],
    ),
    "too many threads": (
        (("a",), 2, 8, 8, 8, math.inf, 8),
        5,
        ["2 ranks of 5 threads on 8 cores of a host: unset --threads, or give 4"],
    ),
    "bound by OpenMP": (
        (("a",), 2, 8, 8, 1, math.inf, 8),
        4,
        ["OMP_PROC_BIND: the main threads of 2 ranks are bound to 1 core of a host: unset it, or"],
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_too_few_cores_are_noted_with_what_to_do(monkeypatch, name):
    cores, threads, begins = NOTES[name]
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    found = hosts.core_notes(hosts.HostCores(*cores), threads, "--threads")
    assert len(found) == len(begins)
    assert all(text.startswith(begin) for text, begin in zip(found, begins, strict=True))


def test_a_variable_that_may_name_cores_is_in_the_advice(monkeypatch):
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "1")
    (note,) = hosts.core_notes(hosts.HostCores(*MANY), 1, "--threads")
    assert note.endswith(", or unset GOMP_CPU_AFFINITY")
