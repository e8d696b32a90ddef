"""The exchange of a sum in tree order: slices of subtrees to their owners, slices of the sum back.

Moves data by Alltoallv and Allgatherv and adds in our own order (tree.py says why and how much).
Host memory only; reduce.py stages that of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.parallel.mpi import MPI, MPI_TYPES, Comm
from hpctrain.parallel.tree import Span, additions


class Exchange:
    """Sums the subtrees of all ranks, messages of one length and type. Collective when called."""

    def __init__(
        self, comm: Comm, spans: Sequence[Sequence[Span]], length: int, dtype: np.dtype
    ) -> None:
        """`spans` are the subtrees of every rank, in order; `length` numbers each."""
        self.comm, self._type = comm, MPI_TYPES[dtype.name]
        self._counts = [len(own) for own in spans]
        self._starts = [length * r // comm.size for r in range(comm.size)]
        ends = [*self._starts[1:], length]
        self._lengths = [end - start for start, end in zip(self._starts, ends, strict=True)]
        self._own = slice(self._starts[comm.rank], ends[comm.rank])
        self._pairs = additions([span for own in spans for span in own])
        others = sum(self._counts) - self._counts[comm.rank]
        self._received = np.empty((others, self._lengths[comm.rank]), dtype)
        self._rounds = [self._round(number) for number in range(max(self._counts))]

    @property
    def sent(self) -> int:
        """Numbers that this rank sends in one call."""
        own = self._lengths[self.comm.rank]
        others = sum(self._lengths) - own
        return self._counts[self.comm.rank] * others + (self.comm.size - 1) * own

    def __call__(self, sums: Sequence[np.ndarray]) -> None:
        """From this rank's subtrees, (length,) each, to the sum of all, in the last of them."""
        for number, (lengths, counts, places) in enumerate(self._rounds):
            self.comm.Alltoallv(
                [sums[min(number, len(sums) - 1)], (lengths, self._starts), self._type],
                [self._received, (counts, places), self._type],
            )
        before = sum(self._counts[: self.comm.rank])
        mine = [s[self._own] for s in sums]
        rows = [*self._received[:before], *mine, *self._received[before:]]
        for number, (i, j) in enumerate(self._pairs, start=1):
            target = mine[-1] if number == len(self._pairs) else rows[i]
            np.add(rows[i], rows[j], out=target)
        self.comm.Allgatherv(MPI.IN_PLACE, [sums[-1], (self._lengths, self._starts), self._type])

    def _round(self, number: int) -> tuple[list[int], list[int], list[int]]:
        """Every rank's subtree of this number: how much of it goes to each rank, how much comes
        from each, and to which places of the received rows.
        """
        rank = self.comm.rank
        own, has = self._lengths[rank], number < self._counts[rank]
        lengths = [n if has and r != rank else 0 for r, n in enumerate(self._lengths)]
        counts, places, row = [], [], 0
        for r, subtrees in enumerate(self._counts):
            there = r != rank and number < subtrees
            counts.append(own if there else 0)
            places.append((row + number) * own if there else 0)
            row += subtrees if r != rank else 0
        return lengths, counts, places
