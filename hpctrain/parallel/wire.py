"""Gradients in bfloat16 on the wire: half the bytes, and of nothing else in the message.

MPI has no bfloat16 (Open MPI would add its bytes up as numbers without an error), so every rank
sends each other rank the slice that this one owns (Alltoallv), the owner adds the slices up in
float32, in the order of ranks, and the sums go back in bfloat16 (Allgatherv). As many bytes as a
ring sends; a gradient is rounded twice, to 8 significant bits. Moments, counts and slots travel in
the same two calls as they are.
"""

from __future__ import annotations

import itertools

import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.device import room
from hpctrain.parallel.message import ALIGNMENT
from hpctrain.parallel.plain import Reduce
from hpctrain.parallel.transport import Transport

Pair = tuple[torch.Tensor, torch.Tensor]  # gradients, what else there is


class NarrowWire(Reduce):
    """Sums gradients, rounded to bfloat16 where they travel, and the rest of a message as it is."""

    def __init__(self, transport: Transport, gradients: torch.Tensor, rest: torch.Tensor) -> None:
        """Either vector may be empty. UsageError for a model that is not float32."""
        if gradients.dtype != torch.float32:
            raise UsageError(f"--wire bf16 is for float32 models; this one is {gradients.dtype}")
        self.transport, self.rank, self.size = transport, transport.comm.rank, transport.comm.size
        self._whole, device = (gradients, rest), gradients.device
        self._wide = _cuts(len(gradients), self.size, ALIGNMENT)  # by owner
        self._rest = _cuts(len(rest), self.size, 1)
        self._bytes = [
            2 * (wide.stop - wide.start) + 4 * (rest.stop - rest.start)
            for wide, rest in zip(self._wide, self._rest, strict=True)
        ]
        self._places = [sum(self._bytes[:rank]) for rank in range(self.size)]
        own, wide = self._bytes[self.rank], self._wide[self.rank]
        # what goes out, then what came back; and the slices that all ranks sent here, if any
        self._all = room((sum(self._bytes),), torch.uint8, device)
        self._own = room((max(1, self.size * own),), torch.uint8, device)  # empty has no views
        sums = room((2, wide.stop - wide.start), torch.float32, device)
        self._sum, self._widened = sums.unbind()

    def __call__(self) -> None:
        """Sum both vectors over all ranks, in place. Collective."""
        if self.size == 1:
            return
        for rank in range(self.size):
            _copy(self._slices(rank), self._place(rank))  # rounds to the nearest
        blocks, own = (self._bytes, self._places), self._bytes[self.rank]
        places = [own] * self.size, [own * rank for rank in range(self.size)]
        self.transport.alltoallv(self._all, blocks, self._own, places)
        _copy(self._added(), self._place(self.rank))
        self.transport.allgatherv(self._all, blocks)
        for rank in range(self.size):
            _copy(self._place(rank), self._slices(rank))

    def _added(self) -> Pair:
        """Sum of the slices that all ranks sent here, in the order of ranks."""
        own = self._bytes[self.rank]
        slices = (self._own[own * rank : own * (rank + 1)] for rank in range(self.size))
        rows = [self._parts(row, self.rank) for row in slices]
        wide, rest = self._sum, rows[0][1]
        wide.copy_(rows[0][0])
        for more, others in rows[1:]:
            wide += self._widened.copy_(more)  # adding what is narrow takes ten times as long
            rest += others
        return wide, rest

    def _parts(self, row: torch.Tensor, rank: int) -> Pair:
        """The two slices that `rank` owns, as they lie in `row` (bytes,)."""
        border = 2 * (self._wide[rank].stop - self._wide[rank].start)
        return row[:border].view(torch.bfloat16), row[border:].view(torch.float32)

    def _place(self, rank: int) -> Pair:
        start = self._places[rank]
        return self._parts(self._all[start : start + self._bytes[rank]], rank)

    def _slices(self, rank: int) -> Pair:
        gradients, rest = self._whole
        return gradients[self._wide[rank]], rest[self._rest[rank]]


def _copy(source: Pair, target: Pair) -> None:
    for a, b in zip(source, target, strict=True):
        b.copy_(a)


def _cuts(length: int, parts: int, unit: int) -> list[slice]:
    """`length` cut evenly into `parts` slices at multiples of `unit`; the last takes the rest."""
    borders = [length // unit * part // parts * unit for part in range(parts)] + [length]
    return [slice(start, stop) for start, stop in itertools.pairwise(borders)]
