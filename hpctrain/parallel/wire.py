"""The message with its gradients in bfloat16 on the wire: half the bytes, and of nothing else.

MPI has no bfloat16 (Open MPI would add its bytes up as numbers without an error), so every rank
sends each other rank the slice that this one owns (Alltoallv), the owner adds the slices up in
float32, in the order of ranks, and the sums go back in bfloat16 (Allgatherv). As many bytes as a
ring sends; a gradient is rounded twice, to 8 significant bits. Moments, counts and slots travel in
the same two calls as they are.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.device import pinned_like, synchronize
from hpctrain.parallel.message import ALIGNMENT, Message
from hpctrain.parallel.mpi import MPI, Comm

Pair = tuple[torch.Tensor, torch.Tensor]  # gradients, everything else


class NarrowWire:
    """Sums messages with gradients rounded to bfloat16 where they travel."""

    def __init__(self, comm: Comm, message: Message) -> None:
        """UsageError for a model that is not float32."""
        if message.tensor.dtype != torch.float32:
            raise UsageError(
                f"--wire bf16 is for float32 models; this one is {message.tensor.dtype}"
            )
        self.comm = comm
        length = len(message.gradients)
        self._wide = _cuts(length, comm.size, ALIGNMENT)  # of gradients, by owner
        self._rest = _cuts(len(message.tensor) - length, comm.size, 1)  # of everything else
        self._bytes = [
            2 * (wide.stop - wide.start) + 4 * (rest.stop - rest.start)
            for wide, rest in zip(self._wide, self._rest, strict=True)
        ]
        self._places = [sum(self._bytes[:rank]) for rank in range(comm.size)]
        self._all = np.empty(sum(self._bytes), np.uint8)  # what goes out, then what came back
        self._own = np.empty((comm.size, self._bytes[comm.rank]), np.uint8)
        own = self._wide[comm.rank]
        self._sum, self._widened = torch.empty(2, own.stop - own.start).unbind()
        self._staged = None  # on a GPU: gradients, already rounded, and the rest
        if message.device.type != "cpu":
            narrow = message.gradients.to(torch.bfloat16)
            self._staged = pinned_like(narrow), pinned_like(message.tensor[length:])

    def keep(self, shard: int) -> None:
        """Nothing to do: the next shard adds to the message."""

    def __call__(self, message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""
        if self.comm.size == 1:
            return
        there = message.gradients, message.tensor[len(message.gradients) :]
        here = self._staged or there
        if self._staged:
            here[0].copy_(there[0].to(torch.bfloat16), non_blocking=True)
            here[1].copy_(there[1], non_blocking=True)
            synchronize(message.device)
        for rank in range(self.comm.size):
            self._copy(self._slices(here, rank), self._place(rank))  # rounds to the nearest
        size, own = self.comm.size, self._bytes[self.comm.rank]
        self.comm.Alltoallv(
            [self._all, (self._bytes, self._places), MPI.BYTE],
            [self._own, ([own] * size, [own * rank for rank in range(size)]), MPI.BYTE],
        )
        self._copy(self._added(), self._place(self.comm.rank))
        self.comm.Allgatherv(MPI.IN_PLACE, [self._all, (self._bytes, self._places), MPI.BYTE])
        for rank in range(self.comm.size):
            self._copy(self._place(rank), self._slices(here, rank))
        if self._staged:
            self._copy(here, there)

    def _added(self) -> Pair:
        """Sum of the slices that all ranks sent here, in the order of ranks."""
        rows = [self._parts(row, self.comm.rank) for row in self._own]
        wide, rest = self._sum, rows[0][1]
        wide.copy_(rows[0][0])
        for more, others in rows[1:]:
            wide += self._widened.copy_(more)  # adding what is narrow takes ten times as long
            rest += others
        return wide, rest

    def _parts(self, row: np.ndarray, rank: int) -> Pair:
        """The two slices that `rank` owns, as they lie in `row` (bytes,)."""
        data = torch.from_numpy(row)
        border = 2 * (self._wide[rank].stop - self._wide[rank].start)
        return data[:border].view(torch.bfloat16), data[border:].view(torch.float32)

    def _place(self, rank: int) -> Pair:
        start = self._places[rank]
        return self._parts(self._all[start : start + self._bytes[rank]], rank)

    def _slices(self, whole: Pair, rank: int) -> Pair:
        return whole[0][self._wide[rank]], whole[1][self._rest[rank]]

    @staticmethod
    def _copy(source: Pair, target: Pair) -> None:
        for a, b in zip(source, target, strict=True):
            b.copy_(a, non_blocking=True)


def _cuts(length: int, parts: int, unit: int) -> list[slice]:
    """`length` cut evenly into `parts` slices at multiples of `unit`; the last takes the rest."""
    borders = [length // unit * part // parts * unit for part in range(parts)] + [length]
    return [slice(start, stop) for start, stop in itertools.pairwise(borders)]
