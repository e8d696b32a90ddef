"""One contestant of ``hpctrain bench data``, in a process of its own on one core.

    python -m hpctrain.bench.readers NAME FOLDER OUTPUT

FOLDER holds what ``data.py`` made: raw.h5 and jpeg.h5, packs of the same images; plain.h5, their
pixels in one piece (as /images, /labels) and gzip.h5, in compressed chunks; files/, some of the
image files at their own size. Prints nothing; OUTPUT becomes the images/s, after one round to warm
up, in which files come into the page cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpctrain.data.foreign import read_foreign
from hpctrain.data.images import Fit, decode
from hpctrain.data.loader import Loader, make_prepare
from hpctrain.data.opened import open_split
from hpctrain.data.orders import make_order
from hpctrain.data.pack_format import Pack
from hpctrain.data.packed import read_pack
from hpctrain.data.partition import cut_epoch
from hpctrain.parallel.device import keep_memory

BATCH, SIDE = 128, 100
BLOCK_ROWS, WINDOW_BLOCKS = 140, 4  # 4 MiB a run
SECONDS = 2.0  # that a contestant is measured for, at least

Batches = Callable[[int], Iterator[int]]  # epoch -> rows of each batch, once it is ready


def random_batches(rows: int, epoch: int) -> Iterator[np.ndarray]:
    """Row numbers of an epoch in random order, (BATCH,) each."""
    order = np.random.default_rng(epoch).permutation(rows)
    for start in range(0, rows - BATCH + 1, BATCH):
        yield order[start : start + BATCH]


def memory_copy(folder: Path) -> Batches:
    """The limit: consecutive rows from memory to memory."""
    with h5py.File(folder / "plain.h5") as file:
        images = file["images"][:]  # (N, H, W, C) uint8
    out = np.empty((BATCH, *images.shape[1:]), np.uint8)

    def epoch(number: int) -> Iterator[int]:
        for start in range(0, len(images) - BATCH + 1, BATCH):
            np.copyto(out, images[start : start + BATCH])
            yield BATCH

    return epoch


def gathered(folder: Path) -> Batches:
    """Rows in random order, by their byte offsets, into one buffer."""
    pack = read_pack(folder / "raw.h5")
    source = open_split(pack, "train")
    out = np.empty((BATCH, *pack.image_shape), np.uint8)

    def epoch(number: int) -> Iterator[int]:
        for rows in random_batches(len(source.labels), number):
            source.gather(rows, out)
            yield BATCH

    return epoch


def fancy(folder: Path) -> Batches:
    """The same rows by h5py's fancy indexing, which wants them sorted."""
    images = h5py.File(folder / "plain.h5")["images"]

    def epoch(number: int) -> Iterator[int]:
        for rows in random_batches(len(images), number):
            yield len(images[np.sort(rows)])

    return epoch


def loaded(pack: Pack, shuffle: str, keep: bool = False, **changes: Any) -> Batches:
    """Batches as training takes them: float32 (n, C, H, W) in [0, 1], NHWC in memory."""
    source = open_split(pack, "train", threads=1)
    augmented = {name: changes.pop(name) for name in ("flip", "shift") if name in changes}
    partition = cut_epoch(len(source.labels), BATCH, 1)
    run_rows, scattered = BLOCK_ROWS, False
    if pack.foreign and shuffle == "blocks":
        run_rows, scattered = pack.foreign.run_rows, True
    loader = Loader(
        source,
        partition,
        [0],
        prepare=make_prepare(**augmented),
        order=make_order(shuffle, partition, 0, run_rows, WINDOW_BLOCKS, scattered),
        read_buffer=(4 << 30) if keep else 0,
        **changes,
    )

    def epoch(number: int) -> Iterator[int]:
        for batches in loader.epoch(number):
            yield len(batches[0].targets)

    return epoch


class Images(torch.utils.data.Dataset):
    """As tutorials read HDF5: a row at a time, the file opened by each worker."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        with h5py.File(path) as file:
            self._rows = len(file["labels"])

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        self._file = self._file or h5py.File(self._path)
        image = torch.from_numpy(self._file["images"][row])
        return image.permute(2, 0, 1).float() / 255, int(self._file["labels"][row])


def data_loader(folder: Path, workers: int) -> Batches:
    """torch's DataLoader over h5py."""
    loader = torch.utils.data.DataLoader(
        Images(folder / "plain.h5"),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )

    def epoch(number: int) -> Iterator[int]:
        for images, _ in loader:
            yield len(images)

    return epoch


def pillow(folder: Path) -> Batches:
    """The files of a folder decoded and resized by one thread, nothing else."""
    files = [path.read_bytes() for path in sorted((folder / "files").rglob("*.jpg"))]
    fit = Fit(SIDE, SIDE, 3, False)

    def epoch(number: int) -> Iterator[int]:
        for data in files:
            decode(data, fit)
            yield 1

    return epoch


def contestants() -> dict[str, Callable[[Path], Batches]]:
    """By name, in the order of the table."""

    def raw(shuffle: str, keep: bool = False, **changes: Any) -> Callable[[Path], Batches]:
        return lambda folder: loaded(read_pack(folder / "raw.h5"), shuffle, keep, **changes)

    def jpeg(**changes: Any) -> Callable[[Path], Batches]:
        return lambda folder: loaded(read_pack(folder / "jpeg.h5"), "partition", **changes)

    def foreign(name: str, shuffle: str) -> Callable[[Path], Batches]:
        runs = None if shuffle == "blocks" else 0
        names = ("images", "labels", None, "1", 0, runs)
        return lambda folder: loaded(read_foreign(folder / name, *names), shuffle)

    return {
        "memory copy": memory_copy,
        "gather": gathered,
        "h5py fancy": fancy,
        "kept": raw("partition", True),
        "partition": raw("partition"),
        "global": raw("global"),
        "blocks": raw("blocks"),
        "kept augmented": raw("partition", True, flip=True, shift=4),
        "jpeg": jpeg(),
        "jpeg crop": jpeg(random_crop=0.08),
        "foreign": foreign("plain.h5", "partition"),
        "foreign gzip": foreign("gzip.h5", "blocks"),
        "DataLoader 0": lambda folder: data_loader(folder, 0),
        "DataLoader 2": lambda folder: data_loader(folder, 2),
        "pillow": pillow,
    }


def rate(epoch: Batches) -> float:
    """images/s over whole epochs, at least SECONDS of them, after one to warm up."""
    sum(epoch(0))
    done, number = 0, 1
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        done += sum(epoch(number))
        number += 1
    return done / (time.perf_counter() - began)


def main(name: str, folder: str, output: str) -> int:
    """Measure one contestant; those with workers of their own may use all cores."""
    if name != "DataLoader 2":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_memory()  # as in training; for all contestants
    found = rate(contestants()[name](Path(folder)))
    Path(output).write_text(repr(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
