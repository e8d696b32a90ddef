"""Who exchanges what with whom in a sum in tree order: recursive halving, then doubling.

Recursive halving and doubling is the Allreduce for long messages of R. Thakur, R. Rabenseifner and
W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High Performance
Computing Applications 19 (2005). With the nearest partner first, it adds in the order of a binary
tree over the ranks. Here it adds in the order of the tree over the shards (tree.py), for any number
of ranks and any assignment of shards.

A group of neighbouring ranks is divided into two, of sizes n/2, or (n - 1)/2 and (n + 1)/2, and so
on down to single ranks; three ranks are divided into three. In a round, the parts of a group become
one:

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
of the tree and no others. The same rounds in reverse distribute it. A rank sends and receives at
most 2 messages in each of at most log2(P) rounds, rounded up, and as many on the way back; one
where a group is of even size, so 2 log2(P) if the number P of ranks is a power of two. It sends
L (1 - 1/P) numbers on the way back, as in a ring, and as many before for every subtree that it
holds: one if P and S are powers of two.

The runs of shards of other numbers begin anywhere in the tree, and a rank may hold 2 log2(S/P)
subtrees. Before the first round it therefore hands some to its neighbours, or receives some, where
this saves bytes: at most 2 messages more. Fewer bytes than a bound are impossible, whoever adds:
every addition needs its operands in one place. For 3 ranks and 63 shards the bound is twice the
bytes of a ring, and it grows with log2(S/P).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]  # shards lo ... hi-1


def middle(span: Span) -> int:
    """Return where a span of the tree splits: after the largest power of two below its length."""
    lo, hi = span
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def subtrees(run: range, span: Span) -> list[Span]:
    """Return the largest spans of the tree below `span` that lie within a run of shards."""
    lo, hi = span
    if hi <= run.start or run.stop <= lo:
        return []
    if run.start <= lo and hi <= run.stop:
        return [span]
    return subtrees(run, (lo, middle(span))) + subtrees(run, (middle(span), hi))


def additions(rows: Sequence[Span], spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the additions that sum `rows`, subtrees in order, to the larger subtrees `spans`.

    They are pairs (i, j) in order: row i += row j. The first row of a span then holds its sum.
    """
    pairs: list[tuple[int, int]] = []
    places = {span: place for place, span in enumerate(rows)}

    def add(span: Span) -> int:
        if span in places:
            return places[span]
        left, right = add((span[0], middle(span))), add((middle(span), span[1]))
        pairs.append((left, right))
        return left

    for span in spans:
        add(span)
    return pairs


class Partner(NamedTuple):
    """What a rank exchanges with another one in a round. On the way back, the reverse."""

    rank: int
    send: range  # numbers of the vector
    sends: list[Span]  # of these subtrees
    receive: range
    receives: list[Span]


class Round(NamedTuple):
    """What one rank does in a round: exchange, then add."""

    held: list[Span]  # subtrees that it holds before
    partners: list[Partner]
    own: range  # numbers of its slice after the round
    result: list[Span]  # subtrees that it holds there after the additions
    comes_back: bool = True  # slices of the sum are exchanged in reverse in the end


def halve(starts: Sequence[int], group: range) -> list[range]:
    """Return the parts of a group of ranks, the largest first.

    If one must be larger by one, they meet at the border between shards that cuts fewer subtrees.
    `starts` are the first shards of all ranks.
    """
    if len(group) <= 3:
        return [range(rank, rank + 1) for rank in group]
    low, high = group.start + len(group) // 2, group.start + (len(group) + 1) // 2
    cut = max(low, high, key=lambda rank: starts[rank] & -starts[rank])
    parts = [range(group.start, cut), range(cut, group.stop)]
    return sorted(parts, key=len, reverse=True)


def rank_at(starts: Sequence[int], group: range, place: int) -> int:
    """Return the rank whose slice is at this place among the slices of a group."""
    while len(group) > 1:
        parts = halve(starts, group)
        place, part = divmod(place, len(parts))
        group = parts[part]
    return group.start


class Borders:
    """Where the shards of each rank begin, before and after neighbours hand over subtrees."""

    def __init__(self, runs: Sequence[range]) -> None:
        """`runs` are the shards that each rank carries, together 0 ... S-1."""
        self.ranks, self.root = len(runs), (0, runs[-1].stop)
        self.starts = [*(run.start for run in runs), runs[-1].stop]
        self._after = {0: 0, len(runs): runs[-1].stop}

    def path(self, rank: int) -> list[tuple[range, list[range], int]]:
        """Return the groups of a rank, the largest first: their parts, and which is the rank's."""
        path, group = [], range(self.ranks)
        while len(group) > 1:
            parts = halve(self.starts, group)
            number = next(n for n, part in enumerate(parts) if rank in part)
            path.append((group, parts, number))
            group = parts[number]
        return path

    def between(self, lo: int, hi: int) -> list[Span]:
        """Return the largest subtrees within the shards lo ... hi-1; none if hi is smaller."""
        return subtrees(range(lo, hi), self.root) if lo < hi else []

    def held(self, part: range) -> list[Span]:
        """Return the subtrees that the ranks of a part hold, after handing over."""
        return self.between(self.after(part.start), self.after(part.stop))

    def after(self, rank: int) -> int:
        """Return the first shard of a rank after handing over.

        It may become the end of a span of the tree that contains shards of no other ranks than this
        one and the one before it, if this saves more than it costs: half of a subtree is sent in
        every round until the two ranks are in one group, and all of it if it is handed over.
        """
        if rank not in self._after:
            lo, start, hi = self.starts[rank - 1 : rank + 2]
            group = next(g for g, parts, n in self.path(rank) if g.start < rank == parts[n].start)
            rounds = (len(group) // 2).bit_length()

            def cost(border: int) -> int:
                moved = self.between(border, start) + self.between(start, border)
                held = self.between(lo, border) + self.between(border, hi)
                return 2 * len(moved) + rounds * len(held)

            places, span = [start], self.root
            while middle(span) != start:
                places += span if lo <= span[0] and span[1] <= hi else ()
                half = middle(span)
                span = (span[0], half) if start < half else (half, span[1])
            places += span if lo <= span[0] and span[1] <= hi else ()
            self._after[rank] = min(places, key=cost)
        return self._after[rank]


def schedule(rank: int, runs: Sequence[range], length: int) -> list[Round]:
    """Return the rounds of a rank, for a vector of `length` numbers.

    `runs` are the shards that each rank carries, together 0 ... S-1.
    """
    borders = Borders(runs)
    rounds = [hand_over(borders, rank, length)]
    place, own = 0, range(length)

    def cut(place: int, ranks: int) -> range:
        return range(length * place // ranks, length * (place + 1) // ranks)

    for group, parts, number in reversed(borders.path(rank)):
        before, many, size, held = own, len(parts), len(group), borders.held(parts[number])
        place = place * many + number
        own = cut(place, size)
        partners = []
        for other in range(max(0, place - many + 1), min(size, place + many)):
            part = parts[other % many]
            theirs = cut(other // many, len(part))
            send, receive = overlap(before, cut(other, size)), overlap(theirs, own)
            if other != place and (send or receive):
                peer = rank_at(borders.starts, group, other)
                partners.append(Partner(peer, send, held, receive, borders.held(part)))
        rounds.append(Round(held, partners, own, borders.held(group)))
    return rounds if rounds[0].partners else rounds[1:]


def hand_over(borders: Borders, rank: int, length: int) -> Round:
    """Return the round in which a rank hands subtrees over to its neighbours, or receives some."""
    partners, everything, starts = [], range(length), borders.starts
    for peer, border in ((rank - 1, rank), (rank + 1, rank + 1)):
        lo, hi = starts[border], borders.after(border)
        down, up = borders.between(lo, hi), borders.between(hi, lo)  # to the lower, the higher rank
        sends, receives = (down, up) if peer < rank else (up, down)
        if up or down:
            partners.append(Partner(peer, everything, sends, everything, receives))
    held = borders.between(starts[rank], starts[rank + 1])
    result = borders.held(range(rank, rank + 1))
    return Round(held, partners, everything, result, comes_back=False)


def overlap(a: range, b: range) -> range:
    """Return the numbers that are in both ranges."""
    lo, hi = max(a.start, b.start), min(a.stop, b.stop)
    return range(lo, max(lo, hi))


def in_messages(spans: list[Span], ranks: int) -> list[list[Span]]:
    """Return the subtrees of each message to a partner, for this number of all ranks.

    They are in one message, so that there are few. Two subtrees of up to 4 ranks are in two: there
    the time for packing them is longer than that of a message.
    """
    return [[span] for span in spans] if ranks <= 4 and len(spans) <= 2 else [spans]
