"""How rows reach a device: what is copied, waited for and handed over, in which order; on a real
GPU the very bits of the CPU, without a host that waits.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from hpctrain.data.augment import Augmentation, add_noise
from hpctrain.data.loader import Loader, make_prepare
from hpctrain.data.partition import cut_epoch
from hpctrain.streams import Upload, copy_to_device
from tests.streams import Recorder, noted, watched

ROWS, SHAPE, SEED = 101, (12, 10, 3), 3
PARTITION = cut_epoch(ROWS, 16, 3)  # 7 steps; the last has 5 rows
SCALING = (torch.tensor([0.1, 0.4, 0.7]), torch.tensor([0.3, 0.2, 0.5]))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Source:
    """Rows in memory."""

    image_shape = SHAPE

    def __init__(self, dtype=np.uint8):
        rng = np.random.default_rng(1)
        self.images = rng.integers(0, 256, (ROWS, *SHAPE)).astype(dtype)
        self.dtype = self.images.dtype
        self.labels = rng.integers(0, 10, ROWS)

    def read_labels(self, indices):
        return self.labels[indices]

    def hold(self, samples):
        pass

    def gather(self, indices, out, crops=None):
        out[:] = self.images[indices]
        return out


def noisy(kind):
    """Make noisy images and clean ones, and a task of it."""
    return lambda images, labels, key: (add_noise(images, kind, 0.3, key), images)


@pytest.fixture
def stream(monkeypatch):
    return Recorder(monkeypatch)


def test_the_order_of_copies_events_and_waits(stream):
    """Of three steps of two batches each."""
    source = Source()
    source.gather = noted(stream, "write", source.gather)
    prepare = noted(stream, "prepare", make_prepare(augmentation=Augmentation(flip=True)))
    pair = noted(stream, "pair", lambda images, labels, key: (images, labels))
    loader = Loader(source, PARTITION, [1, 2], SEED, prepare, pair, read_buffer=0)
    watched(loader._upload, stream)
    steps = list(loader.epoch(0, PARTITION.steps - 3))
    assert [len(step) for step in steps] == [2, 2, 2]

    expected, copied = [("event", 0)], 0
    for step in range(3):
        expected += [("wait", copied), *[("write", None)] * 2]  # never before the copy is done
        copied = 1 + 2 * step
        expected += [
            ("+copy", True),
            ("+event", copied),
            *[("+prepare", None), ("+pair", None)] * 2,
        ]
        expected += [("event", 2 * step + 2)]  # after all that was made of the step
    assert [entry for entry in stream.log if entry[0] != "hand over"] == expected
    for number, (made, tensors) in enumerate(stream.taken):
        assert made == 2 * number + 2
        handed = [t for b in steps[number] for t in (b.images, b.targets)]
        assert [id(t) for t in tensors] == [id(t) for t in handed]


def test_what_is_used_was_handed_over_before(stream):
    for number, _ in enumerate(Loader(Source(), PARTITION, [0], SEED).epoch(0)):
        assert len(stream.taken) == number + 1
        made = [entry for entry in stream.log if entry[0] == "event"]
        assert stream.log.index(("hand over", stream.taken[-1][0])) > stream.log.index(made[number])


def test_on_the_cpu_the_buffer_is_the_batch_and_nothing_is_waited_for():
    way = Upload((4, *SHAPE), np.dtype(np.uint8))
    room = way.buffer(3)
    room[:] = 7
    rows = way.make(3, lambda rows: rows)
    assert rows.data_ptr() == room.ctypes.data and rows.shape == (3, *SHAPE)
    assert not rows.is_pinned()
    way.take(way.record_event(), [rows])
    numbers = torch.arange(3)
    assert copy_to_device(numbers, torch.device("cpu")) is numbers


CASES = {
    "plain": ({}, None),
    "flips, shifts": ({"augmentation": Augmentation(True, 3)}, None),
    "normalised": ({"augmentation": Augmentation(True, 2), "scaling": SCALING}, None),
    "NCHW": (
        {"augmentation": Augmentation(shift=1), "scaling": SCALING, "channels_last": False},
        None,
    ),
    "bfloat16": (
        {"augmentation": Augmentation(flip=True), "scaling": SCALING, "dtype": torch.bfloat16},
        None,
    ),
    "float64": ({"scaling": SCALING, "dtype": torch.float64}, None),
}
NOISY = {
    "salt and pepper": ({"augmentation": Augmentation(flip=True)}, noisy("salt-pepper")),
    "gaussian": ({"augmentation": Augmentation(shift=1)}, noisy("gaussian")),
}


def batches(device, prepare, pair, source=None, use=lambda batch: batch):
    """What `use` makes of every batch of two epochs."""
    prepare = make_prepare(device, **prepare)
    source = source or Source()
    loader = Loader(source, PARTITION, [0, 1, 2], SEED, prepare, pair, device=device)
    return [use(b) for epoch in (0, 1) for step in loader.epoch(epoch) for b in step]


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_makes_the_very_bits_of_the_cpu(case):
    here, there = batches("cpu", *CASES[case]), batches("cuda", *CASES[case])
    for one, other in zip(here, there, strict=True):
        assert (one.shard, one.key, other.images.device.type) == (other.shard, other.key, "cuda")
        assert torch.equal(one.images, other.images.cpu())
        assert torch.equal(one.targets, other.targets.cpu())
        assert one.images.stride() == other.images.stride()
    first, second = there[0].images, there[-3].images
    assert first.shape[1:] == second.shape[1:] and not torch.equal(first[:1], second[:1])


@needs_gpu
@pytest.mark.parametrize("case", NOISY)
def test_a_gpu_draws_noise_of_its_own_the_same_whoever_carries_a_shard(case):
    prepare, pair = NOISY[case]
    here, there = batches("cpu", prepare, pair), batches("cuda", prepare, pair)
    prepare = make_prepare("cuda", **prepare)
    alone = Loader(Source(), PARTITION, [1], SEED, prepare, pair, device="cuda")
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.targets, other.targets.cpu())
        assert not torch.equal(one.images, other.images.cpu())
    found = [batch.images for batch in there if batch.shard == 1][: PARTITION.steps]
    for one, (other,) in zip(found, alone.epoch(0), strict=True):
        assert torch.equal(one, other.images)
    assert not torch.equal(found[0], found[1])


def test_noise_is_drawn_where_the_images_are(monkeypatch):
    """Nothing of the size of a batch is made on the CPU for a GPU."""
    asked, original = [], (torch.Generator, torch.rand)
    images = torch.rand((5, 1, 7, 3))

    def generator(device="cpu"):
        asked.append(device)
        return original[0](device)

    def rand(*shape, generator, device="cpu"):
        asked.append(device)
        return original[1](*shape, generator=generator, device=device)

    monkeypatch.setattr(torch, "Generator", generator)
    monkeypatch.setattr(torch, "rand", rand)
    add_noise(images, "salt-pepper", 0.1, 3)
    assert [type(device) for device in asked] == [torch.device] * 2 == [type(images.device)] * 2


@needs_gpu
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_too(dtype):
    source = Source(dtype)
    here, there = (
        batches(device, {"augmentation": Augmentation(flip=True)}, None, source)
        for device in ("cpu", "cuda")
    )
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.images, other.images.cpu())


@needs_gpu
def test_a_slow_user_sees_the_batch_that_it_took():
    """Every batch is dropped while the kernel that reads it still waits behind a slow one, and the
    thread goes on to use memory again: without `record_stream` or the wait, other bits.
    """

    def slowly(batch):
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
        return batch.images.clone(), batch.targets.clone()

    prepare = {"augmentation": Augmentation(True, 2), "scaling": SCALING}
    expected = batches("cpu", prepare, None)
    found = batches("cuda", prepare, None, use=slowly)
    for one, (images, targets) in zip(expected, found, strict=True):
        assert torch.equal(one.images, images.cpu()) and torch.equal(one.targets, targets.cpu())


@contextlib.contextmanager
def no_hidden_waits():
    """torch refuses what would let the host wait for the GPU without being asked to."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("case", CASES | NOISY)
def test_no_host_waits_for_the_gpu_unasked(case):
    """Neither the thread that trains nor the one that reads."""
    prepare, pair = (CASES | NOISY)[case]
    made = make_prepare("cuda", **prepare)  # copies mean and std, once
    loader = Loader(Source(), PARTITION, [0, 1, 2], SEED, made, pair, device="cuda")
    with no_hidden_waits():
        assert sum(len(step) for step in loader.epoch(0)) > 14
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.zeros(1, device="cuda").item()


@needs_gpu
def test_rows_are_read_into_pinned_memory():
    way = Upload((4, *SHAPE), np.dtype(np.uint8), "cuda")
    assert torch.from_numpy(way.buffer(2)).is_pinned()
    assert copy_to_device(torch.zeros(0, dtype=torch.int64), way.device).shape == (0,)
