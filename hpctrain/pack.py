"""``hpctrain pack``: in one process, or shared by all ranks that a launcher started.

One process starts no MPI. Ranks are the ``Team`` of ``data/packing/team.py``; what they do with it
stands in ``data/pack.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hpctrain.config import PackConfig
from hpctrain.data import pack  # before MPI runs: importing h5py starts a process (uname)
from hpctrain.launcher import launched_size
from hpctrain.watchdog import started, waiting

T = TypeVar("T")


def main(config: PackConfig) -> int:
    """Pack, or check a pack; the exit code. Collective."""
    if (launched_size() or 1) == 1:
        return pack.main(config)
    from hpctrain.parallel.mpi import start_mpi

    comm = start_mpi()
    started("packing")
    return pack.main(config, Ranks(comm))


class Ranks:
    """All ranks of `comm` as the team that makes a pack. All its methods are collective."""

    def __init__(self, comm: Any) -> None:
        from hpctrain.parallel.mpi import fair_threads, local_ranks
        from hpctrain.report.bar import dumb_terminal, terminal_columns

        self.rank, self.size = comm.rank, comm.size
        self.cores = fair_threads(comm)
        self.one_host = local_ranks(comm)[1] == comm.size
        self.columns = None if comm.rank or dumb_terminal() else terminal_columns()
        self._comm = comm

    def call_on_root(self, function: Callable[[], T]) -> T:
        """What `function` gives, or raises, on rank 0."""
        from hpctrain.parallel.mpi import call_on_root

        return call_on_root(self._comm, function)

    def call_on_all(self, function: Callable[[], T]) -> T:
        """Run `function` on all ranks; all raise the first failure."""
        from hpctrain.parallel.mpi import call_on_all

        return call_on_all(self._comm, function)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on rank 0."""
        with waiting():
            return self._comm.gather(value) or []

    def scatter(self, values: Sequence[T]) -> T:
        """To each rank its own of rank 0's values."""
        with waiting("rank 0"):
            return self._comm.scatter(values if self.rank == 0 else None)
