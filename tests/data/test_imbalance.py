"""Orders that draw all classes equally often."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hpctrain.config import Config
from hpctrain.data.imbalance import (
    BalancedOrder,
    describe_missing,
)
from hpctrain.data.orders import Order
from hpctrain.data.partition import cut_epoch
from hpctrain.plan import resolve
from hpctrain.plan_text import describe_plan
from tests.test_plan import FACTS

N, NAMES = 203, ("common", "rare", "usual")
LABELS = np.repeat([0, 1, 2], [160, 13, 30])[np.random.default_rng(3).permutation(N)]
CUTS = {shards: cut_epoch(N, 32, shards) for shards in (1, 2, 5)}


def epoch_of(order, epoch, shard):
    return order.samples(epoch, shard, 0, order.partition.sizes[shard])


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("shards", CUTS)
def test_each_shard_draws_the_classes_of_its_partition_equally_often(shards, scattered):
    order = BalancedOrder(CUTS[shards], 7, LABELS.take, scattered=scattered)
    plain = Order(CUTS[shards], 7, scattered)
    for shard in range(shards):
        own = set(epoch_of(plain, 0, shard).tolist())
        for epoch in range(3):
            drawn = epoch_of(order, epoch, shard)
            counts = Counter(LABELS[drawn].tolist())
            assert len(counts) == 3 and max(counts.values()) - min(counts.values()) <= 1
            assert set(drawn.tolist()) <= own
            for label, count in counts.items():  # in turn: none twice as often as another
                members = [sample for sample in own if LABELS[sample] == label]
                times = Counter(drawn[LABELS[drawn] == label].tolist())
                each = [times[sample] for sample in members]
                assert sum(each) == count and max(each) - min(each) <= 1


def test_drawn_from_all_samples_no_class_is_missing():
    order = BalancedOrder(CUTS[5], 7, LABELS.take, everywhere=True)
    drawn = np.concatenate([epoch_of(order, 0, shard) for shard in range(5)])
    counts = Counter(LABELS[drawn].tolist())
    assert max(counts.values()) - min(counts.values()) <= 1
    rare = Counter(drawn[LABELS[drawn] == 1].tolist())
    assert len(rare) == 13 and max(rare.values()) - min(rare.values()) <= 1
    assert order.reach(range(1, 2)) == range(N)
    assert BalancedOrder(CUTS[5], 7, LABELS.take).reach(range(1, 2)) == Order(CUTS[5], 7).reach(
        range(1, 2)
    )


@pytest.mark.parametrize("everywhere", [False, True])
def test_any_part_of_an_epoch_is_a_pure_function_of_seed_epoch_and_shard(everywhere):
    def make(seed=7):
        return BalancedOrder(CUTS[5], seed, LABELS.take, everywhere)

    whole = epoch_of(make(), 2, 3)
    order = make()
    for first, count in ((11, 5), (0, 3), (20, 17), (4, 0)):
        order.samples(1, 2, 0, 9)  # other epochs and shards between
        order.samples(2, 2, 0, 9)
        assert order.samples(2, 3, first, count).tolist() == whole[first : first + count].tolist()
    others = [epoch_of(make(), 3, 3), epoch_of(make(), 2, 2), epoch_of(make(8), 2, 3)]
    assert all(other.tolist() != whole.tolist() for other in others)


def test_which_samples_of_a_frequent_class_are_left_out_changes_by_epoch():
    order = BalancedOrder(CUTS[1], 7, LABELS.take)
    drawn = [set(epoch_of(order, epoch, 0).tolist()) for epoch in range(12)]
    common = set(np.flatnonzero(LABELS == 0).tolist())
    assert all(len(each & common) in (67, 68) for each in drawn)
    assert len(set.union(*drawn) & common) > 155


def test_the_class_that_is_drawn_once_more_changes_by_epoch():
    order = BalancedOrder(CUTS[1], 7, LABELS.take)  # 203 positions of 3 classes
    counts = [np.bincount(LABELS[epoch_of(order, epoch, 0)]) for epoch in range(12)]
    assert len({tuple(each.tolist()) for each in counts}) == 3


def test_the_classes_alternate_within_an_epoch():
    order = BalancedOrder(CUTS[1], 7, LABELS.take)
    labels = LABELS[epoch_of(order, 0, 0)]
    assert Counter(labels[:60].tolist())[1] > 10, "not one class after another"
    assert len({tuple(labels[i : i + 3]) for i in range(0, 60, 3)}) > 6


def test_a_class_that_a_shard_lacks_is_named():
    labels = np.zeros(20, np.int64)
    labels[[1, 19]] = 1
    partition = cut_epoch(20, 20, 4)
    order = BalancedOrder(partition, 0, labels.take)
    assert describe_missing(order, ("a", "b", "none")) == (
        "--balanced-sampling: some shards have no image of a class, which is therefore drawn less"
        " often (b in shards 1-2): use fewer shards, or --shuffle global"
    )
    assert set(epoch_of(order, 0, 1).tolist()) == set(range(5, 10))
    assert describe_missing(BalancedOrder(partition, 0, labels.take, everywhere=True), "ab") is None
    assert describe_missing(Order(partition, 0), "ab") is None


def test_the_plan_says_that_classes_are_drawn_equally_often():
    plain, alike = (resolve(Config(balanced_sampling=on), FACTS) for on in (False, True))
    assert alike.balanced_sampling and plain.digest() != alike.digest()
    lines = "\n".join(describe_plan(alike))
    assert "order          partition, classes drawn equally often" in lines
