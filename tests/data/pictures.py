"""Small image files and sources for the tests of packing."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from hpctrain.config import PackConfig, check_settings
from hpctrain.data.pack import make_pack
from hpctrain.data.packed import Pack, read_pack
from hpctrain.data.split import Split
from tests.support.pictures import class_folders, encode, picture, tar, zipped

__all__ = ["class_folders", "encode", "picture", "tar", "zipped"]


def pack(source: object, output: Path, **settings) -> Pack:
    """Make a pack as the command does and open it; one process unless `jobs` says otherwise."""
    config = PackConfig(source=str(source), output=str(output), **{"jobs": 1, **settings})
    check_settings(config)
    return read_pack(make_pack(config))


def contents(packed: Pack, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All images (N, H, W, C) and labels (N,) of a split."""
    with Split(packed, split) as rows:
        images = np.empty((len(rows), *packed.image_shape), np.uint8)
        return rows.gather(np.arange(len(rows)), images), rows.labels


def counts(packed: Pack) -> dict[str, list[int]]:
    """Images of every class in every split."""
    return {
        name: np.bincount(contents(packed, name)[1], minlength=len(packed.classes)).tolist()
        for name in packed.splits
    }


def all_rows(packed: Pack) -> set[tuple[int, bytes]]:
    """Every (label, pixels) of a pack."""
    pairs: set[tuple[int, bytes]] = set()
    for name in packed.splits:
        images, labels = contents(packed, name)
        pairs |= {(int(n), image.tobytes()) for n, image in zip(labels, images, strict=True)}
    return pairs


def replaced(name: str, make: Callable[[h5py.File], object]) -> Callable[[h5py.File], None]:
    """A change of an HDF5 file: what `make` does takes the place of `name`."""

    def change(file: h5py.File) -> None:
        del file[name]
        make(file)

    return change


def needs_h5py(packed: Pack) -> bool:
    """Whether a process that got this pack imports h5py to read it."""
    code = (
        "import pickle, sys; from hpctrain.data.split import Split; import numpy as np;"
        f"rows = Split(pickle.loads({pickle.dumps(packed)!r}), 'train');"
        "rows.gather(np.array([1]), np.empty((1, *rows.image_shape), np.uint8));"
        "print('h5py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout != "False\n"
