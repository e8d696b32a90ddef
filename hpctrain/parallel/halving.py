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
    send: range  # numbers of the vector, of all subtrees that this rank holds
    receive: range  # of all subtrees that the partner holds
    spans: list[Span]  # those subtrees


class Round(NamedTuple):
    """One round of halving of one rank."""

    held: list[Span]  # subtrees that it holds before
    partners: list[Partner]
    own: range  # numbers of its slice after the round
    result: list[Span]  # subtrees that it holds there after the additions


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


def schedule(rank: int, runs: Sequence[range], length: int) -> list[Round]:
    """Return the rounds of a rank, for a vector of `length` numbers.

    `runs` are the shards that each rank carries, together 0 ... S-1.
    """
    starts, root = [run.start for run in runs], (0, runs[-1].stop)
    path, group = [], range(len(runs))
    while len(group) > 1:
        parts = halve(starts, group)
        number = next(n for n, part in enumerate(parts) if rank in part)
        path.append((group, parts, number))
        group = parts[number]

    def held(part: range) -> list[Span]:
        return subtrees(range(runs[part.start].start, runs[part.stop - 1].stop), root)

    def cut(place: int, ranks: int) -> range:
        return range(length * place // ranks, length * (place + 1) // ranks)

    rounds: list[Round] = []
    place, own = 0, range(length)
    for group, parts, number in reversed(path):
        before, many, size = own, len(parts), len(group)
        place = place * many + number
        own = cut(place, size)
        partners = []
        for other in range(max(0, place - many + 1), min(size, place + many)):
            part = parts[other % many]
            theirs = cut(other // many, len(part))
            send, receive = overlap(before, cut(other, size)), overlap(theirs, own)
            if other != place and (send or receive):
                peer = rank_at(starts, group, other)
                partners.append(Partner(peer, send, receive, held(part)))
        rounds.append(Round(held(parts[number]), partners, own, held(group)))
    return rounds


def overlap(a: range, b: range) -> range:
    """Return the numbers that are in both ranges."""
    lo, hi = max(a.start, b.start), min(a.stop, b.stop)
    return range(lo, max(lo, hi))


def sent(rounds: Sequence[Round]) -> tuple[int, int]:
    """Return how many messages a rank sends in these rounds and back, and how many numbers."""
    there = [(len(p.send), len(r.held)) for r in rounds for p in r.partners]
    back = [(len(p.receive), 1) for r in rounds for p in r.partners]
    lengths = [numbers * rows for numbers, rows in there + back if numbers * rows]
    return len(lengths), sum(lengths)
