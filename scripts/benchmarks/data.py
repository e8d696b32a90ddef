"""``python -m scripts.benchmarks data``: images/s of reading and packing images of 100x100x3.

Each contestant reads on one core: packs, the same images in memory, by h5py and by torch's
DataLoader, as JPEG files and as HDF5 files that are not packs. Packing is compared with one thread
of Pillow. --data may name any source of ``hpctrain pack``.

    python -m scripts.benchmarks.data NAME FOLDER/raw.h5 OUTPUT     one contestant

It first reads one epoch as a warm-up, which brings the file into the page cache.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import h5py
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hpctrain.config import PackConfig, Shares, Size
from hpctrain.data.augment import Augmentation
from hpctrain.data.external import read_external
from hpctrain.data.images import Fit, decode
from hpctrain.data.loader import Loader, Prepare, ReadOptions, make_prepare
from hpctrain.data.orders import make_order
from hpctrain.data.pack import External, Pack, read_pack
from hpctrain.data.partition import cut_epoch
from hpctrain.data.split import Split
from hpctrain.packing.make import make_pack
from hpctrain.packing.write import write_pack
from hpctrain.parallel.device import keep_memory
from scripts.benchmarks.harness import (
    Options,
    Show,
    goal_line,
    measure,
    python,
    ratio,
    run_job,
    table,
)
from scripts.benchmarks.peers import H5Images

FILES, CLASSES, SIDE = 2000, 5, 100  # number of image files; pixels of packed images
FILE_SIDES = (500, 375)  # pixels, as of photographs on the web
COPIES = 2  # of each image, so that an epoch takes long enough
CHUNK_ROWS = 32
PILLOW, PACK = "Pillow, one thread, from files", "hpctrain pack, all cores, from files"
BATCH = 128
BLOCK_ROWS, WINDOW_BLOCKS = 140, 4  # a block is 4 MiB of images of 100x100x3
SECONDS = 2.0  # minimum time of a reader's measurement
COPY, H5PY = "copy of consecutive rows in memory, bytes", "h5py, fancy indexing, bytes"
GATHER, KEPT = "pack, random rows gathered, bytes", "pack, kept in memory"
LOADER, LOADER_2 = "DataLoader over h5py, 0 workers", "DataLoader over h5py, 2 workers"

Reader = Callable[[Path], Iterator[int]]  # pack -> image count of each epoch, endless
GOALS = (  # contestant, minimum ratio, to this contestant ("": minimum images/s)
    (GATHER, 0.35, COPY),
    (GATHER, 20, H5PY),
    (KEPT, 100_000, ""),
    (KEPT, 20, LOADER),
    (KEPT, 20, LOADER_2),
    (PACK, 1.7, PILLOW),
)


def measure_data(options: Options, folder: Path, show: Show) -> list[str]:
    """Run all rounds and print the table; return a line for each goal."""
    raw, jpeg = make_files(folder, options.data)
    show(
        f"{raw.splits['train'].samples:,} images: {raw.sizes[raw.path] / 2**20:,.1f} MiB of pixels,"
        f" {jpeg.sizes[jpeg.path] / 2**20:,.1f} MiB as JPEG files"
    )

    def run(name: str) -> float:
        if name == PACK:
            return pack_rate(folder)
        words = [name, str(folder / "raw.h5"), str(folder / "rate")]
        run_job(python("scripts.benchmarks.data", *words), name)
        return float((folder / "rate").read_text())

    rates = measure([*READERS, PACK], options.rounds, run, show)
    compared = {**COMPARED, PACK: {"/ Pillow": PILLOW}}
    show(table("Images of 100x100x3 on one core", rates, compared))
    return [
        goal_line(ratio(rates, name, other), least, f"{name} / {other}")
        if other
        else goal_line(median(rates[name]), least, f"{name}, images/s")
        for name, least, other in GOALS
    ]


def make_files(folder: Path, source: str | None) -> tuple[Pack, Pack]:
    """Write the files of all contestants to `folder`; return the two packs.

    raw.h5 and jpeg.h5 are packs. plain.h5 and gzip.h5 hold the pixels contiguously and in
    compressed chunks (/images, /labels). files/ holds the images at their own size.
    """
    write_images(folder / "files", FILES)
    images = source or str(folder / "files")
    size, split = Size(f"{SIDE}x{SIDE}"), Shares("1")
    settings = PackConfig(images, size=size, split=split, output=str(folder / "once.h5"))
    once = read_pack(make_pack(settings))
    settings = replace(settings, output=str(folder / "jpeg.h5"), encoding="jpeg")
    jpeg = read_pack(make_pack(settings))
    with Split(once, "train") as rows:
        shape = (len(rows.labels), *once.image_shape)
        pixels = rows.gather(np.arange(shape[0]), np.empty(shape, np.uint8))
        pixels, labels = np.tile(pixels, (COPIES, 1, 1, 1)), np.tile(rows.labels, COPIES)
    write_pack(folder / "raw.h5", {"train": (pixels, labels)}, once.classes, {"source": "bench"})
    for name, chunks in (
        ("plain.h5", {}),
        ("gzip.h5", {"chunks": (CHUNK_ROWS, *once.image_shape), "compression": "gzip"}),
    ):
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("images", data=pixels, **chunks)
            file.create_dataset("labels", data=labels)
    return read_pack(folder / "raw.h5"), jpeg


def write_images(folder: Path, count: int) -> None:
    """Write JPEG files that compress about as photographs do: smooth colours with some grain."""
    random = np.random.default_rng(0)
    for number in range(count):
        place = folder / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(256, size=(24, 32, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize(FILE_SIDES, Image.Resampling.BICUBIC), np.float32)
        grain = random.normal(0, 6, smooth.shape)
        image = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
        image.save(place / f"{number}.jpg", quality=90)


def pack_rate(folder: Path) -> float:
    """Return the images/s that ``hpctrain pack`` reports."""
    words = ["pack", str(folder / "files"), "--size", f"{SIDE}x{SIDE}", "--overwrite"]
    command = python("hpctrain", *words, "--output", str(folder / "again.h5"))
    images, seconds = run_job(command, PACK).rpartition(" images in ")[::2]
    return int(images.split()[-1].replace(",", "")) / float(seconds.split()[0])


def random_batches(rows: int, epoch: int) -> Iterator[np.ndarray]:
    """Return an iterator over row numbers (BATCH,) in random order, without an incomplete batch."""
    order = np.random.default_rng(epoch).permutation(rows)
    return (order[start : start + BATCH] for start in range(0, rows - BATCH + 1, BATCH))


def copied(path: Path) -> Iterator[int]:
    """Copy consecutive rows from memory to memory: the limit."""
    with h5py.File(path, locking=False) as file:
        images = file["train/images"][:]  # (N, H, W, C) uint8
    out = np.empty((BATCH, *images.shape[1:]), np.uint8)
    starts = range(0, len(images) - BATCH + 1, BATCH)
    while True:
        for start in starts:
            np.copyto(out, images[start : start + BATCH])
        yield BATCH * len(starts)


def gathered(path: Path) -> Iterator[int]:
    """Read rows in random order, by their byte offsets in the file, into one buffer."""
    source = Split(pack := read_pack(path), "train")
    out = np.empty((BATCH, *pack.image_shape), np.uint8)
    for epoch in itertools.count():
        batches = random_batches(len(source), epoch)
        yield sum(len(source.gather(rows, out)) for rows in batches)


def fancy(path: Path) -> Iterator[int]:
    """Read the same rows by h5py's fancy indexing, which requires sorted indices."""
    images = h5py.File(path, locking=False)["train/images"]
    for epoch in itertools.count():
        yield sum(len(images[np.sort(rows)]) for rows in random_batches(len(images), epoch))


def loaded(
    pack: Pack,
    shuffle: str,
    keep: bool = False,
    prepare: Prepare | None = None,
    random_crop: float = 0.0,
) -> Iterator[int]:
    """Load batches as for training: float32 (n, C, H, W) in [0, 1], NHWC in memory."""
    source = Split(pack, "train", threads=1)
    partition = cut_epoch(len(source), BATCH, 1)
    order = make_order(shuffle, partition, 0, pack.block_rows or BLOCK_ROWS, WINDOW_BLOCKS)
    options = ReadOptions((4 << 30) if keep else 0, random_crop)
    loader = Loader(source, order, [0], prepare, options=options)
    for epoch in itertools.count():
        yield sum(len(batches[0].targets) for batches in loader.epoch(epoch))


def by_torch(path: Path, workers: int) -> Iterator[int]:
    """Load batches by torch's DataLoader over h5py."""
    images = H5Images(str(path))
    loader = DataLoader(images, BATCH, True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield sum(len(images) for images, _ in loader)


def pillow(path: Path) -> Iterator[int]:
    """Decode and resize the files beside `path` in one thread, and do nothing else."""
    files = [file.read_bytes() for file in sorted(path.with_name("files").rglob("*.jpg"))]
    fit = Fit(SIDE, SIDE, 3, False)
    while True:
        for data in files:
            decode(data, fit)
        yield len(files)


def jpeg(path: Path, random_crop: float = 0.0) -> Iterator[int]:
    """Read the pack of JPEG files beside `path`."""
    return loaded(read_pack(path.with_name("jpeg.h5")), "partition", random_crop=random_crop)


def external(path: Path, name: str, shuffle: str) -> Iterator[int]:
    """Read an HDF5 file beside `path` that is not a pack."""
    blocks = None if shuffle == "blocks" else 0
    how = External("images", "labels", split="1", block_rows=blocks)
    return loaded(read_external(path.with_name(name), how), shuffle)


READERS: dict[str, Reader] = {
    COPY: copied,
    GATHER: gathered,
    H5PY: fancy,
    KEPT: lambda path: loaded(read_pack(path), "partition", keep=True),
    "pack, --shuffle partition": lambda path: loaded(read_pack(path), "partition"),
    "pack, --shuffle global": lambda path: loaded(read_pack(path), "global"),
    "pack, --shuffle blocks": lambda path: loaded(read_pack(path), "blocks"),
    "pack, kept, --flip --shift 4": lambda path: loaded(
        read_pack(path), "partition", True, prepare=make_prepare(augmentation=Augmentation(True, 4))
    ),
    LOADER: lambda path: by_torch(path, 0),
    LOADER_2: lambda path: by_torch(path, 2),
    "pack of JPEG files": jpeg,
    "pack of JPEG files, --random-crop 0.08": partial(jpeg, random_crop=0.08),
    "external HDF5, contiguous": partial(external, name="plain.h5", shuffle="partition"),
    "external HDF5, gzip chunks": partial(external, name="gzip.h5", shuffle="blocks"),
    PILLOW: pillow,
}
# Readers of bytes are compared with readers of bytes, readers of training batches with LOADER.
COMPARED = {
    name: {"/ copy": COPY, "/ h5py": H5PY} if name in (GATHER, H5PY) else {"/ DataLoader": LOADER}
    for name in READERS
    if name not in (COPY, LOADER, PILLOW)
}


def images_rate(epochs: Iterator[int]) -> float:
    """Measure images/s over whole epochs, for at least `SECONDS`, after one epoch of warm-up."""
    next(epochs)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        done += next(epochs)
    return done / (time.perf_counter() - began)


def read(words: Sequence[str]) -> None:
    """Measure one reader on one core; a reader with worker processes may use all cores."""
    name, path, output = words
    if name != LOADER_2:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_memory()  # for all readers, as in training
    Path(output).write_text(repr(images_rate(READERS[name](Path(path)))))


if __name__ == "__main__":
    read(sys.argv[1:])
