"""Tree order: a sum over shards with the same bits on any number of ranks.

Floating-point addition commutes but is not associative, so the bits of a sum depend on its order.
Here the order depends only on the shards: their messages are the leaves of one binary tree over
0 ... S-1, in which a span of n shards splits after the largest power of two below n. A rank
carries a run of shards, and the largest spans of the tree within its run are its subtrees.

1. While a rank processes its shards, it sums its subtrees (`accumulate`). One buffer is in use for
   each level of the tree that is not complete.
2. The message is split into one slice per rank. Every rank sends each other rank that rank's slice
   of each of its subtrees (Alltoallv); the receiver adds them in tree order.
3. Allgatherv distributes the slices of the sum.

MPI only moves data, so the bits do not depend on the library or its algorithms. With N ranks,
messages of L numbers and P subtrees in total, of which n are its own, a rank sends n L (1 - 1/N)
numbers and then L (1 - 1/N); if S and N are powers of two, n is 1, and that is what a ring
Allreduce sends. It then stores log2(S/N) + 1 messages and a part of one that it receives;
otherwise up to 2 log2(S) subtrees, and P - n received slices.

The leaf of a shard without samples is zero and is skipped: x + 0 is x, bit by bit, because no leaf
holds a negative zero (each is a sum that began at +0).

A transport moves the data; the additions run here, on the device that holds the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpctrain.parallel.device import empty
from hpctrain.parallel.reduce import Reduce
from hpctrain.parallel.transport import Transport

Span = tuple[int, int]  # shards lo ... hi-1


def middle(span: Span) -> int:
    """Return where a span of the tree splits: after the largest power of two below its length."""
    lo, hi = span
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def subtrees(run: range, span: Span) -> list[Span]:
    """Return the largest spans of the tree below `span` that lie within a rank's run of shards."""
    lo, hi = span
    if hi <= run.start or run.stop <= lo:
        return []
    if run.start <= lo and hi <= run.stop:
        return [span]
    return subtrees(run, (lo, middle(span))) + subtrees(run, (middle(span), hi))


def additions(rows: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the additions that sum `rows`, subtrees which together form the whole tree.

    They are pairs (i, j) in order: row i += row j. The last i holds the sum.
    """
    pairs: list[tuple[int, int]] = []
    places = {span: place for place, span in enumerate(rows)}

    def add(span: Span) -> int:
        if span in places:
            return places[span]
        left, right = add((span[0], middle(span))), add((middle(span), span[1]))
        pairs.append((left, right))
        return left

    add((rows[0][0], rows[-1][1]))
    return pairs


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
    """Sums the subtrees of all ranks, which are vectors like `example`. Calls are collective."""

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
        # Rows received in one round are adjacent: the row of each subtree (round, rank).
        rounds, own = range(max(self._counts)), comm.rank
        subtrees = [
            (n, r) for n in rounds for r, c in enumerate(self._counts) if n < c and r != own
        ]
        self._rows = {subtree: row for row, subtree in enumerate(subtrees)}
        shape = len(subtrees), self._lengths[comm.rank]
        self._received = empty(shape, example.dtype, example.device)
        self._rounds = [self._round(number) for number in rounds]

    @property
    def sent(self) -> int:
        """Numbers that this rank sends in one call."""
        own = self._lengths[self.rank]
        others = sum(self._lengths) - own
        return self._counts[self.rank] * others + (self.size - 1) * own

    def __call__(self, sums: Sequence[torch.Tensor]) -> None:
        """Sum this rank's subtrees, (length,) each, and those of all ranks into the last one."""
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
        """Return how to exchange the subtree of this number of every rank.

        That is how many numbers to send to each rank, how many to receive from each, and at which
        offsets of the received rows.
        """
        own, has = self._lengths[self.rank], number < self._counts[self.rank]
        lengths = [n if has and r != self.rank else 0 for r, n in enumerate(self._lengths)]
        rows = [self._rows.get((number, r)) for r in range(self.size)]
        counts = [0 if row is None else own for row in rows]
        return lengths, counts, [own * (row or 0) for row in rows]


class TreeReduce(Reduce):
    """Sums a vector in tree order: the same bits for any number of ranks."""

    def __init__(self, transport: Transport, vector: torch.Tensor, runs: Sequence[range]) -> None:
        """`runs` are the shards that each rank carries, together 0 ... S-1."""
        self.transport, rank = transport, transport.comm.rank
        spans = [subtrees(run, (0, runs[-1].stop)) for run in runs]
        self.subtrees = Subtrees(runs[rank], spans[rank], vector)
        self.exchange = TreeAllreduce(transport, spans, vector)
        self._alone = transport.comm.size == 1

    def accumulate(self, shard: int) -> None:
        """Add the leaf of `shard` to the tree; the vector is zero for the next one."""
        self.subtrees.accumulate(shard)

    def __call__(self) -> None:
        """Sum the vector over all ranks, in place. Collective."""
        sums = self.subtrees.finish()
        if not self._alone:  # else the tree's root is the vector
            self.exchange(sums)
        self.subtrees.release(sums)
