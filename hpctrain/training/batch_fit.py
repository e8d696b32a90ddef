"""--batch-per-rank auto: how many images of a shard fit in the memory of every rank.

This is found before the first step, and becomes part of the plan: later launches of the run do not
measure again.

    without --batch-size        the largest power of two, for each shard (less where the last step
                                could not be divided)
    with --batch-size           as many shards as needed: the default number times a power of two
    with both and --shards      everything is given; it is only tested that a shard fits

On a GPU, forward and backward are run with more and more images until torch is out of memory. The
memory that a run takes besides (message, optimizer, next batches) is allocated meanwhile. On a CPU,
where too much memory ends in a killed process, two small steps are measured and extrapolated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from hpctrain.config import Config, byte_count
from hpctrain.data.loader import Prepare
from hpctrain.data.partition import cut_epoch
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.tasks import Task
from hpctrain.models import ModelState
from hpctrain.parallel.device import fork_rng, gpu_uuid
from hpctrain.parallel.host_memory import free_memory
from hpctrain.parallel.hosts import comm_of_host
from hpctrain.parallel.mpi import Comm, agreed, allgather, call_on_all, minimum
from hpctrain.plan import Facts, shard_count
from hpctrain.streams import IN_FLIGHT
from hpctrain.text import counted
from hpctrain.training.live_bytes import LiveBytes
from hpctrain.watchdog import doing

FLAG = "--batch-per-rank auto"
COPIES = 5  # of the weights: message, optimizer state (2), and what an update makes
GPU_SHARE = 0.95  # of the free memory of a GPU; the rest is lost between the tensors
# Of tensors, to the memory of the process: measured as 1.8 for the digits network and ResNet-50,
# because kernels take memory too, and what is freed is not always used again.
CPU_FACTOR = 2.0
SAMPLES = 4, 16  # images of the two steps that are measured on a CPU


def fit_batch(config: Config, facts: Facts, fits: Callable[[int, int], bool]) -> tuple[Config, str]:
    """Return the settings with --batch-per-rank auto replaced, and a note for the user. Collective.

    `fits(images, shards)`: whether `images` of a shard fit on all ranks, with `shards` in all.
    Other settings are returned as they are. Raises the same UsageError on all ranks.
    """
    if config.batch_per_rank != "auto":
        return config, ""
    resolved = dataclasses.replace(config, batch_per_rank=None)
    shards = shard_count(config, facts.ranks)
    if config.batch_size is not None:
        needed = _shards_needed(config.batch_size, shards, facts.min_samples, fits)
        share = -(-config.batch_size // shards)
        if config.shards and needed > shards:
            raise agreed(
                UsageError(
                    f"--batch-size {config.batch_size} with --shards {shards}: {share} images of a"
                    f" shard do not fit in the memory of a rank; --shards {needed} would"
                )
            )
        most = -(-config.batch_size // needed)
        note = f"{FLAG}: up to {most} images per shard, {counted(needed, 'shard')}"
        return dataclasses.replace(resolved, shards=needed), note
    images = 1 << (facts.min_samples - 1).bit_length()
    if not fits(images, shards):
        raise agreed(_nothing_fits(images))
    while 2 * images * shards <= facts.rows and fits(2 * images, shards):
        images *= 2
    while images > 1 and not _can_be_cut(facts, images * shards, shards):
        images -= 1
    resolved = dataclasses.replace(resolved, batch_size=images * shards)
    return resolved, f"{FLAG}: {images} images per shard"


def _shards_needed(
    batch_size: int, shards: int, least: int, fits: Callable[[int, int], bool]
) -> int:
    """Return the number of shards, `shards` times a power of two, with which a batch fits."""
    while not fits(-(-batch_size // shards), shards):
        if batch_size // (2 * shards) < max(least, 1):
            raise agreed(_nothing_fits(-(-batch_size // shards)))
        shards *= 2
    return shards


def _nothing_fits(images: int) -> UsageError:
    return UsageError(
        f"{FLAG}: not even {counted(images, 'image')} of a shard fit in the memory of a rank: use"
        " fewer ranks per host or GPU, --checkpoint-activations or a smaller network"
    )


def _can_be_cut(facts: Facts, batch_size: int, shards: int) -> bool:
    try:
        cut_epoch(facts.rows, batch_size, shards, facts.min_samples)
    except UsageError:
        return False
    return True


class MemoryTrial:
    """Tests on all ranks whether a step with a number of images per shard fits in memory."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        source: Split,
        prepare: Prepare,
        config: Config,
        comm: Comm,
    ) -> None:
        self._model, self._task, self._prepare, self._comm = model, task, prepare, comm
        self._shape = source.image_shape
        self._dtype = torch.from_numpy(np.empty(0, source.dtype)).dtype
        weights = list(model.parameters())
        self._device, self._weights = weights[0].device, sum(weight.nbytes for weight in weights)
        self._image_bytes = math.prod(self._shape) * weights[0].element_size()
        self._buffered = byte_count(config.read_buffer, "--read-buffer")
        self._free: float | None = None  # bytes that this rank may use; None = not measured yet
        self._peaks: dict[int, int] = {}  # bytes of tensors, by number of images

    def __call__(self, images: int, shards: int) -> bool:
        """Whether `images` per shard fit on all ranks, with `shards` in all. Collective."""
        comm, gpu = self._comm, self._device.type == "cuda"
        if self._free is None:  # on all ranks alike
            place = gpu_uuid(self._device) if gpu else ""
            sharing = allgather(comm_of_host(comm), place).count(place)
            free = call_on_all(comm, lambda: free_on_gpu(self._device) if gpu else free_memory())
            self._free = free / sharing
        own = -(-shards // comm.size) * images  # of this rank in a step
        held = COPIES * self._weights + (2 + IN_FLIGHT[self._device.type]) * own * self._image_bytes
        test = self._fits_gpu if gpu else self._fits_cpu
        doing(f"testing whether {images} images of a shard fit in memory")
        return minimum(comm, call_on_all(comm, lambda: test(images, held))) == [1]

    def _fits_cpu(self, images: int, held: int) -> bool:
        assert self._free is not None
        room = self._free - self._buffered - held
        few, more = SAMPLES
        each = self._peak(few) / few
        if CPU_FACTOR * each * more < room:  # else that step might already take too much
            each = (self._peak(more) - self._peak(few)) / (more - few)
        return CPU_FACTOR * (self._peak(few) + max(0, images - few) * each) < room

    def _peak(self, images: int) -> int:
        if images not in self._peaks:
            with LiveBytes() as live:
                self.step(images)
            self._peaks[images] = live.peak
        return self._peaks[images]

    def _fits_gpu(self, images: int, held: int) -> bool:
        assert self._free is not None
        with limited(self._device, GPU_SHARE * self._free):
            message = None
            try:
                message = torch.empty(held, dtype=torch.uint8, device=self._device)
                self.step(images)
            except torch.cuda.OutOfMemoryError:
                return False
            finally:
                del message  # before its memory is given back
        return True

    def step(self, images: int) -> None:
        """Run forward and backward with black images, and restore the model."""
        before = ModelState(self._model)
        try:
            with fork_rng(self._device):
                black = torch.zeros((images, *self._shape), dtype=self._dtype)
                labels = torch.zeros(images, dtype=torch.int64, device=self._device)
                loss, _ = self._task(
                    self._model, *self._task.pair(self._prepare(black, 0), labels, 0)
                )
                loss.backward()
        finally:
            self._model.zero_grad()
            before.restore()


@contextmanager
def limited(device: torch.device, most: float) -> Iterator[None]:
    """Let torch take at most this many bytes of the memory of a GPU, and free it at the end."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


def free_on_gpu(device: torch.device) -> float:
    """Return the bytes of a GPU that are free or held by torch in this process."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))
