"""The loader against plain indexing: what batches hold, what is read when, how its thread ends."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hpctrain as hp
from tests.support.api import Augmentation, make_order
from tests.support.packs import order_of, places
from tests.support.source import Source
from tests.support.wait import wait_for

ROWS, SHAPE, SEED = 101, (5, 7, 3), 3
PARTITION = hp.cut_epoch(ROWS, 16, 3)  # 7 steps; shares 6, 5, 5; the last step has 5 samples
MINE = [1, 2]
STREAMING, RESIDENT = 0, 1 << 20  # bytes of read_buffer
BLOCKS = {"block_rows": 5, "window_blocks": 2}


def make_loader(source=None, order=None, read_buffer=STREAMING, **settings):
    order, options = order or hp.Order(PARTITION, SEED), hp.ReadOptions(read_buffer)
    return hp.Loader(source or Source(), order, MINE, options=options, **settings)


def augmenting():
    return hp.Pipeline(augmentation=Augmentation(flip=True, shift=2))


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def bits(steps):
    """Everything that batches hold, to compare two loaders."""
    return [[(b.shard, b.key, b.images.tolist(), b.targets.tolist()) for b in s] for s in steps]


def whole_epoch(epoch=0, **settings):
    return bits(make_loader(**settings).epoch(epoch))


# What batches hold


@pytest.mark.parametrize("read_buffer", [STREAMING, RESIDENT])
def test_batches_are_the_samples_of_the_partition(read_buffer):
    source = Source()
    loader = make_loader(source, read_buffer=read_buffer)
    for epoch in (0, 1):
        for step, batches in enumerate(loader.epoch(epoch)):
            rows = [order_of(PARTITION, SEED, epoch, j)[places(PARTITION, step, j)] for j in MINE]
            assert [b.shard for b in batches] == [j for j in MINE if PARTITION.count(step, j)]
            for batch, chosen in zip(batches, filter(len, rows), strict=True):
                plain = source.images[chosen].transpose(0, 3, 1, 2).astype(np.float32) / 255
                np.testing.assert_allclose(batch.images.numpy(), plain, rtol=1e-6, atol=0)
                assert batch.targets.tolist() == source.targets[chosen].tolist()
        assert step == 6
    assert whole_epoch(0) != whole_epoch(1)


def test_every_batch_has_a_key_of_its_own():
    """By seed, epoch, step and shard: two batches with one key would be augmented alike."""
    loaders = [hp.Loader(Source(), hp.Order(PARTITION, seed), range(3)) for seed in (0, 1)]
    steps = [step for loader in loaders for epoch in (0, 1) for step in loader.epoch(epoch)]
    keys = [batch.key for step in steps for batch in step]
    assert len(set(keys)) == len(keys) == 2 * 2 * 7 * 3


def test_a_shard_without_samples_has_no_batch():
    partition = hp.cut_epoch(7, 6, 3)  # the last step has one sample, of one shard
    steps = list(hp.Loader(Source(7), hp.Order(partition), range(3)).epoch(0))
    assert [len(step) for step in steps] == [3, 1]
    assert partition.last[steps[1][0].shard] == 1


@given(
    name=st.sampled_from(["partition", "global", "blocks"]),
    first_step=st.integers(0, 7),
    epoch=st.integers(0, 3),
    read_buffer=st.sampled_from([0, 9000, 1 << 20]),
)
def test_an_epoch_has_the_same_bits_from_any_step_on_and_however_it_is_read(
    name, first_step, epoch, read_buffer
):
    order = make_order(name, PARTITION, SEED, **BLOCKS)
    settings = {"order": order, "pipeline": augmenting()}
    whole = whole_epoch(epoch, **settings)
    loader = make_loader(read_buffer=read_buffer, **settings)
    assert bits(loader.epoch(epoch, first_step)) == whole[first_step:]
    assert whole != whole_epoch(epoch + 1, **settings)


@pytest.mark.parametrize("read_buffer", [STREAMING, RESIDENT])
def test_batches_share_no_memory(read_buffer):
    """Values of an earlier batch stay while the thread reads on into its own buffer."""
    loader = make_loader(read_buffer=read_buffer)
    held, values = [], []
    for batches in loader.epoch(0):
        held += batches
        values += [(b.images.clone(), b.targets.clone()) for b in batches]
    for batch, (images, labels) in zip(held, values, strict=True):
        assert torch.equal(batch.images, images) and torch.equal(batch.targets, labels)
    assert len({b.images.untyped_storage().data_ptr() for b in held}) == len(held) == 14
    held[0].images.zero_()
    assert torch.equal(next(loader.epoch(0))[0].images, values[0][0])


def test_single_samples_are_read_in_the_order_asked_for():
    source, rows = Source(), [100, 0, 53, 0]
    plain = source.images[rows].transpose(0, 3, 1, 2).astype(np.float32) / 255
    inputs = hp.read_samples(source, rows)
    np.testing.assert_allclose(inputs.numpy(), plain, rtol=1e-6, atol=0)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    scaled = hp.read_samples(source, np.array(rows), hp.Pipeline(normalization=(mean, std)))
    torch.testing.assert_close(scaled, (inputs - mean[:, None, None]) / std[:, None, None])
    assert hp.read_samples(source, np.arange(0)).shape == (0, 3, 5, 7)


# What is read, and when


def test_samples_that_fit_the_read_buffer_are_read_once():
    needed = sum(PARTITION.sizes[j] for j in MINE) * 5 * 7 * 3
    for read_buffer, reads in ((needed, 1), (needed - 1, 2 * 14)):
        source = Source()
        loader = make_loader(source, read_buffer=read_buffer)
        assert len([*loader.epoch(0), *loader.epoch(1)]) == 14 and len(source.asked) == reads
    for name in ("global", "blocks"):
        source = Source()
        order = make_order(name, PARTITION, SEED, **BLOCKS)
        loader = make_loader(source, order=order, read_buffer=RESIDENT)
        assert len([*loader.epoch(0), *loader.epoch(1)]) == 14 and len(source.asked) == 1
        assert len(source.asked[0]) == (ROWS if name == "global" else sum(PARTITION.sizes[1:]))


def test_windows_are_read_in_long_runs_two_of_a_shard_at_most():
    order = make_order("blocks", PARTITION, SEED, **BLOCKS)
    other = make_order("blocks", PARTITION, SEED, **BLOCKS)  # for this thread
    source = Source()
    for step, batches in enumerate(make_loader(source, order=order).epoch(0)):
        for batch in batches:
            first = step * PARTITION.shares[batch.shard]
            rows = other.samples(0, batch.shard, first, len(batch.images))
            assert batch.targets.tolist() == source.targets[rows].tolist()
        assert sum(buffer() is not None for buffer in source.buffers) <= 2 * len(MINE)
    runs = [np.count_nonzero(np.diff(rows) != 1) + 1 for rows in source.asked]
    assert max(runs) <= 3
    assert np.mean([len(rows) for rows in source.asked]) > 7


def test_the_thread_reads_only_a_little_ahead():
    source, taken, ahead = Source(), [], []
    gather = source.gather

    def counted(*arguments, **more):
        ahead.append(len(source.asked) // len(MINE) - len(taken))  # whole steps
        return gather(*arguments, **more)

    source.gather = counted
    steps = make_loader(source).epoch(0)
    assert not source.asked  # nothing is read before it is asked for
    for step in steps:
        taken.append(step)
        wait_for(lambda: len(source.asked) >= len(MINE) * min(7, len(taken) + 3))
    assert 1 <= max(ahead) <= 3


@pytest.mark.parametrize("name", ["partition", "blocks"])
def test_the_first_steps_of_an_epoch_are_read_before_the_one_before_ends(name):
    """They are taken while nothing can be read."""
    order, source, prepared = make_order(name, PARTITION, SEED, **BLOCKS), Source(), []

    def stage(inputs, targets, key):
        prepared.append(key)
        return inputs, targets

    alone = [whole_epoch(epoch, order=order) for epoch in range(3)]
    loader = make_loader(source, pipeline=hp.Pipeline(stage=stage), order=order, epochs=3)
    assert bits(loader.epoch(0)) == alone[0]
    for epoch in (1, 2):
        (thread,) = loader_threads()
        used = sum(len(batches) for known in alone[:epoch] for batches in known)
        wait_for(lambda used=used: len(prepared) >= used + 2 * len(MINE))
        source.gate.clear()
        steps = loader.epoch(epoch)
        first = [next(steps), next(steps)]
        source.gate.set()
        assert loader_threads() == [thread]
        assert bits([*first, *steps]) == alone[epoch]
    assert not loader_threads()  # nothing follows the last one


# Errors, and the end of the thread


@pytest.mark.parametrize("name", ["partition", "blocks"])
def test_an_error_of_the_reading_thread_is_raised_where_batches_are_taken(name):
    order, taken = make_order(name, PARTITION, SEED, **BLOCKS), []
    with pytest.raises(hp.RunError, match="cut short"):
        for batches in make_loader(Source(fails_at=4), order=order).epoch(0):
            taken.append(batches)
    assert bits(taken) == whole_epoch(order=order)[: len(taken)]
    assert name != "partition" or len(taken) == 2
    assert not loader_threads()


def test_an_error_of_the_first_read_or_of_one_ahead_is_raised_in_its_own_epoch():
    with pytest.raises(hp.RunError, match="cut short"):
        next(make_loader(Source(fails_at=0), read_buffer=RESIDENT).epoch(0))
    assert not loader_threads()
    loader = make_loader(Source(fails_at=15), epochs=2)
    assert len(list(loader.epoch(0))) == PARTITION.steps
    with pytest.raises(hp.RunError, match="cut short"):
        list(loader.epoch(1))
    assert not loader_threads()


@pytest.mark.parametrize("read_buffer", [STREAMING, RESIDENT])
def test_leaving_an_epoch_early_ends_the_thread(read_buffer):
    loader = make_loader(read_buffer=read_buffer)
    steps = loader.epoch(0)
    next(steps)
    assert len(loader_threads()) == 1
    steps.close()
    assert not loader_threads()
    assert bits(loader.epoch(0)) == whole_epoch()


def test_closing_ends_the_thread_though_an_error_keeps_the_epoch():
    """A generator that the garbage collector closes would join its thread wherever that runs: also
    in a thread that is starting, which then waits for a lock that it holds itself.
    """
    loader = make_loader()
    with pytest.raises(ZeroDivisionError) as kept, contextlib.closing(loader):
        steps = loader.epoch(0)
        next(steps)
        _ = 1 / 0
    assert not loader_threads() and kept.traceback
    steps.close()
    assert bits(loader.epoch(0)) == whole_epoch()


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (2, 0), (1, 3), (None, 0)])
def test_what_was_read_ahead_is_dropped_where_something_else_follows(epoch, step):
    """Another epoch or step, and the end of training."""
    loader = make_loader(epochs=3)
    for number, _ in enumerate(loader.epoch(0), start=1):
        if number == PARTITION.steps:
            break  # as the loop of training does
    assert len(loader_threads()) == 1
    if epoch is not None:
        assert bits(loader.epoch(epoch, step)) == whole_epoch(epoch)[step:]
    loader.close()
    assert not loader_threads()
