"""The exchange of a sum in tree order: slices of subtrees to their owners, slices of the sum back.

A transport moves the data (Alltoallv and Allgatherv); we add in our own order (tree.py says why and
how much), where the data lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.parallel.device import room
from hpctrain.parallel.transport import Transport
from hpctrain.parallel.tree import Span, additions


class Exchange:
    """Sums the subtrees of all ranks, vectors like one `example`. Collective when called."""

    def __init__(
        self, transport: Transport, spans: Sequence[Sequence[Span]], example: torch.Tensor
    ) -> None:
        """`spans` are the subtrees of every rank, in order."""
        self.transport, comm, length = transport, transport.comm, len(example)
        self.rank, self.size = comm.rank, comm.size
        self._counts = [len(own) for own in spans]
        self._starts = [length * r // comm.size for r in range(comm.size)]
        ends = [*self._starts[1:], length]
        self._lengths = [end - start for start, end in zip(self._starts, ends, strict=True)]
        self._own = slice(self._starts[comm.rank], ends[comm.rank])
        self._pairs = additions([span for own in spans for span in own])
        # What is received in one round lies together: the row of each subtree (round, rank).
        rounds, own = range(max(self._counts)), comm.rank
        subtrees = [
            (n, r) for n in rounds for r, c in enumerate(self._counts) if n < c and r != own
        ]
        self._rows = {subtree: row for row, subtree in enumerate(subtrees)}
        shape = len(subtrees), self._lengths[comm.rank]
        self._received = room(shape, example.dtype, example.device)
        self._rounds = [self._round(number) for number in rounds]

    @property
    def sent(self) -> int:
        """Numbers that this rank sends in one call."""
        own = self._lengths[self.rank]
        others = sum(self._lengths) - own
        return self._counts[self.rank] * others + (self.size - 1) * own

    def __call__(self, sums: Sequence[torch.Tensor]) -> None:
        """From this rank's subtrees, (length,) each, to the sum of all, in the last of them."""
        for number, (lengths, counts, places) in enumerate(self._rounds):
            vector, blocks = sums[min(number, len(sums) - 1)], (lengths, self._starts)
            self.transport.alltoallv(vector, blocks, self._received.flatten(), (counts, places))
        received, mine = self._received.unbind(), [s[self._own] for s in sums]
        before, after = (
            [received[self._rows[n, r]] for r in ranks for n in range(self._counts[r])]
            for ranks in (range(self.rank), range(self.rank + 1, self.size))
        )
        rows = [*before, *mine, *after]
        for number, (i, j) in enumerate(self._pairs, start=1):
            target = mine[-1] if number == len(self._pairs) else rows[i]
            torch.add(rows[i], rows[j], out=target)
        self.transport.allgatherv(sums[-1], (self._lengths, self._starts))

    def _round(self, number: int) -> tuple[list[int], list[int], list[int]]:
        """Every rank's subtree of this number: how much of it goes to each rank, how much comes
        from each, and to which places of the received rows.
        """
        own, has = self._lengths[self.rank], number < self._counts[self.rank]
        lengths = [n if has and r != self.rank else 0 for r, n in enumerate(self._lengths)]
        rows = [self._rows.get((number, r)) for r in range(self.size)]
        counts = [0 if row is None else own for row in rows]
        return lengths, counts, [own * (row or 0) for row in rows]
