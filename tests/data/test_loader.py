"""The loader against plain indexing: what batches hold, and how its thread ends."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from hpctrain.data import jpeg
from hpctrain.data import loader as module
from hpctrain.data.augment import Augmentation
from hpctrain.data.loader import Ahead, Loader, make_prepare, read_samples
from hpctrain.data.orders import make_order
from hpctrain.data.partition import cut_epoch
from hpctrain.data.split import Split
from hpctrain.errors import RunError
from tests.data.pictures import class_folders, pack
from tests.support.packs import order_of, places
from tests.support.wait import wait_for

ROWS, SHAPE, SEED = 101, (5, 7, 3), 3
PARTITION = cut_epoch(ROWS, 16, 3)  # 7 steps; shares 6, 5, 5; the last step has 5 rows
MINE = [1, 2]
STREAMING, RESIDENT = 0, 1 << 20  # bytes of read_buffer


class Source:
    """Rows in memory; notes what is asked for."""

    image_shape, dtype = SHAPE, np.dtype(np.uint8)

    def __init__(self, rows=ROWS):
        rng = np.random.default_rng(1)
        self.images = rng.integers(0, 256, (rows, *SHAPE), dtype=np.uint8)
        self.labels = rng.integers(0, 10, rows)
        self.asked = []

    def read_labels(self, indices):
        return self.labels[indices]

    def hold(self, samples):
        pass

    def gather(self, indices, out, crops=None):
        self.asked.append(indices.copy())
        out[:] = self.images[indices]
        return out


class Torn(Source):
    """Cannot be read any more from the gather number `last` on."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def gather(self, indices, out, crops=None):
        if len(self.asked) == self.last:
            raise RunError("the pack was cut short")
        return super().gather(indices, out)


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("ahead")]


def indexed(source, epoch):
    """What each step must hold, by plain indexing: [(shard, images (m, C, H, W), labels)]."""
    steps = []
    for step in range(PARTITION.steps):
        rows = [(j, order_of(PARTITION, SEED, epoch, j)[places(PARTITION, step, j)]) for j in MINE]
        inputs = [
            (j, source.images[r].transpose(0, 3, 1, 2).astype(np.float32) / 255, source.labels[r])
            for j, r in rows
            if len(r)
        ]
        steps.append(inputs)
    return steps


def bits(steps):
    """Everything that batches hold, to compare two loaders."""
    return [[(b.shard, b.key, b.images.tolist(), b.targets.tolist()) for b in s] for s in steps]


@pytest.mark.parametrize("read_buffer", [STREAMING, RESIDENT])
def test_batches_are_the_rows_of_the_partition(read_buffer):
    source = Source()
    loader = Loader(source, PARTITION, MINE, SEED, read_buffer=read_buffer)
    for epoch in (0, 1):
        steps, expected = list(loader.epoch(epoch)), indexed(source, epoch)
        assert len(steps) == len(expected) == 7
        for batches, rows in zip(steps, expected, strict=True):
            assert [b.shard for b in batches] == [j for j, _, _ in rows]
            for batch, (_, images, labels) in zip(batches, rows, strict=True):
                np.testing.assert_allclose(batch.images.numpy(), images, rtol=1e-6, atol=0)
                np.testing.assert_array_equal(batch.targets.numpy(), labels)
    assert not np.array_equal(indexed(source, 0)[0][0][1], indexed(source, 1)[0][0][1])


def test_every_batch_has_a_key_of_its_own():
    """By seed, epoch, step and shard: two batches with one key would be augmented alike."""
    keys = [
        batch.key
        for seed in (0, 1)
        for epoch in (0, 1)
        for batches in Loader(Source(), PARTITION, range(3), seed).epoch(epoch)
        for batch in batches
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * 7 * 3


def test_a_shard_without_rows_has_no_batch():
    partition = cut_epoch(7, 6, 3)  # the last step has one row, of one shard
    steps = list(Loader(Source(7), partition, range(3)).epoch(0))
    assert [[b.shard for b in batches] for batches in steps] == [
        [0, 1, 2],
        [j for j in range(3) if partition.last[j]],
    ]
    assert len(steps[1]) == 1


def test_resident_and_streaming_give_the_same_bits_but_read_differently():
    partition_rows = np.arange(PARTITION.start(1), ROWS)
    streamed, kept = Source(), Source()
    augmenting = {"augmentation": Augmentation(flip=True, shift=2)}
    results = []
    for source, read_buffer in ((streamed, STREAMING), (kept, RESIDENT)):
        prepare = make_prepare(**augmenting)
        loader = Loader(source, PARTITION, MINE, SEED, prepare, read_buffer=read_buffer)
        results.append([bits(loader.epoch(epoch)) for epoch in (0, 1)])
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]
    assert len(kept.asked) == 1
    np.testing.assert_array_equal(kept.asked[0], partition_rows)
    for epoch in (0, 1):  # 14 gathers an epoch: shard 1, then shard 2 in each step
        asked = streamed.asked[14 * epoch : 14 * (epoch + 1)]
        for number, shard in enumerate(MINE):
            order = order_of(PARTITION, SEED, epoch, shard)
            np.testing.assert_array_equal(np.concatenate(asked[number::2]), order)


def test_read_buffer_is_counted_in_the_bytes_of_this_ranks_rows():
    needed = sum(PARTITION.sizes[j] for j in MINE) * 5 * 7 * 3
    for read_buffer, reads in ((needed, 1), (needed - 1, 14)):
        source = Source()
        list(Loader(source, PARTITION, MINE, SEED, read_buffer=read_buffer).epoch(0))
        assert len(source.asked) == reads


@pytest.mark.parametrize("read_buffer", [STREAMING, RESIDENT])
def test_an_epoch_goes_on_from_a_step_with_the_very_same_batches(read_buffer):
    def loader():
        prepare = make_prepare(augmentation=Augmentation(flip=True, shift=2))
        return Loader(Source(), PARTITION, MINE, SEED, prepare, read_buffer=read_buffer)

    whole = bits(loader().epoch(4))
    for first_step in (0, 1, 6, 7):
        assert bits(loader().epoch(4, first_step)) == whole[first_step:]
    assert bits(loader().epoch(4, 1)) != whole[:-1]


@pytest.mark.parametrize("read_buffer", [STREAMING, RESIDENT])
def test_batches_share_no_memory(read_buffer):
    """Values of an earlier batch stay while the thread reads on into its own buffer."""
    loader = Loader(Source(), PARTITION, MINE, SEED, read_buffer=read_buffer)
    held, values = [], []
    for batches in loader.epoch(0):
        held += batches
        values += [(b.images.clone(), b.targets.clone()) for b in batches]
    for batch, (images, labels) in zip(held, values, strict=True):
        assert torch.equal(batch.images, images)
        assert torch.equal(batch.targets, labels)
    pointers = {b.images.untyped_storage().data_ptr() for b in held}
    assert len(pointers) == len(held) == 14
    held[0].images.zero_()
    again = next(loader.epoch(0))
    assert torch.equal(again[0].images, values[0][0])


def test_an_error_of_the_reading_thread_is_raised_where_batches_are_taken():
    steps = Loader(Torn(4), PARTITION, MINE, SEED, read_buffer=STREAMING).epoch(0)
    taken = []
    with pytest.raises(RunError, match="cut short"):
        for batches in steps:
            taken.append(batches)
    assert bits(taken) == bits(Loader(Source(), PARTITION, MINE, SEED).epoch(0))[:2]
    assert not loader_threads()


def test_an_error_of_the_first_whole_read_is_raised_too():
    steps = Loader(Torn(0), PARTITION, MINE, SEED, read_buffer=RESIDENT).epoch(0)
    with pytest.raises(RunError, match="cut short"):
        next(steps)
    assert not loader_threads()


@pytest.mark.parametrize("read_buffer", [STREAMING, RESIDENT])
def test_leaving_early_ends_the_thread(read_buffer):
    loader = Loader(Source(), PARTITION, MINE, SEED, read_buffer=read_buffer)
    steps = loader.epoch(0)
    assert not loader_threads()  # nothing is read before it is asked for
    next(steps)
    assert len(loader_threads()) == 1  # two steps ahead of seven it waits
    steps.close()
    assert not loader_threads()
    assert bits(loader.epoch(0)) == bits(Loader(Source(), PARTITION, MINE, SEED).epoch(0))
    assert not loader_threads()


def test_an_error_of_the_consumer_ends_the_thread():
    with pytest.raises(ZeroDivisionError):
        for _ in Loader(Source(), PARTITION, MINE, SEED).epoch(0):
            assert len(loader_threads()) == 1
            _ = 1 / 0
    assert not loader_threads()


def test_closing_ends_the_thread_though_an_error_keeps_the_epoch():
    """A generator that the garbage collector closes would join its thread wherever that runs: also
    in a thread that is starting, which then waits for a lock that it holds itself.
    """
    loader = Loader(Source(), PARTITION, MINE, SEED)
    with pytest.raises(ZeroDivisionError) as kept, contextlib.closing(loader):
        steps = loader.epoch(0)
        next(steps)
        _ = 1 / 0
    assert not loader_threads() and kept.traceback
    steps.close()
    assert bits(loader.epoch(0)) == bits(Loader(Source(), PARTITION, MINE, SEED).epoch(0))


def test_the_thread_reads_only_a_little_ahead():
    source = Source()
    steps = Loader(source, PARTITION, MINE, SEED, read_buffer=STREAMING).epoch(0)
    next(steps)
    ahead = 2 * 4  # gathers of 2 shards: 1 step taken, 3 read before they are needed
    wait_for(lambda: len(source.asked) >= ahead)
    time.sleep(0.1)  # in which it might read more
    assert len(source.asked) == ahead
    steps.close()


class Gated(Source):
    """Can be read only while its gate is open."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def gather(self, indices, out, crops=None):
        assert self.gate.wait(20)
        return super().gather(indices, out)


@pytest.mark.parametrize("name", ["partition", "blocks"])
def test_the_first_steps_of_an_epoch_are_read_before_the_one_before_ends(name):
    """They are taken while nothing can be read."""
    order, source, made, plain = (
        make_order(name, PARTITION, SEED, 5, 2),
        Gated(),
        [],
        make_prepare(),
    )

    def prepare(images, key):
        made.append(key)
        return plain(images, key)

    alone = [bits(Loader(Source(), PARTITION, MINE, SEED, order=order).epoch(e)) for e in range(3)]
    loader = Loader(source, PARTITION, MINE, SEED, prepare, None, order, STREAMING, epochs=3)
    assert bits(loader.epoch(0)) == alone[0]
    for epoch in (1, 2):
        (thread,) = loader_threads()
        used = sum(len(batches) for known in alone[:epoch] for batches in known)
        wait_for(lambda used=used: len(made) == used + module.AHEAD * len(MINE))
        source.gate.clear()
        steps = loader.epoch(epoch)
        first = [next(steps), next(steps)]
        source.gate.set()
        assert loader_threads() == [thread]
        assert bits([*first, *steps]) == alone[epoch]
    assert not loader_threads()  # nothing follows the last one


def test_what_was_read_ahead_is_dropped_where_something_else_follows():
    """Another epoch or step, and the end of training."""
    whole = [bits(Loader(Source(), PARTITION, MINE, SEED).epoch(e)) for e in range(3)]

    def begun():
        loader = Loader(Source(), PARTITION, MINE, SEED, epochs=3)
        for step, _ in enumerate(loader.epoch(0), start=1):
            if step == PARTITION.steps:
                break  # as the loop of training does
        assert len(loader_threads()) == 1
        return loader

    for epoch, step in ((0, 0), (2, 0), (1, 3)):
        loader = begun()
        assert bits(loader.epoch(epoch, step)) == whole[epoch][step:]
        loader.close()
        assert not loader_threads()
    loader = begun()
    loader.close()
    assert not loader_threads()


def test_an_error_that_was_met_ahead_is_raised_in_its_own_epoch():
    loader = Loader(Torn(15), PARTITION, MINE, SEED, read_buffer=STREAMING, epochs=2)
    assert len(list(loader.epoch(0))) == PARTITION.steps
    with pytest.raises(RunError, match="cut short"):
        list(loader.epoch(1))
    assert not loader_threads()


def test_read_rows_gives_rows_in_the_order_asked_for():
    source = Source()
    rows = [100, 0, 53, 0]
    expected = source.images[rows].transpose(0, 3, 1, 2).astype(np.float32) / 255
    inputs = read_samples(source, rows)
    assert inputs.shape == (4, 3, 5, 7)
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-6, atol=0)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    scaled = read_samples(source, np.array(rows), make_prepare(scaling=(mean, std)))
    by_hand = (inputs - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(scaled, by_hand)
    assert read_samples(source, np.arange(0)).shape == (0, 3, 5, 7)


class Counting(Source):
    """Knows how many bytes of rows it has handed out at once, and how."""

    def __init__(self):
        super().__init__()
        self.buffers = []

    def gather(self, indices, out, crops=None):
        self.buffers.append(weakref.ref(out.base if out.base is not None else out))
        return super().gather(indices, out)


@pytest.mark.parametrize("scattered", [False, True])
def test_windows_hold_what_single_rows_hold(scattered):
    """And are read in long runs, two of a shard in memory at most."""
    order = make_order("blocks", PARTITION, SEED, 5, 2, scattered)
    other = make_order("blocks", PARTITION, SEED, 5, 2, scattered)  # orders are for one thread
    rows = Source()
    source = Counting()
    loader = Loader(source, PARTITION, MINE, SEED, order=order, read_buffer=STREAMING, epochs=2)
    for epoch in (0, 1):
        for step, batches in enumerate(loader.epoch(epoch)):
            for batch in batches:
                out = np.empty((len(batch.images), *SHAPE), np.uint8)
                first = step * PARTITION.shares[batch.shard]
                found = other.samples(epoch, batch.shard, first, len(out))
                rows.gather(found, out)
                expected = torch.from_numpy(out.transpose(0, 3, 1, 2) / np.float32(255))
                assert torch.allclose(batch.images, expected)
                assert batch.targets.tolist() == rows.labels[found].tolist()
            alive = sum(buffer() is not None for buffer in source.buffers)
            assert alive <= 2 * len(MINE)
    runs = [np.count_nonzero(np.diff(rows) != 1) + 1 for rows in source.asked]
    assert max(runs) <= 3
    assert np.mean([len(rows) for rows in source.asked]) > 7


def test_what_fits_is_read_once_in_whatever_order():
    for name in ("global", "blocks"):
        order = make_order(name, PARTITION, SEED, 5, 2)
        source = Source()
        loader = Loader(source, PARTITION, MINE, SEED, order=order, read_buffer=RESIDENT)
        assert len(list(loader.epoch(0))) == len(list(loader.epoch(1))) == PARTITION.steps
        assert len(source.asked) == 1
        assert len(source.asked[0]) == (ROWS if name == "global" else sum(PARTITION.sizes[1:]))


def test_a_torn_file_is_an_error_with_windows_too():
    order = make_order("blocks", PARTITION, SEED, 5, 2)
    steps = Loader(Torn(3), PARTITION, MINE, SEED, order=order, read_buffer=STREAMING).epoch(0)
    with pytest.raises(RunError, match="cut short"):
        list(steps)
    assert not loader_threads()


def test_one_thing_is_made_while_the_one_before_is_used():
    begun, used = [], []
    for made in Ahead(lambda n: begun.append(n) or n * n, range(5)):
        used.append(made)
        wait_for(lambda: len(begun) >= min(5, len(used) + 1))
        assert begun == list(range(min(5, len(used) + 1)))
    assert used == [0, 1, 4, 9, 16]
    assert list(Ahead(str, [])) == []

    def fail(n):
        if n == 2:
            raise RunError("two")
        return n

    made = Ahead(fail, range(4))
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(RunError, match="two"):
        next(made)


def test_what_was_not_begun_is_not_made_after_closing():
    begun, may_end = [], threading.Event()

    def make(n):
        begun.append(n)
        assert n == 0 or may_end.wait(60)
        return n

    made = Ahead(make, range(9), 3)
    shutdown = made._thread.shutdown

    def end(**options):
        shutdown(wait=False, **options)
        may_end.set()
        shutdown(**options)

    made._thread.shutdown = end
    assert next(made) == 0
    made.close()
    assert begun in ([0], [0, 1])


def test_the_garbage_collector_waits_for_no_thread():
    """It may run where a thread starts and holds a lock without which no other can end."""
    may_end, began = threading.Event(), threading.Event()

    def make(n):
        if n:
            began.set()
            may_end.wait(20)
        return n

    made = Ahead(make, range(3))
    assert next(made) == 0 and began.wait(20)
    cycle = [made]
    cycle.append(cycle)
    del made, cycle
    collected = threading.Thread(target=gc.collect)
    collected.start()
    collected.join(10)
    waited = collected.is_alive()
    may_end.set()
    assert not waited
    wait_for(lambda: not loader_threads())


def test_parts_of_images_are_other_ones_in_every_step_and_epoch(tmp_path, monkeypatch):
    source = class_folders(tmp_path / "images", {"a": 9, "b": 9}, ".jpg", width=41, height=37)
    packed = pack(source, tmp_path / "b.h5", size="8x8", encoding="jpeg", split="1")
    keys = []
    draw = jpeg.draw_crops
    monkeypatch.setattr(
        jpeg, "draw_crops", lambda least, n, key: keys.append(key) or draw(least, n, key)
    )
    with Split(packed, "train") as rows:
        loader = Loader(rows, cut_epoch(18, 6, 2), range(2), random_crop=0.1)
        steps = [len(list(loader.epoch(epoch))) for epoch in range(2)]
    assert steps == [3, 3] and len(set(keys)) == len(keys) == 2 * 3 * 2  # epochs, steps, shards
