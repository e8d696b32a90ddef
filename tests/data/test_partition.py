"""Shares, partitions and steps: every row exactly once an epoch, all shards finish together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpctrain.data.partition import (
    cut_epoch,
    cut_last_step,
    even_shares,
    proportional_cut,
)
from hpctrain.errors import UsageError
from tests.support.packs import order_of, places


@pytest.mark.parametrize(("total", "parts"), [(128, 48), (7, 3), (8, 8), (101, 4), (1, 1)])
def test_even_shares_differ_by_at_most_one_and_the_first_get_more(total, parts):
    shares = even_shares(total, parts)
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


def test_proportional_cut_never_exceeds_a_share():
    for total in range(129):
        cut = proportional_cut(total, even_shares(128, 48))
        assert sum(cut) == total
        assert all(c <= b for c, b in zip(cut, even_shares(128, 48), strict=True))


@pytest.mark.parametrize("rows", [101, 128, 129, 3301, 256, 1009])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7, 48])
def test_every_row_is_read_exactly_once_an_epoch(rows, shards):
    partition = cut_epoch(rows, 128, shards)
    read = [
        order_of(partition, 3, 5, j)[places(partition, t, j)]
        for t in range(partition.steps)
        for j in range(shards)
    ]
    assert np.array_equal(np.sort(np.concatenate(read)), np.arange(rows))
    for t in range(partition.steps):
        counts = [partition.count(t, j) for j in range(shards)]
        assert sum(counts) == partition.total(t)
        if t < partition.steps - 1:
            assert counts == list(partition.shares), "a step before the last is full"
    starts = [partition.start(j) for j in range(shards + 1)]
    assert starts == [sum(partition.sizes[:j]) for j in range(shards + 1)]


def test_all_shards_of_an_uneven_mini_batch_finish_together():
    partition = cut_epoch(10_007, 128, 48)
    assert set(partition.shares) == {2, 3}
    steps = [-(-n // b) for n, b in zip(partition.sizes, partition.shares, strict=True)]
    assert max(steps) == partition.steps
    assert min(steps) >= partition.steps - 1


def test_orders_differ_by_epoch_and_shard_and_seed_and_repeat():
    partition = cut_epoch(1009, 64, 2)
    first = order_of(partition, 0, 0, 0)
    assert np.array_equal(first, order_of(partition, 0, 0, 0))
    assert not np.array_equal(first, order_of(partition, 0, 1, 0))
    assert not np.array_equal(first, order_of(partition, 1, 0, 0))
    assert not np.array_equal(np.sort(order_of(partition, 0, 0, 1)), np.sort(first))
    assert not np.array_equal(order_of(partition, 1, 0, 0), order_of(partition, 0, 1, 0))


def test_a_mini_batch_smaller_than_the_shards_is_refused_with_both_numbers():
    with pytest.raises(UsageError, match="101 .* in mini-batches of 3, .* 5 shards of 1"):
        cut_epoch(101, 3, 5)
    with pytest.raises(UsageError, match="4 training images .* 5 shards"):
        cut_epoch(4, 128, 5)


def test_a_mini_batch_larger_than_the_split_is_one_step():
    partition = cut_epoch(101, 128, 3)
    assert (partition.steps, partition.batch_size, sum(partition.last)) == (1, 101, 101)


@pytest.mark.parametrize(("rows", "shards"), [(128 + 5, 4), (128 + 7, 8), (128 * 3 + 2, 3)])
def test_single_rows_are_planned_away_where_a_layer_needs_two(rows, shards):
    single = cut_epoch(rows, 128, shards).last
    assert 1 in single, "the case would not need planning"
    partition = cut_epoch(rows, 128, shards, min_samples=2)
    assert all(r == 0 or r >= 2 for r in partition.last)
    assert sum(partition.last) == sum(single)
    assert sum(partition.sizes) == rows


def test_what_cannot_be_planned_away_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match="129 .* of 128, the last one of 1, .* 2 shards of 2 or"):
        cut_epoch(129, 128, 2, min_samples=2)
    with pytest.raises(UsageError, match="8 shards of 2 or more images .the model normalizes"):
        cut_epoch(128, 8, 8, min_samples=2)
    with pytest.raises(UsageError, match="9 training images .* 5 shards .* fewer shards or ranks"):
        cut_epoch(9, 8, 5, min_samples=2)


@pytest.mark.parametrize(("rows", "batch", "shards"), [(225, 128, 64), (119, 60, 30), (9, 9, 4)])
def test_uneven_shares_are_cut_or_refused_at_once(rows, batch, shards):
    try:
        partition = cut_epoch(rows, batch, shards, min_samples=2)
    except UsageError:
        return
    assert sum(partition.sizes) == rows
    assert all(r == 0 or r >= 2 for r in (*partition.last, *partition.shares))


def old_cut_last_step(rows, shares, least):
    """The definition: as few shards as can hold the rows, found by trying all numbers of them."""
    cut = proportional_cut(rows, shares)
    if all(r == 0 or r >= least for r in cut):
        return cut
    for filled in range(1, len(shares) + 1):
        cut = even_shares(rows, filled)
        if all(least <= r <= b for r, b in zip(cut, shares, strict=False)):
            return cut + (0,) * (len(shares) - filled)
    return None


def test_the_last_step_is_cut_as_by_trying_all_numbers_of_shards():
    for batch, shards, least in itertools.product(range(1, 40), range(1, 14), (1, 2, 3)):
        shares = even_shares(batch, shards)
        for rows in range(1, batch + 1):
            assert cut_last_step(rows, shares, least) == old_cut_last_step(rows, shares, least)


def test_rows_of_the_last_step_move_where_a_neighbour_cannot_lend():
    for rows in range(2, 9):
        cut = cut_last_step(rows, (3, 2, 2, 2), 2)
        assert cut is None or (sum(cut) == rows and all(r == 0 or r >= 2 for r in cut))
    assert cut_last_step(6, (3, 2, 2, 2), 2) == (2, 2, 2, 0)
