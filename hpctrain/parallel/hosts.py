"""The cores of the hosts of a job: each rank's share of them, and what to do about too few."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.cluster import more_cores, place_in_step
from hpctrain.cores import BINDING, allowed_cores, cpu_quotas, thread_limit, whole_cores
from hpctrain.parallel.mpi import Comm, allgather, comm_of_host
from hpctrain.text import counted, listed


class RankCores(NamedTuple):
    """The cores that a rank may use, and the threads that it would compute with."""

    host: str
    allowed: set[int]
    main: set[int]  # on which its main thread may run: OpenMP may have bound it
    quota: float  # its share of the CPU time of quotas, in cores
    present: int  # cores of the host
    threads: int  # OMP_NUM_THREADS, or its share of the cores


class HostCores(NamedTuple):
    """The cores of the host that has the fewest per rank."""

    hosts: tuple[str, ...]  # all of the job, sorted
    ranks: int
    allowed: int  # cores that its ranks may use together
    cores: int  # of them by their quotas, at least 1
    main: int  # on which their main threads may run
    quota: float  # the CPU time, in cores, to which quotas limit its ranks together
    present: int


class JobCores(NamedTuple):
    """The cores of a job, and the share of this rank."""

    share: int  # cores of this rank by affinity masks and quotas, at least 1
    quota: float  # its share of the CPU time of quotas, in cores
    threads: int  # CPU threads with which no cores are oversubscribed; equal on all ranks
    scarcest: HostCores

    def decoding_threads(self, device: str) -> int | None:
        """Return how many threads of this rank decode JPEG files; None: as `Split` does.

        On a GPU (`device` "cuda") they are as many as the rank's share of cores, which have little
        else to do.
        """
        return self.share if device == "cuda" else None


def share_cores(comm: Comm) -> JobCores:
    """Return the cores of the job, and this rank's share. Collective.

    The threads are OMP_NUM_THREADS if set, otherwise the share; the minimum over all ranks.
    """
    cores, quota = core_share(comm)
    share = whole_cores(cores, quota)
    rank = RankCores(
        host=socket.gethostname(),
        allowed=allowed_cores(),
        main=os.sched_getaffinity(0),
        quota=quota,
        present=os.cpu_count() or 1,
        threads=threads_asked() or min(share, thread_limit() or share),
    )
    ranks = allgather(comm, rank)
    threads = min(rank.threads for rank in ranks)
    return JobCores(share, quota, threads, scarcest_host(ranks))


def threads_asked() -> int:
    """Return OMP_NUM_THREADS, of whose levels the first counts; 0 if it is no number above 0."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal():
        return int(wanted)
    return 0


def core_share(comm: Comm) -> tuple[float, float]:
    """Return this rank's share of the allowed cores, and of the CPU time of quotas. Collective.

    The cores are divided by the number of ranks of this host that may use them, the CPU time of a
    quota, in cores, by that of the ranks in its cgroup. The number of cores for a task of srun
    counts as a quota of the rank. Without any quota its share is infinite.
    """
    cores = allowed_cores()
    quotas = cpu_quotas()
    groups = {quota.group for quota in quotas}
    host = allgather(comm_of_host(comm), (cores, groups))
    sharing = [theirs for theirs, _ in host if cores & theirs]
    limits = []
    for quota in quotas:
        members = [theirs for _, theirs in host if quota.group in theirs]
        limits.append(quota.cores / len(members))
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdecimal() and place_in_step(comm.rank, comm.size)[0] >= 0:
        limits.append(float(given))
    return len(cores) / len(sharing), min(limits, default=math.inf)


def scarcest_host(ranks: Sequence[RankCores]) -> HostCores:
    """Return the cores of the host that has the fewest per rank."""
    groups: dict[str, list[RankCores]] = {}
    for rank in ranks:
        groups.setdefault(rank.host, []).append(rank)
    hosts = []
    for group in groups.values():
        allowed = len(set[int]().union(*(rank.allowed for rank in group)))
        quota = sum(rank.quota for rank in group)
        host = HostCores(
            hosts=tuple(sorted(groups)),
            ranks=len(group),
            allowed=allowed,
            cores=whole_cores(allowed, quota + 1e-6),  # a sum of thirds
            main=len(set[int]().union(*(rank.main for rank in group))),
            quota=quota,
            present=group[0].present,
        )
        hosts.append(host)
    return min(hosts, key=lambda host: host.cores / host.ranks)


def core_notes(host: HostCores, threads: int, setting: str) -> list[str]:
    """Return notes on too few cores, and what to do about them.

    `threads` is the number of each rank, which `setting` may have asked for.
    """
    ranks = counted(host.ranks, "rank")
    cores = counted(host.cores, "core")
    notes = []
    if host.quota < host.allowed:
        notes.append(
            f"{ranks} may use the CPU time of {host.quota:.3g} of {host.allowed} cores of a host:"
            " ask for more with the job or container"
        )
    if host.ranks > host.cores:
        notes.append(f"{ranks} share {cores} of a host: start at most {host.cores} there")
    elif host.ranks == host.allowed < host.present:
        notes.append(
            f"{ranks} may use {host.cores} of the {host.present} cores of a host;"
            f" reading needs a core, too: {more_cores()}"
        )
    if host.main < min(host.ranks, host.cores):
        names = listed(name for name in BINDING if name in os.environ)
        notes.append(
            f"{names}: the main threads of {ranks} are bound to {counted(host.main, 'core')}"
            " of a host: unset it, or bind ranks to cores of their own"
        )
    if threads > 1 and threads * host.ranks > host.cores:
        fair = max(1, host.cores // host.ranks)
        notes.append(
            f"{ranks} of {threads} threads on {cores} of a host: unset {setting}, or give {fair}"
        )
    return notes
