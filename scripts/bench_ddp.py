"""The peers that ``hpctrain bench`` measures hpctrain against, in plain torch.

    mpirun -n 2 python scripts/bench_ddp.py loader --pack data/digits.h5 --model digits

limit    Every process trains its part of the pack alone, on batches that lie ready in memory, with
         its memory kept between steps. No data-parallel training of the same batches is faster.
ddp      The same batches from memory under DistributedDataParallel over gloo.
loader   DistributedDataParallel as it is usually written: a Dataset that reads the HDF5 file image
         by image with h5py, DataLoader, DistributedSampler, the loss looked at in every step.

All train the same network as hpctrain, with SGD and momentum, on one thread, and say how long the
steps after the warm-up took: rank r writes FOLDER/rank{r}.json with rows, seconds and cores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import h5py
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from hpctrain.bench.plain import plain_step
from hpctrain.data.augment import to_input
from hpctrain.data.packed import Pack, Rows, read_pack
from hpctrain.launcher import launched_rank, launched_size
from hpctrain.models import build

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]  # images (n, C, H, W), labels (n,)


def main() -> None:
    """Join the other ranks, train, and write what it took."""
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, size = join(options.port)
    pack = read_pack(options.pack)
    model = build(options.model, pack.image_shape, len(pack.classes))
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model.train()

    if options.mode == "loader":
        epoch = loaded(pack, options.batch // size, rank, size, options.workers)
    else:
        epoch = in_memory(pack, options.batch // size, rank, size, options.channels_last)
    if options.mode == "limit":
        keep_memory()
        dist.barrier()
        dist.destroy_process_group()
    else:
        model = DistributedDataParallel(model)
    # Fused where the best is wanted; people take the default.
    plain = plain_step(model, options.precision, fused=None if options.mode == "loader" else True)

    def looked_at(images: torch.Tensor, labels: torch.Tensor) -> None:
        plain(images, labels).item()

    step = looked_at if options.mode == "loader" else plain
    rows, seconds = timed(step, epoch, options.epochs, options.warm)
    cores = len(os.sched_getaffinity(0))
    told = json.dumps({"rows": rows, "seconds": seconds, "cores": cores})
    print(told, flush=True)
    if options.output:
        (options.output / f"rank{rank}.json").write_text(told)
    if options.mode != "limit":
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with plain torch and say how fast.")
    parser.add_argument("mode", choices=("limit", "ddp", "loader"))
    parser.add_argument("--pack", required=True, help="pack whose split train is read")
    parser.add_argument("--model", default="digits", help="a network of hpctrain")
    parser.add_argument("--batch", type=int, default=128, help="mini-batch over all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warm", type=int, default=71, help="steps before the clock starts")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--port", type=int, default=29500, help="where the ranks meet")
    parser.add_argument("--output", type=Path, help="folder for rank0.json, rank1.json ...")
    return parser.parse_args()


def join(port: int) -> tuple[int, int]:
    """Start torch.distributed over gloo on this host; give rank and size."""
    rank, size = launched_rank(), launched_size() or 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    return rank, size


def keep_memory() -> None:
    """Let the C library keep what is freed: to fault pages in anew costs up to a tenth of a step.

    mallopt(3) of glibc: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD. Other libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)
        mallopt(-3, 2**30) or mallopt(-3, 2**25)  # older ones refuse more than 32 MiB


def timed(
    step: Callable[[torch.Tensor, torch.Tensor], object],
    epoch: Callable[[int], Batches],
    epochs: int,
    warm: int,
) -> tuple[int, float]:
    """Train; the rows of this rank and the seconds from the end of step `warm` to the last's."""
    done = rows = 0
    began = time.perf_counter()
    for number in range(epochs):
        for images, labels in epoch(number):
            step(images, labels)
            done += 1
            rows += len(labels)
            if done == warm:
                began, rows = time.perf_counter(), 0
    return rows, time.perf_counter() - began


def in_memory(
    pack: Pack, batch: int, rank: int, size: int, channels_last: bool
) -> Callable[[int], Batches]:
    """This rank's block of rows as batches that are ready; every epoch gives the same ones."""
    count = pack.splits["train"].rows // size
    mine = np.arange(rank * count, (rank + 1) * count)
    batches = []
    with Rows(pack, "train") as source:
        for start in range(0, count, batch):
            rows = mine[start : start + batch]
            images = source.gather(rows, np.empty((len(rows), *pack.image_shape), np.uint8))
            ready = to_input(torch.from_numpy(images), channels_last=channels_last)
            batches.append((ready, torch.from_numpy(source.labels[rows])))
    return lambda epoch: batches


class Images(Dataset):
    """The split train of the pack through h5py, one image at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.group: h5py.Group | None = None
        with h5py.File(path, "r") as file:
            self.labels = file["train/labels"][:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.group is None:  # every worker process opens the file itself
            self.group = h5py.File(self.path, "r")["train"]
        image = torch.from_numpy(self.group["images"][index])  # (H, W, C)
        return image.permute(2, 0, 1).float() / 255, int(self.labels[index])


def loaded(pack: Pack, batch: int, rank: int, size: int, workers: int) -> Callable[[int], Batches]:
    """Epochs of a DataLoader, shuffled by a DistributedSampler."""
    dataset = Images(pack.path)
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers)

    def epoch(number: int) -> Batches:
        sampler.set_epoch(number)
        return loader

    return epoch


if __name__ == "__main__":
    main()
