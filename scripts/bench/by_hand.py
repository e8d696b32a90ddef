"""Pack a folder of images as one does without hpctrain: two processes decode them, h5py writes.

    python -m scripts.bench.by_hand FOLDER OUTPUT [SIDE]

TIFF files are read by tifffile as they are, others by Pillow, resized to SIDE x SIDE. Nothing is
checked, and no checksum, statistics or splits are made. This module imports no more than it needs:
the start of each process counts.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import h5py
import numpy as np

PROCESSES = 2
FILES_PER_TASK = 16
REACH = 2  # a JPEG is decoded at a scale of at least so many times the side, as by hpctrain


def read(path: Path, side: int) -> np.ndarray:
    """Return the values of an image file."""
    if path.suffix == ".tif":
        import tifffile

        return tifffile.imread(path)
    from PIL import Image

    with Image.open(path) as image:
        image.draft(None, (REACH * side, REACH * side))
        return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


def main() -> None:
    """Write /images and /labels, in the order of the paths."""
    folder, output, *sides = sys.argv[1:]
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    classes = sorted({path.parent.name for path in files})
    load = partial(read, side=int(sides[0]) if sides else 0)
    first = load(files[0])
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawn) as pool, h5py.File(output, "w") as file:
        images = file.create_dataset("images", (len(files), *first.shape), first.dtype)
        file["labels"] = [classes.index(path.parent.name) for path in files]
        for row, image in enumerate(pool.map(load, files, chunksize=FILES_PER_TASK)):
            images[row] = image


if __name__ == "__main__":
    main()
