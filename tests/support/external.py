"""HDF5 files as other people make them, for tests."""

from __future__ import annotations

import os

import h5py
import numpy as np

import hpctrain as hp
from tests.support.api import ExternalOptions, read_external
from tests.support.packs import draw_images

ROWS, SHAPE, CLASSES = 211, (7, 5, 3), 4


def pixels(rows=ROWS, shape=SHAPE, classes=CLASSES, seed=0, ordered=True):
    """Images that can be learnt, and labels, by class if `ordered`."""
    images, labels = draw_images(np.random.default_rng(seed), rows, shape, classes)
    order = np.argsort(labels, kind="stable") if ordered else slice(None)
    return images[order], labels[order]


def write(path, images, labels, at=("x", "y"), **storage):
    """A file of two data sets; `storage` as h5py takes it, for the images."""
    with h5py.File(path, "w") as file:
        file.create_dataset(at[0], data=images, **storage)
        file[at[1]] = labels
    return path


def read(path, images="x", labels="y", layout=None, split=None, cache_dir="", **how):
    """The file, or the set of files of a pattern, as rank 0 opens it."""
    options = ExternalOptions(images, labels, layout, split, **how)
    return read_external(path, options, str(cache_dir))


def contents(pack, name="train", order=None):
    """Images and labels of a split: all, or these."""
    with hp.Split(pack, name) as split:
        order = np.arange(len(split)) if order is None else order
        out = np.empty((len(order), *split.image_shape), split.dtype)
        return split.gather(order, out), split.targets[order]


def open_files(folder):
    """The files below the folder that this process has open."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return [link for link in links if link.startswith(str(folder))]
