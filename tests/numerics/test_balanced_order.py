"""Orders that draw all classes equally often."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import make_order

N = 203
LABELS = np.repeat([0, 1, 2], [160, 13, 30])[np.random.default_rng(3).permutation(N)]
CUTS = {shards: hp.cut_epoch(N, 32, shards) for shards in (1, 2, 5)}


def balanced(shards, seed=7, **how):
    return make_order("partition", CUTS[shards], seed, LABELS, **how)


def epoch_of(order, epoch, shard):
    return order.samples(epoch, shard, 0, order.partition.sizes[shard])


def are_even(counts):
    return max(counts) - min(counts) <= 1


@pytest.mark.parametrize("shards", CUTS)
def test_each_shard_draws_the_classes_of_its_partition_equally_often(shards):
    order = balanced(shards)
    plain = make_order("partition", CUTS[shards], 7)
    for shard in range(shards):
        own = set(epoch_of(plain, 0, shard).tolist())
        for epoch in range(3):
            drawn = epoch_of(order, epoch, shard)
            counts = Counter(LABELS[drawn].tolist())
            assert len(counts) == 3 and are_even(counts.values())
            assert set(drawn.tolist()) <= own
            for label in counts:  # in turn: none twice as often as another
                members = [sample for sample in own if LABELS[sample] == label]
                times = Counter(drawn.tolist())
                assert are_even([times[sample] for sample in members])


def test_drawn_from_all_samples_no_class_is_missing():
    order = balanced(5, everywhere=True)
    drawn = np.concatenate([epoch_of(order, 0, shard) for shard in range(5)])
    assert are_even(Counter(LABELS[drawn].tolist()).values())
    rare = Counter(drawn[LABELS[drawn] == 1].tolist())
    assert len(rare) == 13 and are_even(rare.values())
    assert order.reach(range(1, 2)) == range(N)
    plain = make_order("partition", CUTS[5], 7)
    assert balanced(5).reach(range(1, 2)) == plain.reach(range(1, 2)) != range(N)


@pytest.mark.parametrize("everywhere", [False, True])
def test_any_part_of_an_epoch_is_a_pure_function_of_seed_epoch_and_shard(everywhere):
    whole = epoch_of(balanced(5, everywhere=everywhere), 2, 3)
    order = balanced(5, everywhere=everywhere)
    for first, count in ((11, 5), (0, 3), (20, 17), (4, 0)):
        order.samples(1, 2, 0, 9)  # other epochs and shards between
        order.samples(2, 2, 0, 9)
        assert order.samples(2, 3, first, count).tolist() == whole[first : first + count].tolist()
    others = [(7, 3, 3), (7, 2, 2), (8, 2, 3)]
    for seed, epoch, shard in others:
        other = epoch_of(balanced(5, seed, everywhere=everywhere), epoch, shard)
        assert other.tolist() != whole.tolist()


def test_what_is_left_out_and_what_is_drawn_once_more_change_by_epoch():
    order = balanced(1)  # 203 positions of 3 classes
    drawn = [epoch_of(order, epoch, 0) for epoch in range(12)]
    frequent = set(np.flatnonzero(LABELS == 0).tolist())
    parts = [frequent & set(each.tolist()) for each in drawn]
    assert {len(part) for part in parts} <= {67, 68} and len(set.union(*parts)) > 155
    assert len({str(np.bincount(LABELS[each])) for each in drawn}) == 3


def test_the_classes_alternate_within_an_epoch():
    labels = LABELS[epoch_of(balanced(1), 0, 0)]
    assert Counter(labels[:60].tolist())[1] > 10, "not one class after another"
    assert len({tuple(labels[i : i + 3]) for i in range(0, 60, 3)}) > 6
