"""Tree order: a sum over shards with the same bits on any number of ranks.

Floating-point addition commutes but is not associative, so the bits of a sum depend on its order.
Here the order depends only on the shards: their messages are the leaves of one binary tree over
0 ... S-1, in which a span of n shards splits after the largest power of two below n. A rank
carries a run of shards, and the largest spans of the tree within its run are its subtrees.

1. While a rank processes its shards, it sums its subtrees (`TreeReduce.accumulate`).
2. Ranks exchange slices of their subtrees by recursive halving and add them (`schedule`), until
   each has one slice of the sum of all.
3. The same exchanges in reverse, recursive doubling, distribute the slices of the sum.

MPI only moves data, so the bits do not depend on the library or its algorithms. The leaf of a shard
without samples is zero: x + 0 is x, bit by bit, because no leaf holds a negative zero (each is a
sum that began at +0).

Recursive halving and doubling is the Allreduce for long messages of R. Thakur, R. Rabenseifner and
W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High Performance
Computing Applications 19 (2005). With the nearest partner first, it adds in the order of a binary
tree over the ranks. Here it adds in the order of the tree over the shards, for any number of ranks
and any assignment of shards. A group of neighbouring ranks is divided into two, of sizes n/2, or
(n - 1)/2 and (n + 1)/2, and so on down to single ranks; three ranks are divided into three. In a
round, the parts of a group become one:

* Before it, the ranks of each part own disjoint slices of the vector, which together are all of it.
  At its slice, a rank holds the sums of the largest subtrees of the tree within the shards of its
  part.
* The slices of the group are those of its parts, split: L k/n ... L (k + 1)/n is of the rank at
  place k, and the ranks of the parts take turns. Each lies within the slice that its rank had,
  because 2k/n >= k/a and (2k + 1)/n <= (k + 1)/a for a part of a = n/2 or (n + 1)/2 ranks at even
  places, and likewise at odd ones. A rank therefore loses the two ends of its slice to the ranks at
  places k - 1 and k + 1, and receives their subtrees at its new slice. It then makes all additions
  of the tree whose operands it holds.

After the last round, every rank holds the root of the tree at its slice, computed by the additions
of the tree and no others. A rank sends and receives at most 2 messages in each of log2(P) rounds,
rounded up, and as many on the way back; one where a group is of even size, so 2 log2(P) in all if
the number P of ranks is a power of two. It sends L (1 - 1/P) numbers on the way back, as in a ring,
and as many before for every subtree that it holds: one if P and S are powers of two. It then stores
log2(S/P) + 1 messages, else up to 2 log2(S) subtrees, and what it receives.

A short vector is not divided, because a round then costs more than its bytes: all ranks of a group
hold the same sums, each receives those of the other parts from one rank of each, and nothing is
left to distribute (recursive doubling). Groups of up to four ranks exchange with all others at
once, so there are at most log2(P) - 1 rounds, rounded up; one for two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch

from hpctrain.parallel.device import empty
from hpctrain.parallel.reduce import Reduce
from hpctrain.parallel.transport import Transport

Span = tuple[int, int]  # shards lo ... hi-1
Operands = tuple[torch.Tensor, torch.Tensor]  # two operands
DIRECT = 3  # ranks of a group that exchange with all others at once
DIRECT_WHOLE = 4  # the same, of a vector that is not divided


def split(span: Span) -> tuple[Span, Span]:
    """Split a span of the tree, after the largest power of two below its length."""
    lo, hi = span
    middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
    return (lo, middle), (middle, hi)


def subtrees(run: range, span: Span) -> list[Span]:
    """Return the largest spans of the tree below `span` that lie within a run of shards."""
    lo, hi = span
    if hi <= run.start or run.stop <= lo:
        return []
    if run.start <= lo and hi <= run.stop:
        return [span]
    return [subtree for half in split(span) for subtree in subtrees(run, half)]


def count_additions(span: Span) -> list[int]:
    """Return how many additions of a subtree can be made after each of its leaves, in order."""
    if span[1] - span[0] == 1:
        return [0]
    left, right = split(span)
    *others, last = count_additions(left) + count_additions(right)
    return [*others, last + 1]


class Round(NamedTuple):
    """What one rank does when the parts of its group become one: exchange, then add.

    Numbers of the vector go to and come from other ranks: of all subtrees that the sender holds.
    """

    own: range  # numbers of its slice after the round
    sends: list[tuple[int, range]]  # rank, numbers
    receives: list[tuple[int, range, list[Span]]]  # rank, numbers, subtrees
    spans: list[Span]  # subtrees that it holds after the additions


def schedule(rank: int, shards: Sequence[range], length: int, whole: bool) -> list[Round]:
    """Return the rounds of a rank, for a vector of `length` numbers.

    `shards` are the shards that each rank carries, together 0 ... S-1. If `whole`, every rank owns
    all numbers from the start, and receives them from one rank of each other part.
    """
    starts = [run.start for run in shards]

    def held(group: range) -> list[Span]:
        return subtrees(range(starts[group[0]], shards[group[-1]].stop), (0, shards[-1].stop))

    rounds = []
    group = range(len(shards))
    while len(group) > 1:
        parts = divide(starts, group, DIRECT_WHOLE if whole else DIRECT)
        if whole:
            before = after = dict.fromkeys(group, range(length))
        else:
            after = slices(starts, group, length)
            before = {
                peer: numbers
                for part in parts
                for peer, numbers in slices(starts, part, length).items()
            }
        mine = next(part for part in parts if rank in part)
        others = [(peer, part) for part in parts if part != mine for peer in part]
        sends = [
            (peer, numbers)
            for peer, part in others
            if not whole or is_source(rank, mine, peer, part)
            if (numbers := overlap(before[rank], after[peer]))
        ]
        receives = [
            (peer, numbers, held(part))
            for peer, part in others
            if not whole or is_source(peer, part, rank, mine)
            if (numbers := overlap(before[peer], after[rank]))
        ]
        mine_after = after[rank]  # empty if there are more ranks than numbers
        spans = held(group) if mine_after else []
        rounds.append(Round(mine_after, sends, receives, spans))
        group = mine
    return rounds[::-1]


def is_source(rank: int, part: range, peer: int, other: range) -> bool:
    """Whether it is `rank` of this part that sends the whole vector to `peer` of another."""
    return (peer - other.start) % len(part) == rank - part.start


def divide(starts: Sequence[int], group: range, direct: int = DIRECT) -> list[range]:
    """Return the parts of a group of ranks, the largest first: single ranks if at most `direct`.

    If one must be larger by one, they meet at the border between shards that cuts fewer subtrees.
    `starts` are the first shards of all ranks.
    """
    if len(group) <= direct:
        return [range(rank, rank + 1) for rank in group]
    low = group.start + len(group) // 2
    high = group.start + (len(group) + 1) // 2
    cut = max(low, high, key=lambda rank: starts[rank] & -starts[rank])
    parts = [range(group.start, cut), range(cut, group.stop)]
    return sorted(parts, key=len, reverse=True)


def slices(starts: Sequence[int], group: range, length: int) -> dict[int, range]:
    """Return the slice of a vector that each rank of a group owns."""
    ranks = order(starts, group)
    borders = [length * place // len(ranks) for place in range(len(ranks) + 1)]
    return dict(zip(ranks, map(range, borders, borders[1:]), strict=True))


def order(starts: Sequence[int], group: range) -> list[int]:
    """Return the ranks of a group in the order of their slices: those of its parts take turns."""
    if len(group) == 1:
        return [*group]
    turns = zip_longest(*(order(starts, part) for part in divide(starts, group)))
    return [rank for turn in turns for rank in turn if rank is not None]


def overlap(a: range, b: range) -> range:
    """Return the numbers that are in both ranges."""
    return range(max(a.start, b.start), min(a.stop, b.stop))


def plan_sum(
    span: Span, rows: Mapping[Span, torch.Tensor], last: int, additions: list[Operands]
) -> torch.Tensor:
    """Append the additions that sum rows to a span of the tree; return where the sum will be.

    An addition changes its first operand: that with shard `last`, if one of them has it.
    """
    if span in rows:
        return rows[span]
    halves = split(span)
    left, right = (plan_sum(half, rows, last, additions) for half in halves)
    pair = (right, left) if last >= halves[1][0] else (left, right)
    additions.append(pair)
    return pair[0]


class TreeReduce(Reduce):
    """Sums a vector in tree order: the same bits for any number of ranks."""

    short_bytes = 1 << 18  # most bytes of a vector that is not divided, times log2(P)

    def __init__(self, transport: Transport, vector: torch.Tensor, shards: Sequence[range]) -> None:
        """`shards` are the shards that each rank carries, together 0 ... S-1."""
        super().__init__(transport, vector)
        rank = transport.comm.rank
        length = len(vector)
        self._own = shards[rank]
        self._next = self._own.start  # shard
        spans = subtrees(self._own, (0, shards[-1].stop))
        # The sums of shards so far are on a stack; the last subtree is in the vector.
        self._additions = [count for span in spans for count in count_additions(span)]
        self._heights = [*accumulate(1 - count for count in self._additions)]
        self._stack = [
            empty((length,), vector.dtype, vector.device)
            for _ in range(max(self._heights[:-1], default=0))
        ]
        rows = dict(zip(spans, [*self._stack[: len(spans) - 1], vector], strict=True))
        # the exchange of each round, and what to add after it; and the exchanges on the way back
        self._there: list[tuple[Callable[[], None], list[Operands]]] = []
        self._back: list[Callable[[], None]] = []
        start = 0  # of the slice in the rows
        whole = (len(shards) - 1).bit_length() * vector.nbytes <= self.short_bytes
        for round_ in schedule(rank, shards, length, whole):
            sends = [
                (peer, [row[_within(numbers, start)] for row in rows.values()])
                for peer, numbers in round_.sends
            ]
            arriving = sorted({span for _, _, spans in round_.receives for span in spans})
            block = empty((len(arriving), len(round_.own)), vector.dtype, vector.device)
            received = dict(zip(arriving, block, strict=True))
            receives = [
                (peer, [received[span][_within(numbers, round_.own.start)] for span in spans])
                for peer, numbers, spans in round_.receives
            ]
            rows = {span: row[_within(round_.own, start)] for span, row in rows.items()} | received
            pairs: list[Operands] = []
            rows = {span: plan_sum(span, rows, self._own[-1], pairs) for span in round_.spans}
            self._there.append((transport.prepare(sends, receives), pairs))
            if whole:
                continue
            sends = [(peer, [vector[_within(numbers, 0)]]) for peer, numbers, _ in round_.receives]
            receives = [(peer, [vector[_within(numbers, 0)]]) for peer, numbers in round_.sends]
            self._back.insert(0, transport.prepare(sends, receives))
            start = round_.own.start

    def accumulate(self, shard: int) -> None:
        """Add the leaf of `shard` to the tree; the vector is zero for the next one."""
        while self._next < shard:  # of shards without samples
            self._add_leaf(None)
        self._add_leaf(self._vector)

    def _add_leaf(self, leaf: torch.Tensor | None) -> None:
        """Add a leaf, or None, one of zeros: then rows of the stack are summed alone."""
        number = self._next - self._own.start
        place = self._heights[number] - 1
        count = self._additions[number]
        parts = self._stack[place : place + count]
        if leaf is None:
            leaf = parts.pop() if parts else self._stack[place].zero_()
        for part in reversed(parts):
            leaf.add_(part)
        self._next += 1
        if self._next < self._own.stop and leaf is not self._stack[place]:
            self._stack[place].copy_(leaf)
            leaf.zero_()

    def __call__(self) -> None:
        """Sum the vector over all ranks, in place. Collective."""
        if self._next < self._own.stop:  # the last shard had no samples: only flags and seconds
            self.accumulate(self._own.stop - 1)
        self._next = self._own.start
        for exchange, pairs in self._there:
            exchange()
            for total, part in pairs:
                total.add_(part)
        for exchange in self._back:
            exchange()


def _within(numbers: range, start: int) -> slice:
    """Return where these numbers are in a row whose first number is `start`."""
    return slice(numbers.start - start, numbers.stop - start)
