"""The schedule of a sum in tree order, played for all ranks in this process."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hpctrain.parallel.halving import additions, in_messages, schedule, subtrees
from hpctrain.parallel.placement import assign_shards
from tests.parallel.test_tree import leaves_of, tree_sum


class Player:
    """One rank. Numbers that it does not have are NaN, so that a wrong addition shows."""

    def __init__(self, rank, runs, leaves, box):
        self.rank, self.box, self.rounds = rank, box, schedule(rank, runs, leaves.shape[1])
        spans = subtrees(runs[rank], (0, len(leaves)))
        self.rows = {(lo, hi): tree_sum(leaves[lo:hi]) for lo, hi in spans}
        self.vector = np.full_like(leaves[0], np.nan)

    def send(self, peer, message):
        self.box.setdefault((self.rank, peer), []).append(message)

    def receive(self, peer):
        """Messages arrive in the order in which they were sent, as MPI and NCCL have it."""
        while not self.box.get((peer, self.rank)):
            yield
        return self.box[peer, self.rank].pop(0)

    def halve(self):
        for each in self.rounds:
            assert sorted(self.rows) == each.held
            rows = {span: np.full_like(self.vector, np.nan) for span in self.rows}
            for span, row in rows.items():
                row[each.own] = self.rows[span][each.own]
            for peer, send, spans, _, _ in each.partners:
                if send and spans:
                    self.send(peer, [self.rows[span][send] for span in spans])
            for peer, _, _, receive, spans in each.partners:
                if receive and spans:
                    message = yield from self.receive(peer)
                    for span, numbers in zip(spans, message, strict=True):
                        row = rows.setdefault(span, np.full_like(self.vector, np.nan))
                        assert np.isnan(row[receive]).all()
                        row[receive] = numbers
            order = sorted(rows)
            sums = [rows[span] for span in order]
            for i, j in additions(order, each.result) if each.own else []:
                sums[i] = sums[i] + sums[j]
            firsts = {span[0]: row for span, row in zip(order, sums, strict=True)}
            self.rows = {span: firsts.get(span[0], self.vector) for span in each.result}
        (self.vector,) = self.rows.values()

    def double(self):
        for each in reversed([each for each in self.rounds if each.comes_back]):
            for peer, _, _, receive, _ in each.partners:
                if receive:
                    self.send(peer, self.vector[receive])
            for peer, send, _, _, _ in each.partners:
                if send:
                    assert np.isnan(self.vector[send]).all()
                    self.vector[send] = yield from self.receive(peer)


def sent(rounds, ranks):
    """Return how many messages one of the ranks sends in its rounds and back, and numbers."""
    there = [
        len(p.send) * len(spans)
        for r in rounds
        for p in r.partners
        for spans in in_messages(p.sends, ranks)
    ]
    back = [len(p.receive) for r in rounds if r.comes_back for p in r.partners]
    lengths = [numbers for numbers in there + back if numbers]
    return len(lengths), sum(lengths)


def play(runs, length):
    """Check the sum of all ranks; return the messages and the numbers that each of them sends."""
    leaves, box = leaves_of(runs[-1].stop)[:, :length], {}
    players = [Player(rank, runs, leaves, box) for rank in range(len(runs))]
    done = object()
    for phase in (Player.halve, Player.double):
        left = [phase(player) for player in players]
        for _ in range(len(runs) + 20):  # more would be a deadlock
            left = [one for one in left if next(one, done) is not done]
        assert not left
    expected = tree_sum(leaves).tobytes()
    assert all(player.vector.tobytes() == expected for player in players)
    assert not any(box.values())
    return [sent(player.rounds, len(runs)) for player in players]


def limits(ranks):
    """The most messages that a rank may send, and the numbers of a ring for each of the vector."""
    return 4 * math.ceil(math.log2(ranks)) + 2, 2 * (1 - 1 / ranks)


@pytest.mark.parametrize("ranks", range(1, 34))
def test_all_ranks_get_the_sum_of_the_tree_in_few_messages(ranks):
    draw = random.Random(ranks)
    most, ring = limits(ranks)
    for shards in range(ranks, 65, 1 if ranks < 4 else 5):
        for loads in ((), [draw.random() + 0.05 for _ in range(ranks)]):
            runs = assign_shards(shards, ranks, loads)
            length = draw.choice([1, 7, 2 * ranks + 1, 101])
            found = play(runs, length)
            assert max(messages for messages, _ in found) <= most
            if length == 101:
                mean = sum(numbers for _, numbers in found) / ranks / length
                assert mean <= (1.2 if shards == ranks else 2 if shards < 37 else 2.5) * ring


@pytest.mark.parametrize("ranks", [2**n for n in range(15)])
@pytest.mark.parametrize("shards", [1, 4], ids="shards {} per rank".format)
def test_powers_of_two_send_what_a_ring_sends_in_two_messages_for_each_doubling(ranks, shards):
    runs = assign_shards(shards * ranks, ranks)
    for rank in {0, ranks // 3, ranks - 1}:
        messages, numbers = sent(schedule(rank, runs, 3 * ranks), ranks)
        assert messages == 2 * math.log2(ranks)
        assert numbers == 2 * 3 * (ranks - 1)


@pytest.mark.parametrize("ranks", [1000, 5000, 16383])
def test_thousands_of_ranks_exchange_few_messages(ranks):
    for shards in (ranks, ranks + ranks // 3):
        runs = assign_shards(shards, ranks)
        found = [sent(schedule(rank, runs, 1 << 20), ranks) for rank in range(0, ranks, 97)]
        most, ring = limits(ranks)
        assert max(messages for messages, _ in found) <= most
        assert max(numbers for _, numbers in found) <= 2 * ring * (1 << 20)
