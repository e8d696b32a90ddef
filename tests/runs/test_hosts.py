"""Which ranks share a host and its cores, on hosts that Slurm's variables describe."""

from __future__ import annotations

import os
import socket

import pytest

import hpctrain as hp
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
}


@pytest.fixture
def short(tmp_path):
    return short_run(tmp_path) | {"threads": None, "epochs": 1, "test": False}


def check(comm, settings, patch, name):
    ranks, per_host, cores, variables, expected = CASES[name]
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
        crowded = [note for note in records(settings, "note") if "ranks share" in note["text"]]
        assert len(crowded) == (expected[0] > expected[1])
        assert facts["hosts"] == sorted({f"n{9 - rank // per_host}" for rank in range(ranks)})


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == 1])
def test_a_rank_alone_uses_all_cores_of_its_host(comm, short, monkeypatch, name):
    check(comm, short, monkeypatch, name)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == 3])
def test_ranks_share_the_cores_of_a_host_and_all_use_the_smallest_number_of_threads(
    comm, short, monkeypatch, name
):
    check(comm, short, monkeypatch, name)
