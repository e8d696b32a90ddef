"""Shares, partitions and steps: every sample once an epoch, all shards finish together."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import hpctrain as hp
from tests.support.api import make_order


def even(total, parts):
    """The definition: as equal as can be, the first are the larger."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def in_proportion(total, shares):
    """The definition: the differences of cumulative floors."""
    floors = [total * sum(shares[:part]) // sum(shares) for part in range(len(shares) + 1)]
    return [b - a for a, b in itertools.pairwise(floors)]


def last_step(rows, shares, least):
    """The definition: in proportion to the shares where that leaves none with fewer than `least`;
    else evenly among as few shards as can hold the rows, by trying all numbers of them.
    """
    cut = in_proportion(rows, shares)
    if all(r == 0 or r >= least for r in cut):
        return cut
    for filled in range(1, len(shares) + 1):
        cut = even(rows, filled)
        if all(least <= r <= b for r, b in zip(cut, shares, strict=False)):
            return cut + [0] * (len(shares) - filled)
    return None


@given(st.data())
def test_a_partition_is_that_of_the_definition_or_refused(data):
    shards, least = data.draw(st.integers(1, 48)), data.draw(st.integers(1, 3))
    batch = data.draw(st.integers(1, 150))
    rows = data.draw(st.integers(1, 400))
    shares = even(min(batch, rows), shards)
    last = last_step(rows % sum(shares) or sum(shares), shares, least)
    if min(shares) < least or last is None:
        with pytest.raises(hp.UsageError, match=rf"{rows} training images .* {shards} shards?\b"):
            hp.cut_epoch(rows, batch, shards, least)
        return
    partition = hp.cut_epoch(rows, batch, shards, least)
    assert (list(partition.shares), list(partition.last)) == (shares, last)
    assert partition.batch_size == min(batch, rows)
    check_reading(partition, rows)


def check_reading(partition, rows):
    """Step by step, with a full batch in all steps but the last, by shards that end together."""
    shards = range(len(partition.shares))
    order, seen = make_order("partition", partition, 3), []
    places = [0 for _ in shards]
    for step in range(partition.steps):
        counts = [partition.count(step, shard) for shard in shards]
        assert sum(counts) == partition.total(step)
        assert counts == list(partition.shares if step < partition.steps - 1 else partition.last)
        for shard, count in enumerate(counts):
            seen += order.samples(5, shard, places[shard], count).tolist()
            places[shard] += count
    assert sorted(seen) == list(range(rows))
    assert places == list(partition.sizes)
    assert [*partition.starts] == [sum(partition.sizes[:shard]) for shard in (*shards, len(shards))]
    assert all(r <= b for r, b in zip(partition.last, partition.shares, strict=True))


def test_a_partition_of_very_many_samples_is_cut_at_once():
    partition = hp.cut_epoch(10**12 + 7, 4096, 1000)
    assert sum(partition.sizes) == 10**12 + 7
    assert np.ptp(partition.sizes) <= partition.steps
