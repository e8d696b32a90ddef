"""``python -m scripts.benchmarks data``: images/s of reading and packing images of 100x100x3.

It runs ``hpctrain bench data``, and reads the same images as JPEG files and as HDF5 files that are
not packs. Packing is compared with one thread of Pillow. --data may name any source of
``hpctrain pack``.

    python -m scripts.benchmarks.data NAME FOLDER/raw.h5 OUTPUT     one contestant
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
from PIL import Image

from hpctrain.bench import Show, peers
from hpctrain.bench.harness import measure, python, ratio, run_job, table
from hpctrain.bench.peers import COPY, GATHER, H5PY, KEPT, LOADER, LOADER_2, Reader, loaded
from hpctrain.config import BenchConfig, PackConfig
from hpctrain.data.external import read_external
from hpctrain.data.images import Fit, decode
from hpctrain.data.pack import make_pack, write_pack
from hpctrain.data.pack_format import Pack
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split

FILES, CLASSES, SIDE = 2000, 5, 100  # number of image files; pixels of packed images
FILE_SIDES = (500, 375)  # pixels, as of photographs on the web
COPIES = 2  # of each image, so that an epoch takes long enough
CHUNK_ROWS = 32
PILLOW, PACK = "Pillow, one thread, from files", "hpctrain pack, all cores, from files"
GOALS = (  # contestant, minimum ratio, to this contestant ("": minimum images/s)
    (GATHER, 0.35, COPY),
    (GATHER, 20, H5PY),
    (KEPT, 100_000, ""),
    (KEPT, 20, LOADER),
    (KEPT, 20, LOADER_2),
    (PACK, 1.7, PILLOW),
)


def measure_data(config: BenchConfig, folder: Path, show: Show) -> list[str]:
    """Run all rounds and print the table; return a line for each goal."""
    raw, jpeg = make_files(folder, config.data)
    show(
        f"{raw.splits['train'].samples:,} images: {raw.file_size / 2**20:,.1f} MiB of pixels,"
        f" {jpeg.file_size / 2**20:,.1f} MiB as JPEG files"
    )

    def run(name: str) -> float:
        if name == PACK:
            return pack_rate(folder)
        words = [name, str(folder / "raw.h5"), str(folder / "rate")]
        run_job(python("scripts.benchmarks.data", *words), name)
        return float((folder / "rate").read_text())

    rates = measure([*READERS, PACK], config.rounds, run, show)
    compared = {**peers.COMPARED, PACK: {"/ Pillow": PILLOW}}
    show(table("Images of 100x100x3 on one core", rates, compared))
    return [
        goal_line(ratio(rates, name, other), least, f"{name} / {other}")
        if other
        else goal_line(median(rates[name]), least, f"{name}, images/s")
        for name, least, other in GOALS
    ]


def goal_line(found: float, bound: float, what: str, at_most: bool = False) -> str:
    """Return a line that reports whether a goal is met."""
    met = found <= bound if at_most else found >= bound
    sign = "<=" if at_most else ">="
    return f"{'met   ' if met else 'MISSED'} {found:,.3f}  {what} {sign} {bound:,}"


def make_files(folder: Path, source: str | None) -> tuple[Pack, Pack]:
    """Write the files of all contestants to `folder`; return the two packs.

    raw.h5 and jpeg.h5 are packs. plain.h5 and gzip.h5 hold the pixels contiguously and in
    compressed chunks (/images, /labels). files/ holds the images at their own size.
    """
    write_images(folder / "files")
    images = source or str(folder / "files")
    settings = PackConfig(images, size=f"{SIDE}x{SIDE}", split="1", output=str(folder / "once.h5"))
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


def write_images(folder: Path) -> None:
    """Write JPEG files that compress about as photographs do: smooth colours with some grain."""
    random = np.random.default_rng(0)
    for number in range(FILES):
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
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    images, seconds = done.stderr.rpartition(" images in ")[::2]
    return int(images.split()[-1].replace(",", "")) / float(seconds.split()[0])


def pillow(path: Path) -> Iterator[int]:
    """Decode and resize the files beside `path` in one thread, and do nothing else."""
    files = [file.read_bytes() for file in sorted(path.with_name("files").rglob("*.jpg"))]
    fit = Fit(SIDE, SIDE, 3, False)
    while True:
        for data in files:
            decode(data, fit)
        yield len(files)


def jpeg(path: Path, **options: Any) -> Iterator[int]:
    """Read the pack of JPEG files beside `path`."""
    return loaded(read_pack(path.with_name("jpeg.h5")), "partition", **options)


def external(path: Path, name: str, shuffle: str) -> Iterator[int]:
    """Read an HDF5 file beside `path` that is not a pack."""
    names = ("images", "labels", None, "1", 0, None if shuffle == "blocks" else 0)
    return loaded(read_external(path.with_name(name), *names), shuffle)


READERS: dict[str, Reader] = {
    **peers.READERS,
    "pack of JPEG files": jpeg,
    "pack of JPEG files, --random-crop 0.08": partial(jpeg, random_crop=0.08),
    "external HDF5, contiguous": partial(external, name="plain.h5", shuffle="partition"),
    "external HDF5, gzip chunks": partial(external, name="gzip.h5", shuffle="blocks"),
    PILLOW: pillow,
}

if __name__ == "__main__":
    peers.read(sys.argv[1:], READERS)
