"""The training jobs in plain torch that hpctrain is compared with, each run as a process.

The argument is a `TrainingJob` as a JSON object. This process is one rank of it, with the mode:
limit    Each process trains alone on its part of the pack: batches are prepared in memory, nothing
         is communicated, freed memory is reused. No data-parallel training is faster.
ddp      The same batches from memory, under DistributedDataParallel over gloo.
loader   DistributedDataParallel as it is usually written: a Dataset that reads the HDF5 file image
         by image with h5py, DataLoader, DistributedSampler, `loss.item()` in every step.
All modes train hpctrain's network with SGD and momentum on one thread and time the steps after the
warm-up: rank r writes its rows and seconds to FOLDER/rank{r}.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpctrain.cluster import launched_rank, launched_size
from hpctrain.data.augment import to_input
from hpctrain.data.pack import Pack, read_pack
from hpctrain.data.split import Split
from hpctrain.memory import keep_memory
from hpctrain.models import build
from hpctrain.models.memory_format import move_model
from scripts.bench.steps import plain_step

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]  # images (n, C, H, W), labels (n,)


@dataclass(frozen=True)
class TrainingJob:
    """The network, data and mode of a training job, and its length."""

    model: str
    data: str  # a pack
    batch_size: int  # over all ranks
    epochs: int
    warm: int  # steps before the clock starts
    mode: str = "limit"
    precision: str = "fp32"  # or bf16
    channels_last: bool = False
    folder: str = ""  # for rank0.json ...


def train(job: TrainingJob) -> None:
    """Join the process group, train, and write this rank's rows and seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = launched_rank()
    size = launched_size() or 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(job.folder, "meeting")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pack = read_pack(job.data)
    model = build(job.model, pack.image_shape, len(pack.classes))
    move_model(model.train(), torch.device("cpu"), job.channels_last)
    is_loader = job.mode == "loader"
    make_batches = load_batches if is_loader else keep_batches
    batches = make_batches(job, pack, rank, size)
    if job.mode == "limit":
        keep_memory()
        dist.barrier()
    else:
        model = DistributedDataParallel(model)
    # Fused for the best possible speed; "loader" uses the default, as is usual.
    step = plain_step(model, job.precision, fused=None if is_loader else True)
    rows = 0
    began = time.perf_counter()
    for done, (images, labels) in enumerate(batches, start=1):
        loss = step(images, labels)
        if is_loader:
            loss.item()
        rows += len(labels)
        if done == job.warm:
            began = time.perf_counter()
            rows = 0
    result = {"rows": rows, "seconds": time.perf_counter() - began}
    Path(job.folder, f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def keep_batches(job: TrainingJob, pack: Pack, rank: int, size: int) -> Batches:
    """Read this rank's part of the rows as batches into memory; all epochs use the same ones."""
    count = pack.splits["train"].samples // size
    batch = job.batch_size // size
    batches = []
    with Split(pack, "train") as source:
        for start in range(0, count, batch):
            rows = rank * count + np.arange(start, min(start + batch, count))
            images = source.gather(rows, np.empty((len(rows), *pack.image_shape), np.uint8))
            ready = to_input(torch.from_numpy(images), channels_last=job.channels_last)
            batches.append((ready, torch.from_numpy(source.read_targets(rows))))
    return iter(batches * job.epochs)


class H5Images(Dataset):
    """The split train of a pack, read as in tutorials on HDF5: by h5py, one image at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.group: Any = None
        with h5py.File(path, "r", locking=False) as file:
            self.labels = file["train/targets"][:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.group is None:  # each worker process must open the file itself
            self.group = h5py.File(self.path, locking=False)["train"]
        image = torch.from_numpy(self.group["images"][index])  # (H, W, C)
        return image.permute(2, 0, 1).float() / 255, int(self.labels[index])


def load_batches(job: TrainingJob, pack: Pack, rank: int, size: int) -> Batches:
    """Yield the batches of a DataLoader, shuffled by a DistributedSampler in each epoch."""
    dataset = H5Images(pack.path)
    sampler: DistributedSampler = DistributedSampler(dataset, size, rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=job.batch_size // size, sampler=sampler)
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        yield from loader


if __name__ == "__main__":
    train(TrainingJob(**json.loads(sys.argv[1])))
