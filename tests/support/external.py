"""HDF5 files as other people make them, for tests."""

from __future__ import annotations

import h5py
import numpy as np

ROWS, SHAPE, CLASSES = 211, (7, 5, 3), 4


def pixels(rows=ROWS, shape=SHAPE, classes=CLASSES, seed=0, ordered=True):
    """Images that can be learnt, each class brighter in its band of lines, and labels, by class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    labels = np.sort(labels) if ordered else labels
    images = rng.integers(0, 100, (rows, *shape), dtype=np.uint8)
    band = max(1, shape[0] // classes)
    for image, label in zip(images, labels, strict=True):
        image[label * band : (label + 1) * band] += 120
    return images, labels


def write(path, images, labels, at=("x", "y"), **storage):
    """A file of two data sets; `storage` as h5py takes it, for the images."""
    with h5py.File(path, "w") as file:
        file.create_dataset(at[0], data=images, **storage)
        file[at[1]] = labels
    return path
