"""A rank reads the labels and offsets of the samples that its shards may use, and no others."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest

from hpctrain.data import columns
from hpctrain.data.checks import Checks
from hpctrain.data.imbalance import BalancedOrder, describe_missing
from hpctrain.data.loader import Loader
from hpctrain.data.orders import make_order
from hpctrain.data.packed import read_pack, read_sums
from hpctrain.data.partition import cut_epoch
from hpctrain.data.split import Split
from tests.support.packs import make_pack

ROWS = 203


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pack, and the labels of its training split."""
    path = make_pack(tmp_path_factory.mktemp("pack") / "a.h5", {"train": ROWS}, (6, 6, 1))
    with h5py.File(path, locking=False) as file:
        return read_pack(path), file["train/labels"][:]


@pytest.fixture
def label_reads(made, monkeypatch):
    """The rows whose labels are read from the file."""
    layout, rows, preadv = made[0].splits["train"], [], os.preadv

    def counted(descriptor, buffers, offset):
        size, first = sum(map(len, buffers)), (offset - layout.labels_offset) // 8
        if 0 <= first < ROWS and offset >= layout.labels_offset:
            rows.extend(range(first, first + size // 8))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return rows


@pytest.mark.parametrize("checked", [False, True])
def test_labels_in_memory_and_on_demand_equal_those_of_the_file(made, monkeypatch, checked):
    pack, labels = made
    monkeypatch.setattr(columns, "PIECE_ROWS", 7)
    checks = Checks(read_sums(pack) if checked else None)
    with Split(pack, "train", checks=checks) as split:
        for part in (range(50, 90), range(ROWS)):
            split.hold(part)
            for rows in ([3], [60, 51, 60], [89, 90], [], np.arange(ROWS), np.arange(ROWS)[::-1]):
                rows = np.array(rows, np.int64)
                assert np.array_equal(split.read_labels(rows), labels[rows])
        assert np.array_equal(split.count_classes(), np.bincount(labels, minlength=10))
        assert np.array_equal(split.labels, labels)


@pytest.mark.parametrize("order", ["partition", "blocks"])
def test_a_rank_reads_only_the_labels_of_its_shards(made, label_reads, order):
    pack, labels = made
    partition = cut_epoch(ROWS, 32, 4)
    order, shards = make_order(order, partition, 0, 5, 3), range(1, 3)
    reach = order.reach(shards)
    with Split(pack, "train") as split:
        loader = Loader(split, partition, shards, order=order, epochs=2)
        found = [b for epoch in range(2) for step in loader.epoch(epoch) for b in step]
        loader.close()
    assert set(label_reads) == set(reach) and len(reach) < ROWS
    assert np.array_equal(np.bincount(label_reads)[reach.start :], [1] * len(reach))
    targets = np.concatenate([batch.targets.numpy() for batch in found])
    assert np.array_equal(np.sort(targets), np.sort(np.tile(labels[reach.start : reach.stop], 2)))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("row", [-1, ROWS])
def test_rows_outside_the_split_are_refused(made, held, row):
    with Split(made[0], "train") as split:
        split.hold(range(ROWS if held else 0))
        with pytest.raises(IndexError, match=f"to {max(row, 7)} requested of {ROWS} labels"):
            split.read_labels(np.array([7, row]))


def test_opening_a_split_reads_no_label(made, label_reads):
    with Split(made[0], "train") as split:
        assert len(split) == ROWS
    assert not label_reads


def test_a_balanced_order_reads_only_the_labels_of_the_requested_shards(
    made, monkeypatch, label_reads
):
    monkeypatch.setattr(columns, "PIECE_ROWS", 7)
    pack, labels = made
    partition = cut_epoch(ROWS, 32, 4)
    with Split(pack, "train") as split:
        order = BalancedOrder(partition, 3, split.read_labels)
        found = order.samples(0, 2, 0, 20)
        assert set(label_reads) == set(order.reach(range(2, 3)))
        kept = BalancedOrder(partition, 3, labels.take)
        assert np.array_equal(found, kept.samples(0, 2, 0, 20))
        counts = np.bincount(labels[order.reach(range(2, 3))])
        assert np.array_equal(order.count_classes(order.pool(2)), counts)
        names = [str(k) for k in range(10)]
        assert describe_missing(order, names) == describe_missing(kept, names)
