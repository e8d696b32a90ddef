"""What hpctrain is measured against, in plain torch: one rank of a job of ``hpctrain bench``.

    mpirun -n 2 python -m hpctrain.bench.peers loader --data data/digits.h5 --model digits

limit    Every process trains on its part of the pack alone: batches lie ready in memory, nothing is
         communicated, memory is kept between steps. No data-parallel training is faster.
ddp      The same batches from memory under DistributedDataParallel over gloo.
loader   DistributedDataParallel as it is usually written: a Dataset that reads the HDF5 file image
         by image with h5py, DataLoader, DistributedSampler, `loss.item()` in every step.

All train the network of hpctrain with SGD and momentum on one thread, and time the steps after the
warm-up: rank r writes FOLDER/rank{r}.json with its rows and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpctrain.data.augment import to_input
from hpctrain.data.packed import Pack, read_pack
from hpctrain.data.split import Split
from hpctrain.launcher import launched_rank, launched_size
from hpctrain.models import build
from hpctrain.parallel.device import keep_memory, place

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]  # images (n, C, H, W), labels (n,)
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # images, labels -> loss


def main() -> None:
    """Join the other ranks, train, and write what it took."""
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, size = launched_rank(), launched_size() or 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    pack, batch = read_pack(options.data), options.batch_size // size
    model = build(options.model, pack.image_shape, len(pack.classes))
    place(model.train(), torch.device("cpu"), options.channels_last)
    if options.mode == "loader":
        epoch = load_epochs(pack, batch, rank, size, options.workers)
    else:
        epoch = keep_epoch(pack, batch, rank, size, options.channels_last)
    if options.mode == "limit":
        keep_memory()
        dist.barrier()
        dist.destroy_process_group()
    else:
        model = DistributedDataParallel(model)
    # Fused where the best is wanted; people take the default.
    step = plain_step(model, options.precision, fused=None if options.mode == "loader" else True)
    reads_loss = options.mode == "loader"
    rows, seconds = time_steps(step, epoch, options.epochs, options.warm, reads_loss)
    (options.output / f"rank{rank}.json").write_text(json.dumps({"rows": rows, "seconds": seconds}))
    if options.mode != "limit":
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with plain torch and time the steps.")
    parser.add_argument("mode", choices=("limit", "ddp", "loader"))
    parser.add_argument("--data", required=True, help="pack of pixels whose split train is read")
    parser.add_argument("--model", default="digits", help="network of hpctrain")
    parser.add_argument("--batch-size", type=int, default=128, help="global batch size")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warm", type=int, default=71, help="steps before the clock starts")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--workers", type=int, default=0, help="processes of the DataLoader")
    parser.add_argument("--port", type=int, default=29500, help="TCP port of rank 0")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for rank0.json ...")
    return parser.parse_args()


def plain_step(
    model: nn.Module,
    precision: str,
    fused: bool | None = True,
    foreach: bool | None = None,
    weight_decay: float = 0.0,
) -> Step:
    """A step of SGD with momentum on `model`, wrapped or not, in "fp32", "tf32" or "bf16"; TF32 is
    a setting of the process.
    """
    optimizer = torch.optim.SGD(
        model.parameters(), 0.01, 0.9, weight_decay=weight_decay, fused=fused, foreach=foreach
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16, precision == "bf16"):
            scores = model(images)
        loss = F.cross_entropy(scores.float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def time_steps(
    step: Step, epoch: Callable[[int], Batches], epochs: int, warm: int, reads_loss: bool
) -> tuple[int, float]:
    """Train; the rows of this rank and the seconds from the end of step `warm` to the last's."""
    done = rows = 0
    began = time.perf_counter()
    for number in range(epochs):
        for images, labels in epoch(number):
            loss = step(images, labels)
            if reads_loss:
                loss.item()
            done += 1
            rows += len(labels)
            if done == warm:
                began, rows = time.perf_counter(), 0
    return rows, time.perf_counter() - began


def keep_epoch(
    pack: Pack, batch: int, rank: int, size: int, channels_last: bool
) -> Callable[[int], Batches]:
    """This rank's part of the rows as batches in memory; every epoch gives the same ones."""
    count = pack.splits["train"].rows // size
    mine = np.arange(rank * count, (rank + 1) * count)
    batches = []
    with Split(pack, "train") as source:
        for start in range(0, count, batch):
            rows = mine[start : start + batch]
            images = source.gather(rows, np.empty((len(rows), *pack.image_shape), np.uint8))
            ready = to_input(torch.from_numpy(images), channels_last=channels_last)
            batches.append((ready, torch.from_numpy(source.labels[rows])))
    return lambda epoch: batches


class H5Images(Dataset):
    """The split train of a pack as tutorials read HDF5: through h5py, one image at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.group: Any = None
        with h5py.File(path, "r", locking=False) as file:
            self.labels = file["train/labels"][:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.group is None:  # every worker process opens the file itself
            self.group = h5py.File(self.path, locking=False)["train"]
        image = torch.from_numpy(self.group["images"][index])  # (H, W, C)
        return image.permute(2, 0, 1).float() / 255, int(self.labels[index])


def load_epochs(
    pack: Pack, batch: int, rank: int, size: int, workers: int
) -> Callable[[int], Batches]:
    """Epochs of a DataLoader, shuffled by a DistributedSampler."""
    dataset = H5Images(pack.path)
    sampler: DistributedSampler = DistributedSampler(
        dataset, num_replicas=size, rank=rank, shuffle=True
    )
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers)

    def epoch(number: int) -> Batches:
        sampler.set_epoch(number)
        return loader

    return epoch


if __name__ == "__main__":
    main()
