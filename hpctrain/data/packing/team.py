"""The processes that make a pack together, as packing sees them.

Packing knows nothing of MPI: it is handed a team. ``Alone`` is the team of one process; that of
the ranks of a launcher stands above, in ``hpctrain/pack.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import Protocol, TypeVar

T = TypeVar("T")
Frame = Callable[[], AbstractContextManager[None]]
ASK = -1  # columns: the console finds out itself whether it is a terminal


class Team(Protocol):
    """Its methods are for all of its processes, which call them in the same order (Collective)."""

    @property
    def rank(self) -> int:
        """Which of its processes this is; the root is 0."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def cores(self) -> int:
        """The fair share of this process, in CPU cores."""

    @property
    def one_host(self) -> bool:
        """Whether they all share one memory, so that what one writes the others see at once."""

    @property
    def columns(self) -> int | None:
        """Width of the terminal that shows what the root says; None = none, ASK = not known."""

    def call_on_root(self, function: Callable[[], T]) -> T:
        """What `function` gives on the root, or the Failure it raises there, for all."""

    def call_on_all(self, function: Callable[[], T]) -> T:
        """What `function` gives here; a Failure that it raises anywhere is raised by all."""

    def gather(self, value: T) -> list[T]:
        """The values of all in order of their ranks, on the root; elsewhere nothing."""

    def scatter(self, values: Sequence[T]) -> T:
        """To each its own of the root's `values`, which elsewhere do not matter."""


class Alone:
    """The team of one process, without MPI."""

    rank, size, one_host = 0, 1, True
    columns: int | None = ASK

    @property
    def cores(self) -> int:
        """All cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def call_on_root(self, function: Callable[[], T]) -> T:
        """As in Team."""
        return function()

    def call_on_all(self, function: Callable[[], T]) -> T:
        """As in Team."""
        return function()

    def gather(self, value: T) -> list[T]:
        """As in Team."""
        return [value]

    def scatter(self, values: Sequence[T]) -> T:
        """As in Team."""
        return values[0]


class Framed:
    """A team that runs what it is given within `frame`, where errors of the system become
    Failures, which alone can be agreed on."""

    def __init__(self, team: Team, frame: Frame) -> None:
        self.rank, self.size, self.cores = team.rank, team.size, team.cores
        self.one_host, self.columns = team.one_host, team.columns
        self.gather, self.scatter = team.gather, team.scatter
        self._team, self._frame = team, frame

    def call_on_root(self, function: Callable[[], T]) -> T:
        """As in Team."""
        return self._team.call_on_root(lambda: self._framed(function))

    def call_on_all(self, function: Callable[[], T]) -> T:
        """As in Team."""
        return self._team.call_on_all(lambda: self._framed(function))

    def _framed(self, function: Callable[[], T]) -> T:
        with self._frame():
            return function()


def part(count: int, team: Team) -> range:
    """Which of `count` things in a row are this process's: shares differ by one at most."""
    return parts(count, team.size)[team.rank]


def parts(count: int, size: int) -> list[range]:
    """`count` things in a row cut into `size` shares; what is left over goes to the first ones."""
    borders = [-(-count * rank // size) for rank in range(size + 1)]
    return [range(start, stop) for start, stop in pairwise(borders)]


@contextmanager
def on_root(team: Team, make: Callable[[], AbstractContextManager[T]]) -> Iterator[T | None]:
    """What entering `make()` gives, on the root; None elsewhere. Failures in entering and leaving
    it are raised by all. Collective."""
    with ExitStack() as stack:
        entered: list[T] = []
        team.call_on_root(lambda: entered.append(stack.enter_context(make())))
        yield entered[0] if entered else None
        leave = stack.pop_all()
        team.call_on_root(leave.close)
