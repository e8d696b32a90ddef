"""One contestant of ``hpctrain bench data``, in a process of its own on one core.

    python -m hpctrain.bench.reading NAME PACK OUTPUT

Reads the split train of PACK, a pack of pixels, and writes images/s to OUTPUT, after one epoch to
warm up, in which the file comes into the page cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpctrain.bench.peers import H5Images
from hpctrain.data.augment import Augmentation
from hpctrain.data.loader import Loader, make_prepare
from hpctrain.data.orders import make_order
from hpctrain.data.pack_format import Pack
from hpctrain.data.packed import read_pack
from hpctrain.data.partition import cut_epoch
from hpctrain.data.split import Split
from hpctrain.parallel.device import keep_memory

BATCH = 128
BLOCK_ROWS, WINDOW_BLOCKS = 140, 4  # 4 MiB of images of 100x100x3 a block
SECONDS = 2.0  # that a contestant is measured for, at least
COPY, H5PY = "copy of consecutive rows in memory, bytes", "h5py, fancy indexing, bytes"
GATHER, KEPT = "pack, random rows gathered, bytes", "pack, kept in memory"
LOADER, LOADER_2 = "DataLoader over h5py, 0 workers", "DataLoader over h5py, 2 workers"

Epoch = Callable[[int], Iterator[int]]  # number of the epoch -> images of each batch


def random_batches(rows: int, epoch: int) -> Iterator[np.ndarray]:
    """Row numbers of an epoch in random order, (BATCH,) each."""
    order = np.random.default_rng(epoch).permutation(rows)
    for start in range(0, rows - BATCH + 1, BATCH):
        yield order[start : start + BATCH]


def copied(path: Path) -> Epoch:
    """The limit: consecutive rows from memory to memory."""
    with h5py.File(path, locking=False) as file:
        images = file["train/images"][:]  # (N, H, W, C) uint8
    out = np.empty((BATCH, *images.shape[1:]), np.uint8)

    def epoch(number: int) -> Iterator[int]:
        for start in range(0, len(images) - BATCH + 1, BATCH):
            np.copyto(out, images[start : start + BATCH])
            yield BATCH

    return epoch


def gathered(path: Path) -> Epoch:
    """Rows in random order, by their byte offsets, into one buffer."""
    pack = read_pack(path)
    source = Split(pack, "train")
    out = np.empty((BATCH, *pack.image_shape), np.uint8)

    def epoch(number: int) -> Iterator[int]:
        for rows in random_batches(len(source.labels), number):
            source.gather(rows, out)
            yield BATCH

    return epoch


def fancy(path: Path) -> Epoch:
    """The same rows by h5py's fancy indexing, which wants them sorted."""
    images = h5py.File(path, locking=False)["train/images"]

    def epoch(number: int) -> Iterator[int]:
        for rows in random_batches(len(images), number):
            yield len(images[np.sort(rows)])

    return epoch


def loaded(pack: Pack, shuffle: str, keep: bool = False, **options: Any) -> Epoch:
    """Batches as training takes them: float32 (n, C, H, W) in [0, 1], NHWC in memory."""
    source = Split(pack, "train", threads=1)
    partition = cut_epoch(len(source.labels), BATCH, 1)
    block_rows = pack.external.block_rows if pack.external else BLOCK_ROWS
    blocks = (block_rows, WINDOW_BLOCKS, pack.external is not None)
    order = make_order(shuffle, partition, 0, *blocks)
    loader = Loader(
        source, partition, [0], order=order, read_buffer=(4 << 30) if keep else 0, **options
    )
    return lambda number: (len(batches[0].targets) for batches in loader.epoch(number))


def by_torch(path: Path, workers: int) -> Epoch:
    """torch's DataLoader over h5py."""
    loader = torch.utils.data.DataLoader(
        H5Images(str(path)),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda number: (len(images) for images, _ in loader)


CONTESTANTS: dict[str, Callable[[Path], Epoch]] = {
    COPY: copied,
    GATHER: gathered,
    H5PY: fancy,
    KEPT: lambda path: loaded(read_pack(path), "partition", keep=True),
    "pack, --shuffle partition": lambda path: loaded(read_pack(path), "partition"),
    "pack, --shuffle global": lambda path: loaded(read_pack(path), "global"),
    "pack, --shuffle blocks": lambda path: loaded(read_pack(path), "blocks"),
    "pack, kept, --flip --shift 4": lambda path: loaded(
        read_pack(path),
        "partition",
        keep=True,
        prepare=make_prepare(augmentation=Augmentation(True, 4)),
    ),
    LOADER: lambda path: by_torch(path, 0),
    LOADER_2: lambda path: by_torch(path, 2),
}
# Bytes are compared with bytes, batches that are ready to train with such batches.
COMPARED = {
    name: {"/ copy": COPY, "/ h5py": H5PY} if name in (GATHER, H5PY) else {"/ DataLoader": LOADER}
    for name in CONTESTANTS
    if name not in (COPY, LOADER)
}


def images_rate(epoch: Epoch) -> float:
    """images/s over whole epochs, at least SECONDS of them, after one to warm up."""
    sum(epoch(0))
    done, number = 0, 1
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        done += sum(epoch(number))
        number += 1
    return done / (time.perf_counter() - began)


def main(contestants: Mapping[str, Callable[[Path], Epoch]]) -> None:
    """Measure one contestant on one core; those with workers of their own may use all."""
    name, path, output = sys.argv[1:]
    if name != LOADER_2:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_memory()  # as in training; for all contestants
    Path(output).write_text(repr(images_rate(contestants[name](Path(path)))))


if __name__ == "__main__":
    main(CONTESTANTS)
