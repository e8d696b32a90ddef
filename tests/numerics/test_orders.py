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
ORDERS = {
    "partition": {},
    "global": {},
    "blocks": {"block_rows": 17, "window_blocks": 3},
    "blocks, of one row": {"block_rows": 1, "window_blocks": 7},
    "blocks, all in one": {"block_rows": 5000, "window_blocks": 1},
}
KNOWN = {
    "partition": "b8d26b1957400a69",
    "global": "fe7f45ecf6fb6a5b",
    "blocks": "b08c806e63634c4c",
    "blocks, of one row": "2968c397b41a1372",
    "blocks, all in one": "8c0f2a288a005d7a",
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


@pytest.mark.parametrize(
    ("kept", "first"),
    [
        (1 << 22, [6, 3, 12, 11, 4, 10, 9, 0, 2, 8, 7, 5, 1]),
        (0, [6, 5, 10, 8, 9, 2, 3, 11, 0, 7, 4, 1, 12]),
    ],
)
def test_equal_keys_are_equal_orders_for_ever(kept, first):
    assert Permutation(13, 7, kept)(np.arange(13)).tolist() == first


def test_all_orders_are_as_probable():
    found = Counter(tuple(Permutation(4, key)(np.arange(4)).tolist()) for key in range(4800))
    assert len(found) == 24
    assert chi_square_tail(sum((n - 200) ** 2 / 200 for n in found.values()), 23) > 1e-3


def test_a_large_permutation_takes_no_memory_and_looks_random():
    found = Permutation(10**12, 3)(np.arange(500_000, 520_000)) / 10**12
    assert found.min() >= 0 and found.max() < 1
    counts = np.histogram(found, 20, (0, 1))[0]
    assert chi_square_tail(((counts - 1000.0) ** 2 / 1000).sum(), 19) > 1e-3
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03


@st.composite
def orders(draw):
    """A function that makes an order anew, of any kind, of any partition."""
    shards = draw(st.integers(1, 12))
    rows = draw(st.integers(shards, 400))
    partition = hp.cut_epoch(rows, draw(st.integers(shards, 60)), shards)
    name, seed = draw(st.sampled_from(["partition", "global", "blocks"])), draw(st.integers(0, 99))
    how = {}
    if name == "blocks":
        how = {"block_rows": draw(st.integers(1, 60)), "window_blocks": draw(st.integers(1, 9))}
    return lambda: make_order(name, partition, seed, **how)


@given(orders(), st.integers(0, 9), st.data())
def test_every_sample_is_read_once_an_epoch_and_any_part_of_it_is_had_without_the_rest(
    make, epoch, data
):
    order = make()
    sizes, parts = order.partition.sizes, epoch_of(order, epoch)
    assert sorted(np.concatenate(parts).tolist()) == list(range(order.partition.samples))
    for shard, samples in enumerate(parts):
        reach = order.reach(range(shard, shard + 1))
        assert len(samples) == sizes[shard]
        assert not len(samples) or (samples.min() >= reach.start and samples.max() < reach.stop)
    again = make()
    for _ in range(3):
        shard = data.draw(st.integers(0, len(sizes) - 1))
        first = data.draw(st.integers(0, sizes[shard]))
        count = data.draw(st.integers(0, sizes[shard] - first))
        found = again.samples(epoch, shard, first, count)
        assert found.tolist() == parts[shard][first : first + count].tolist()


@pytest.mark.parametrize("case", ORDERS)
def test_orders_differ_by_epoch_and_seed(case):
    first = np.concatenate(epoch_of(order_named(case), 0))
    assert not np.array_equal(first, np.concatenate(epoch_of(order_named(case), 1)))
    assert not np.array_equal(first, np.concatenate(epoch_of(order_named(case, seed=1), 0)))
    assert np.array_equal(first, np.concatenate(epoch_of(order_named(case), 0)))


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_a_seed_is_never_another(case):
    """Another one is another run: it needs a new version of the plan (plan.py)."""
    rows = np.concatenate(epoch_of(order_named(case, seed=5), 3)).astype("<i8")
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == KNOWN[case]


def test_shards_read_their_own_samples_in_every_epoch_or_others():
    sets = {
        case: [set(epoch_of(order_named(case), epoch)[0].tolist()) for epoch in (0, 1)]
        for case in ORDERS
    }
    own = set(range(PARTITION.sizes[0]))
    for case in ("partition", "blocks", "blocks, of one row"):
        assert sets[case] == [own, own]
    assert sets["global"][0] != sets["global"][1]


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
