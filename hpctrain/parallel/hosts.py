"""Hosts: which ranks run on the same host, and how they share its cores."""

from __future__ import annotations

import os
import socket
from collections import Counter, defaultdict
from typing import cast

from hpctrain.cluster import place_in_step
from hpctrain.parallel.mpi import MPI, Comm, allgather, minimum
from hpctrain.watchdog import waiting

HOST = MPI.Comm.Create_keyval()  # attribute of a communicator: the communicator of its host


def comm_of_host(comm: Comm) -> Comm:
    """Return the communicator of the ranks of this host, an attribute of `comm`. Collective.

    Under srun, Slurm's variables define it: MPI libraries that compare host names with Slurm's node
    names would put every rank into a communicator of its own if the two differ.
    """
    if (host := comm.Get_attr(HOST)) is None:
        node, task = place_in_step(comm.rank, comm.size)
        with waiting():
            if minimum(comm, node)[0] >= 0:
                host = comm.Split(node, task)
            else:
                host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        comm.Set_attr(HOST, host)
    return cast(Comm, host)


def fair_threads(comm: Comm) -> int:
    """Return the number of CPU threads per rank with which no cores are oversubscribed. Collective.

    This is OMP_NUM_THREADS if set, otherwise the number of allowed cores divided by the number of
    ranks that may use them; the minimum over all ranks.
    """
    cores = os.sched_getaffinity(0)
    sharing = sum(bool(cores & theirs) for theirs in allgather(comm_of_host(comm), cores))
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    given = int(wanted) if wanted.isdigit() else 0
    return max(1, minimum(comm, given or len(cores) // sharing)[0])


def describe_hosts(comm: Comm) -> tuple[list[str], int, int]:
    """Return all host names, and ranks and cores of the host with the fewest cores per rank.

    Collective.
    """
    ranks, cores = Counter[str](), defaultdict[str, set[int]](set)
    for host, allowed in allgather(comm, (socket.gethostname(), os.sched_getaffinity(0))):
        ranks[host] += 1
        cores[host] |= allowed
    fullest = max(ranks, key=lambda host: ranks[host] / len(cores[host]))
    return sorted(ranks), ranks[fullest], len(cores[fullest])
