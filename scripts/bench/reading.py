"""``python -m scripts.bench data``: images/s of reading images of 100x100x3.

Each contestant reads on one core: packs, the same images by torch's DataLoader over h5py, packs of
JPEG files and HDF5 files that are not packs. --data may name any source of
``hpctrain pack``.

    python -m scripts.bench.reading NAME FOLDER/raw.h5 OUTPUT     one contestant

It first reads one epoch as a warm-up, which brings the file into the page cache.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

import hpctrain as hp
from hpctrain.config import PackConfig, Shares, Size
from hpctrain.data.augment import Augmentation
from hpctrain.data.external import read_external
from hpctrain.data.loader import Loader, ReadOptions
from hpctrain.data.orders import make_order
from hpctrain.data.pack import ExternalOptions, Pack, read_pack
from hpctrain.data.partition import cut_epoch
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.split import Split
from hpctrain.memory import keep_memory
from hpctrain.packing.make import make_pack
from scripts.bench.harness import measure, print_table, python, run_job
from scripts.bench.peers import H5Images

FILES = 2000
CLASSES = 5
SIDE = 100  # pixels of packed images
FILE_SIDES = (500, 375)  # pixels, as of photographs on the web
COPIES = 2  # of each image, so that an epoch takes long enough
CHUNK_ROWS = 32
BATCH = 128
BLOCK_ROWS = 140  # 4 MiB of images of 100x100x3
WINDOW_BLOCKS = 4
SECONDS = 2.0  # minimum time of a reader's measurement
LOADER = "DataLoader over h5py, 0 workers"
LOADER_2 = "DataLoader over h5py, 2 workers"

Reader = Callable[[Path], Iterator[int]]  # pack -> image count of each epoch, endless


def measure_data(options: Namespace, folder: Path) -> None:
    """Measure all readers and print the table."""
    make_files(folder, options.data)

    def run(name: str) -> float:
        words = [name, str(folder / "raw.h5"), str(folder / "rate")]
        run_job(python("scripts.bench.reading", *words), name)
        return float((folder / "rate").read_text())

    rates = measure(READERS, options.rounds, run)
    compared = {name: {"/ DataLoader": LOADER} for name in READERS if name != LOADER}
    print_table("Images of 100x100x3 on one core", rates, compared)


def make_files(folder: Path, source: str | None) -> None:
    """Write the files of all contestants to `folder`.

    raw.h5 and jpeg.h5 are packs. plain.h5 and gzip.h5 hold the pixels contiguously and in
    compressed chunks (/images, /labels). files/ holds the images at their own size.
    """
    write_images(folder / "files", FILES)
    settings = PackConfig(
        source or str(folder / "files"),
        size=Size(f"{SIDE}x{SIDE}"),
        split=Shares("1"),
        output=str(folder / "once.h5"),
    )
    once = read_pack(make_pack(settings))
    make_pack(replace(settings, output=str(folder / "jpeg.h5"), encoding="jpeg"))
    with Split(once, "train") as rows:
        shape = (len(rows.targets), *once.image_shape)
        pixels = rows.gather(np.arange(shape[0]), np.empty(shape, np.uint8))
        pixels = np.tile(pixels, (COPIES, 1, 1, 1))
        labels = np.tile(rows.targets, COPIES)
    hp.write_pack(folder / "raw.h5", {"train": (pixels, labels)}, once.classes, {"source": "bench"})
    chunks = {"chunks": (CHUNK_ROWS, *once.image_shape), "compression": "gzip"}
    for name, storage in (("plain.h5", {}), ("gzip.h5", chunks)):
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("images", data=pixels, **storage)
            file.create_dataset("labels", data=labels)


def write_images(folder: Path, count: int) -> None:
    """Write JPEG files that compress about as photographs do: smooth colours with some grain."""
    random = np.random.default_rng(0)
    for number in range(count):
        of_class = folder / f"class{number % CLASSES}"
        of_class.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(256, size=(24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(FILE_SIDES, Image.Resampling.BICUBIC), np.float32)
        grain = random.normal(0, 6, smooth.shape)
        image = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
        image.save(of_class / f"{number}.jpg", quality=90)


def gathered(path: Path) -> Iterator[int]:
    """Read rows in random order, by their byte offsets in the file, into one buffer."""
    source = Split(pack := read_pack(path), "train")
    out = np.empty((BATCH, *pack.image_shape), np.uint8)
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(len(source))
        starts = range(0, len(source) - BATCH + 1, BATCH)
        yield sum(len(source.gather(order[at : at + BATCH], out)) for at in starts)


def loaded(
    pack: Pack,
    shuffle: str,
    keep: bool = False,
    pipeline: Pipeline | None = None,
    random_crop: float = 0.0,
) -> Iterator[int]:
    """Load batches as for training: float32 (n, C, H, W) in [0, 1], NHWC in memory."""
    source = Split(pack, "train", threads=1)
    partition = cut_epoch(len(source), BATCH, 1)
    order = make_order(shuffle, partition, 0, pack.block_rows or BLOCK_ROWS, WINDOW_BLOCKS)
    options = ReadOptions((4 << 30) if keep else 0, random_crop)
    loader = Loader(source, order, [0], pipeline, options=options)
    for epoch in itertools.count():
        yield sum(len(batches[0].targets) for batches in loader.epoch(epoch))


def by_torch(path: Path, workers: int) -> Iterator[int]:
    """Load batches by torch's DataLoader over h5py."""
    images = H5Images(str(path))
    loader = DataLoader(images, BATCH, True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield sum(len(images) for images, _ in loader)


def jpeg(path: Path, random_crop: float = 0.0) -> Iterator[int]:
    """Read the pack of JPEG files beside `path`."""
    return loaded(read_pack(path.with_name("jpeg.h5")), "partition", random_crop=random_crop)


def external(path: Path, name: str, shuffle: str) -> Iterator[int]:
    """Read an HDF5 file beside `path` that is not a pack."""
    blocks = None if shuffle == "blocks" else 0
    how = ExternalOptions("images", "labels", split="1", block_rows=blocks)
    return loaded(read_external(path.with_name(name), how), shuffle)


READERS: dict[str, Reader] = {
    "pack, random rows gathered, bytes": gathered,
    "pack, kept in memory": lambda path: loaded(read_pack(path), "partition", keep=True),
    "pack, --shuffle partition": lambda path: loaded(read_pack(path), "partition"),
    "pack, --shuffle global": lambda path: loaded(read_pack(path), "global"),
    "pack, --shuffle blocks": lambda path: loaded(read_pack(path), "blocks"),
    "pack, kept, --flip --shift 4": lambda path: loaded(
        read_pack(path), "partition", True, Pipeline(augmentation=Augmentation(True, 4))
    ),
    "pack, kept, all flips, turns, --shift 4": lambda path: loaded(
        read_pack(path), "partition", True, Pipeline(augmentation=Augmentation(True, 4, True, True))
    ),
    "pack, kept, --random-crop 0.08": lambda path: loaded(
        read_pack(path), "partition", True, random_crop=0.08
    ),
    LOADER: partial(by_torch, workers=0),
    LOADER_2: partial(by_torch, workers=2),
    "pack of JPEG files": jpeg,
    "pack of JPEG files, --random-crop 0.08": partial(jpeg, random_crop=0.08),
    "external HDF5, contiguous": partial(external, name="plain.h5", shuffle="partition"),
    "external HDF5, gzip chunks": partial(external, name="gzip.h5", shuffle="blocks"),
}


def images_rate(epochs: Iterator[int]) -> float:
    """Measure images/s over whole epochs, for at least `SECONDS`, after one epoch of warm-up."""
    next(epochs)
    done = 0
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        done += next(epochs)
    return done / (time.perf_counter() - began)


def main() -> None:
    """Measure one reader on one core; a reader with worker processes may use all cores."""
    name, path, output = sys.argv[1:]
    if name != LOADER_2:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_memory()  # for all readers, as in training
    Path(output).write_text(repr(images_rate(READERS[name](Path(path)))))


if __name__ == "__main__":
    main()
