"""Tree order: a sum over shards with the same bits on any number of ranks.

Floating-point addition commutes but is not associative, so the bits of a sum depend on its order.
Here the order depends only on the shards: their messages are the leaves of one binary tree over
0 ... S-1, in which a span of n shards splits after the largest power of two below n. A rank
carries a run of shards, and the largest spans of the tree within its run are its subtrees.

1. While a rank processes its shards, it sums its subtrees (`accumulate`). One buffer is in use for
   each level of the tree that is not complete.
2. Ranks exchange slices of their subtrees by recursive halving and add them (halving.py), until
   each has one slice of the sum of all.
3. The same exchanges in reverse, recursive doubling, distribute the slices of the sum.

MPI only moves data, so the bits do not depend on the library or its algorithms. With N ranks and
messages of L numbers, a rank that holds one subtree at a time sends 2 L (1 - 1/N) numbers, as in a
ring Allreduce; this is so if S and N are powers of two. It then stores log2(S/N) + 1 messages and
a part of one that it receives; otherwise up to 2 log2(S) subtrees, and those that it receives.

The leaf of a shard without samples is zero and is skipped: x + 0 is x, bit by bit, because no leaf
holds a negative zero (each is a sum that began at +0).

A transport moves the data; the additions run here, on the device that holds the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.parallel.device import empty
from hpctrain.parallel.halving import Round, Span, additions, in_messages, schedule, subtrees
from hpctrain.parallel.reduce import Reduce
from hpctrain.parallel.transport import Messages, Transport


class Subtrees:
    """The sums of one rank's subtrees, computed while it processes its run of shards."""

    def __init__(self, run: range, spans: Sequence[Span], message: torch.Tensor) -> None:
        """`spans` are the subtrees of `run`; every leaf is read from `message`, (L,)."""
        self._run, self._spans, self._message = run, spans, message
        self._free: list[torch.Tensor] = []
        self._start()

    def _start(self) -> None:
        self._next = self._run.start
        self._waiting: list[tuple[int, torch.Tensor | None]] = []  # number of shards, their sum
        self._sums: list[torch.Tensor | None] = []  # of complete subtrees; None is zero

    def accumulate(self, shard: int) -> None:
        """Add the leaf of `shard`, in the message, to the tree; make room for the next."""
        while self._next < shard:
            self._add_leaf(None)
        self._add_leaf(self._message)

    def finish(self) -> list[torch.Tensor]:
        """Return the sums of all subtrees, in order; the last one is the message itself."""
        while self._next < self._run.stop:
            self._add_leaf(None)
        *sums, last = self._sums
        if last is not None and last is not self._message:
            # The last shard had no samples: the message holds flags and seconds, and zeros.
            self._add(last, self._message)
        self._start()
        return [self._take().zero_() if s is None else s for s in sums] + [self._message]

    def release(self, sums: list[torch.Tensor]) -> None:
        """Take back the buffers that `finish` returned."""
        self._free += sums[:-1]

    def _add_leaf(self, leaf: torch.Tensor | None) -> None:
        self._next += 1
        complete = self._next == self._spans[len(self._sums)][1]
        node, size = leaf, 1
        while self._waiting and (complete or self._waiting[-1][0] == size):
            shards, left = self._waiting.pop()
            node, size = self._add(left, node), size + shards
        if node is self._message and self._next < self._run.stop:
            node = self._take().copy_(self._message)
            self._message.zero_()
        if complete:
            self._sums.append(node)
        else:
            self._waiting.append((size, node))

    def _add(self, left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
        if left is None or right is None:
            return right if left is None else left
        self._free.append(left)
        return right.add_(left)

    def _take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        return empty(tuple(self._message.shape), self._message.dtype, self._message.device)


class TreeAllreduce:
    """Sums the subtrees of all ranks by recursive halving and doubling. Calls are collective."""

    def __init__(self, transport: Transport, runs: Sequence[range], vector: torch.Tensor) -> None:
        """`runs` are the shards that each rank carries, together 0 ... S-1.

        `vector`, (L,), holds this rank's last subtree, and takes the sum.
        """
        self.transport, self._vector = transport, vector
        self.rounds = schedule(transport.comm.rank, runs, len(vector))
        self._steps = [Halving(each, vector, transport.comm.size) for each in self.rounds]

    def __call__(self, sums: Sequence[torch.Tensor]) -> None:
        """Sum this rank's subtrees, (L,) each, and those of all ranks into the vector."""
        rows, start = list(sums), 0
        for step in self._steps:
            self.transport.exchange(step.sends(rows, start), step.receives)
            rows, start = step.add(rows, start), step.own.start
        for total in rows:
            if total.data_ptr() != self._vector[start:].data_ptr():  # all but one of several rows
                self._vector[start : start + len(total)].copy_(total)
        for step in reversed(self._steps):
            self.transport.exchange(*step.back)


class Halving:
    """One round of one rank: its messages, the memory for what it receives, and the additions."""

    def __init__(self, each: Round, vector: torch.Tensor, ranks: int) -> None:
        """`vector` takes the sum. `ranks` is the number of all ranks."""
        self.own = each.own
        self._sends = [
            (p.rank, p.send, [each.held.index(span) for span in spans])
            for p in each.partners
            for spans in in_messages(p.sends, ranks)
            if p.send and spans
        ]
        rows: dict[Span, torch.Tensor | None] = dict.fromkeys(each.held)
        self.receives: list[tuple[int, list[torch.Tensor]]] = []
        for peer, _, _, receive, spans in each.partners:
            if not receive or not spans:
                continue
            if spans[0] not in rows:  # else another rank of the same part sends the rest of them
                block = empty((len(spans), len(each.own)), vector.dtype, vector.device)
                rows.update(zip(spans, block, strict=True))
            part = _within(receive, each.own.start)
            for message in in_messages(spans, ranks):
                found = [row[part] for span in message if (row := rows[span]) is not None]
                self.receives.append((peer, found))
        order = sorted(rows)
        self._rows = [rows[span] for span in order]  # None = held before
        self._pairs = additions(order, each.result) if each.own else []
        firsts = [lo for lo, _ in order]
        self._kept = [firsts.index(lo) for lo, _ in each.result] if each.own else []
        back = each.partners if each.comes_back else []
        self.back = (
            [(p.rank, [vector[_within(p.receive, 0)]]) for p in back if p.receive],
            [(p.rank, [vector[_within(p.send, 0)]]) for p in back if p.send],
        )

    def sends(self, held: Sequence[torch.Tensor], start: int) -> Messages:
        """Return what to send of the rows held before, whose first number is `start`."""
        return [
            (peer, [held[place][_within(send, start)] for place in places])
            for peer, send, places in self._sends
        ]

    def add(self, held: Sequence[torch.Tensor], start: int) -> list[torch.Tensor]:
        """Add what was received to the rows held before; return the rows of the own slice."""
        if not self.own:  # there are more ranks than numbers
            return []
        mine = iter([row[_within(self.own, start)] for row in held])
        rows = [next(mine) if row is None else row for row in self._rows]
        for i, j in self._pairs:
            into = j if self._rows[i] is not None and self._rows[j] is None else i
            rows[i] = torch.add(rows[i], rows[j], out=rows[into])
        return [rows[place] for place in self._kept]


def _within(numbers: range, start: int) -> slice:
    """Return where these numbers are in a row whose first number is `start`."""
    return slice(numbers.start - start, numbers.stop - start)


class TreeReduce(Reduce):
    """Sums a vector in tree order: the same bits for any number of ranks."""

    def __init__(self, transport: Transport, vector: torch.Tensor, runs: Sequence[range]) -> None:
        """`runs` are the shards that each rank carries, together 0 ... S-1."""
        self.transport, run = transport, runs[transport.comm.rank]
        self.subtrees = Subtrees(run, subtrees(run, (0, runs[-1].stop)), vector)
        self.exchange = TreeAllreduce(transport, runs, vector)

    def accumulate(self, shard: int) -> None:
        """Add the leaf of `shard` to the tree; the vector is zero for the next one."""
        self.subtrees.accumulate(shard)

    def __call__(self) -> None:
        """Sum the vector over all ranks, in place. Collective."""
        sums = self.subtrees.finish()
        self.exchange(sums)
        self.subtrees.release(sums)
