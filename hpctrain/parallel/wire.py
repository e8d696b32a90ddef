"""The message with its gradients in bfloat16 on the wire: half the bytes, and of nothing else.

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
from hpctrain.parallel.message import ALIGNMENT, Message
from hpctrain.parallel.transport import Transport

Pair = tuple[torch.Tensor, torch.Tensor]  # gradients, everything else


class NarrowWire:
    """Sums messages with gradients rounded to bfloat16 where they travel."""

    def __init__(self, transport: Transport, message: Message) -> None:
        """UsageError for a model that is not float32."""
        if message.tensor.dtype != torch.float32:
            raise UsageError(
                f"--wire bf16 is for float32 models; this one is {message.tensor.dtype}"
            )
        self.transport, self.rank, self.size = transport, transport.comm.rank, transport.comm.size
        length, device = len(message.gradients), message.device
        self._wide = _cuts(length, self.size, ALIGNMENT)  # of gradients, by owner
        self._rest = _cuts(len(message.tensor) - length, self.size, 1)  # of everything else
        self._bytes = [
            2 * (wide.stop - wide.start) + 4 * (rest.stop - rest.start)
            for wide, rest in zip(self._wide, self._rest, strict=True)
        ]
        self._places = [sum(self._bytes[:rank]) for rank in range(self.size)]
        own, wide = self._bytes[self.rank], self._wide[self.rank]
        # what goes out, then what came back; and the slices that all ranks sent here
        self._all = room((sum(self._bytes),), torch.uint8, device)
        self._own = room((self.size, own), torch.uint8, device)
        sums = room((2, wide.stop - wide.start), torch.float32, device)
        self._sum, self._widened = sums.unbind()

    def keep(self, shard: int) -> None:
        """Nothing to do: the next shard adds to the message."""

    def __call__(self, message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""
        if self.size == 1:
            return
        whole = message.gradients, message.tensor[len(message.gradients) :]
        for rank in range(self.size):
            _copy(self._slices(whole, rank), self._place(rank))  # rounds to the nearest
        blocks, own = (self._bytes, self._places), self._bytes[self.rank]
        places = [own] * self.size, [own * rank for rank in range(self.size)]
        self.transport.alltoallv(self._all, blocks, self._own.flatten(), places)
        _copy(self._added(), self._place(self.rank))
        self.transport.allgatherv(self._all, blocks)
        for rank in range(self.size):
            _copy(self._place(rank), self._slices(whole, rank))

    def _added(self) -> Pair:
        """Sum of the slices that all ranks sent here, in the order of ranks."""
        rows = [self._parts(row, self.rank) for row in self._own]
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

    def _slices(self, whole: Pair, rank: int) -> Pair:
        return whole[0][self._wide[rank]], whole[1][self._rest[rank]]


def _copy(source: Pair, target: Pair) -> None:
    for a, b in zip(source, target, strict=True):
        b.copy_(a)


def _cuts(length: int, parts: int, unit: int) -> list[slice]:
    """`length` cut evenly into `parts` slices at multiples of `unit`; the last takes the rest."""
    borders = [length // unit * part // parts * unit for part in range(parts)] + [length]
    return [slice(start, stop) for start, stop in itertools.pairwise(borders)]
