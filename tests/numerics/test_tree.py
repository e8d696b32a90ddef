"""Sums in tree order: the same bits on any number of ranks, whatever each of them carries; in few
messages.
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from tests.support.api import Transport, TreeReduce, assign_shards, make_sum
from tests.support.simulated import on_simulated_ranks


def tree_sum(leaves):
    """The definition: split after the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    half = 2 ** math.ceil(math.log2(len(leaves)) - 1)
    return tree_sum(leaves[:half]) + tree_sum(leaves[half:])


def leaves_of(shards, length=101, missing=()):
    """Numbers of very different size, so that every order of summation gives other bits."""
    rng = np.random.default_rng(shards)
    values = rng.standard_normal((shards, length)) * 10 ** rng.uniform(-3, 3, (shards, length))
    values[list(missing)] = 0
    return values.astype(np.float32)


def sum_in_steps(transport, runs, leaves, missing=()):
    """Two steps of one rank: in the first every number is NaN, so that what is used in the second
    without having been sent shows. Each rank adds a number of its own after its last shard.
    """
    rank, size, length = transport.comm.rank, len(runs), leaves.shape[1]
    vector = torch.empty(length + size)
    reduce = make_sum(transport, vector, runs)
    for leaf in (lambda shard: math.nan, lambda shard: torch.from_numpy(leaves[shard])):
        transport.sent = []
        vector.zero_()
        for shard in runs[rank]:
            if shard not in missing:
                vector[:length] += leaf(shard)
                reduce.accumulate(shard)
        vector[length + rank] += rank + 0.5
        reduce()
    return vector.numpy().copy(), transport.sent


def check_sum(runs, leaves, missing=()):
    """Check the sum on all simulated ranks; return the bytes of the messages that each sends."""
    found = on_simulated_ranks(
        len(runs), lambda transport: sum_in_steps(transport, runs, leaves, missing)
    )
    expected = tree_sum(leaves).tobytes()
    for vector, sent in found:
        assert vector[: leaves.shape[1]].tobytes() == expected
        assert vector[leaves.shape[1] :].tolist() == [rank + 0.5 for rank in range(len(runs))]
        assert len(sent) <= most_messages(len(runs))
    return [sum(sent) for _, sent in found]


def most_messages(ranks):
    return 4 * math.ceil(math.log2(ranks)) + 2


def ring_bytes(ranks, length):
    """What each rank sends in a ring Allreduce of float32."""
    return 4 * length * 2 * (1 - 1 / ranks)


@pytest.fixture
def divided(monkeypatch):
    """Short vectors are divided as long ones are."""
    monkeypatch.setattr(TreeReduce, "short_bytes", 0)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("ranks", range(1, 34))
def test_all_ranks_get_the_sum_of_the_tree_in_few_bytes(ranks):
    draw = random.Random(ranks)
    for shards in (ranks, draw.randint(ranks, 36), draw.randint(37, 64)):
        loads = draw.choice([(), [draw.random() + 0.05 for _ in range(ranks)]])
        leaves = leaves_of(shards)
        sent = check_sum(assign_shards(shards, ranks, loads), leaves)
        ratio = 1.2 if shards == ranks else 2 if shards < 37 else 2.5
        assert sum(sent) / ranks <= ratio * ring_bytes(ranks, leaves.shape[1] + ranks)


@st.composite
def assignments(draw):
    """Runs of shards of up to 33 ranks, as loads may divide them; shards without samples; and the
    length of the vector.
    """
    ranks = draw(st.integers(1, 33))
    shards = ranks + draw(st.integers(0, 40))
    load = st.floats(0.05, 20)
    loads = draw(st.just(()) | st.lists(load, min_size=ranks, max_size=ranks))
    missing = draw(st.sets(st.integers(0, shards - 1)))
    return assign_shards(shards, ranks, loads), missing, draw(st.integers(1, 130))


@given(assignments(), st.sampled_from([0, TreeReduce.short_bytes]))
def test_however_shards_are_carried_and_whichever_are_empty_the_bits_are_those_of_the_tree(
    case, short_bytes
):
    runs, missing, length = case
    with mock.patch.object(TreeReduce, "short_bytes", short_bytes):
        check_sum(runs, leaves_of(runs[-1].stop, length, missing), missing)


def test_another_order_of_additions_gives_other_bits():
    """Negative control: the leaves show it."""
    for shards in (4, 5, 13):
        leaves = leaves_of(shards)
        assert sum(leaves[1:], start=leaves[0]).tobytes() != tree_sum(leaves).tobytes()


class Lonely(Transport):
    """The transport of one rank of many that are not there: it notes what the rank sends."""

    def __init__(self, rank, size):
        super().__init__(SimpleNamespace(rank=rank, size=size))
        self.sent, self.exchanges = [], 0

    def prepare(self, sends, receives):
        self.exchanges += 1
        sizes = [sum(vector.nbytes for vector in vectors) for _, vectors in sends]
        return lambda: self.sent.extend(sizes)


def lonely_sum(rank, runs, length):
    transport = Lonely(rank, len(runs))
    make_sum(transport, torch.zeros(length), runs)()
    return transport


def sent_by(rank, runs, length):
    return lonely_sum(rank, runs, length).sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8, 13, 17, 64, 1000])
def test_a_short_vector_is_sent_whole_in_few_rounds(ranks):
    for rank in {0, ranks // 3, ranks - 1}:
        found = lonely_sum(rank, assign_shards(ranks, ranks), 100)
        assert found.sent
        assert set(found.sent) <= {4 * 100 * span for span in range(1, 2 * ranks.bit_length())}
        most = max(1, math.ceil(math.log2(ranks)) - 1)
        assert found.exchanges == most if ranks & (ranks - 1) == 0 else found.exchanges <= most


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("ranks", [2**n for n in range(15)])
@pytest.mark.parametrize("shards", [1, 4], ids="shards {} per rank".format)
def test_powers_of_two_send_what_a_ring_sends_in_two_messages_for_each_doubling(ranks, shards):
    runs = assign_shards(shards * ranks, ranks)
    for rank in {0, ranks // 3, ranks - 1}:
        sent = sent_by(rank, runs, 3 * ranks)
        assert len(sent) == 2 * math.log2(ranks)
        assert sum(sent) == ring_bytes(ranks, 3 * ranks)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("ranks", [1000, 16383])
def test_each_of_thousands_of_ranks_sends_few_messages(ranks):
    for shards in (ranks, ranks + ranks // 3):
        runs, length = assign_shards(shards, ranks), 1 << 16
        for rank in range(0, ranks, ranks // 9):
            sent = sent_by(rank, runs, length)
            assert len(sent) <= most_messages(ranks)
            assert sum(sent) <= 2.1 * ring_bytes(ranks, length)


def by_definition(shards, size, loads):
    """Every shard to the rank that would have the least to do with it."""
    counts = [1] * size
    for _ in range(shards - size):
        counts[min(range(size), key=lambda rank: (counts[rank] + 1) / loads[rank])] += 1
    return counts


@given(st.data())
def test_every_shard_goes_to_the_rank_with_the_least_to_do(data):
    size = data.draw(st.integers(1, 13))
    shards = size + data.draw(st.integers(0, 60))
    load = data.draw(st.sampled_from([st.just(1), st.integers(1, 3), st.floats(1e-6, 10)]))
    loads = data.draw(st.lists(load, min_size=size, max_size=size))
    runs = assign_shards(shards, size, loads)
    assert [len(run) for run in runs] == by_definition(shards, size, loads)
    assert [shard for run in runs for shard in run] == list(range(shards))
    if set(loads) == {1}:
        assert runs == assign_shards(shards, size)


def test_shards_go_to_ranks_in_proportion_to_their_loads():
    for shards, loads, counts in (
        (8, [1, 1, 1], [3, 3, 2]),
        (8, [3, 1], [6, 2]),
        (5, [100, 1], [4, 1]),
        (12, [1, 2, 3], [2, 4, 6]),
    ):
        assert [len(run) for run in assign_shards(shards, len(loads), loads)] == counts
