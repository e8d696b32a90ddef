"""Orders: every sample once an epoch, any part of it without the rest, all classes mixed."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import hpctrain as hp
from tests.support.api import Permutation, make_order

ROWS, SHARDS = 1009, 5
PARTITION = hp.cut_epoch(ROWS, 64, SHARDS)
LABELS = np.repeat([0, 1, 2], [790, 63, 156])[np.random.default_rng(3).permutation(ROWS)]
ORDERS = {
    "partition": {},
    "global": {},
    "blocks": {"block_rows": 17, "window_blocks": 3},
    "blocks, of one row": {"block_rows": 1, "window_blocks": 7},
    "blocks, all in one": {"block_rows": 5000, "window_blocks": 1},
    "balanced": {"labels": LABELS},
    "balanced, from all": {"labels": LABELS, "everywhere": True},
}
KNOWN = {
    "partition": "b8d26b1957400a69",
    "global": "fe7f45ecf6fb6a5b",
    "blocks": "b08c806e63634c4c",
    "blocks, of one row": "2968c397b41a1372",
    "blocks, all in one": "8c0f2a288a005d7a",
    "balanced": "88676a1166bcc4aa",
    "balanced, from all": "cf9ad83acebde93d",
}


def order_named(case, seed=0):
    return make_order(case.partition(",")[0], PARTITION, seed, **ORDERS[case])


def epoch_of(order, epoch):
    """The samples that each shard reads."""
    sizes = order.partition.sizes
    return [order.samples(epoch, shard, 0, size) for shard, size in enumerate(sizes)]


@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.sampled_from([0, 1 << 22]))
def test_a_permutation_has_every_number_once(n, key, kept):
    found = Permutation(n, key, kept)(np.arange(n))
    assert sorted(found.tolist()) == list(range(n))
    if n > 200:
        other = Permutation(n, key ^ 1, kept)(np.arange(n))
        assert (found != other).mean() > 0.9
        assert (found != np.arange(n)).mean() > 0.9


@pytest.mark.parametrize("n", [1, 2, 3, 101, 4096, 4097])
def test_small_permutations_are_ordered_by_raw_random_words(n):
    """What NumPy promises never to change; larger ones are not drawn."""
    words, drop = np.random.PCG64(5).random_raw(n).tolist(), (n - 1).bit_length()
    expected = sorted(range(n), key=lambda i: words[i] >> drop)
    assert Permutation(n, 5)(np.arange(n)).tolist() == expected
    large = [6, 5, 10, 8, 9, 2, 3, 11, 0, 7, 4, 1, 12]
    assert Permutation(13, 7, kept=0)(np.arange(13)).tolist() == large


def test_a_large_permutation_takes_no_memory_and_looks_random():
    found = Permutation(10**12, 3)(np.arange(500_000, 520_000)) / 10**12
    assert found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, 20, (0, 1))[0]
    assert chi_square_tail(((counts - 1000.0) ** 2 / 1000).sum(), 19) > 1e-3
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03


@st.composite
def orders(draw):
    """The name of an order, and a function that makes it anew, of any partition."""
    shards = draw(st.integers(1, 12))
    rows = draw(st.integers(shards, 400))
    partition = hp.cut_epoch(rows, draw(st.integers(shards, 60)), shards)
    name, seed = draw(st.sampled_from([*ORDERS])), draw(st.integers(0, 99))
    how = dict(ORDERS[name])
    if "block_rows" in how:
        how = {"block_rows": draw(st.integers(1, 60)), "window_blocks": draw(st.integers(1, 9))}
    return name, lambda: make_order(name.partition(",")[0], partition, seed, **how)


@given(orders(), st.integers(0, 9), st.data())
def test_every_sample_is_read_once_an_epoch_and_any_part_of_it_is_had_without_the_rest(
    made, epoch, data
):
    """But in a balanced order, which leaves out some and repeats others."""
    (name, make), everywhere = made, ("global", "balanced, from all")
    order = make()
    partition, parts = order.partition, epoch_of(order, epoch)
    sizes = partition.sizes
    if not name.startswith("balanced"):
        assert sorted(np.concatenate(parts).tolist()) == list(range(partition.samples))
    for shard, samples in enumerate(parts):
        own = range(*partition.starts[shard : shard + 2])
        reach = order.reach(range(shard, shard + 1))
        assert reach == (range(partition.samples) if name in everywhere else own)
        assert len(samples) == sizes[shard] and set(samples.tolist()) <= set(reach)
    again = make()
    for _ in range(3):
        shard = data.draw(st.integers(0, len(sizes) - 1))
        first = data.draw(st.integers(0, sizes[shard]))
        count = data.draw(st.integers(0, sizes[shard] - first))
        again.samples(data.draw(st.integers(0, 9)), shard, 0, 1)  # another epoch between
        found = again.samples(epoch, shard, first, count)
        assert found.tolist() == parts[shard][first : first + count].tolist()


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_a_seed_is_never_another_and_differs_by_epoch_and_seed(case):
    """Another one is another run: it needs a new version of the plan (plan.py)."""
    rows, later, other = (
        np.concatenate(epoch_of(order_named(case, seed), epoch)).astype("<i8")
        for seed, epoch in ((5, 3), (5, 4), (4, 3))
    )
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == KNOWN[case]
    assert not np.array_equal(rows, later) and not np.array_equal(rows, other)


def test_blocks_are_read_whole_and_windows_are_small():
    order = make_order("blocks", PARTITION, 0, block_rows=17, window_blocks=3)
    for shard in range(SHARDS):
        seen = []
        for number in range(order.count(shard)):
            samples = order.window(0, shard, number).samples
            assert len(samples) <= 3 * 17
            assert np.count_nonzero(np.diff(samples) != 1) <= 3  # a partition may end within one
            seen += samples.tolist()
        assert sorted(seen) == sorted(epoch_of(order, 0)[shard].tolist())
    windows = {str(sorted(order.window(epoch, 0, 0).samples)) for epoch in range(4)}
    assert len(windows) == 4, "others come together in every epoch"


def chi_square_tail(value, freedom):
    """P(X > value) of a chi-square distribution, by Wilson and Hilferty's cube root."""
    z = ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def mix(order, classes, batch):
    """How probable a mix of the ten classes in mini-batches is that is at least as uneven as this
    order's, if samples were drawn at random.
    """
    labels = classes[np.concatenate(epoch_of(order, 0))]
    full = len(labels) // batch
    counts = [np.bincount(labels[i * batch : (i + 1) * batch], minlength=10) for i in range(full)]
    expected = batch * np.bincount(classes, minlength=10) / len(classes)
    value = ((np.array(counts) - expected) ** 2 / expected).sum() / (1 - batch / len(classes))
    return chi_square_tail(value, 9 * full)


@pytest.mark.parametrize("name", ["partition", "global", "blocks"])
def test_classes_are_mixed_in_every_mini_batch(name):
    """Where the file is ordered by class, they are not, unless samples move between shards."""
    rows = 20_011
    classes = np.sort(np.arange(rows) % 10)
    blocks = {"block_rows": 5, "window_blocks": 1000}
    order = make_order(name, hp.cut_epoch(rows, 128, 2), 0, **blocks)
    assert 1e-3 < mix(order, np.random.default_rng(0).permutation(classes), 64) < 0.999
    assert name == "global" or mix(order, classes, 64) < 1e-9


def are_even(counts):
    return max(counts) - min(counts) <= 1


@pytest.mark.parametrize("case", ["balanced", "balanced, from all"])
def test_all_classes_are_drawn_equally_often_and_in_turn(case):
    """By each shard or by all together; and no sample twice as often as another of its class."""
    order, everywhere = order_named(case), case.endswith("all")
    parts = epoch_of(order, 1)
    for shard, drawn in enumerate([np.concatenate(parts)] if everywhere else parts):
        reach, labels, times = order.reach(range(shard, shard + 1)), LABELS[drawn], Counter(drawn)
        assert are_even(np.bincount(labels, minlength=3))
        for label in range(3):
            assert are_even([times[sample] for sample in reach if LABELS[sample] == label])
        assert np.count_nonzero(labels[:60] == 1) > 10, "not one class after another"
        assert len({tuple(labels[i : i + 3]) for i in range(0, 60, 3)}) > 6


def test_what_a_balanced_order_leaves_out_and_draws_once_more_changes_by_epoch():
    order = order_named("balanced")
    drawn = [epoch_of(order, epoch)[1] for epoch in range(12)]  # 205 of 3 classes
    frequent = [set(each[LABELS[each] == 0].tolist()) for each in drawn]
    assert len(set.union(*frequent)) > 1.5 * len(frequent[0])
    assert len({str(np.bincount(LABELS[each])) for each in drawn}) == 3
