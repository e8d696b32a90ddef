"""Batches on a GPU: the very bits of the CPU, without a host that waits."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.api import Augmentation, add_noise
from tests.support.source import Source

SHAPE, SEED = (12, 10, 3), 3
PARTITION = hp.cut_epoch(101, 16, 3)  # 7 steps; the last has 5 samples
NORMALIZATION = (torch.tensor([0.1, 0.4, 0.7]), torch.tensor([0.3, 0.2, 0.5]))
pytestmark = pytest.mark.gpu


def noisy(kind):
    """Make noisy images and clean ones."""
    return lambda images, labels, key: (add_noise(images, kind, 0.3, key), images)


CASES = {  # settings of a pipeline
    "plain": {},
    "flips, shifts": {"augmentation": Augmentation(True, 3)},
    "normalized": {"augmentation": Augmentation(True, 2), "normalization": NORMALIZATION},
    "NCHW": {"augmentation": Augmentation(False, 1), "channels_last": False},
    "bfloat16": {"normalization": NORMALIZATION, "dtype": torch.bfloat16},
    "float64": {"normalization": NORMALIZATION, "dtype": torch.float64},
}
NOISY = {
    "salt and pepper": {"augmentation": Augmentation(True, 0), "stage": noisy("salt-pepper")},
    "gaussian": {"augmentation": Augmentation(False, 1), "stage": noisy("gaussian")},
}


def make_loader(device, settings, dtype=np.uint8, shards=(0, 1, 2)):
    pipeline, options = hp.Pipeline(device, **settings), hp.ReadOptions(device=device)
    source, order = Source(101, SHAPE, dtype), hp.Order(PARTITION, SEED)
    return hp.Loader(source, order, shards, pipeline, options=options)


def batches(device, settings, use=lambda batch: batch, **more):
    """What `use` makes of every batch of two epochs."""
    loader = make_loader(device, settings, **more)
    return [use(b) for epoch in (0, 1) for step in loader.epoch(epoch) for b in step]


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_makes_the_bits_of_the_cpu(case):
    here, there = batches("cpu", CASES[case]), batches("cuda", CASES[case])
    for one, other in zip(here, there, strict=True):
        assert (one.shard, one.key, other.images.device.type) == (other.shard, other.key, "cuda")
        assert torch.equal(one.images, other.images.cpu())
        assert torch.equal(one.targets, other.targets.cpu())
        assert one.images.stride() == other.images.stride()
    assert not torch.equal(there[0].images[:1], there[-3].images[:1])


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32, np.float64])
def test_other_types_have_the_bits_of_the_cpu_too(dtype):
    settings = {"augmentation": Augmentation(True, 1)}
    here, there = (batches(device, settings, dtype=dtype) for device in ("cpu", "cuda"))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.images, other.images.cpu())


@pytest.mark.parametrize("case", NOISY)
def test_a_gpu_draws_noise_of_its_own_the_same_whoever_carries_a_shard(case):
    here, there = batches("cpu", NOISY[case]), batches("cuda", NOISY[case])
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.targets, other.targets.cpu())
        assert not torch.equal(one.images, other.images.cpu())
    found = [batch.images for batch in there if batch.shard == 1]
    alone = batches("cuda", NOISY[case], shards=[1])
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one, other.images)
    assert not torch.equal(found[0], found[1])


def test_a_slow_user_sees_the_batch_that_it_took():
    """Every batch is dropped while the kernel that reads it still waits behind a slow one, and the
    thread goes on to use memory again: without `record_stream` or the wait, other bits.
    """

    def slowly(batch):
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
        return batch.images.clone(), batch.targets.clone()

    expected = batches("cpu", CASES["normalized"])
    found = batches("cuda", CASES["normalized"], use=slowly)
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


@pytest.mark.filterwarnings("default:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("case", CASES | NOISY)
def test_no_host_waits_for_the_gpu_unasked(case):
    """Neither the thread that trains nor the one that reads."""
    loader = make_loader("cuda", (CASES | NOISY)[case])  # copies mean and std, once
    with no_hidden_waits():
        assert sum(len(step) for step in loader.epoch(0)) > 14
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.zeros(1, device="cuda").item()
